"""How the mathematics runs: compiled, exported, in which arithmetic, when, and in how much memory."""

from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpattention import gp
from gpattention.gp import CausalCGPState, LogDensity, Posterior
from gpattention.numerics import is_exporting
from tests.gp.calls import CGP, EVERY, POSTERIORS, SPARSE_DENSITIES, Call, cgp_log_density, over, tensors
from tests.gp.samples import Sample, sample

# a sample as compilers take it
Inputs = namedtuple("Inputs", [f.name for f in fields(Sample)])
Outputs = tuple[Tensor, ...]
COST = Call(cgp_log_density, CGP, {"noise": 0.1}, {"objective": "monte_carlo"})
CASES = EVERY | {"density-cgp-monte_carlo": COST}
SPARSE = [name for name in SPARSE_DENSITIES if name != "density-scgp-dual"]
COMMON = [
    "direct", "direct-causal", "softmax", "softmax-causal", "softmax-inducing", "cgp", "cgp-causal", "scgp",
    "sgpa", "density-cgp-marginal-noisy", "density-direct-marginal", "density-scgp-dtc",
    "density-scgp-jensen", "kl-direct", "kl-cgp", "kl-scgp", "kl-sgpa", "amplitude", "amplitude-sparse",
]  # fmt: skip
COMPILED = [n if n in COMMON else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
every_case = pytest.mark.parametrize("name", CASES)


def inputs(dtype: torch.dtype = torch.float64, tokens: int = 5, inducing: tuple[int, int] = (3, 4)) -> Inputs:
    x = sample(2, 2, queries=tokens, keys=tokens, inducing=inducing, seed=3)
    return to(dtype, Inputs(**vars(x)))


def to(dtype: torch.dtype, x: Inputs) -> Inputs:
    return Inputs(*(t.to(dtype) if t.is_floating_point() else t for t in x))


def result(name: str, x: Inputs, **options: Any) -> Posterior | LogDensity | Tensor:
    call = CASES[name]
    extra = {n: getattr(x, n) for n in ("mask", "log_amplitude") if n in call.extras}
    noise = torch.tensor([0.125, 0.25], dtype=x.v.dtype)  # one number per head, the same in every type
    return call(x, **extra, **({"noise": noise} if "noise" in call.parameters else {}), **options)


def compute(name: str, x: Inputs, **options: Any) -> Outputs:
    """Mean and variance, or both terms, or one tensor."""
    found = result(name, x, **options)
    if isinstance(found, Posterior):
        return found.mean, found.variance
    return (found.query, found.key) if isinstance(found, LogDensity) else (found,)


def outputs(name: str, x: Inputs) -> Outputs:
    """The same with random numbers of one seed."""
    torch.manual_seed(5)
    return compute(name, x)


def with_gradients(function: Callable[[Inputs], Outputs], x: Inputs) -> tuple[Outputs, list[Tensor]]:
    """Outputs, and the gradients of a weighted sum of all of them where there are any."""
    leaves = Inputs(*(t.clone().requires_grad_() if t.is_floating_point() else t for t in x))
    torch.manual_seed(5)
    found = function(leaves)
    weights = [torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape) for y in found]
    loss = sum((w * y).sum() for w, y in zip(weights, found, strict=True))
    found_gradients = torch.autograd.grad(loss, [t for t in leaves if t.requires_grad], allow_unused=True)
    return found, [g for g in found_gradients if g is not None]


class Module(nn.Module):
    def __init__(self, function: Callable[[Inputs], Outputs]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Tensor) -> Outputs:
        return self.function(Inputs(*x))


