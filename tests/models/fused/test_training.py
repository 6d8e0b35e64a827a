"""A few training steps with fused kernels under Triton's interpreter are those of plain operations."""

import pytest
import torch

from tests.training.seeded_steps import losses

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU runs tests/training/test_gpu_fused.py"
)
SMALL = {"image_size": 8, "width": 8, "heads": 1, "depth": 1}


@pytest.mark.parametrize("kind", ["softmax", "kernel", "scgp", pytest.param("cgp", marks=pytest.mark.slow)])
def test_steps(kind: str) -> None:
    plain, fused = (losses(kind, mode, 4, device="cpu", batch=2, **SMALL) for mode in ("off", "on"))
    assert float(((fused - plain) / plain).abs().max()) < 1e-4
    assert float(plain.std()) > 1e-3  # steps differ
