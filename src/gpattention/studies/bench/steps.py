"""Whole training steps as the trainer runs them: time, ratios, memory, launches.

The model is the paper's for CIFAR-10 (depth 5, width 128, 4 heads, 64 tokens) in float32.  A step is
forward, loss with regulariser and draws, backward and Adam; on a GPU captured as one graph, elsewhere plain
calls.  All models of a run are timed in turns.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpattention import gp
from gpattention.data import Batch
from gpattention.gp.fused.switch import Mode, fused_mode
from gpattention.models import VisionConfig
from gpattention.studies.bench.launches import KernelTime, Launches, count_launches
from gpattention.studies.bench.paper_model import ALLOWED_GAP, PAPERS, gap_to_ours
from gpattention.studies.bench.timing import Progress, check_counts, time_in_turns
from gpattention.studies.bench.variants import (
    PAPER_KERNEL,
    SOFTMAX,
    VARIANTS,
    build,
    check_kinds,
    default_kinds,
)
from gpattention.training import recipe_from_dict
from gpattention.training.engine import CaptureFailedError, EagerEngine, Engine, StepFailedError
from gpattention.training.graphs import WARM_UP, GraphEngine
from gpattention.training.objective import Objective
from gpattention.training.schedule import Controls
from gpattention.training.single import SingleProcess

AT_ONCE = {"cuda": 10, "cpu": 1}  # steps between two looks at the device
# a learning rate at which no step drifts from the first, and the weight of the regulariser
RATE, ALPHA = 1e-6, 0.01


@dataclass(frozen=True)
class StepRow:
    """One model."""

    name: str
    seconds: float | None  # of a step, median of the turns; None where it failed
    to_softmax: float | None = None  # how many times softmax's
    to_paper: float | None = None  # how many times faster than the paper's way to the same thing
    to_paper_kernel: float | None = None  # how many times faster than the paper's kernel attention
    peak_mib: float | None = None
    launches: float | None = None  # kernels, copies and fills of a step on a GPU
    fused: tuple[str, ...] | None = None  # names of our kernels among them
    engine: str = "eager"
    reason: str | None = None  # why it is not captured, or why there is no time
    kernels: tuple[KernelTime, ...] = ()  # on a GPU, by the profiler


@dataclass(frozen=True)
class StepResult:
    """One table, with what it was measured with."""

    rows: tuple[StepRow, ...]
    batch: int
    repeats: int
    at_once: int
    seed: int
    device: str  # its type
    mode: str  # of the fused kernels
    gaps: dict[str, float]  # between each baseline and our mathematics

    @property
    def baselines_hold(self) -> bool:
        """Whether each baseline computes what it claims."""
        return all(gap < ALLOWED_GAP for gap in self.gaps.values())


def bench_steps(
    kinds: Sequence[str] | None = None,
    *,
    batch: int = 100,
    repeats: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
    fused: Mode | None = None,
    config: VisionConfig | None = None,
    progress: Progress | None = None,
) -> StepResult:
    """Training steps of each kind, of softmax and of the paper's kernel attention.

    Args:
        kinds: of `VARIANTS`; all that are quick enough on the device if not given.
        batch: images of a step.
        repeats: timed turns of each model after one to warm up.
        seed: of weights, images and draws.
        device: where to compute.
        fused: the mode of fused kernels; the one in force if not given.
        config: the transformer but for its attention; the paper's if not given.
        progress: told the turns done, and in all.
    """
    place = torch.device(device)
    chosen = default_kinds(place) if kinds is None else tuple(kinds)
    check_kinds(chosen)
    check_counts(batch=batch, repeats=repeats)
    shape = VisionConfig() if config is None else config
    names = tuple(dict.fromkeys((SOFTMAX, *chosen, PAPER_KERNEL)))
    at_once = AT_ONCE.get(place.type, 1)
    with gp.fused_kernels(fused_mode() if fused is None else fused):
        runs = {name: _prepared(name, shape, batch, seed, place) for name in names}
        calls = {name: run.step for name, run in runs.items() if run.step is not None}
        times = time_in_turns(calls, repeats, place, progress, at_once=at_once)
        rows = tuple(_row(name, runs[name], times, place) for name in names)
        mode = fused_mode()
    gaps = {name: gap_to_ours(name) for name in names if name in PAPERS}
    return StepResult(rows, batch, repeats, at_once, seed, place.type, mode, gaps)


def prepare_step(
    kind: str, *, batch: int = 100, seed: int = 0, device: torch.device | str = "cpu"
) -> Callable[[], None]:
    """One training step of the paper's model, to be called again and again; the first steps are done."""
    check_kinds((kind,))
    check_counts(batch=batch)
    run = _prepared(kind, VisionConfig(), batch, seed, torch.device(device))
    if run.step is None:
        raise RuntimeError(f"no step of {kind}: {run.reason}")
    return run.step


