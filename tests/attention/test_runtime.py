"""How modules run: compiled, exported, copied, saved, in which arithmetic; and their positive parameters."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from gpattention import gp
from gpattention.attention import Attention, Positive, attention_class, build_attention
from gpattention.attention.parameters import values_of
from tests.attention.variants import (
    DEFAULTS,
    EMBED,
    HEADS,
    VARIANTS,
    Variant,
    build,
    every_default,
    every_variant,
    needs,
    padding,
    tokens,
)

Outputs = tuple[Tensor, ...]
# weights are one more posterior to compile: the long tests do
COMPILED = [
    *(pytest.param(v, "weights", id=v.name) for v in DEFAULTS),
    *(pytest.param(v, "", id=f"{v.name} with weights", marks=pytest.mark.slow) for v in VARIANTS),
]
every_compiled = pytest.mark.parametrize(("variant", "without"), COMPILED)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Everything(nn.Module):
    """Output, regulariser, weights and, where there is one, variance as a tuple."""

    def __init__(self, attention: Attention, *, without: str = "") -> None:
        super().__init__()
        self.attention = attention
        self.need = tuple(name for name in needs(attention) if name != without)

    def forward(self, x: Tensor, ignore: Tensor | None) -> Outputs:
        found = self.attention(x, key_padding_mask=ignore, need=self.need)
        asked = (found.output, found.regularizer, found.weights, found.variance)
        return tuple(part for part in asked if part is not None)


def with_gradients(
    function: Callable[..., Outputs], module: nn.Module, x: Tensor, ignore: Any
) -> list[Tensor]:
    """Outputs and the gradients of a weighted sum of them."""
    x = x.clone().requires_grad_()
    found = function(x, ignore)
    loss = sum((y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in found)
    leaves = [x, *module.parameters()]
    return [*found, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


@every_compiled
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_equals_eager(variant: Variant, without: str) -> None:
    module, x, ignore = Everything(build(variant), without=without), tokens(), padding()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected = with_gradients(module, module, x, ignore)
    assert_close(with_gradients(compiled, module, x, ignore), expected, rtol=1e-9, atol=1e-10)


@every_compiled
@pytest.mark.usefixtures("_fresh_compiler")
def test_exported_equals_eager(variant: Variant, without: str) -> None:
    module, x, ignore = Everything(build(variant), without=without), tokens(), padding()
    program = torch.export.export(module, (x, ignore)).module()
    y, other = tokens(seed=8), padding(seed=9)
    assert_close(program(y, other), module(y, other), rtol=1e-9, atol=1e-10)


def gap(found: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest entry."""
    difference = (found.double() - expected.double()).detach().abs().max()
    return float(difference / expected.detach().double().abs().max().clamp_min(1e-12))


@every_variant
def test_float32_is_float64_rounded(variant: Variant) -> None:
    module, x, ignore = Everything(build(variant)), tokens(), padding()
    expected = module(x, ignore)
    assert {y.dtype for y in expected} == {torch.float64}
    found = module.to(torch.float32)(x.float(), ignore)
    assert {y.dtype for y in found} == {torch.float32}
    assert max(gap(y, z) for y, z in zip(found, expected, strict=True)) < 1e-4


@every_variant
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_autocast_is_close(variant: Variant, inputs: torch.dtype) -> None:
    module, x, ignore = Everything(build(variant, dtype=torch.float32)), tokens(), padding()
    expected = module(x.to(inputs).float(), ignore)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients(module, module, x.to(inputs), ignore)
    assert [y for y in found if not bool(y.isfinite().all())] == []
    assert max(gap(y, z) for y, z in zip(found, expected, strict=False)) < 0.1


@every_default
def test_dropout_only_in_training(variant: Variant) -> None:
    module, x = build(variant, dropout=0.5), tokens()
    plain = build(variant)
    assert torch.equal(module(x).output, plain(x).output)
    module.train()
    dropped = module(x).output
    zeros = dropped == 0
    assert 0.4 < float(zeros.double().mean()) < 0.6
    assert_close(dropped[~zeros], 2 * plain(x).output[~zeros])
    # the closed form of a training step rounds otherwise than plain operations
    assert_close(plain.train()(x).output, plain.eval()(x).output, rtol=1e-12, atol=1e-13)
    assert f"kind={variant.kind!r}, regularizer={module.regularizer!r}" in repr(module)


