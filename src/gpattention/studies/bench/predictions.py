"""Posterior samples of many images as `model.predict` draws them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpattention import gp
from gpattention.gp.fused.switch import Mode, fused_mode
from gpattention.models import VisionConfig, VisionTransformer
from gpattention.studies.bench.paper_model import ALLOWED_GAP, PAPERS, gap_to_ours
from gpattention.studies.bench.timing import Progress, check_counts, time_in_turns
from gpattention.studies.bench.variants import SOFTMAX, build, check_kinds

# training's regulariser does not matter here, nor does its engine
KINDS = ("softmax", "kernel", "direct", "cgp", "cgp-rows", "scgp-16", "sgpa-32")


@dataclass(frozen=True)
class PredictRow:
    """One model."""

    name: str
    seconds: float | None  # for all images; None where memory did not suffice
    draws: int  # samples of each image; 1 for a kind that cannot draw
    to_softmax: float | None = None  # how many times softmax's, which needs one pass
    images_per_second: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class PredictResult:
    """One table, with what it was measured with."""

    rows: tuple[PredictRow, ...]
    images: int
    samples: int
    batch_size: int | None
    capture: bool | None
    repeats: int
    seed: int
    device: str  # its type
    mode: str  # of the fused kernels
    gaps: dict[str, float]

    @property
    def baselines_hold(self) -> bool:
        """Whether each baseline computes what it claims."""
        return all(gap < ALLOWED_GAP for gap in self.gaps.values())


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
) -> PredictResult:
    """Seconds to predict all images, with `samples` draws where a kind draws.

    Args:
        kinds: of `VARIANTS`; those of `KINDS` if not given.
        images: how many; they lie on the device.
        samples: draws of each.
        batch_size: rows at once; the model's own choice if not given.
        capture: whether batches are replays of a graph; the model's own choice if not given.
        repeats: timed predictions after one to warm up.
        seed: of weights, images and draws.
        device: where to compute.
        fused: the mode of fused kernels; the one in force if not given.
        config: the transformer but for its attention; the paper's if not given.
        progress: told the predictions done, and in all.
    """
    chosen = KINDS if kinds is None else tuple(kinds)
    check_kinds(chosen)
    check_counts(images=images, samples=samples, repeats=repeats)
    place = torch.device(device)
    shape = VisionConfig() if config is None else config
    names = tuple(dict.fromkeys((SOFTMAX, *chosen)))
    options: dict[str, Any] = {"samples": samples, "seed": seed, "batch_size": batch_size, "capture": capture}
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(images, shape.channels, *shape.sides, generator=g).to(place)
    failures: dict[str, str] = {}
    draws: dict[str, int] = {}

    def call(name: str, model: VisionTransformer) -> Callable[[], object]:
        def predict() -> None:
            if name in failures:
                return
            try:
                draws[name] = model.predict(x, **options).samples
            except torch.OutOfMemoryError:
                failures[name] = "out of memory"

        return predict

    with gp.fused_kernels(fused_mode() if fused is None else fused):
        models = {name: build(name, shape, seed).to(place).eval() for name in names}
        calls = {name: call(name, model) for name, model in models.items()}
        times = time_in_turns(calls, repeats, place, progress)
        mode = fused_mode()
    rows = tuple(
        PredictRow(name, None, 0, failure=failures[name])
        if name in failures
        else PredictRow(name, times[name], draws[name], times[name] / times[SOFTMAX], images / times[name])
        for name in names
    )
    gaps = {name: gap_to_ours(name) for name in names if name in PAPERS}
    return PredictResult(
        rows, images, samples, batch_size, capture, repeats, seed, place.type, mode, gaps
    )  # fmt: skip
