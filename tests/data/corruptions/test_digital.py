"""JPEG: bit for bit what libjpeg makes of it, and each step against its definition; saturation of greys."""

import hashlib
import io

import numpy as np
import pytest
import torch
from torch import Tensor

from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from tests.data.corruptions.pictures import pictures

QUALITIES = [int(c[0]) for c in CORRUPTIONS["jpeg_compression"].severities]


# SHA-256 of what Pillow 13.0.0 (libjpeg-turbo) decodes of `pattern()` after encoding it, by severity
BY_PILLOW = {
    1: "745e6c65e87b95681757790513533be98177159a6f90b63c76f01cc76c8532a4",
    2: "91115a0ac101851c9c7871d67f0a62a817f11157d665ce315f3bc606b684f712",
    3: "b1bf53a1d602a968f3477e38ca1dfa82ce8aecc9056ee7aa6bc49113e76df2a5",
    4: "79f60dba95d3a201e464017efe2581f61b4cf7905d4181c111973317453918eb",
    5: "2f17b0b3b2ee1e2d62f06978027a6ca4da1f4283749ac45088dba9bb4bf5b55b",
}


def pattern() -> Tensor:
    """Slopes, steps and a fine texture in whole numbers, of sides that are not multiples of 16."""
    y, x = torch.meshgrid(torch.arange(40), torch.arange(28), indexing="ij")
    return torch.stack(
        [(6 * x + 2 * y) % 256, (x * y // 5) % 256, (3 * y + 40 * (x // 7) + 9 * (x % 2)) % 256]
    )[None].to(torch.uint8)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_is_what_pillow_made(severity: int) -> None:
    made = corrupt(pattern(), "jpeg_compression", severity)[0].permute(1, 2, 0).contiguous()
    assert hashlib.sha256(made.numpy().tobytes()).hexdigest() == BY_PILLOW[severity]


@pytest.mark.parametrize("size", [(32, 32), (33, 47)], ids=str)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_is_what_pillow_makes(severity: int, size: tuple[int, int]) -> None:
    image_module = pytest.importorskip("PIL.Image")
    images = pictures(8, *size)
    made = corrupt(images, "jpeg_compression", severity)
    for before, after in zip(images, made, strict=True):
        file = io.BytesIO()
        image_module.fromarray(before.permute(1, 2, 0).contiguous().numpy()).save(
            file, "JPEG", quality=QUALITIES[severity - 1]
        )
        decoded = np.asarray(image_module.open(file)).astype(int)
        away = np.abs(after.permute(1, 2, 0).numpy() - decoded)
        # none with libjpeg-turbo; another libjpeg may round its transform otherwise
        assert away.mean() < 0.5
