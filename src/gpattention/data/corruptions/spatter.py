"""Spatter: drops of water (severities 1 to 3) or mud (4 and 5) on the lens."""

import torch
from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.distance import distance
from gpattention.data.corruptions.edges import canny
from gpattention.data.corruptions.filters import box_filter, correlate, gaussian_filter
from gpattention.data.corruptions.levels import cut_levels

_WATER = (175 / 255, 238 / 255, 238 / 255)  # pale turquoise
_MUD = (63 / 255, 42 / 255, 20 / 255)
_EMBOSS = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))
_FARTHEST = 20  # pixels


def spatter(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """A smooth random field is liquid where it is above a threshold."""
    mean, spread, smoothness, threshold, strength, is_mud = constants
    liquid = mean + spread * scene.random.normal("liquid", *images.shape[2:])  # [B, H, W]
    liquid = gaussian_filter(liquid, smoothness)
    liquid = torch.where(liquid < threshold, 0, liquid)
    if is_mud:
        cover = gaussian_filter((liquid > threshold).to(images.dtype), strength)
        cover = torch.where(cover < 0.8, 0, cover)[:, None]
        return images * (1 - cover) + _colour(_MUD, images) * cover
    return images + strength * water_thickness(cut_levels(liquid))[:, None] * _colour(_WATER, images)


def water_thickness(liquid: Tensor) -> Tensor:
    """How much light each drop adds, at most 1: embossed by the distance to the drops' edges.

    Levels in, [B, H, W]; all steps but the last work on bytes.
    """
    away = box_filter(distance(canny(liquid, 50, 150), _FARTHEST))
    relief = equalize((away + 1e-6).floor().long(), _FARTHEST).to(torch.float64)
    relief = correlate(relief, _EMBOSS, "mirror").clamp(0, 255)
    relief = (box_filter(relief) + 0.5).floor()
    thickness = liquid * relief
    thickest = thickness.amax((1, 2), keepdim=True)
    return torch.where(thickest > 0, thickness / thickest, 0)


def equalize(levels: Tensor, most: int) -> Tensor:
    """Levels 0..most of [B, H, W] spread over 0..255 by their ranks: OpenCV's equalizeHist."""
    counts = torch.stack([(levels == level).sum((1, 2)) for level in range(most + 1)], 1)  # [B, most + 1]
    total = levels.shape[1] * levels.shape[2]
    up_to = counts.cumsum(1)
    lowest = torch.where(up_to > 0, up_to, total + 1).amin(1, keepdim=True)  # how many have the lowest level
    ranks = (up_to - lowest).clamp(min=0) * 255 / (total - lowest).clamp(min=1)
    table = torch.where(lowest == total, torch.arange(most + 1, device=levels.device), ranks.round())
    return table.gather(1, levels.flatten(1)).reshape(levels.shape)


def _colour(rgb: tuple[float, float, float], images: Tensor) -> Tensor:
    return images.new_tensor(rgb)[:, None, None]
