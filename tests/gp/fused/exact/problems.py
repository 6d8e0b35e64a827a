"""Fused kernels in float32 beside the plain operations in float32 and float64: outputs and gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention import gp
from gpattention.gp.correlated_density import cgp_density_of
from gpattention.gp.direct_density import direct_density_of
from gpattention.gp.divergence import cgp_kl_of, direct_kl_of
from tests.gp.samples import Sample, sample

Outputs = dict[str, Tensor]
Call = Callable[[Sample, dict[str, Tensor]], Outputs]
PARAMETERS = {"scale_q": 1.3, "scale_k": 0.7}
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
        return "-".join(
            [f"{self.queries}x{self.keys}x{self.width}x{self.channels}", *flags, f"{self.noise:g}"]
        )


def evaluate(call: Call, problem: Problem, dtype: torch.dtype, device: str, *, mode: str) -> Outputs:
    """The call's outputs and, under d<name>, the gradients of a random combination of them."""
    s = sample(
        *problem.lead, queries=problem.queries, keys=problem.keys, width=problem.width,
        channels=problem.channels, spread=problem.spread, dtype=torch.float32,
    )  # fmt: skip
    names = ["q", "k", "o", "v"] + (["log_amplitude"] if problem.amplified else [])
    leaves = {name: getattr(s, name).to(device, dtype).requires_grad_() for name in names}
    heads = problem.lead[-1:]
    for name, value in {"noise": problem.noise, **PARAMETERS}.items():
        leaves[name] = torch.full(heads, value, dtype=dtype, device=device).requires_grad_()
    options = dict(leaves)
    if problem.masked:
        options |= {"mask": s.mask.to(device), "query_mask": s.query_mask.to(device)}
    moved = Sample(**{**vars(s), **{name: options.pop(name) for name in ("q", "k", "o", "v")}})
    with gp.fused_kernels(mode):
        outputs = call(moved, options)
        g = torch.Generator().manual_seed(1)
        loss = torch.zeros((), dtype=dtype, device=device)
        for x in outputs.values():
            weight = torch.randn(x.shape, generator=g, dtype=torch.float64)
            loss = loss + (x * weight.to(device, dtype)).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {f"d{name}": x for name, x in zip(leaves, found, strict=True) if x is not None}
    return {name: x.detach().cpu() for name, x in {**outputs, **gradients}.items()}


def errors(call: Call, problem: Problem, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Relative errors against float64 of the fused and of the plain float32 results, by name."""
    exact = evaluate(call, problem, torch.float64, device, mode="off")
    plain = evaluate(call, problem, torch.float32, device, mode="off")
    fused = evaluate(call, problem, torch.float32, device, mode="on")
    for name in fused.keys() | exact.keys():  # plain operations give no gradient where it is 0
        assert name in exact or not fused[name].any(), name

    def error(x: Tensor, name: str) -> float:
        return float((x.double() - exact[name]).norm() / exact[name].norm().clamp_min(1e-6))

    return {name: (error(fused[name], name), error(plain[name], name)) for name in exact}


def check(call: Call, problem: Problem, device: str = "cpu", *, tolerance: float = TOLERANCE) -> None:
    """Every output and gradient within rounding, or within what the plain operations lose themselves."""
    for name, (fused, plain) in errors(call, problem, device).items():
        # one number a head: whether its rounding errors cancel is luck, and another on other processors
        luck = 4 if name in ("dnoise", "dscale_q", "dscale_k") else 1
        assert fused < max(luck * tolerance, 6 * plain), f"{name}: {fused:.1e}, plain operations {plain:.1e}"


def moments(s: Sample, options: dict[str, Tensor]) -> Outputs:
    p = gp.cgp_posterior(s.q, s.k, s.o, s.v, with_variance=True, **options)
    return {"mean": p.mean, "variance": p.variance}


def mean(s: Sample, options: dict[str, Tensor]) -> Outputs:
    return {"mean": gp.cgp_posterior(s.q, s.k, s.o, s.v, **options).mean}


def density(s: Sample, options: dict[str, Tensor]) -> Outputs:
    found = gp.cgp_log_density(s.q, s.k, s.o, s.v, **options)
    return {"query": found.query, "key": found.key}


def draw(s: Sample, options: dict[str, Tensor]) -> Outputs:
    batch = s.q.shape[0]
    noise = gp.ItemNoise(0, torch.arange(batch, device=s.q.device), torch.zeros(batch, device=s.q.device))
    p = gp.cgp_posterior(s.q, s.k, s.o, s.v, with_variance=True, **options)
    return {"draws": p.sample(2, generator=noise)}


def kl(s: Sample, options: dict[str, Tensor]) -> Outputs:
    return {"kl": gp.cgp_kl(s.q, s.k, s.o, s.v, **options)}


def announced(cost: str) -> Call:
    """Moments and a regulariser that was announced, which share one backward pass."""

    def call(s: Sample, options: dict[str, Tensor]) -> Outputs:
        p = gp.cgp_posterior(s.q, s.k, s.o, s.v, with_variance=True, with_cost=cost, **options)
        value = cgp_kl_of(p) if cost == "kl" else p.fused_cost("marginal")
        if value is None:
            value = -cgp_density_of(p).total
        return {"mean": p.mean, "variance": p.variance, "cost": value}

    return call


def direct(s: Sample, options: dict[str, Tensor]) -> Outputs:
    """Everything the direct model's kernels give, each with a gradient of its own."""
    p = gp.direct_posterior(s.q, s.k, s.v, with_variance=True, **options)
    found = {"mean": p.mean, "stddev": p.stddev, "variance": p.variance}
    return found if "query_mask" in options else found | {"log_variance": p.log_variance}  # -inf at padding


def direct_mean(s: Sample, options: dict[str, Tensor]) -> Outputs:
    return {"mean": gp.direct_posterior(s.q, s.k, s.v, **options).mean}


def direct_density(s: Sample, options: dict[str, Tensor]) -> Outputs:
    found = gp.direct_log_density(s.q, s.k, s.v, **options)
    return {"query": found.query, "key": found.key}


def direct_kl(s: Sample, options: dict[str, Tensor]) -> Outputs:
    return {"kl": gp.direct_kl(s.q, s.k, s.v, **options)}


def direct_announced(cost: str) -> Call:
    """Moments and a regulariser that was announced, which share one backward pass."""

    def call(s: Sample, options: dict[str, Tensor]) -> Outputs:
        p = gp.direct_posterior(s.q, s.k, s.v, with_variance=True, with_cost=cost, **options)
        value = direct_kl_of(p) if cost == "kl" else p.fused_cost("marginal")
        if value is None:
            value = -direct_density_of(p).total
        return {"mean": p.mean, "stddev": p.stddev, "cost": value}

    return call
