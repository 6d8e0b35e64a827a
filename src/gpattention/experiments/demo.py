"""Six kinds of attention on handwritten digits: clean, corrupted, and digits never seen.

Every model has the same size and schedule: half of it as kernel attention (softmax: as itself), half with
draws.  Predictions average ten draws.  Uncertainty for out-of-distribution detection is the entropy.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpattention.data import ImageData, load_digits
from gpattention.data.corruptions import corrupt
from gpattention.experiments.images import image_training_data
from gpattention.metrics import accuracy, auroc, ece, nll
from gpattention.models import Transformer
from gpattention.training import Progress, Recipe, TrainingData, fit, recipe_from_dict

MODELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "kernel": {},
    "sgpa": {"num_inducing": 16},
    "direct": {"regularizer": "marginal"},
    "cgp": {"regularizer": "marginal"},
    "scgp": {"num_inducing": 16, "regularizer": "dtc"},
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


def demo_recipe(model: str, *, epochs: int = 12, seed: int = 0) -> Recipe:
    """The recipe of one of the demo's models."""
    return recipe_from_dict(
        {
            "name": f"demo-{model}",
            "seed": seed,
            "data": {"name": "digits"},
            "model": {
                "attention": model,
                "options": MODELS[model],
                "config": {"width": 48, "heads": 4, "depth": 3},
            },
            "optimizer": {"batch_size": 50, "learning_rate": 2e-3},
            "phases": {"kernel_epochs": epochs, "epochs": epochs},
            "checkpoint": {"every": 4, "keep": 1},
        }
    )


def run_demo(
    folder: str | Path,
    *,
    models: tuple[str, ...] = tuple(MODELS),
    epochs: int = 12,
    seed: int = 0,
    on_model: Callable[[str, Recipe], Callable[[Progress], object] | None] | None = None,
) -> DemoResult:
    """Train and evaluate the models; what an earlier demo left in `folder` is replaced."""
    unknown = sorted(set(models) - set(MODELS))
    if unknown:
        raise ValueError(f"expected models among {', '.join(MODELS)}, got {', '.join(unknown)}")
    folder = Path(folder)
    data = load_digits(seed)
    training = image_training_data(data)
    rows = [_train_and_judge(name, folder / name, data, training, epochs, seed, on_model) for name in models]
    return DemoResult(tuple(rows), folder)


def _train_and_judge(
    name: str,
    folder: Path,
    data: ImageData,
    training: TrainingData,
    epochs: int,
    seed: int,
    on_model: Callable[[str, Recipe], Callable[[Progress], object] | None] | None,
) -> DemoRow:
    recipe = demo_recipe(name, epochs=epochs, seed=seed)
    if (folder / "recipe.json").is_file():  # a demo's own run, not somebody's work
        shutil.rmtree(folder)
    rates: list[float] = []
    show = None if on_model is None else on_model(name, recipe)

    def progress(p: Progress) -> None:
        rates.append(recipe.optimizer.batch_size / p.examples_per_second)
        if show is not None:
            show(p)

    result = fit(recipe, training, folder, progress=progress)
    share = result.rows[-1]["floor_share"]
    return _judge(name, result.model, data, sum(rates), share)


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