class Watch(TorchDispatchMode):
    """Shapes of everything made, and the float32 precision every product ran under."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.precisions: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            backends = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
            self.precisions |= {b.fp32_precision for b in backends}
        made = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(made) if isinstance(x, Tensor)}
        return made

    def largest(self) -> int:
        return max(torch.Size(s).numel() for s in self.shapes)


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    torch._dynamo.reset()
    assert not any(gp.health().values())
    yield
    assert not any(gp.health().values())


@pytest.mark.parametrize("name", [*COMPILED, pytest.param("cgp inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(name: str) -> None:
    backend = "inductor" if name == "cgp inductor" else "aot_eager"
    case = partial(compute, name.removesuffix(" inductor"))
    expected = with_gradients(case, inputs())
    compiled = torch.compile(lambda x: case(x), fullgraph=True, backend=backend)
    assert_close(with_gradients(compiled, inputs()), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", COMPILED)
def test_exported_equals_eager(name: str) -> None:
    x = inputs()
    program = torch.export.export(Module(partial(compute, name)), tuple(x)).module()
    torch.manual_seed(5)
    assert_close(tuple(program(*x)), outputs(name, x), rtol=1e-12, atol=1e-13)


@every_case
def test_autocast_changes_nothing(name: str) -> None:
    def lowered(x: Inputs) -> Outputs:  # the backward pass runs outside, as torch.autocast asks
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compute(name, x)

    expected = with_gradients(partial(compute, name), inputs(torch.float32))
    assert_close(with_gradients(lowered, inputs(torch.float32)), expected, rtol=0, atol=0)


def test_autocast_leaves_draws_covariances_and_states_alone() -> None:
    def everything() -> list[Tensor]:
        x, state, found = inputs(torch.float32), CausalCGPState(noise=0.1), []
        for i in range(3):
            row = state.append(*(t[..., i, :] for t in x[:4]))
            found += [row.mean, row.variance]
        for name in POSTERIORS:
            p, g = result(name, x), torch.Generator().manual_seed(6)
            found += [p.sample(2, generator=g), p.log_variance, p.stddev]
            if "causal" not in name:
                found += [p.covariance(), p.sample(2, generator=g, joint=True)]
        return [*found, p.kl() if name == "sgpa" else p.mean]

    expected = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = everything()
    assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_case
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    """Posteriors come back in the inputs' type; densities, divergences and amplitudes in float32."""
    x = inputs(dtype)
    expected = outputs(name, to(torch.float32, x))
    expected = tuple(y.to(dtype) for y in expected) if name in POSTERIORS else expected
    assert_close(outputs(name, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in CASES if name != "amplitude-capped"])  # it is its cap
def test_float64_stays_float64(name: str) -> None:
    found, gradients = with_gradients(partial(compute, name), inputs())
    assert {y.dtype for y in (*found, *gradients)} == {torch.float64}
    narrow = outputs(name, inputs(torch.float32))
    gap = max((y - z).abs().max() / y.abs().max() for y, z in zip(found, narrow, strict=True))
    most = 1 if "monte_carlo" in name else 1e-4  # draws are not the same numbers in both types
    assert 0 < gap < most  # not a float32 computation in disguise, and the same quantity


@every_case
def test_float32_matmul_precision_changes_nothing(name: str) -> None:
    x = inputs(torch.float32, tokens=40, inducing=(6, 7))
    expected, before = outputs(name, x), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with Watch() as watch:
            found = outputs(name, x)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # the caller's own, put back
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)
    assert watch.precisions == {"ieee"}
    assert_close(found, expected, rtol=0, atol=0)


FACTORS = {  # Cholesky factors of the mean alone, and of mean and variance
    "direct": (0, 1), "direct-causal": (0, 1), "softmax": (0, 1), "softmax-causal": (0, 1),
    "softmax-inducing": (0, 2), "cgp": (1, 3), "cgp-causal": (1, 2), "scgp": (4, 5), "sgpa": (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORS)
def test_variance_is_computed_when_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, factor = [], torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda A: (calls.append(A.shape), factor(A))[1])
    p = result(name, inputs())
    _, with_mean = p.mean, len(calls)
    variance, with_variance = p.variance, len(calls)
    assert (with_mean, with_variance) == FACTORS[name]
    assert_close(p.stddev.square(), variance)
    assert len(calls) == with_variance  # read again, not computed again


def failing(x: Inputs) -> Outputs:
    """Sequence 1, head 0 has one latent input five times and a noise that float32 cannot see."""
    o = torch.where(torch.tensor([[False, False], [True, False]])[..., None, None], x.o[..., :1, :], x.o)
    p = gp.cgp_posterior(x.q, x.k, o, x.v, noise=1e-12, with_variance=True)
    return p.mean, p.variance


