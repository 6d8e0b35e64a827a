"""Inputs for the kernels around the attention, and their comparison with float64 plain operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.ops.layers import (
    Added,
    gather_and_sum,
    gather_and_sum_reference,
    gelu_linear,
    gelu_linear_reference,
    residual_norm,
    residual_norm_reference,
)

Call = Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Norm:
    """A residual stream with what is added to it."""

    lead: tuple[int, ...]
    width: int
    rate: float = 0.0
    kind: str = "added"  # "alone", "added", "inside" (positions), "repeated" (samples of one stream)
    biased: bool = True

    def inputs(self) -> list[Tensor | None]:
        x, z, bias, weight, shift = random(
            self._stream(), (*self.lead, self.width), (self.width,), (self.width,), (self.width,)
        )
        return [
            3 * x + 1,
            None if self.kind == "alone" else z,
            bias if self.biased else None,
            weight + 1,
            shift,
        ]

    def call(self, *, fused: bool) -> Call:
        def run(given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
            x, z, bias, weight, shift = given
            seed = torch.tensor(123456789012345, device=x.device)
            added = None if z is None else Added(z, bias, self.rate, 7, inside=self.kind == "inside")
            call = residual_norm if fused else residual_norm_reference
            return call(x, added, weight, shift, 1e-5, seed)

        return run

    def _stream(self) -> tuple[int, ...]:
        short = self.kind in ("inside", "repeated")
        return (*(self.lead[1:] if short else self.lead), self.width)


@dataclass(frozen=True)
class Gelu:
    """The hidden layer of a feed-forward part."""

    lead: tuple[int, ...]
    hidden: int
    width: int
    rate: float = 0.0
    biased: bool = True

    def inputs(self) -> list[Tensor | None]:
        h, bias, weight = random((*self.lead, self.hidden), (self.hidden,), (self.width, self.hidden))
        return [2 * h, bias if self.biased else None, weight]

    def call(self, *, fused: bool) -> Call:
        def run(given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
            h, bias, weight = given
            seed = torch.tensor(-98765, device=h.device)
            return ((gelu_linear if fused else gelu_linear_reference)(h, bias, weight, self.rate, seed, 3),)

        return run


@dataclass(frozen=True)
class Sums:
    """Matrices whose rows are put side by side and summed; it has no gradient."""

    rows: int
    width: int
    parts: int = 3

    def inputs(self) -> list[Tensor | None]:
        return list(random(*[(self.rows, self.width)] * self.parts))

    def call(self, *, fused: bool) -> Call:
        return gather_and_sum if fused else gather_and_sum_reference


Problem = Norm | Gelu | Sums


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=g) for shape in shapes]


def results(problem: Problem, device: str, dtype: torch.dtype, *, fused: bool) -> list[Tensor]:
    """Outputs, and the gradients of all inputs for random weights of the outputs."""
    given = [None if x is None else x.to(device, dtype) for x in problem.inputs()]
    if isinstance(problem, Sums):
        return [y.cpu() for y in problem.call(fused=fused)(given)]
    leaves = [x.requires_grad_() for x in given if x is not None]
    outputs = problem.call(fused=fused)(given)
    g = torch.Generator().manual_seed(6)
    loss = sum((y * torch.randn(y.shape, generator=g).to(y)).sum() for y in outputs)
    used = [
        x for x in leaves if not (isinstance(problem, Norm) and problem.kind == "alone" and x is given[2])
    ]
    return [t.detach().cpu() for t in (*outputs, *torch.autograd.grad(loss, used))]


def check(problem: Problem, device: str, limit: float = 3e-6) -> None:
    if isinstance(problem, Norm) and problem.width == 1:
        limit *= 4  # its variance is 0: rounding is divided by the square root of epsilon
    exact = results(problem, device, torch.float64, fused=False)
    found = results(problem, device, torch.float32, fused=True)
    for place, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert a.shape == b.shape
        error = float((a.double() - b).norm() / b.norm().clamp_min(1e-6))
        assert error < limit, f"result {place}: {error:.1e}"
