r"""float32 against float64 where tokens are many length scales apart: mean, variance and gradients.

Two clusters, one token away from the rest, or clusters all over a ball; errors are relative to the largest
number, the worst of the noises and of some samples.  With `--fused on` the Triton kernels run, on the CPU
under TRITON_INTERPRET=1.

    python benchmarks/far_tokens.py
    python benchmarks/far_tokens.py --device cuda --fused on
    TRITON_INTERPRET=1 python benchmarks/far_tokens.py --fused on --tokens 20 --width 8 --samples 1 \
        --distances 30 1000 10000
"""

import argparse

import torch
from torch import Tensor

from gpattention import gp

REGIMES = ("clusters", "outlier", "ball")
DISTANCES = (10, 30, 100, 300, 1000, 3000, 10000)
NOISES = (1e-4, 1e-2, 1.0)


def tokens(regime: str, distance: float, n: int, width: int, seed: int) -> tuple[Tensor, ...]:
    """q, k, o, v and inducing inputs, near one another but for the regime, in float32."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    ways = normal(n // 4, width)
    ways = distance * ways / ways.norm(dim=-1, keepdim=True)
    number = torch.arange(n)
    if regime == "clusters":
        shift = (number % 2)[:, None] * ways[:1]
    elif regime == "outlier":
        shift = (number == 0)[:, None] * ways[:1]
    else:
        shift = ways[number % len(ways)]
    q, k, o = (normal(n, width) / width**0.5 + shift for _ in range(3))
    return q.float(), k.float(), o.float(), normal(n, 8).float(), o[: n // 4].float()


def evaluate(kind: str, given: tuple[Tensor, ...], noise: float, fused: str) -> list[Tensor]:
    """Mean, variance, and the gradients of a fixed combination of both to all tokens, as one."""
    q, k, o, v, m = leaves = [x.clone().requires_grad_() for x in given]
    with gp.fused_kernels(fused):  # type: ignore[arg-type]
        if kind == "CGP":
            p: gp.Posterior = gp.cgp_posterior(q, k, o, v, noise=noise, with_variance=True)
        elif kind == "SCGP":
            p = gp.scgp_posterior(q, k, o, v, m, noise=noise)
        else:
            p = gp.direct_posterior(q, k, v, noise=noise, with_variance=True)
        found = [p.mean, p.variance]
    loss = torch.zeros((), device=q.device, dtype=q.dtype)
    for x in found:
        loss = loss + (torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype) * x.flatten()).sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*found, torch.cat([x for x in gradients[:3] if x is not None], -2)]


def errors(kind: str, regime: str, distance: float, options: argparse.Namespace) -> list[float]:
    """The worst relative error of mean, variance and gradients."""
    worst = [0.0, 0.0, 0.0]
    for seed in range(options.samples):
        given = tokens(regime, distance, options.tokens, options.width, seed)
        single = tuple(x.to(options.device) for x in given)
        for noise in NOISES:
            ours = evaluate(kind, single, noise, options.fused)
            theirs = evaluate(kind, tuple(x.double() for x in single), noise, "off")
            for place, (x, y) in enumerate(zip(ours, theirs, strict=True)):
                worst[place] = max(worst[place], float((x - y).detach().abs().max() / y.detach().abs().max()))
    return worst


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fused", choices=("off", "on"), default="off")
    options = parser.parse_args()
    print("| kind | tokens | " + " | ".join(map(str, options.distances)) + " |")
    print("|---|---|" + "---|" * len(options.distances))
    for kind in ("CGP", "SCGP", "direct"):
        for regime in REGIMES:
            cells = []
            for distance in options.distances:
                try:
                    cells.append(" / ".join(f"{x:.0e}" for x in errors(kind, regime, distance, options)))
                except gp.NumericalError:
                    cells.append("refused")
            print(f"| {kind} | {regime} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
