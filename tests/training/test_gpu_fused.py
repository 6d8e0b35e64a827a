"""The paper's CIFAR-10 model trains the same with fused and with plain operations, step by step."""

import pytest
import torch

from tests.training.seeded_steps import losses

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("kind", ["softmax", "kernel", "cgp", "scgp"])
def test_two_hundred_captured_steps(kind: str) -> None:
    plain, fused = (losses(kind, mode, 200, device="cuda", batch=100) for mode in ("off", "auto"))
    assert float(plain[-20:].mean()) < float(plain[:20].mean())  # it learns
    assert float(((fused - plain) / plain).abs().max()) < 1e-3
