"""Benchmarks: training steps, predictions and floors, beside softmax and the paper's own way.

Everything is measured in one run, in turns: absolute times mean little between machines.  A training step is
that of the paper's model for CIFAR-10 (depth 5, width 128, 4 heads, 64 tokens) in float32: forward, loss with
regulariser and draws, backward and Adam; on a GPU captured as one graph, elsewhere plain calls.
`bench_lengths` has sequences of growing length, `bench_tables` what people read.
"""

import gc
import re
import statistics
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpattention import gp
from gpattention.checks import check_choice, check_count
from gpattention.data import Batch
from gpattention.graphs import WARM_UP
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from gpattention.ops import Mode, fused_mode
from gpattention.runs import recipe_from_dict
from gpattention.studies import published
from gpattention.studies.bench_paper import ALLOWED_GAP, PAPERS, gaps_to_ours, paper_model
from gpattention.training.engine import (
    CaptureFailedError,
    Controls,
    EagerEngine,
    GraphEngine,
    Hardware,
    Objective,
    SingleProcess,
    StepFailedError,
    why_no_graph,
)

Progress = Callable[[int, int], object]
Name = TypeVar("Name", bound=Hashable)
SOFTMAX, PAPER_KERNEL = "softmax", "paper-kernel"


@dataclass(frozen=True)
class Measurement:
    """One table of numbers.

    Attributes:
        rows: by column; a model that failed has a reason or failure instead of a time.
        facts: what it was measured with.
        gaps: between each baseline and our mathematics.
    """

    rows: tuple[dict[str, Any], ...]
    facts: dict[str, Any]
    gaps: dict[str, float] = field(default_factory=dict)

    @property
    def baselines_hold(self) -> bool:
        """Whether each baseline computes what it claims."""
        return all(gap < ALLOWED_GAP for gap in self.gaps.values())

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON holds it."""
        return {"rows": list(self.rows), **self.facts, "gaps": self.gaps}


# The models that are timed


@dataclass(frozen=True)
class Variant:
    """One model to be timed: its kind and options, and the paper's way to the same thing."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: str | None = None
    eager: bool = False  # not captured, whatever the device


PUBLISHED: dict[str, Any] = tomllib.loads(published("bench.toml"))  # models, columns, targets; see there
VARIANTS = {name: Variant(**of) for name, of in PUBLISHED["variants"].items()}
VARIANTS |= {name: Variant(paper.kind, paper.options, name) for name, paper in PAPERS.items()}
# on a CPU a step of the paper's other two takes minutes
SLOW = tuple(name for name in PAPERS if name != PAPER_KERNEL)


def default_kinds(device: torch.device) -> tuple[str, ...]:
    """The kinds that can be timed on a device within minutes."""
    everything = device.type == "cuda"
    return tuple(name for name, v in VARIANTS.items() if everything or (name not in SLOW and not v.eager))


def check_kinds(kinds: Sequence[str], known: Sequence[str] = tuple(VARIANTS)) -> tuple[str, ...]:
    """The kinds without repetition; an unknown one is an error."""
    for kind in kinds:
        check_choice("kinds", kind, known)
    return tuple(dict.fromkeys(kinds))


def build(name: str, shape: VisionConfig, seed: int = 0) -> VisionTransformer:
    """A model with fresh weights; the same seed gives the same ones."""
    torch.manual_seed(seed)
    if name in PAPERS:
        return paper_model(name, shape)
    variant = VARIANTS[name]
    return VisionTransformer(replace(shape, attention=AttentionConfig(variant.kind, variant.options)))


# Times


def time_in_turns(
    calls: Mapping[Name, Callable[[], object]],
    repeats: int,
    device: torch.device,
    progress: Progress | None = None,
    *,
    at_once: int = 1,
    warm_up: int = 1,
) -> dict[Name, float]:
    """Time several pieces of work in turns, so that a machine that slows down slows all of them.

    Args:
        calls: by name.
        repeats: turns that count.
        device: which is waited for.
        progress: called with the calls done, and in all.
        at_once: calls before the device is waited for, as a trainer makes them.
        warm_up: turns before those that count.

    Returns:
        Median seconds of each call.
    """
    turns = [name for _ in range(repeats + warm_up) for name in calls]
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for done, name in enumerate(turns, 1):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(at_once):
            calls[name]()
        wait_for(device)
        times[name].append((time.perf_counter() - start) / at_once)
        if progress is not None:
            progress(done, len(turns))
    return {name: statistics.median(each[warm_up:]) for name, each in times.items()}


