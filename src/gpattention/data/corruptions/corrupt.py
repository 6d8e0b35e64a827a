"""Corrupt a batch of images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpattention.data.corruptions.catalogue import CORRUPTIONS, SEVERITIES
from gpattention.data.corruptions.corruption import Scene
from gpattention.data.corruptions.frost import shrunk_pictures
from gpattention.data.corruptions.frost_pictures import generated_pictures
from gpattention.data.corruptions.levels import cut_levels, fractions
from gpattention.data.corruptions.random_fields import RandomFields

SMALLEST_SIDE = 8  # pixels
# values of a chunk: on a CPU its intermediates should stay in the cache
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 25}


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    first_item: int = 0,
    frost: Sequence[Tensor] | Tensor | None = None,
) -> Tensor:
    """Images [B, 3, H, W] under the corruption `name` of `CORRUPTIONS` at severity 1 to 5.

    Bytes come back as bytes, decimals cut off as in the published code; floats in [0, 1] come back as floats
    of their type, on their device. Image b is item `first_item + b` of the test set; its random numbers
    depend on the seed, the item, the corruption and the severity alone, so batches may be cut at will.

    Args:
        images: uint8, or floats in [0, 1]; RGB, at least 8 x 8 pixels.
        name: such as "gaussian_noise".
        severity: 1, 2, 3, 4 or 5.
        seed: of all random numbers.
        first_item: the index of the first image in its test set.
        frost: pictures of frost, RGB [3, h, w] each in their published size; None draws on generated ones.

    >>> corrupt(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "gaussian_noise", 3).shape
    torch.Size([4, 3, 32, 32])
    """
    check_request(name, severity)
    check_images(images)
    if first_item < 0:
        raise ValueError(f"first_item: expected an index of at least 0, got {first_item}")
    corruption = CORRUPTIONS[name]
    constants = corruption.severities[severity - 1]
    pictures: tuple[Tensor, ...] = ()
    if name == "frost":
        pictures = generated_pictures(seed, images) if frost is None else shrunk_pictures(list(frost), images)
    chunk = max(1, _AT_ONCE.get(images.device.type, 1 << 18) // images.shape[1:].numel())
    done = []
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk]
        items = torch.arange(first_item + start, first_item + start + len(part), device=images.device)
        scene = Scene(RandomFields(seed, items, name, severity), pictures)
        if images.dtype == torch.uint8:
            changed = cut_levels(corruption.apply(fractions(part), constants, scene))
        else:
            changed = corruption.apply(part.to(torch.float64), constants, scene).clamp(0, 1)
        done.append(changed.to(images.dtype))
    return torch.cat(done) if done else images.clone()


def check_request(name: str, severity: int) -> None:
    """Raise unless there is such a corruption at such a severity."""
    if name not in CORRUPTIONS:
        raise ValueError(f"name: expected one of {', '.join(CORRUPTIONS)}, got {name!r}")
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity: expected 1, 2, 3, 4 or 5, got {severity!r}")


def check_images(images: Tensor) -> None:
    """Raise unless these are images of bytes or of floats in [0, 1]."""
    if not isinstance(images, Tensor):
        kind = type(images).__name__
        raise ValueError(f"images: expected a tensor, got {kind}: torch.as_tensor makes one of it")
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < SMALLEST_SIDE:
        raise ValueError(
            f"images: expected shape [B, 3, H, W] with H and W of at least {SMALLEST_SIDE}, "
            f"got {tuple(images.shape)}"
        )
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise ValueError(f"images: expected uint8 or floats in [0, 1], got {images.dtype}")
    if len(images) > 0:
        low, high = (float(bound) for bound in images.aminmax())
        if not (low >= 0 and high <= 1):  # also false for NaN
            raise ValueError(f"images: expected floats in [0, 1], got {low:.4g} to {high:.4g}")
