"""Other colours and fewer tones; see `gpattention.data.shifts.geometry` for what the functions take."""

import math

import torch
from torch import Tensor

from gpattention.data.corruptions.random_fields import RandomFields

# red, green and blue to brightness and two axes of colour (NTSC)
_TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def recoloured(images: Tensor, degrees: float, random: RandomFields) -> Tensor:
    """The circle of colours turned, brightness kept."""
    angle = math.radians(degrees)
    to_yiq = torch.tensor(_TO_YIQ, dtype=torch.float64, device=images.device)
    turn = torch.eye(3, dtype=torch.float64, device=images.device)
    turn[1:, 1:] = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
    )
    mix = torch.linalg.solve(to_yiq, turn @ to_yiq)  # [3, 3]
    # sums in a fixed order, so that a batch may be cut at will
    return torch.stack([sum(mix[i, j] * images[:, j] for j in range(3)) for i in range(3)], 1)


def posterised(images: Tensor, tones: float, random: RandomFields) -> Tensor:
    """So many tones of each colour alone."""
    return (images * (tones - 1)).add(0.5).floor() / (tones - 1)


def solarised(images: Tensor, threshold: float, random: RandomFields) -> Tensor:
    """Values above a threshold reversed."""
    return torch.where(images > threshold, 1 - images, images)
