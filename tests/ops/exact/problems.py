"""Problems of the exact and the direct model, and everything that their kernels give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpattention import gp
from tests.gp.samples import Sample, sample
from tests.ops.comparison import Outputs, check_fused, with_gradients

# rounding of float32 sums of this length; gradients divide by the noise once more
TOLERANCE = 4e-6
KL_TOLERANCE = 2e-5  # and a divergence is a difference of sums


@dataclass(frozen=True)
class Problem:
    """Sizes and conditions of one comparison."""

    queries: int
    keys: int
    width: int = 3
    channels: int = 4
    masked: bool = False
    amplified: bool = False
    noise: float = 0.2
    spread: float = 1.0
    lead: tuple[int, ...] = (1, 2)

    def __str__(self) -> str:
        flags = [name for name in ("masked", "amplified") if getattr(self, name)]
        sizes = f"{self.queries}x{self.keys}x{self.width}x{self.channels}"
        return "-".join([sizes, *flags, f"{self.noise:g}"])


def evaluate(call: str, problem: Problem, device: str, dtype: torch.dtype) -> Outputs:
    """The call's outputs and the gradients of tokens, amplitudes and parameters."""
    s = sample(
        *problem.lead, queries=problem.queries, keys=problem.keys, width=problem.width,
        channels=problem.channels, spread=problem.spread, dtype=torch.float32,
    )  # fmt: skip
    names = ["q", "k", "o", "v"] + (["log_amplitude"] if problem.amplified else [])
    leaves = {name: getattr(s, name).to(device, dtype).requires_grad_() for name in names}
    for name, value in {"noise": problem.noise, "scale_q": 1.3, "scale_k": 0.7}.items():
        leaves[name] = torch.full(problem.lead[-1:], value, dtype=dtype, device=device).requires_grad_()
    options = dict(leaves)
    if problem.masked:
        options |= {"mask": s.mask.to(device), "query_mask": s.query_mask.to(device)}
    moved = Sample(**{**vars(s), **{name: options.pop(name) for name in ("q", "k", "o", "v")}})
    return with_gradients(leaves, CALLS[call](moved, options))


def check(call: str, problem: Problem, device: str = "cpu", *, tolerance: float = TOLERANCE) -> None:
    """The kernels of one call against the plain operations."""
    check_fused(lambda dtype: evaluate(call, problem, device, dtype), tolerance)


def calls_of(
    model: str, names: str, posterior: Any
) -> dict[str, Callable[[Sample, dict[str, Tensor]], Outputs]]:
    """All that is asked of one model: call(sample, options)."""

    def tokens(s: Sample) -> list[Tensor]:
        return [getattr(s, name) for name in names.split()]

    def mean(s: Sample, options: dict[str, Tensor]) -> Outputs:
        return {"mean": posterior(*tokens(s), **options).mean}

    def moments(s: Sample, options: dict[str, Tensor]) -> Outputs:
        p = posterior(*tokens(s), with_variance=True, **options)
        found = {"mean": p.mean, "variance": p.variance}
        if model == "cgp":
            return found
        found |= {"stddev": p.stddev}  # whose kernels give each with a gradient of its own
        # -inf at padding
        return found if "query_mask" in options else found | {"log_variance": p.log_variance}

    def density(s: Sample, options: dict[str, Tensor]) -> Outputs:
        found = posterior(*tokens(s), with_variance=True, **options).log_density()
        return {"query": found.query, "key": found.key}

    def kl(s: Sample, options: dict[str, Tensor]) -> Outputs:
        return {"kl": posterior(*tokens(s), with_cost="kl", **options).kl()}

    def draw(s: Sample, options: dict[str, Tensor]) -> Outputs:
        items = torch.arange(s.q.shape[0], device=s.q.device)
        p = posterior(*tokens(s), with_variance=True, **options)
        return {"draws": p.sample(2, generator=gp.ItemNoise(0, items, torch.zeros_like(items)))}

    def announced(cost: str) -> Callable[[Sample, dict[str, Tensor]], Outputs]:
        """Moments and a regulariser that was announced, which share one backward pass."""

        def call(s: Sample, options: dict[str, Tensor]) -> Outputs:
            p = posterior(*tokens(s), with_variance=True, with_cost=cost, **options)
            value = p.kl() if cost == "kl" else p.fused_cost("marginal")
            value = -p.log_density().total if value is None else value
            return {"mean": p.mean, "spread": p.variance if model == "cgp" else p.stddev, "cost": value}

        return call

    found = {f"{model} {call.__name__}": call for call in (mean, moments, density, kl, draw)}
    return found | {f"{model} announced {cost}": announced(cost) for cost in ("marginal", "kl")}


CALLS = calls_of("cgp", "q k o v", gp.cgp_posterior) | calls_of("direct", "q k v", gp.direct_posterior)
