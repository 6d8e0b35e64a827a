"""The corruptions of CIFAR-10-C, made anew from any clean test set.

D. Hendrycks and T. Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019; constants as published for 32 x 32 images, lengths in pixels.  Each corruption is
one function in the file of its category.

>>> from gpattention.data.corruptions import corrupt
>>> corrupt(images, "fog", severity=3)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpattention.checks import check_choice, check_count, check_tensor
from gpattention.data.corruptions import blur as _blur  # noqa: F401
from gpattention.data.corruptions import digital as _digital  # noqa: F401
from gpattention.data.corruptions import noise as _noise  # noqa: F401
from gpattention.data.corruptions.core import (
    REGISTERED,
    Corruption,
    RandomFields,
    Scene,
    check_pixels,
    cut_levels,
    fractions,
)
from gpattention.data.corruptions.weather import generated_pictures, shrunk_pictures

__all__ = ["CATEGORIES", "CORRUPTIONS", "SEVERITIES", "Corruption", "corrupt"]

SEVERITIES = (1, 2, 3, 4, 5)
CATEGORIES = {
    category: tuple(each.name for each in REGISTERED if each.category == category)
    for category in ("noise", "blur", "weather", "digital")
}
CORRUPTIONS = {each.name: each for names in CATEGORIES.values() for each in REGISTERED if each.name in names}

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

    Bytes remain bytes, with decimals cut off as in the published code; floats in [0, 1] remain floats of
    their type, on the same device.  Image b is item `first_item + b` of the test set; its random numbers
    depend only on the seed, the item, the corruption and the severity, so that the choice of batches does not
    matter.

    Args:
        images: uint8, or floats in [0, 1]; RGB, at least 8 x 8 pixels.
        name: such as "gaussian_noise".
        severity: 1, 2, 3, 4 or 5.
        seed: of all random numbers.
        first_item: the index of the first image in its test set.
        frost: pictures of frost, RGB [3, h, w], each in its published size; generated ones if not given.

    Returns:
        New images of the same shape, type and device.

    Raises:
        ValueError: the corruption or severity is unknown, or the images have another form.

    >>> corrupt(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "gaussian_noise", 3).shape
    torch.Size([4, 3, 32, 32])
    """
    check_request(name, severity)
    check_images(images)
    first_item = check_count("first_item", first_item, least=0)
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
            changed = cut_levels(corruption.apply(fractions(part), scene, *constants))
        else:
            changed = corruption.apply(part.to(torch.float64), scene, *constants).clamp(0, 1)
        done.append(changed.to(images.dtype))
    return torch.cat(done) if done else images.clone()


def check_request(name: str, severity: int) -> None:
    """Refuse unknown corruptions and severities."""
    check_choice("name", name, CORRUPTIONS)
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity: expected 1, 2, 3, 4 or 5, got {severity!r}")


def check_images(images: Tensor, channels: tuple[int, ...] = (3,), smallest: int = SMALLEST_SIDE) -> None:
    """Refuse anything but images of bytes or of floats in [0, 1]."""
    check_tensor("images", images)
    if images.ndim != 4 or images.shape[1] not in channels or min(images.shape[2:]) < smallest:
        raise ValueError(
            f"images: expected shape [B, {' or '.join(map(str, channels))}, H, W] with H and W of at least "
            f"{smallest}, got {tuple(images.shape)}"
        )
    check_pixels("images", images)
