"""What `diagnose` says of kinds whose kernel has parameters, against the kernel they attend with."""

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.attention.diagnosis import diagnose

APART = ~torch.eye(9, dtype=torch.bool)


def tokens() -> Tensor:
    torch.manual_seed(0)
    return torch.nn.functional.layer_norm(torch.randn(2, 9, 32, dtype=torch.float64), (32,))


@pytest.mark.parametrize("kind", ["kernel", "sgpa"])
@pytest.mark.parametrize("lengthscale", [0.7, 20.0])
def test_kappa_and_amplitude_are_those_of_the_layers_own_kernel(kind: str, lengthscale: float) -> None:
    x, H = tokens(), 2
    layer = build_attention(kind, embed_dim=32, num_heads=H, kernel="ard_rbf").double().eval()
    layer.lengthscale.set(lengthscale)
    layer.variance.set(9.0)
    health = diagnose(layer, x)
    q = layer.query(x).unflatten(-1, (H, -1)).transpose(1, 2).detach()  # [B, H, N, D]
    kappa = gp.ard_rbf(q, q, lengthscale)[..., APART].mean()
    assert health.kappa_qq == pytest.approx(float(kappa), rel=1e-12)
    assert health.amplitude == pytest.approx(3.0, rel=1e-6)
    if kind == "sgpa":
        assert health.prior_stddev == pytest.approx(3.0, rel=1e-6)
    assert any("queries have merged" in problem for problem in health.problems()) == (lengthscale > 10)
