"""Times of training steps and predictions by kind of attention, against softmax and the paper's way.

Everything is measured in one run and told as ratios: absolute times mean little between machines.  The model
is the paper's for CIFAR-10 (depth 5, width 128, 4 heads, 64 tokens) in float32.  A step is forward, loss
with regulariser and draws, backward and Adam, as plain calls without a captured graph.
"""

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpattention.experiments.paper_kernel import gap_to_ours, paper_model
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer

ALPHA = 0.01  # weight of the regulariser
PAPER = "paper's kernel"
SOFTMAX = "softmax"
ALLOWED_GAP = 1e-5  # between the paper's kernel attention and ours


@dataclass(frozen=True)
class Variant:
    """One model to be timed."""

    kind: str
    draws: bool = False  # in training; predictions draw where the kind can
    options: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = {
    SOFTMAX: Variant("softmax"),
    "kernel": Variant("kernel", options={"normalize": "none"}),
    "sgpa": Variant("sgpa", draws=True, options={"num_inducing": 16}),
    "direct": Variant("direct", draws=True, options={"normalize": "none", "regularizer": "marginal"}),
    "cgp": Variant("cgp", draws=True, options={"normalize": "none", "regularizer": "marginal"}),
    "cgp-kl": Variant("cgp", draws=True, options={"normalize": "none", "regularizer": "kl"}),
    "cgp-rows": Variant("cgp", draws=True, options={"regularizer": "marginal"}),
    "scgp": Variant("scgp", draws=True, options={"normalize": "none", "num_inducing": 16}),
}


@dataclass(frozen=True)
class BenchRow:
    """One model."""

    name: str
    seconds: float  # median of the repeats
    to_softmax: float  # how many times softmax's
    to_paper: float  # how many times faster than the paper's kernel attention


@dataclass(frozen=True)
class BenchResult:
    """One table, with what it was measured on."""

    what: str  # "step" or "predict"
    rows: tuple[BenchRow, ...]
    batch: int
    repeats: int
    samples: int  # draws of a prediction; 0 for steps
    gap: float  # largest difference between the paper's kernel attention and ours
    environment: Mapping[str, str]


def bench_steps(
    kinds: Sequence[str] = tuple(VARIANTS),
    *,
    batch: int = 100,
    repeats: int = 3,
    device: torch.device | str = "cpu",
    config: VisionConfig | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> BenchResult:
    """Seconds of a training step of each kind, of softmax and of the paper's kernel attention.

    Args:
        kinds: of `VARIANTS`.
        batch: images of a step.
        repeats: timed steps of each model, in turns, after one to warm up.
        device: where to compute.
        config: the transformer but for its attention; the paper's if not given.
        progress: told the steps done, and in all.
    """
    return _bench("step", kinds, batch, repeats, 0, torch.device(device), config, progress)


def bench_predictions(
    kinds: Sequence[str] = tuple(VARIANTS),
    *,
    batch: int = 100,
    repeats: int = 3,
    samples: int = 10,
    device: torch.device | str = "cpu",
    config: VisionConfig | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> BenchResult:
    """Seconds to predict `batch` images, with `samples` draws where a kind draws; see `bench_steps`."""
    if samples < 0:
        raise ValueError(f"expected samples >= 0, got {samples}")
    return _bench("predict", kinds, batch, repeats, samples, torch.device(device), config, progress)


def _bench(
    what: str,
    kinds: Sequence[str],
    batch: int,
    repeats: int,
    samples: int,
    device: torch.device,
    config: VisionConfig | None,
    progress: Callable[[int, int], object] | None,
) -> BenchResult:
    check_kinds(kinds)
    for name, value in (("batch", batch), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"expected {name} >= 1, got {value}")
    shape = VisionConfig() if config is None else config
    calls: dict[str, Callable[[], object]] = {}
    for name in dict.fromkeys((PAPER, SOFTMAX, *kinds)):
        model, draws = _model(name, shape, device)
        if what == "step":
            calls[name] = _step(model, batch, device, draws=draws)
        else:
            calls[name] = _prediction(model, batch, samples, device)
    times = time_in_turns(calls, repeats, device, progress)
    rows = tuple(
        BenchRow(name, own, own / times[SOFTMAX], times[PAPER] / own) for name, own in times.items()
    )  # fmt: skip
    gap = gap_to_ours(shape)
    return BenchResult(what, rows, batch, repeats, samples, gap, environment(device))


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise for a kind that cannot be timed."""
    for kind in kinds:
        if kind not in VARIANTS:
            raise ValueError(f"expected kinds among {', '.join(VARIANTS)}, got {kind!r}")


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, float]:
    """Median seconds of each call; in turns, so that a machine that slows down slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    total, done = len(calls) * (repeats + 1), 0
    for turn in range(repeats + 1):
        for name, call in calls.items():
            _wait_for(device)
            start = time.perf_counter()
            call()
            _wait_for(device)
            if turn > 0:  # the first warms up
                times[name].append(time.perf_counter() - start)
            done += 1
            if progress is not None:
                progress(done, total)
    return {name: statistics.median(each) for name, each in times.items()}


def environment(device: torch.device) -> dict[str, str]:
    """What the times depend on."""
    cuda = device.type == "cuda"
    return {
        "gpattention": version("gpattention"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": str(torch.get_num_threads()),
    }


def _processor() -> str:
    """The CPU's name, where Linux tells it."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _model(name: str, shape: VisionConfig, device: torch.device) -> tuple[VisionTransformer, bool]:
    torch.manual_seed(0)
    if name == PAPER:
        return paper_model(shape).to(device), False
    variant = VARIANTS[name]
    attention = AttentionConfig(variant.kind, variant.options)
    return VisionTransformer(replace(shape, attention=attention)).to(device), variant.draws


def _step(model: VisionTransformer, batch: int, device: torch.device, *, draws: bool) -> Callable[[], None]:
    """One training step on a fixed batch."""
    images, labels = _batch(model, batch, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    noise = torch.Generator(device).manual_seed(1)
    need = ("logits", "regularizer") if draws else ("logits",)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        out = model(images, draw="independent" if draws else "none", generator=noise, need=need)
        loss = cross_entropy(out.logits, labels)
        if out.regularizer is not None:
            loss = loss + ALPHA * out.regularizer
        loss.backward()
        optimizer.step()

    return step


def _prediction(
    model: VisionTransformer, batch: int, samples: int, device: torch.device
) -> Callable[[], object]:
    images, _ = _batch(model, batch, device)
    return lambda: model.predict(images, samples=samples)


def _batch(model: VisionTransformer, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    config = model.vision
    images = torch.randn(batch, config.channels, *config.sides, generator=g)
    labels = torch.randint(config.classes, (batch,), generator=g)
    return images.to(device), labels.to(device)
