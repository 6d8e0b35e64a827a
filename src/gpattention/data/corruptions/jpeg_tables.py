"""The quantisation tables of the JPEG standard (Annex K), scaled by quality as libjpeg does."""

import torch
from torch import Tensor

_LUMINANCE = (
    16, 11, 10, 16, 24, 40, 51, 61,
    12, 12, 14, 19, 26, 58, 60, 55,
    14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77,
    24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMINANCE = (
    17, 18, 24, 47, 99, 99, 99, 99,
    18, 21, 26, 66, 99, 99, 99, 99,
    24, 26, 56, 99, 99, 99, 99, 99,
    47, 66, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99,
)  # fmt: skip


def quantisation_tables(quality: int) -> tuple[Tensor, Tensor]:
    """Step sizes of luminance and chrominance by vertical and horizontal frequency, int64.  [8, 8] each"""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    luminance, chrominance = (
        torch.tensor([min(max((step * percent + 50) // 100, 1), 255) for step in table])
        for table in (_LUMINANCE, _CHROMINANCE)
    )
    return luminance.reshape(8, 8), chrominance.reshape(8, 8)
