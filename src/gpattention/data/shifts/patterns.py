"""Something over the image; see `gpattention.data.shifts.geometry` for what the functions take."""

import torch
from torch import Tensor

from gpattention.data.corruptions.random_fields import RandomFields

WAVELENGTHS = (2.5, 5.5)  # pixels


def covered(images: Tensor, share: float, random: RandomFields) -> Tensor:
    """A grey square, its side a share of the image's."""
    hidden = torch.ones(len(images), *images.shape[-2:], dtype=torch.bool, device=images.device)
    for axis, name in ((-2, "rows"), (-1, "columns")):
        size = images.shape[axis]
        side = max(1, round(share * size))
        first = (random.uniform(name, 1) * (size - side + 1)).floor()  # [B, 1]
        place = torch.arange(size, device=images.device)
        within = (place >= first) & (place < first + side)  # [B, size]
        hidden &= within[:, :, None] if axis == -2 else within[:, None, :]
    return torch.where(hidden[:, None], 0.5, images)


def waved(images: Tensor, strength: float, random: RandomFields) -> Tensor:
    """A grating of some direction and wavelength on top."""
    height, width = images.shape[-2:]
    angle, phase = (random.uniform(name, 1, 1) * 2 * torch.pi for name in ("angle", "phase"))
    shortest, longest = WAVELENGTHS
    wavelength = shortest + (longest - shortest) * random.uniform("wavelength", 1, 1)
    y = torch.arange(height, device=images.device, dtype=torch.float64)[:, None]
    x = torch.arange(width, device=images.device, dtype=torch.float64)
    along = angle.cos() * y + angle.sin() * x  # [B, H, W]
    return images + strength * torch.sin(2 * torch.pi * along / wavelength + phase)[:, None]


def chequered(images: Tensor, strength: float, random: RandomFields) -> Tensor:
    """Every other field of eight by eight darker."""
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device)[:, None] * 8 // height
    x = torch.arange(width, device=images.device) * 8 // width
    return images * (1 - strength * ((y + x) % 2).to(images.dtype))


def striped(images: Tensor, share: float, random: RandomFields) -> Tensor:
    """A share of the rows lost, each in a colour of its own."""
    height = images.shape[-2]
    order = random.uniform("rows", height).argsort(-1).argsort(-1)  # [B, H]
    lost = order < max(1, round(share * height))
    colours = random.uniform("colours", images.shape[1], height)  # [B, C, H]
    return torch.where(lost[:, None, :, None], colours[..., None], images)


def ghosted(images: Tensor, share: float, random: RandomFields) -> Tensor:
    """Its own picture upside down shines through."""
    return (1 - share) * images + share * images.flip(-2)
