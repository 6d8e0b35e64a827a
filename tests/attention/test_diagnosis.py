"""What `diagnose` says of kinds whose kernel has parameters, against the kernel they attend with."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.attention.diagnosis import diagnose
from gpattention.attention.parameters import Positive
from tests.attention.variants import Variant, build, every_variant
from tests.attention.variants import tokens as small_tokens

APART = ~torch.eye(9, dtype=torch.bool)


def tokens() -> Tensor:
    torch.manual_seed(0)
    return torch.nn.functional.layer_norm(torch.randn(2, 9, 32, dtype=torch.float64), (32,))


@pytest.mark.parametrize(("kind", "options"), [("kernel", {"normalize": "none"}), ("sgpa", {})])
@pytest.mark.parametrize("lengthscale", [0.7, 20.0])
def test_kappa_and_amplitude_are_those_of_the_layers_own_kernel(
    kind: str, options: dict[str, Any], lengthscale: float
) -> None:
    x, H = tokens(), 2
    layer = build_attention(kind, embed_dim=32, num_heads=H, kernel="ard_rbf", **options).double().eval()
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


@every_variant
def test_an_amplitude_is_told_only_where_it_matters(variant: Variant) -> None:
    """Told is a scale that moves the output or the prior; the variance of a kernel whose rows are divided by
    their sums moves neither.
    """
    layer, x = build(variant), small_tokens()
    told = diagnose(layer, x)
    parameters = {name: part for name, part in layer.named_children() if isinstance(part, Positive)}
    scales = {name: parameters[name] for name in ("prior_scale", "scale_q", "variance") if name in parameters}
    before = layer(x).output
    for scale in scales.values():
        scale.set(4 * scale().detach())
    after = diagnose(layer, x)
    moved = not torch.allclose(layer(x).output, before, rtol=1e-9) or after.prior_stddev != told.prior_stddev
    assert (told.amplitude is not None) == moved
    assert after.amplitude != told.amplitude or not moved