@every_default
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_made_with_a_type_and_on_a_device(variant: Variant, dtype: torch.dtype) -> None:
    sizes = {"embed_dim": EMBED, "num_heads": HEADS}
    module = build_attention(variant.kind, **sizes, **variant.options, dtype=dtype)
    assert {t.dtype for t in module.state_dict().values()} == {dtype}
    x = tokens(dtype=dtype)
    found = module(x)
    assert found.output.dtype == dtype
    assert bool(found.output.isfinite().all())
    elsewhere = build_attention(variant.kind, **sizes, **variant.options, device="meta")
    assert {t.device.type for t in elsewhere.state_dict().values()} == {"meta"}
    assert {n: t.shape for n, t in elsewhere.state_dict().items()} == {
        n: t.shape for n, t in module.state_dict().items()
    }


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("initial", "floor"), [(0.01, 1e-4), (1.0, 0.0), (2.0, 0.5), (1e-6, 0.0), (300.0, 0.0)]
)
def test_positive_starts_and_is_set_at_a_value(
    initial: float, floor: float, dtype: torch.dtype, learned: bool
) -> None:
    p = Positive((3,), initial, floor=floor, dtype=dtype, learned=learned)
    assert [list(p.state_dict()), len(list(p.parameters()))] == [["raw"], int(learned)]
    assert p.raw.dtype == dtype
    assert p().dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert f"(3,), floor={floor}" in repr(p)
    assert ("fixed" in repr(p)) == (not learned)
    close = {"rtol": {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype], "atol": 0}
    assert_close(p().double(), torch.full((3,), initial, dtype=torch.float64), **close)
    values = floor + torch.tensor([0.2, 0.7, 50.0], dtype=torch.float64)
    for given in (0.7 + floor, values.requires_grad_()):
        p.set(given)
        expected = given if isinstance(given, Tensor) else torch.full((3,), given, dtype=torch.float64)
        assert_close(p().double(), expected, **close)
        assert p.raw.requires_grad == learned
    for bad in (floor, floor - 1.0, torch.tensor([1e3, 1e3, floor]), float("nan")):
        with pytest.raises(ValueError, match=rf"above the floor {floor}, got"):
            p.set(bad)
    assert_close(p().double(), values, **close)
    with pytest.raises(ValueError, match=rf"above the floor {floor}, got {floor}"):
        Positive((1,), floor, floor=floor)


def test_positive_never_falls_below_its_floor() -> None:
    p = Positive((2, 3), 1.0, floor=0.25, dtype=torch.float64)
    with torch.no_grad():
        p.raw.copy_(torch.tensor([[-1e4, -50.0, -1.0], [0.0, 1.0, 1e4]]))
    assert bool((p() >= 0.25).all())
    assert float(p().detach()[0, 0]) == 0.25
    (slope,) = torch.autograd.grad(p().sum(), p.raw)
    assert_close(slope, torch.sigmoid(p.raw))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_positive_values_compiled_together_have_the_same_bits(dtype: torch.dtype) -> None:
    given = [Positive((3,), 0.5, floor=floor, learned=learned, dtype=dtype) for floor, learned in _FLOORS]
    for i, p in enumerate(given):
        p.raw.data.copy_(torch.linspace(-2, 1 + i, 3))
    learned = [p.raw for p in given if p.raw.requires_grad]

    def answers(call: Callable[..., Outputs]) -> list[Tensor]:
        values = call(*given)
        return [*values, *torch.autograd.grad(sum(i * x.sum() for i, x in enumerate(values)), learned)]

    torch._dynamo.reset()
    compiled = answers(torch.compile(values_of, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(x, y) for x, y in zip(compiled, answers(values_of), strict=True))
    assert all(torch.equal(x, p()) for x, p in zip(compiled, given, strict=False))


_FLOORS = [(1e-4, True), (0.0, False), (0.25, True)]
REGULARIZED = [
    Variant(f"{v.kind} {name}", v.kind, {**v.options, "regularizer": name})
    for v in DEFAULTS
    for name in attention_class(v.kind).regularizers
]


HOLLOW = [
    *(pytest.param(v, "meta", id=v.name) for v in [*VARIANTS, *REGULARIZED]),
    *(pytest.param(v, "fake", id=f"{v.name} fake") for v in DEFAULTS),
]


@pytest.mark.parametrize(("variant", "mode"), HOLLOW)
def test_shapes_without_values(variant: Variant, mode: str) -> None:
    """Built and run, forwards and backwards, where tensors have a shape alone."""
    real = build(variant, dtype=torch.float32)
    x, ignore = tokens(dtype=torch.float32), padding()
    draws = ("none",) if not real.draws else ("none", "independent") + (("joint",) * (not variant.causal))
    fake: Any = FakeTensorMode() if mode == "fake" else nullcontext()
    device = "meta" if mode == "meta" else "cpu"
    with fake, torch.device(device):
        sizes = {"embed_dim": EMBED, "num_heads": HEADS}
        hollow = build_attention(variant.kind, **sizes, **variant.options)
        y, masked = torch.empty(x.shape), torch.empty(ignore.shape, dtype=torch.bool)
    assert [(name, z.shape) for name, z in hollow.named_parameters()] == [
        (name, z.shape) for name, z in real.named_parameters()
    ]
    for draw, kept, training in product(draws, (None, ignore), (True, False)):
        given: dict[str, Any] = {"draw": draw, "samples": 1 if draw == "none" else 3, "need": needs(real)}
        expected = real.train(training)(x, key_padding_mask=kept, **given)
        with fake:
            found = hollow.train(training)(y, key_padding_mask=None if kept is None else masked, **given)
            (found.output.sum() + found.regularizer.sum()).backward()
        for name in ("output", "regularizer", "weights", "variance"):
            one, other = getattr(found, name), getattr(expected, name)
            assert (one is None) == (other is None), name
            assert one is None or (one.shape, one.dtype) == (other.shape, other.dtype), name
    gp.check_health()
