"""Frost: a crop of a picture of frost laid over the image."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.levels import fractions

# The published code shrinks its pictures to a fifth by linear interpolation at the centres of the new pixels,
# which is at the centre of every fifth old one.
_KEPT = slice(2, None, 5)


def frost(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Dim the image by c1 and add c2 times a random crop of a random picture."""
    kept, added = constants
    height, width = images.shape[-2:]
    count = len(images)
    which = (scene.random.uniform("picture") * len(scene.frost)).long()  # [B]
    place = scene.random.uniform("place", 2)  # [B, 2]
    crops = torch.empty_like(images)
    for number, picture in enumerate(scene.frost):
        _, tall, wide = picture.shape
        top = (place[:, 0] * (tall - height)).long()
        left = (place[:, 1] * (wide - width)).long()
        rows = top[:, None] + torch.arange(height, device=images.device)  # [B, H]
        columns = left[:, None] + torch.arange(width, device=images.device)
        index = (rows[:, :, None] * wide + columns[:, None, :]).flatten(1)  # [B, H W]
        crop = picture.flatten(1)[:, index].movedim(0, 1).reshape(count, 3, height, width)
        crops = torch.where((which == number)[:, None, None, None], crop, crops)
    return kept * images + added * crops


def shrunk_pictures(pictures: Sequence[Tensor], images: Tensor) -> tuple[Tensor, ...]:
    """Pictures as published, RGB [3, h, w], to fractions of a fifth of their size, where `images` are."""
    if len(pictures) == 0:
        raise ValueError("frost: expected at least one picture, got none")
    shrunk = []
    for number, picture in enumerate(pictures):
        if picture.ndim != 3 or len(picture) != 3:
            raise ValueError(f"frost[{number}]: expected shape [3, h, w], got {tuple(picture.shape)}")
        if picture.dtype != torch.uint8 and not picture.is_floating_point():
            raise ValueError(f"frost[{number}]: expected uint8 or floats in [0, 1], got {picture.dtype}")
        whole = fractions(picture) if picture.dtype == torch.uint8 else picture.to(torch.float64)
        small = whole[:, _KEPT, _KEPT].to(images.device)
        if small.shape[1] <= images.shape[2] or small.shape[2] <= images.shape[3]:
            raise ValueError(
                f"frost[{number}]: a fifth of {tuple(whole.shape[1:])} must be larger than the images, "
                f"{tuple(images.shape[2:])}"
            )
        low, high = (float(bound) for bound in whole.aminmax())
        if not (low >= 0 and high <= 1):
            raise ValueError(f"frost[{number}]: expected values in [0, 1], got {low:.4g} to {high:.4g}")
        shrunk.append(small)
    return tuple(shrunk)
