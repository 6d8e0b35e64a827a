"""Image data of any loader as what training wants."""

from collections.abc import Callable
from pathlib import Path

import torch

from gpattention.data import ImageData, load
from gpattention.training import Progress, Recipe, TrainingData, TrainingResult, fit


def image_training_data(data: ImageData) -> TrainingData:
    """Normalised images, and the facts that the data decides about a vision transformer."""
    facts = {
        "classes": len(data.classes),
        "image_size": data.image_size,
        "channels": data.channels,
        "patch": data.patch,
    }
    return TrainingData(
        train=data.inputs(data.train.images),
        train_labels=data.train.labels,
        validation=data.inputs(data.validation.images),
        validation_labels=data.validation.labels,
        facts=facts,
    )


def train_images(
    recipe: Recipe,
    folder: str | Path,
    *,
    root: str | Path | None = None,
    resume: bool = False,
    device: torch.device | str = "cpu",
    progress: Callable[[Progress], object] | None = None,
) -> TrainingResult:
    """Load the recipe's images and train on them."""
    data = load(recipe.data.name, root, recipe.seed, **recipe.data.options)
    if not isinstance(data, ImageData):
        raise ValueError(f"expected data of images for a vision model, got {recipe.data.name!r}")
    return fit(recipe, image_training_data(data), folder, resume=resume, device=device, progress=progress)