@dataclass(frozen=True)
class _Prepared:
    """A model that has run its first steps."""

    step: Callable[[], None] | None
    engine: str
    reason: str | None = None
    peak_mib: float | None = None


def _prepared(name: str, shape: VisionConfig, batch: int, seed: int, device: torch.device) -> _Prepared:
    before = _fresh_memory(device)
    try:
        engine, reason = _engine(name, shape, batch, seed, device)
    except (torch.OutOfMemoryError, StepFailedError, gp.NumericalError) as error:
        return _Prepared(None, "none", _short(error))
    step = _stepper(engine, _batch(shape, batch, seed, device))
    peak = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return _Prepared(step, "graph" if reason is None else "eager", reason, peak)


def _engine(
    name: str, shape: VisionConfig, batch: int, seed: int, device: torch.device
) -> tuple[Engine, str | None]:
    """The trainer's engine after its first steps, and why it is not a captured one."""
    reason = _why_eager(name, device)
    if reason is None:
        try:
            return _warmed(name, shape, batch, seed, device, captured=True), None
        except CaptureFailedError as error:
            reason = _short(error)
        _fresh_memory(device)  # the attempt's memory is not the model's
    return _warmed(name, shape, batch, seed, device, captured=False), reason


def _why_eager(name: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    return "asked for" if VARIANTS[name].eager else None


def _warmed(
    name: str, shape: VisionConfig, batch: int, seed: int, device: torch.device, *, captured: bool
) -> Engine:
    model = build(name, shape, seed).to(device)
    recipe = recipe_from_dict({"model": {"attention": VARIANTS[name].kind}})
    optimizer = torch.optim.Adam(
        model.parameters(), lr=RATE, fused=captured or None, capturable=captured and device.type == "cuda"
    )  # fmt: skip
    make = GraphEngine if captured else EagerEngine
    engine: Engine = make(SingleProcess(device), Objective(model, recipe, "gp"), optimizer, recipe)
    step = _stepper(engine, _batch(shape, batch, seed, device))
    for _ in range(WARM_UP + 2 if device.type == "cuda" else 0):
        step()
    return engine


def _stepper(engine: Engine, batches: list[Batch]) -> Callable[[], None]:
    """Steps on one batch, each with draws of its own."""
    number = 0

    def step() -> None:
        nonlocal number
        engine.step(batches, Controls(number, number, RATE, ALPHA))
        number += 1

    return step


def _row(name: str, run: _Prepared, times: dict[str, float], device: torch.device) -> StepRow:
    if run.step is None:
        return StepRow(name, None, engine=run.engine, reason=run.reason)
    own, softmax = times[name], times.get(SOFTMAX)
    paper = times.get(VARIANTS[name].paper or "")
    counted = count_launches(run.step, device) if device.type == "cuda" else Launches(None, None)
    return StepRow(
        name,
        own,
        to_softmax=None if softmax is None else own / softmax,
        to_paper=None if paper is None else paper / own,
        to_paper_kernel=times[PAPER_KERNEL] / own if PAPER_KERNEL in times else None,
        peak_mib=run.peak_mib,
        launches=counted.number,
        fused=counted.fused,
        engine=run.engine,
        reason=run.reason,
        kernels=counted.times,
    )


def _batch(shape: VisionConfig, batch: int, seed: int, device: torch.device) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, shape.channels, *shape.sides, generator=g).to(device)
    labels = torch.randint(shape.classes, (batch,), generator=g).to(device)
    return [Batch(torch.arange(batch, device=device), images, labels)]


def _fresh_memory(device: torch.device) -> int:
    """Bytes held before a measurement, whose peak then starts anew."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _short(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error).partition("\n")[0]
