"""Projections made again in the backward pass: the same gradients, and nothing of them is kept."""

import pytest
import torch
from torch import Tensor, nn

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.attention.projections import projected_together
from gpattention.attention.recomputation import recomputed

pytest.importorskip("triton")


def maps(bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4, bias=bias) for _ in range(3)]


def products(again: bool, bias: bool, backwards: int = 1) -> list[Tensor]:
    """Gradients of a sum of products."""
    linears = maps(bias)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with gp.fused_kernels("on"):
        made = projected_together(x, linears)
    assert made is not None
    named = dict(zip("abc", made, strict=True))
    with recomputed(named if again else {}):
        total = (named["a"].unflatten(-1, (2, 2)) * named["b"].unflatten(-1, (2, 2))).sum()
        total = total + (named["c"] * named["a"]).sum() + x.square().sum()
    wanted = [x, *(p for linear in linears for p in linear.parameters())]
    for _ in range(backwards):
        found = torch.autograd.grad(total, wanted, retain_graph=backwards > 1)
    return list(found)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_are_the_same(bias: bool, backwards: int) -> None:
    for a, b in zip(products(True, bias, backwards), products(False, bias), strict=True):
        assert torch.equal(a, b)


def sparse_step(fused: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    net = build_attention(
        "scgp", embed_dim=8, num_heads=2, num_inducing=3, normalize="none", regularizer="dtc"
    )
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    items = torch.arange(2)
    with gp.fused_kernels("on" if fused else "off"):
        noise = gp.ItemNoise(0, items, torch.zeros_like(items))
        out = net(x, draw="independent", generator=noise, need=("output", "regularizer"))
        loss = out.output.square().sum() + out.regularizer
        return out.output.detach(), list(torch.autograd.grad(loss, [x, *net.parameters()]))


def test_sparse_attention() -> None:
    (plain, slow), (fused, quick) = sparse_step(False), sparse_step(True)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    for a, b in zip(quick, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * float(b.abs().max()))


def test_nothing_of_them_is_kept() -> None:
    linears = maps(bias=True)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    for again, expected in ((False, 2), (True, 0)):
        with gp.fused_kernels("on"):
            made = projected_together(x, linears)
        assert made is not None
        named = dict(zip("abc", made, strict=True))
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), recomputed(named if again else {}):
            (named["a"] * named["b"]).sum()
        assert len(sizes) == expected
