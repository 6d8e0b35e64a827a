"""Pictures of frost for those who do not have the published ones: needles of ice over slow clouds.

Each picture has the mean colour and the contrast of one of the five pictures that the published code draws
from (its second and third are the same picture), so that the severities mean about the same. They are not
these pictures.
"""

import torch
from torch import Tensor

from gpattention.data.corruptions.motion import smear
from gpattention.data.corruptions.plasma import plasma, plasma_side
from gpattention.data.corruptions.random_fields import RandomFields

# mean red, green and blue, and standard deviation of the grey, in levels, at a fifth of the size
_LOOKS = (
    (78, 149, 166, 18),
    (201, 205, 214, 22),
    (201, 205, 214, 22),
    (138, 153, 166, 29),
    (112, 123, 135, 43),
)
_SLOW_SHARE = 0.45  # of the variance: neighbours then correlate as in the published pictures, about 0.6
_NEEDLE_ANGLES = (0.0, 36.0, 72.0, 108.0, 144.0)  # degrees


def generated_pictures(seed: int, images: Tensor) -> tuple[Tensor, ...]:
    """Five pictures of frost as fractions, [3, side, side] each, at least four times as large as `images`."""
    side = plasma_side(4 * images.shape[2], 4 * images.shape[3])
    numbers = torch.arange(len(_LOOKS), device=images.device)
    random = RandomFields(seed, numbers, "pictures of frost", 0)
    clouds = plasma(random.uniform("clouds", side, side), decay=1.6)
    specks = random.normal("specks", 1, side, side)  # [5, 1, side, side]
    angles = torch.tensor(_NEEDLE_ANGLES, device=images.device, dtype=torch.float64)
    smeared = [smear(specks, 3, 1.5, angle.expand(len(numbers))) for angle in angles]
    needles = torch.stack(smeared).amax(0)[:, 0]
    texture = _SLOW_SHARE**0.5 * _standard(clouds) + (1 - _SLOW_SHARE) ** 0.5 * _standard(needles)
    looks = images.new_tensor(_LOOKS, dtype=torch.float64)
    pictures = looks[:, :3, None, None] + looks[:, 3:, None, None] * texture[:, None]
    return tuple((pictures / 255).clamp(0, 1).unbind())


def _standard(fields: Tensor) -> Tensor:
    """Mean 0 and variance 1 over each picture."""
    centred = fields - fields.mean((1, 2), keepdim=True)
    return centred / centred.square().mean((1, 2), keepdim=True).sqrt()
