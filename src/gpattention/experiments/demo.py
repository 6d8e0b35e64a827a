"""Six kinds of attention on handwritten digits: clean, corrupted, and digits never seen.

Every model has the same size and schedule: a third of it as kernel attention (softmax: as itself), the rest
with draws.  Predictions average ten draws.  Uncertainty for out-of-distribution detection is the entropy.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpattention.data import ImageData, load_digits
from gpattention.data.corruptions import corrupt
from gpattention.experiments.images import image_training_data
from gpattention.metrics import accuracy, auroc, ece, nll
from gpattention.models import Transformer
from gpattention.training import Recipe, fit, recipe_from_dict

MODELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "kernel": {},
    "sgpa": {"num_inducing": 16},
    "direct": {},
    "cgp": {},
    "scgp": {"num_inducing": 16},
}
CORRUPTIONS = ("gaussian_noise", "gaussian_blur", "contrast", "brightness")
SEVERITIES = (2, 5)
FAR = ("noise", "patterns")
DRAWS = 10


@dataclass(frozen=True)
class DemoRow:
    """One model; NLL and ECE over test images, corrupted ones as means over types and severities."""

    model: str
    accuracy: float
    nll: float
    ece: float
    corrupted_accuracy: float
    corrupted_nll: float
    corrupted_ece: float
    near_auroc: float
    far_auroc: float
    floor_share: float | None
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """All models of the demo."""

    rows: tuple[DemoRow, ...]
    folder: Path


def demo_recipe(model: str, *, kernel_epochs: int = 10, epochs: int = 20, seed: int = 0) -> Recipe:
    """The recipe of one of the demo's models."""
    return recipe_from_dict(
        {
            "name": f"demo-{model}",
            "seed": seed,
            "data": {"name": "digits"},
            "model": {
                "attention": model,
                "options": MODELS[model],
                "config": {"width": 64, "heads": 4, "depth": 3},
            },
            "optimizer": {"batch_size": 50, "learning_rate": 2e-3},
            "phases": {"kernel_epochs": kernel_epochs, "epochs": epochs},
            "checkpoint": {"every": 5, "keep": 1},
        }
    )


def run_demo(
    folder: str | Path,
    *,
    models: tuple[str, ...] = tuple(MODELS),
    kernel_epochs: int = 10,
    epochs: int = 20,
    seed: int = 0,
    workers: int = 1,
    on_done: Callable[[DemoRow], object] | None = None,
) -> DemoResult:
    """Train and evaluate the models; what an earlier demo left in `folder` is replaced.

    Each model trains on one thread, `workers` of them at once: matrices this small gain nothing from more.
    """
    unknown = sorted(set(models) - set(MODELS))
    if unknown:
        raise ValueError(f"expected models among {', '.join(MODELS)}, got {', '.join(unknown)}")
    if workers < 1:
        raise ValueError(f"expected workers >= 1, got {workers}")
    folder = Path(folder)
    jobs = [
        (demo_recipe(m, kernel_epochs=kernel_epochs, epochs=epochs, seed=seed), folder / m) for m in models
    ]
    rows = {}
    for row in _run_all(jobs, workers):
        rows[row.model] = row
        if on_done is not None:
            on_done(row)
    return DemoResult(tuple(rows[m] for m in models), folder)


def _run_all(jobs: list[tuple[Recipe, Path]], workers: int) -> Iterator[DemoRow]:
    if workers == 1:
        threads = torch.get_num_threads()
        try:
            yield from (_train_and_judge(*job) for job in jobs)
        finally:
            torch.set_num_threads(threads)
        return
    # the long ones first, so that none is left alone at the end
    longest = sorted(jobs, key=lambda job: list(MODELS).index(job[0].model.attention), reverse=True)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_train_and_judge, *job) for job in longest]):
            yield done.result()


def _train_and_judge(recipe: Recipe, folder: Path) -> DemoRow:
    torch.set_num_threads(1)
    if (folder / "recipe.json").is_file():  # a demo's own run, not somebody's work
        shutil.rmtree(folder)
    data = load_digits(recipe.seed)
    start = time.perf_counter()
    result = fit(recipe, image_training_data(data), folder)
    seconds = time.perf_counter() - start
    share = result.rows[-1]["floor_share"]
    return _judge(recipe.model.attention, result.model, data, seconds, share)


def _judge(name: str, model: Transformer, data: ImageData, seconds: float, share: float | None) -> DemoRow:
    def probs(images: Tensor) -> Tensor:
        return model.predict(data.inputs(images), samples=DRAWS).probs

    labels = data.test.labels
    clean = probs(data.test.images)
    harmed = [
        probs(_corrupted(data.test.images, corruption, severity, data.seed))
        for corruption in CORRUPTIONS
        for severity in SEVERITIES
    ]
    uncertainty = {part: _entropy(probs(images.images)) for part, images in data.ood.items()}
    known = _entropy(clean)
    return DemoRow(
        model=name,
        accuracy=accuracy(clean, labels),
        nll=nll(clean, labels),
        ece=ece(clean, labels),
        corrupted_accuracy=_mean([accuracy(p, labels) for p in harmed]),
        corrupted_nll=_mean([nll(p, labels) for p in harmed]),
        corrupted_ece=_mean([ece(p, labels) for p in harmed]),
        near_auroc=auroc(known, uncertainty["near"]),
        far_auroc=_mean([auroc(known, uncertainty[part]) for part in FAR]),
        floor_share=share,
        seconds=seconds,
    )


def _corrupted(images: Tensor, name: str, severity: int, seed: int) -> Tensor:
    """Grey images through a corruption of coloured ones.  [n, 1, H, W]"""
    coloured = corrupt(images.expand(-1, 3, -1, -1), name, severity, seed=seed)
    return coloured.float().mean(1, keepdim=True).round().to(images.dtype)


def _entropy(probs: Tensor) -> Tensor:
    return -torch.special.xlogy(probs, probs).sum(-1)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
