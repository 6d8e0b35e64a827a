"""The sparse model's kernels in float32 beside plain operations in float32 and float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention import gp
from tests.ops.comparison import check_fused, with_gradients

# rounding of float32 sums of this length; gradients divide by the noise once more
TOLERANCE = 6e-6
EVERYTHING = ("mean", "variance", "query", "key", "kl")


@dataclass(frozen=True)
class Sparse:
    """Sizes and conditions of one comparison."""

    queries: int
    keys: int
    m: int = 4
    l: int | None = None  # noqa: E741 - the paper's letter
    width: int = 3
    channels: int = 4
    lead: tuple[int, int] = (1, 1)
    masked: bool = False
    amplified: bool = False
    pooled: bool = False
    values: str = "paper"
    include_noise: bool = True
    conditional: str = "deterministic"
    noise: float = 0.2
    spread: float = 1.0
    asked: tuple[str, ...] = EVERYTHING

    def __str__(self) -> str:
        flags = [name for name in ("masked", "amplified", "pooled") if getattr(self, name)]
        sizes = f"{self.queries}x{self.keys}-{self.m}-{self.l}-{self.width}x{self.channels}"
        asked = [] if self.asked == EVERYTHING else ["+".join(self.asked)]
        return "-".join([sizes, self.values, *flags, *asked])

    def inputs(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What gradients are taken of, and the masks."""
        g = torch.Generator().manual_seed(0)
        B, H = self.lead
        sets = (B, H) if self.pooled else (H,)

        def normal(*shape: int) -> Tensor:
            return self.spread * torch.randn(*shape, generator=g)

        x = {
            "q": normal(B, H, self.queries, self.width),
            "k": normal(B, H, self.keys, self.width),
            "o": normal(B, H, self.keys, self.width),
            "v": normal(B, H, self.keys, self.channels) / self.spread,
            "inducing_q": normal(*sets, self.m, self.width),
        }
        if self.l is not None:
            x["inducing_k"] = normal(*sets, self.l, self.width)
        for name, value in {"noise": self.noise, "scale_q": 1.3, "scale_k": 0.7}.items():
            x[name] = torch.full((H,), value)
        if self.amplified:
            x["log_amplitude"] = 0.3 * torch.randn(B, H, self.queries, generator=g)
        masks = {}
        if self.masked:
            masks = {
                "mask": torch.rand(B, H, self.keys, generator=g) > 0.35,
                "query_mask": torch.rand(B, H, self.queries, generator=g) > 0.35,
            }
        return x, masks


def evaluate(problem: Sparse, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All outputs, and the gradients of those that are asked."""
    x, masks = problem.inputs()
    leaves = {name: t.to(device, dtype).requires_grad_() for name, t in x.items()}
    p = gp.scgp_posterior(
        **leaves, **{name: t.to(device) for name, t in masks.items()}, values=problem.values,
        include_noise=problem.include_noise, conditional=problem.conditional,
    )  # fmt: skip
    density = p.log_density()
    outputs = {"mean": p.mean, "variance": p.variance, "query": density.query, "key": density.key}
    return with_gradients(leaves, outputs | {"kl": p.kl()}, problem.asked)


def check(problem: Sparse, device: str = "cpu") -> None:
    """The kernels against the plain operations."""
    check_fused(lambda dtype: evaluate(problem, device, dtype), TOLERANCE, least=1e-3)
