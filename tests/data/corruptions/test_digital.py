"""JPEG: bit for bit what libjpeg-turbo makes of it, whatever Pillow is installed."""

import hashlib

import pytest
import torch
from torch import Tensor

from gpattention.data.corruptions import SEVERITIES, corrupt

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