def wait_for(device: torch.device) -> None:
    """Wait until all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fresh_memory(device: torch.device) -> int:
    """Bytes that a GPU holds before a measurement; the record of its peak starts anew."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def in_proc(file: str, name: str) -> str | None:
    """An entry of a file of /proc on Linux; None elsewhere."""
    path = Path("/proc") / file
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


# Training steps

AT_ONCE = {"cuda": 10, "cpu": 1}  # steps between two looks at the device
# a learning rate at which no step drifts from the first, and the weight of the regulariser
RATE, ALPHA = 1e-6, 0.01


def bench_steps(
    kinds: Sequence[str] | None = None,
    *,
    batch: int = 100,
    repeats: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
    fused: Mode | None = None,
    tokens: int | None = None,
    config: VisionConfig | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Time training steps of each kind, of softmax and of the paper's kernel attention.

    Args:
        kinds: kinds of `VARIANTS`; all that are quick enough on the device if not given.
        batch: images of a step.
        repeats: timed turns of each model after one to warm up.
        seed: seed of weights, images and draws.
        device: where to compute.
        fused: the mode of fused kernels; the one in force if not given.
        tokens: length of a sequence, in one row of patches; that of the config if not given.  The paper's
            kernel attention, which on a CPU takes longer than all others together, is then only timed where
            `kinds` names it.
        config: the transformer but for its attention; the paper's if not given.
        progress: called with the turns done, and in all.

    Returns:
        One row for each model: seconds; how many times softmax's (`to_softmax`); how many times faster than
        the paper's way to the same thing (`to_paper`) and than its kernel attention; memory; on a GPU the
        kernels.  A model that fails has no seconds, and a reason.

    Raises:
        ValueError: an unknown kind, or a count below 1.
    """
    place, shape = torch.device(device), config or VisionConfig()
    names = check_kinds((SOFTMAX, *(default_kinds(place) if kinds is None else kinds), PAPER_KERNEL))
    if tokens is not None:
        shape = replace(shape, image_size=(shape.patch, shape.patch * check_count("tokens", tokens)))
        names = tuple(name for name in names if name != PAPER_KERNEL or name in (kinds or ()))
    batch, repeats = check_count("batch", batch), check_count("repeats", repeats)
    at_once, rows = AT_ONCE.get(place.type, 1), []
    with gp.fused_kernels(fused or fused_mode()):
        runs = {name: _prepared(name, shape, batch, seed, place) for name in names}
        calls = {name: step for name, (step, _) in runs.items() if step is not None}
        times = time_in_turns(calls, repeats, place, progress, at_once=at_once)
        for name, (step, engine) in runs.items():
            own, kernels = times.get(name), dict.fromkeys(("launches", "fused", "kernels"))
            ratios = {
                "to_softmax": _ratio(own, times.get(SOFTMAX)),
                "to_paper": _ratio(times.get(VARIANTS[name].paper or ""), own),
                "to_paper_kernel": _ratio(times.get(PAPER_KERNEL), own),
            }
            profile = count_launches(step, place) if step and place.type == "cuda" else kernels
            rows.append({"name": name, "seconds": own, **ratios, **engine, **profile})
        mode = fused_mode()
    facts = {"batch": batch, "repeats": repeats, "at_once": at_once, "seed": seed, "device": place.type}
    facts |= {"tokens": shape.tokens}
    return Measurement(tuple(rows), {**facts, "mode": mode}, gaps_to_ours(names))


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def prepare_step(
    kind: str, *, batch: int = 100, seed: int = 0, device: torch.device | str = "cpu"
) -> Callable[[], None]:
    """One training step of the paper's model, to be called again and again; the first steps are done."""
    check_kinds((kind,))
    step, engine = _prepared(kind, VisionConfig(), check_count("batch", batch), seed, torch.device(device))
    if step is None:
        raise RuntimeError(f"no step of {kind}: {engine['reason']}")
    return step


def _prepared(
    name: str, shape: VisionConfig, batch: int, seed: int, device: torch.device
) -> tuple[Callable[[], None] | None, dict[str, Any]]:
    """A step after the first ones; its engine, the reason if it is not captured, and its memory."""
    reason = why_no_graph(Hardware(graphs=not VARIANTS[name].eager), SingleProcess(device))
    before = fresh_memory(device)
    try:
        try:
            step = _stepper(name, shape, batch, seed, device, captured=reason is None)
        except CaptureFailedError as error:
            reason = str(error)
            fresh_memory(device)  # the attempt's memory is not the model's
            step = _stepper(name, shape, batch, seed, device, captured=False)
    except (torch.OutOfMemoryError, StepFailedError, gp.NumericalError) as error:
        short = isinstance(error, torch.OutOfMemoryError)
        why = "out of memory" if short else str(error).partition("\n")[0]
        return None, {"engine": "none", "reason": why, "peak_mib": None}
    wait_for(device)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if device.type == "cuda" else None
    return step, {"engine": "graph" if reason is None else "eager", "reason": reason, "peak_mib": peak}


def _stepper(
    name: str, shape: VisionConfig, batch: int, seed: int, device: torch.device, *, captured: bool
) -> Callable[[], None]:
    """Steps of the trainer's engine on one batch, each with draws of its own; on a GPU some are done."""
    model = build(name, shape, seed).to(device)
    recipe = recipe_from_dict({"model": {"attention": VARIANTS[name].kind}})
    optimizer = recipe.optimizer.build(model.parameters(), captured=captured and device.type == "cuda")
    make = GraphEngine if captured else EagerEngine
    engine = make(SingleProcess(device), Objective(model, recipe, "gp"), optimizer, recipe)
    g, numbers = torch.Generator().manual_seed(seed), count()
    images = torch.randn(batch, shape.channels, *shape.sides, generator=g).to(device)
    labels = torch.randint(shape.classes, (batch,), generator=g).to(device)
    batches = [Batch(torch.arange(batch, device=device), images, labels)]

    def step() -> None:
        number = next(numbers)
        engine.step(batches, Controls(number, number, RATE, ALPHA))

    for _ in range(WARM_UP + 2 if device.type == "cuda" else 0):
        step()
    return step


# The kernels that a GPU runs for a step

CALLS = 3  # over which the profiler counts
# families of third-party kernels by words in their names, the first that fits; ours keep their own names
FAMILIES = {
    "matrix products": r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk",
    "softmax attention": r"fmha|flash|attention",
    "optimiser": r"adam|multi_tensor",
    "copies and fills": r"memcpy|memset|fill",
    "other operations": "",
}


def count_launches(call: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """What the profiler sees on the GPU, a mean over three calls: launches, our kernels, and all by time."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize(device)
    ours, launches, seconds = our_kernels(), Counter[str](), Counter[str]()
    seen = [event for event in found.key_averages() if event.device_type.name == "CUDA"]
    for event in seen:
        known = (name for name, words in FAMILIES.items() if re.search(words, event.key.lower()))
        name = event.key if event.key in ours else next(known)
        launches[name] += event.count / CALLS
        seconds[name] += event.self_device_time_total / CALLS / 1e6
    return {
        "launches": launches.total(),
        "fused": sorted(ours & {event.key for event in seen}),
        "kernels": [{"name": n, "launches": launches[n], "seconds": s} for n, s in seconds.most_common()],
    }


def our_kernels() -> frozenset[str]:
    """Names of the Triton kernels in the parts of the library that were used; none without Triton."""
    if "triton" not in sys.modules:
        return frozenset()
    from triton.runtime.jit import KernelInterface  # type: ignore[import-untyped]

    parts = [module for name, module in list(sys.modules.items()) if name.startswith("gpattention.")]
    things = [thing for part in parts for thing in vars(part).values()]
    return frozenset(str(thing.fn.__name__) for thing in things if isinstance(thing, KernelInterface))


# Predictions

# training's regulariser does not matter here, nor does its engine
TIMED = ("seconds", "to_softmax", "images_per_second")  # None where memory does not suffice
PREDICTED = ("softmax", "kernel", "direct", "cgp", "cgp-rows", "scgp-16", "sgpa-32")


def bench_predictions(
    kinds: Sequence[str] | None = None,
    *,
    images: int = 10_000,
    samples: int = 10,
    batch_size: int | None = None,
    capture: bool | None = None,
    repeats: int = 3,
    seed: int = 0,
    device: torch.device | str = "cpu",
    fused: Mode | None = None,
    config: VisionConfig | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Time `model.predict` on all images, with `samples` draws where a kind draws.

    Args:
        kinds: kinds of `VARIANTS`; those of `PREDICTED` if not given.
        images: how many; they lie on the device.
        samples: draws of each.
        batch_size: rows at once; the model's own choice if not given.
        capture: whether batches are replays of a graph; the model's own choice if not given.
        repeats: timed predictions after one to warm up.
        seed: seed of weights, images and draws.
        device: where to compute.
        fused: the mode of fused kernels; the one in force if not given.
        config: the transformer but for its attention; the paper's if not given.
        progress: called with the predictions done, and in all.

    Returns:
        One row for each model; one for which memory does not suffice has a failure instead of seconds.

    Raises:
        ValueError: an unknown kind, or a count below 1.
    """
    counts = {"images": images, "samples": samples, "repeats": repeats}
    for name, number in counts.items():
        check_count(name, number)
    place, shape = torch.device(device), config or VisionConfig()
    names = check_kinds((SOFTMAX, *(PREDICTED if kinds is None else kinds)))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(images, shape.channels, *shape.sides, generator=g).to(place)
    options: dict[str, Any] = {"samples": samples, "seed": seed, "batch_size": batch_size, "capture": capture}
    rows, calls = {}, {}
    with gp.fused_kernels(fused or fused_mode()):
        for name in names:
            model = build(name, shape, seed).to(place).eval()
            call = partial(model.predict, x, **options)
            row: dict[str, Any] = {"name": name, "draws": 0, **dict.fromkeys(TIMED)}
            try:  # this one warms up
                rows[name] = row | {"draws": call().samples, "failure": None}
                calls[name] = call
            except torch.OutOfMemoryError:
                rows[name] = row | {"failure": "out of memory"}
        times = time_in_turns(calls, repeats, place, progress, warm_up=0)
        mode = fused_mode()
    for name, seconds in times.items():
        rows[name] |= {"seconds": seconds, "to_softmax": _ratio(seconds, times.get(SOFTMAX))}
        rows[name]["images_per_second"] = images / seconds
    facts = {**options, **counts, "device": place.type, "mode": mode}
    return Measurement(tuple(rows.values()), facts, gaps_to_ours(names))


# Floors: the least that a training step can take, from the model's sizes
#
# Everything is counted for one step with B items of N tokens, width E, L layers, H heads of width d = E / H
# and m inducing inputs, in float32:
#
# - arithmetic: a product of [a, b] and [b, c] is 2abc operations, a Cholesky factor n^3 / 3, a triangular
#   solve with c right-hand sides n^2 c; a backward pass is twice its forward pass.
# - bytes: every tensor of tokens that the next product needs is written and read once forward, and read once
#   with its gradient written and read backward; weights are read twice, their gradients written and read, and
#   Adam reads and writes weights and both moments.  Matrices between tokens never leave the chip.
# - launches: one for each product, norm, attention and chain of elementwise operations.
#
# The time is no less than the largest of the three, each at the peak that the machine is assumed to have.

FLOPS_PER_SECOND = 67e12  # float32 of an H200, without tensor cores
BYTES_PER_SECOND = 4.8e12  # its memory
SECONDS_PER_LAUNCH = 2.2e-6  # of an empty kernel inside a captured graph
ASSUMED = "H200: 67 TFLOP/s in float32, 4.8 TB/s, 2.2 us for a launch inside a captured graph"
LAYER_LAUNCHES, OTHER_LAUNCHES = 11 + 19, 25  # forward and backward of a layer, and all the rest
PROJECTIONS = {"softmax": 3, "kernel": 3, "direct": 3, "cgp": 4, "scgp": 4, "sgpa": 2}
TOKEN_TENSORS = 7  # beside the projections: two norms, heads, output, residuals, hidden before and after


def step_floors(
    kinds: Sequence[str] | None = None, *, batch: int = 100, config: VisionConfig | None = None
) -> list[dict[str, Any]]:
    """Compute the floor of a training step.

    Args:
        kinds: kinds of `VARIANTS`; all of ours if not given.  The paper's have that of the same mathematics.
        batch: images of a step.
        config: the transformer but for its attention; the paper's if not given.

    Returns:
        One row for each kind: `flops`, `bytes_moved` and `launches`, the seconds that each of them takes
        (`shares`), and the largest of these (`seconds`).

    Raises:
        ValueError: an unknown kind.
    """
    ours = [name for name, variant in VARIANTS.items() if not name.startswith("paper") and not variant.eager]
    chosen = check_kinds(ours if kinds is None else kinds)
    return [_floor(name, batch, config or VisionConfig()) for name in chosen]


def _floor(name: str, batch: int, shape: VisionConfig) -> dict[str, Any]:
    maps, tokens, width = PROJECTIONS[VARIANTS[name].kind], batch * shape.tokens, shape.width
    inside = width * ((maps + 1) * width + 2 * (shape.mlp_width or width))  # a layer's weights, the last too
    attended = batch * shape.heads * attention_flops(name, shape.tokens, width // shape.heads)
    patches = 2 * tokens * shape.channels * shape.patch**2 * width
    weights = shape.depth * inside + shape.tokens * width
    token_bytes = 4 * shape.depth * tokens * width * (maps + TOKEN_TENSORS)
    flops = 3.0 * (shape.depth * (2 * tokens * inside + attended) + patches)
    moved = float(5 * token_bytes + 4 * weights * (2 + 2 + 6))
    launches = shape.depth * LAYER_LAUNCHES + OTHER_LAUNCHES
    shares = flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND, launches * SECONDS_PER_LAUNCH
    counts = {"flops": flops, "bytes_moved": moved, "launches": launches}
    return {"name": name, **counts, "shares": shares, "seconds": max(shares)}


def attention_flops(name: str, n: int, d: int) -> float:
    """Forward pass of one sequence and head, without projections, regulariser included."""
    variant = VARIANTS[name]
    m = int(variant.options.get("num_inducing", 32))
    gram = 2 * n * n * d  # one matrix of kappa, or one product with the values
    chol = n**3 / 3
    density = gram + chol + n * n * d  # -log N(mean; 0, K_q + tau^2 I), eq. 10
    if variant.kind in ("softmax", "kernel"):
        return 2 * gram
    if variant.kind == "direct":  # K_qk V, K_k, one factor and one solve (eq. 2), two densities
        return 3 * gram + chol + n**3 + density + n * n * d
    exact = variant.options.get("exact_when_shorter") and n <= m
    # four matrices, K_ok V, two factors, three solves and a product (eq. 4, 6)
    if variant.kind == "cgp" or exact:
        moments = 4 * gram + gram + 2 * chol + 3 * n**3 + 2 * n**3 + 2 * gram
        with_kl = variant.options.get("regularizer", "kl") == "kl"
        if with_kl:  # K_q, V, both factors, one solve each way (eq. 23)
            return moments + gram + 4 * n**3 + 2 * chol + n**3 + n * n * d
        return moments + density + n * n * d
    small = 2 * n * m * d  # kappa with the inducing inputs, or a product m x n with the values
    if variant.kind == "scgp":  # four matrices, whitened; their products; mean and variance (eq. 15); dtc
        return 4 * (small + n * m * m) + 4 * 2 * n * m * m + 2 * small + 4 * m**3
    # sgpa: K_qq, its product with v, two with the inducing inputs, a variance for each channel (eq. 19)
    return 2 * gram + 3 * small + n * m * m + d * 2 * n * m * m + (d + 1) * m**3 / 3
