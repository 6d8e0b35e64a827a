"""The kernels around the attention against plain operations in float64: odd and real sizes, every gradient.

On a CPU they run under Triton's interpreter, on a GPU compiled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpattention import gp
from gpattention.attention.parameters import projected_together
from gpattention.models.moments import Moments, layer_norm_moments
from gpattention.ops.layers import (
    Added,
    fused_norm_moments,
    gather_and_sum,
    gather_and_sum_reference,
    gelu_linear,
    gelu_linear_reference,
    residual_norm,
    residual_norm_reference,
    seeded_dropout,
)
from tests.models.small_models import images, layer, sentences, text, vision

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]

Given = Sequence[Tensor | None]
Call = Callable[..., tuple[Tensor, ...]]  # call(given, fused=...)


@dataclass(frozen=True)
class Problem:
    """Inputs, of which the first ones are differentiated, and how they are called."""

    name: str
    call: Call
    inputs: list[Tensor | None]
    used: int

    def results(self, device: str, dtype: torch.dtype, *, fused: bool) -> list[Tensor]:
        """Outputs, and the gradients of all inputs for random weights of the outputs."""
        given = [None if x is None else x.to(device, dtype) for x in self.inputs]
        leaves = [x.requires_grad_() for x in given[: self.used] if x is not None]
        outputs = self.call(given, fused=fused)
        g = torch.Generator().manual_seed(6)
        loss = sum((y * torch.randn(y.shape, generator=g).to(y)).sum() for y in outputs)
        found = torch.autograd.grad(loss, leaves) if leaves else ()
        return [x.detach().cpu() for x in (*outputs, *found)]

    def check(self, device: str = DEVICE, limit: float = 3e-6) -> None:
        exact = self.results(device, torch.float64, fused=False)
        found = self.results(device, torch.float32, fused=True)
        for place, (a, b) in enumerate(zip(found, exact, strict=True)):
            assert a.shape == b.shape
            error = float((a.double() - b).norm() / b.norm().clamp_min(1e-6))
            assert error < limit, f"result {place}: {error:.1e}"


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=g) for shape in shapes]


def norm(lead: tuple[int, ...], width: int, kind: str, rate: float = 0.0, *, biased: bool = True) -> Problem:
    """A stream `alone`, with what is `added`, itself dropped `inside` it, or `repeated` for its samples."""
    stream = (*(lead[1:] if kind in ("inside", "repeated") else lead), width)
    x, z, bias, weight, shift = random(stream, (*lead, width), (width,), (width,), (width,))

    def call(given: Given, *, fused: bool) -> tuple[Tensor, ...]:
        x, weight, shift, z, bias = given
        seed = torch.tensor(123456789012345, device=x.device)
        added = None if kind == "alone" else Added(z, bias, rate, 7, inside=kind == "inside")
        return (residual_norm if fused else residual_norm_reference)(x, added, weight, shift, 1e-5, seed)

    inputs = [3 * x + 1, weight + 1, shift, z, bias if biased else None]
    return Problem(f"norm {lead} {width} {kind} {rate}", call, inputs, 3 if kind == "alone" else 5)


def gelu(
    lead: tuple[int, ...], hidden: int, width: int, rate: float = 0.0, *, biased: bool = True
) -> Problem:
    """The hidden layer of a feed-forward part."""
    h, bias, weight = random((*lead, hidden), (hidden,), (width, hidden))

    def call(given: Given, *, fused: bool) -> tuple[Tensor, ...]:
        h, bias, weight = given
        seed = torch.tensor(-98765, device=h.device)
        return ((gelu_linear if fused else gelu_linear_reference)(h, bias, weight, rate, seed, 3),)

    return Problem(f"gelu {lead} {hidden} {width} {rate}", call, [2 * h, bias if biased else None, weight], 3)


def sums(rows: int, width: int, parts: int = 3) -> Problem:
    """Matrices whose rows are put side by side and summed; it has no gradient."""

    def call(given: Given, *, fused: bool) -> tuple[Tensor, ...]:
        return (gather_and_sum if fused else gather_and_sum_reference)(given)

    return Problem(f"sums {rows} {width} {parts}", call, list(random(*[(rows, width)] * parts)), 0)


PROBLEMS = [
    norm((3, 5), 33, "alone"), norm((3, 5), 16, "added", 0.25), norm((2, 70), 48, "added", biased=False),
    norm((4, 3), 130, "inside", 0.5), norm((3, 2), 7, "inside", biased=False),
    norm((3, 2, 5), 12, "repeated", 0.1), gelu((3, 5), 20, 6, 0.25), gelu((35,), 130, 3, biased=False),
    gelu((1, 1), 1, 1), sums(1, 1, 2), sums(37, 20, 3), sums(9, 129, 4),
]  # fmt: skip
LARGE = [
    norm((100, 64), 128, "alone"), norm((100, 64), 128, "added", 0.1), norm((100, 64), 128, "inside", 0.1),
    norm((10, 20, 64), 128, "repeated"), norm((37, 11), 250, "added", 0.5, biased=False),
    norm((3001,), 1000, "added", 0.9), norm((50_001,), 128, "added", 0.1), gelu((100, 64), 128, 128, 0.1),
    gelu((37, 11), 530, 33, 0.5, biased=False), sums(6400, 128, 4), sums(5001, 250, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    "problem", [*PROBLEMS, *(pytest.param(p, marks=on_a_gpu) for p in LARGE)], ids=lambda p: p.name
)
def test_outputs_and_gradients(problem: Problem) -> None:
    problem.check()


def test_of_one_column() -> None:
    """Its variance is 0: rounding is divided by the square root of epsilon."""
    norm((1, 1), 1, "alone").check(limit=12e-6)


def test_a_program_takes_several_tiles_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpattention.ops.layers.MOST_PROGRAMS", 3)
    for problem in (norm((9, 5), 250, "added", 0.2), gelu((70,), 10, 4, 0.2), sums(450, 17)):
        problem.check()


@pytest.mark.parametrize("read", [0, 1], ids=["the stream alone", "what was normalised alone"])
def test_of_two_results_one_is_read(read: int) -> None:
    """The last LayerNorm: only what it normalised is read."""
    x, z, weight, shift, w = random((4, 6), (4, 6), (6,), (6,), (4, 6))
    found = []
    for call in (residual_norm_reference, residual_norm):
        leaves = [t.to(DEVICE).requires_grad_() for t in (x.clone(), z.clone())]
        rest = (t.to(DEVICE) for t in (weight, shift))
        y = call(leaves[0], Added(leaves[1], None, 0.0, 0), *rest, 1e-5, None)[read]
        found.append(torch.autograd.grad((y * w.to(DEVICE)).square().sum(), leaves))
    torch.testing.assert_close(found[1], found[0])


def test_dropping_needs_a_seed_and_frozen_weights_get_no_gradient() -> None:
    h, weight = (t.to(DEVICE) for t in random((3, 4), (2, 4)))
    for rate, given in ((0.5, None), (1.0, torch.tensor(1))):
        with pytest.raises(ValueError, match=rf"expected a rate.* got {rate}"):
            gelu_linear(h, None, weight, rate, given, 0)
    gelu_linear(h.requires_grad_(), None, weight, 0.0, None, 0).sum().backward()
    assert h.grad is not None
    assert weight.grad is None


def test_masks_have_the_bits_of_the_plain_operations() -> None:
    rows = 6400 if DEVICE == "cuda" else 40
    seed, ones = torch.tensor(5, device=DEVICE), torch.ones(rows, 128, device=DEVICE)
    for site in (0, 1, 2, 16, 1000):
        y = residual_norm(0 * ones, Added(ones, None, 0.1, site), ones[0], ones[0], 1e-5, seed)[0]
        assert torch.equal(y, seeded_dropout(ones, 0.1, seed, site))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_projections_of_one_input() -> None:
    torch.manual_seed(0)
    maps = [nn.Linear(128, 128, device="cuda") for _ in range(4)]
    x = torch.randn(100, 64, 128, device="cuda", requires_grad=True)
    weights = torch.randn(4, 100, 64, 128, device="cuda")
    leaves = [x, *(p for m in maps for p in m.parameters())]
    results = []
    for made in (projected_together(x, maps), [m(x) for m in maps]):
        assert made is not None
        loss = sum((y * w).sum() for y, w in zip(made, weights, strict=True))
        results.append((*made, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device; `test_models.py` is without one")
@pytest.mark.parametrize("kind", ["softmax", "sgpa"])
@pytest.mark.parametrize("make", [vision, text])
def test_models_of_the_papers_sizes(kind: str, make: Any) -> None:
    size = {"width": 128, "heads": 4, "dropout": 0.1, "dtype": torch.float32}
    size |= {"image_size": 32} if make is vision else {"max_length": 128}
    model = make(layer(kind, **({"num_inducing": 32} if kind == "sgpa" else {})), **size).train().cuda()
    inputs = images(16, 32, dtype=torch.float32) if make is vision else sentences(*range(1, 9), to=23)
    found = []
    for mode in ("off", "on"):
        model.zero_grad()
        with gp.fused_kernels(mode):  # type: ignore[arg-type]
            out = model(inputs.cuda(), dropout_seed=torch.tensor(3, device="cuda"))
            out.logits.square().sum().backward()
        # a parameter that the mean does not touch has no gradient in plain operations, and 0 in a kernel's
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append([out.logits.detach(), *grads])
    largest = max(float(g.norm()) for g in found[0][1:])
    for fused, plain in zip(found[1], found[0], strict=True):
        assert float((fused - plain).norm()) < 1e-4 * max(float(plain.norm()), 1e-2 * largest)


@pytest.mark.parametrize(("rows", "width"), [(5, 33), (70, 48), (3, 130)])
def test_moments_of_a_norm(rows: int, width: int) -> None:
    x, v, weight, shift = random((rows, width), (rows, width), (width,), (width,))
    x, v = 3 * x + 1, v.square()
    exact = layer_norm_moments(Moments(x.double(), v.double()), weight.double(), shift.double(), 1e-5)
    given = [y.to(DEVICE) for y in (x, v, weight, shift)]
    mean, variance = fused_norm_moments(*given, 1e-5)
    assert exact.variance is not None
    torch.testing.assert_close(mean.double().cpu(), exact.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance.double().cpu(), exact.variance, rtol=1e-5, atol=1e-6)
    given[1][1, 2] = torch.nan  # of a factor that failed: it must not become 0
    assert bool(fused_norm_moments(*given, 1e-5)[1][1].isnan().all())
