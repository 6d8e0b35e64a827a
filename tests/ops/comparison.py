"""Fused kernels in float32 beside the plain operations in float32 and float64: outputs and gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.ops import tapes

Outputs = dict[str, Tensor]
Result = TypeVar("Result")


def with_gradients(
    leaves: dict[str, Tensor], outputs: Outputs, asked: tuple[str, ...] | None = None
) -> Outputs:
    """Outputs and, under d<name>, the gradients of a random combination of those that are asked."""
    g = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(y.shape, generator=g, dtype=torch.float64).to(y) for n, y in outputs.items()}
    loss = sum((outputs[name] * weights[name]).sum() for name in asked or outputs)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    gradients = {f"d{name}": x for name, x in zip(leaves, found, strict=True)}
    return {name: x.detach().cpu() for name, x in {**outputs, **gradients}.items()}


def check_fused(evaluate: Callable[[torch.dtype], Outputs], tolerance: float, *, least: float = 1e-6) -> None:
    """Every output and gradient within rounding, or within what the plain operations lose themselves.

    Of one number a head, whether its rounding errors cancel is luck, and another on other processors.
    """
    with gp.fused_kernels("off"):
        exact, plain = evaluate(torch.float64), evaluate(torch.float32)
    with gp.fused_kernels("on"):
        fused = evaluate(torch.float32)
    for name, x in exact.items():
        error, usual = (
            float((y[name].double() - x).norm() / x.norm().clamp_min(least)) for y in (fused, plain)
        )
        luck = 4 if name in ("dnoise", "dscale_q", "dscale_k") else 1
        assert error < max(luck * tolerance, 6 * usual), f"{name}: {error:.1e}, plain operations {usual:.1e}"


def both(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The call and the gradient of its square, kernels against plain operations."""
    found = []
    for mode in ("off", "on"):
        leaf = x.clone().requires_grad_()
        with gp.fused_kernels(mode):
            y = call(leaf)
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaf)))
    for plain, fused in zip(*found, strict=True):
        assert float((fused - plain).norm() / plain.norm()) < 1e-5


@contextmanager
def without_tapes() -> Iterator[None]:
    """Inside, functions of operators run as they are written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tapes, "kind_of", lambda args, settings: None)
        yield


def captured(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of a step, run eagerly before as capture asks, and the tensors that a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found