@pytest.mark.parametrize("how", ["deferred", "inference", "compiled", "exported"])
def test_failures_where_nothing_can_raise(how: str) -> None:
    x = inputs(torch.float32)
    if how == "compiled":
        mean, variance = torch.compile(failing, fullgraph=True, backend="aot_eager")(x)
    elif how == "exported":
        mean, variance = torch.export.export(Module(failing), tuple(x)).module()(*x)
    else:
        with gp.deferred_checks(), torch.inference_mode(how == "inference"):
            mean, variance = failing(x)
    assert mean.isnan().flatten(2).sum(-1).tolist() == [[0, 0], [20, 0]]
    assert variance.isnan().sum(-1).tolist() == [[0, 0], [5, 0]]
    if how != "exported":  # a program that leaves this process takes no counter along
        assert sum(gp.health().values()) == 1
        with pytest.raises(gp.NotPositiveDefiniteError, match="last check: 1 on cpu"):
            gp.check_health()
    assert not any(gp.health().values())
    gp.check_health()  # raises once only
    with pytest.raises(gp.NotPositiveDefiniteError, match=r"^1 of 4 matrices K_o \+ noise I .* \[1, 0\]"):
        failing(x)  # eager again: at once


LONG, CHUNK = 512, 32
LINEAR: dict[str, Callable[[Inputs], Outputs]] = {
    **{name: partial(compute, name) for name in ("scgp", "kl-scgp", "amplitude-sparse")},
    "draws": lambda x: (result("scgp", x).sample(2), result("scgp", x).sample(2, joint=True)),
    **{name.replace("density", "chunked"): partial(compute, name, chunk=CHUNK) for name in SPARSE},
}


@pytest.mark.parametrize("name", LINEAR)
def test_sparse_functions_make_no_square_matrix(name: str) -> None:
    x = inputs(tokens=LONG, inducing=(8, 7))
    with Watch() as watch:
        _, gradients = with_gradients(LINEAR[name], x)
    assert [s for s in watch.shapes if sum(axis >= LONG for axis in s) > 1] == []
    widths = {"draws": 2 * 8, "amplitude-sparse": 7}
    width = CHUNK if "chunked" in name and "dtc" not in name else widths.get(name, 8)
    assert watch.largest() == 2 * 2 * LONG * width
    assert len(gradients) >= 3


@pytest.mark.parametrize("kernel", [gp.rbf, gp.ard_rbf, gp.exp_dot])
def test_kernels_make_no_differences_of_all_pairs(kernel: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = sample(2, 2, queries=48, keys=40, width=24, seed=3)
    q, k = x.q.requires_grad_(), x.k.requires_grad_()
    with Watch() as watch:
        (kernel(q, k).sum() + kernel(q, q).sum()).backward()
    assert watch.largest() == 2 * 2 * 48 * 48
    assert q.grad.shape == q.shape


def shapes(found: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (x.shape, x.dtype) for name, x in found.items()}


@over()
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_shapes_without_values(call: Call, kind: str) -> None:
    """Tensors that have a shape alone go through everything, backwards too: there is no value to check."""
    s = call.problem(2, 3)
    extra = call.extra(s)
    expected, health = shapes(call.outputs(s, **extra)), gp.health()
    mode: Any = FakeTensorMode() if kind == "fake" else nullcontext()

    def hollow(x: Tensor) -> Tensor:
        return mode.from_tensor(x) if kind == "fake" else x.to("meta")

    with mode, torch.device("meta" if kind == "meta" else "cpu"):
        empty = replace(s, **{f.name: hollow(getattr(s, f.name)) for f in fields(s)})
        leaves = [getattr(empty, name).requires_grad_() for name in call.arguments]
        noise = torch.ones(3, dtype=torch.float64)  # one number per head, which may not be read
        parameters = {name: noise for name in call.parameters if name != "delta"}
        result = call(empty, **call.extra(empty), **parameters)
        found = tensors(result)
        assert shapes(found) == expected
        sum(x.sum() for x in found.values()).backward()
        assert {x.grad.shape == x.shape for x in leaves if x.grad is not None} == {True}
        if isinstance(result, Posterior):
            assert result.sample(4).shape == (4, *expected["mean"][0])
            assert result.prior_stddev.shape == expected["mean"][0][:-1]
            rows = torch.arange(2)
            assert result.sample(4, generator=gp.ItemNoise(0, rows, rows)).shape == (4, *expected["mean"][0])
            if "covariance" in found:
                assert result.sample(4, joint=True).shape == (4, *expected["mean"][0])
    assert gp.health() == health


def test_what_is_compiled_is_not_exported() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + float(is_exporting())

    asking, x = Asking(), torch.zeros(())
    assert float(asking(x)) == 0
    assert float(torch.compile(asking, backend="eager", fullgraph=True)(x)) == 0
    assert float(torch.export.export(asking, (x,)).module()(x)) == 1
