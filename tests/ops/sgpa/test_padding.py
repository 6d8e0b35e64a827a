"""What padding costs SGPA in float32, by plain operations and by its kernels."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from gpattention import gp
from gpattention.gp import ArdRbf
from tests.ops.sgpa.test_posterior import Problem

pytest.importorskip("triton")

OFFSET, PADDING = 30, 32


def evaluate(leaves: dict[str, Tensor], dtype: torch.dtype, padding: int) -> list[Tensor]:
    """Mean, KL and the gradients of q and v at the real tokens."""
    x = {name: y.to(dtype).requires_grad_() for name, y in leaves.items()}
    n = x["q"].shape[-2]
    q, v = (pad(x[name], (0, 0, 0, padding)) for name in ("q", "v"))
    p = gp.sgpa_posterior(
        q, v, x["inducing_k"], x["inducing_v"], x["scale_tril"], jitter=1e-4,
        kernel=ArdRbf(x["lengthscale"], x["variance"]) if "variance" in x else gp.rbf,
        mask=torch.arange(n + padding).expand(*q.shape[:-2], -1) < n if padding else None,
    )  # fmt: skip
    mean = p.mean[..., :n, :]
    gradients = torch.autograd.grad(mean.square().sum() + p.kl().sum(), (x["q"], x["v"]))
    return [mean.detach(), p.kl().detach(), *gradients]


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("scaled", [False, True], ids=["rbf", "ard_rbf"])
def test_padding_costs_no_digits_far_from_the_origin(mode: str, scaled: bool) -> None:
    """An offset common to all tokens, as the bias of a projection is, is nothing to a kernel of distances."""
    leaves = Problem(8, width=8, lead=(2, 1), scaled=scaled).leaves()
    leaves["q"] = 2 * leaves["q"] + OFFSET
    leaves["inducing_k"] = leaves["inducing_k"] + OFFSET
    exact = evaluate(leaves, torch.float64, 0)
    with gp.fused_kernels(mode):
        found = evaluate(leaves, torch.float32, PADDING)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
