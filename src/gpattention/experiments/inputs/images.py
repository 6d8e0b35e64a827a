"""Image data of any loader as what training wants."""

from functools import partial

from torch import Tensor

from gpattention.data import ImageData
from gpattention.models.rows import Inputs
from gpattention.training import TrainingData


def image_training_data(data: ImageData) -> TrainingData:
    """Images as stored, normalised batch by batch, and the facts they decide about a vision transformer."""
    facts = {
        "classes": len(data.classes),
        "image_size": data.image_size,
        "channels": data.channels,
        "patch": data.patch,
    }
    return TrainingData(
        train=data.train.images,
        train_labels=data.train.labels,
        validation=data.inputs(data.validation.images),
        validation_labels=data.validation.labels,
        facts=facts,
        prepare=partial(_prepare, data),
    )


def _prepare(data: ImageData, images: Inputs, items: Tensor, epoch: int) -> Inputs:
    """Augmented, if the dataset was asked for so, and normalised, where the images lie."""
    if not isinstance(images, Tensor):
        raise ValueError(f"expected a tensor of images, got {type(images).__name__}")
    return data.training_inputs(images, items, epoch)
