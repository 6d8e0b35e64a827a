"""Projections made together, and again in the backward pass: the same numbers, and none is kept."""

import pytest
import torch
from torch import Tensor, nn

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.attention.parameters import projected_together, recomputed

pytest.importorskip("triton")


def maps(count: int = 3, width: int = 5, *, bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, width, bias=bias) for _ in range(count)]


def products(again: bool, bias: bool, backwards: int = 1) -> list[Tensor]:
    """Gradients of a sum of products."""
    linears = maps(width=4, bias=bias)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
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
    linears = maps(width=4)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
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


@pytest.mark.parametrize(("count", "bias"), [(2, True), (3, False), (4, True)])
def test_they_are_the_maps(count: int, bias: bool) -> None:
    linears, x = maps(count, bias=bias), torch.randn(2, 7, 6, requires_grad=True)
    weights = torch.randn(count, 2, 7, 5)
    leaves = [x, *(p for m in linears for p in m.parameters())]
    with gp.fused_kernels("on"):
        made = projected_together(x, linears)
        assert made is not None
        found = torch.autograd.grad(sum((y * w).sum() for y, w in zip(made, weights, strict=True)), leaves)
    apart = [m(x) for m in linears]
    exact = torch.autograd.grad(sum((y * w).sum() for y, w in zip(apart, weights, strict=True)), leaves)
    torch.testing.assert_close((*made, *found), (*apart, *exact), rtol=1e-5, atol=1e-5)


def test_frozen_maps_and_inputs() -> None:
    linears, x = maps(), torch.randn(3, 6)
    for m in linears:
        m.weight.requires_grad_(False)
    with gp.fused_kernels("on"):
        made = projected_together(x, linears)
        assert made is not None
        sum(y.sum() for y in made).backward()  # type: ignore[union-attr]
    for m in linears:
        assert m.weight.grad is None
        torch.testing.assert_close(m.bias.grad, torch.full((5,), 3.0))


def test_what_is_not_plain_is_called() -> None:
    x = torch.randn(3, 6)
    with gp.fused_kernels("on"):
        assert projected_together(x, maps()) is not None
        double, watched = [m.double() for m in maps()], maps()
        watched[1].register_forward_hook(lambda *_: None)
        for inputs, linears in (
            (x.double(), double),
            (x, double),
            (x, maps(1)),
            (x[:0], maps()),
            (x, watched),
        ):
            assert projected_together(inputs, linears) is None
        for other in (nn.Linear(6, 4), nn.Linear(6, 5, bias=False), nn.Sequential(nn.Linear(6, 5))):
            assert projected_together(x, [*maps(2), other]) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert projected_together(x, maps()) is None
    with gp.fused_kernels("off"):
        assert projected_together(x, maps()) is None
