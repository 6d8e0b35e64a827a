"""Fused kernels as operators: in compiled graphs of every kind, with the bits of the eager calls."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from gpattention import gp
from gpattention.attention import Attention, build_attention
from gpattention.ops.operators import Fused
from tests.gp.samples import sample

pytest.importorskip("triton")

# operators of a call with draws and regulariser; each of them has its backward pass in the graph too
KINDS = {
    "softmax": {"attention"},
    "kernel": {"attention"},
    "direct": {"row_log_amplitude", "direct_draw"},
    "cgp": {"row_log_amplitude", "cgp_draw"},
    "scgp": {"sparse_row_sum", "scgp_draw"},
    "sgpa": {"triangle", "sgpa_draw"},
    "softmax-gp": {"draw"},  # torch's own kernels attend
}
OPTIONS = {"scgp": {"num_inducing": 3}, "sgpa": {"num_inducing": 3}}
GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with gp.fused_kernels("on"):
        yield
    torch._dynamo.reset()


def made(kind: str, device: str = "cpu", tokens: int = 5) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    attention = build_attention(kind, embed_dim=8, num_heads=2, **OPTIONS.get(kind, {}))
    return attention.to(device), torch.randn(2, tokens, 8).to(device).requires_grad_()


def answers(attention: Attention, x: Tensor, call: Callable[..., Any] | None = None) -> list[Tensor]:
    """Output, regulariser, and the gradients of both."""
    torch.manual_seed(1)
    draw = "independent" if attention.draws else "none"
    found = (attention if call is None else call)(x, need=("output", "regularizer"), draw=draw)
    loss = found.output.square().sum() + found.regularizer
    asked = [x, *(p for p in attention.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(loss, asked, allow_unused=True, materialize_grads=True)
    return [found.output.detach(), found.regularizer.detach(), *gradients]


def by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on eager calls take the way of compiled ones."""

    def call(self: Fused, *args: Any) -> Any:
        tensors = self._operator(*args[: self._count])
        made = self._named(tensors)
        return tuple(made[name] for name in self.outputs)

    monkeypatch.setattr(Fused, "__call__", call)


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_have_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = made(kind)
    with gp.deferred_checks():
        eager = answers(attention, x)
        by_operators(monkeypatch)
        for one, other in zip(eager, answers(attention, x), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_graphs_of_every_kind_hold_the_operators(kind: str) -> None:
    attention, x = made(kind)
    eager, seen = answers(attention, x), set()

    def look(graph: torch.fx.GraphModule, inputs: object) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    compiled = answers(attention, x, torch.compile(attention, fullgraph=True, backend=backend))
    names = {f"gpattention.{name}{part}.default" for name in KINDS[kind] for part in ("", "_backward")}
    assert names == {name for name in seen if name.startswith("gpattention.") and "count" not in name}
    for one, other in zip(eager, compiled, strict=True):
        assert float((one - other).norm()) < 1e-4 * max(float(one.norm()), 1.0)


DRAWN = ["direct", "cgp", "scgp", "sgpa"]


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("options", [{"samples": 2}, {"generator": gp.ItemNoise(0, *[torch.arange(2)] * 2)}])
def test_other_draws_are_operators_of_their_own(kind: str, options: dict[str, Any]) -> None:
    attention, x = made(kind)
    seen: set[str] = set()

    def look(graph: torch.fx.GraphModule, inputs: object) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    with torch.no_grad():
        compiled = torch.compile(attention, fullgraph=True, backend=aot_autograd(fw_compiler=look))
        compiled(x, draw="independent", **options)
    assert {f"gpattention.{kind}.default", "gpattention.draw.default"} <= seen
    assert not any("_draw." in name for name in seen)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", DRAWN)
def test_a_draw_made_with_the_moments_is_the_one_made_after_them(kind: str, together: bool) -> None:
    """Values have the same bits, and gradients of draw, mean, variance and cost add up."""
    s = sample(2, 1, queries=4, keys=4, dtype=torch.float32)
    names = ("q", "v", "k", "v") if kind == "sgpa" else ("q", "k", "v") if kind == "direct" else "qkov"

    def found(with_draw: bool) -> list[Tensor]:
        tensors = [getattr(s, name).clone().requires_grad_() for name in names]
        torch.manual_seed(0)
        if kind == "sgpa":
            m = tensors[2][0, :, :2], tensors[3][0, :, :2]
            factors = torch.eye(2).expand(1, s.v.shape[-1], 2, 2).contiguous()
            p: Any = gp.sgpa_posterior(*tensors[:2], *m, factors, with_variance=True, with_draw=with_draw)
        elif kind == "scgp":
            p = gp.scgp_posterior(*tensors, s.k[0, :, :3], noise=0.1, objectives=("kl",), with_draw=with_draw)
        else:
            make = gp.cgp_posterior if kind == "cgp" else gp.direct_posterior
            p = make(*tensors, noise=0.1, with_variance=True, with_cost="kl", with_draw=with_draw)
        draw = p.sample()
        values = [draw, p.mean, p.variance, p.kl()] if together else [draw]
        loss = sum((x * (1 + torch.arange(x.numel()).view(x.shape))).sum() for x in values)
        gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
        assert not torch.equal(p.sample(), draw)
        return [*values, *(x for x in gradients if x is not None)]

    for one, other in zip(found(True), found(False), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * float(other.detach().abs().max()))
    assert torch.equal(found(True)[0], found(False)[0])


@pytest.mark.parametrize("name", ["cgp", "scgp", "sgpa", "attention", "draw", "numbers"])
def test_shapes_are_told_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own check of a registered operator: its schema, and what it says of results without values."""
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    monkeypatch.setattr(Fused, "__call__", _noting(Fused.__call__, calls))
    attention, x = made(name if name in KINDS else "kernel" if name == "attention" else "cgp")
    items = torch.arange(2)
    noise = gp.ItemNoise(0, items, items)
    if attention.draws:
        attention(x, draw="independent", generator=noise)
        gp.direct_posterior(*(torch.zeros(2, 3, 2),) * 3, noise=1.0).sample(generator=noise)
        noise.normal((1, 2, 3), torch.float32, x.device)
    else:
        attention(x)
    operator, args = calls[name]
    torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def _noting(call: Callable[..., Any], calls: dict[str, tuple[Any, tuple[Any, ...]]]) -> Callable[..., Any]:
    def noting(self: Fused, *args: Any) -> Any:
        calls[self.name] = self._operator, args[: self._count]
        return call(self, *args)

    return noting


def test_a_second_derivative_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def first() -> Tensor:
        mean = gp.kernel_attention(x, x, x, normalised=True)
        (found,) = torch.autograd.grad(mean.square().sum(), x, create_graph=True)
        return found

    with pytest.raises(RuntimeError, match="the gradient of attention is written out"):
        first()
    by_operators(monkeypatch)
    with pytest.raises(RuntimeError, match="gpattention::attention_backward is written out"):
        torch.autograd.grad(first().sum(), x)


def test_failures_of_a_compiled_call_are_counted() -> None:
    s = sample(1, 1, queries=4, keys=4, dtype=torch.float32)
    same = s.k[:, :, :1].expand_as(s.k)

    def call(k: Tensor, noise: Tensor) -> Tensor:
        return gp.cgp_posterior(k, k, k, k, noise=noise, with_variance=True).mean

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert compiled(s.k, torch.tensor(0.1)).isfinite().all()
    assert gp.health()["cpu"] == 0
    assert compiled(same, torch.tensor(1e-12)).isnan().all()
    with pytest.raises(gp.NotPositiveDefiniteError, match="2 on cpu"):
        gp.check_health()


def test_a_transform_in_compiled_code_stays_plain() -> None:
    s = sample(2, 1, queries=3, keys=3, dtype=torch.float32)
    call = torch.func.vmap(lambda q: gp.kernel_attention(q, q, q, normalised=True))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(s.q)
    assert torch.allclose(compiled, call(s.q), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_generated_code_keeps_the_operators_on_a_gpu(kind: str) -> None:
    attention, x = made(kind, "cuda", tokens=33)
    with gp.fused_kernels("auto"):
        eager = answers(attention, x)
        compiled = answers(attention, x, torch.compile(attention, fullgraph=True))
    same = len(eager) if kind in ("softmax", "kernel") else 0  # draws differ: generated code has its own
    for one, other in zip(eager[:same], compiled[:same], strict=True):
        assert float((one - other).norm()) < 1e-3 * max(float(one.norm()), 1.0)
    assert all(bool(x.isfinite().all()) for x in compiled)
    assert torch.allclose(eager[1], compiled[1], rtol=1e-3, atol=1e-5)  # the regulariser knows no draw
    gp.check_health()
