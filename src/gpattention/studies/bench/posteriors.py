"""Times of the posteriors themselves against softmax attention and against their definition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpattention import gp
from gpattention.gp import reference
from gpattention.studies.bench.timing import time_in_turns

BATCH, HEADS, WIDTH, INDUCING = 8, 4, 32, 16
NOISE = 0.01
NAMES = ("softmax", "direct", "cgp", "scgp", "cgp by inverses")


@dataclass(frozen=True)
class PosteriorTimes:
    """Mean and variance of one length, forward and backward, in seconds."""

    tokens: int
    seconds: dict[str, float]


def bench_posteriors(
    lengths: Sequence[int] = (64, 128, 256),
    *,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> tuple[PosteriorTimes, ...]:
    """One entry for each length; batch 8, 4 heads of width 32, 16 inducing inputs, float32."""
    if repeats < 1 or not lengths or min(lengths) < 1:
        raise ValueError(f"expected lengths and repeats >= 1, got {list(lengths)} and {repeats}")
    place = torch.device(device)
    found = []
    each = len(NAMES) * (repeats + 1)
    for number, tokens in enumerate(lengths):

        def tell(done: int, _: int, before: int = number * each) -> None:
            if progress is not None:
                progress(before + done, each * len(lengths))

        found.append(PosteriorTimes(tokens, time_in_turns(_calls(tokens, place), repeats, place, tell)))
    return tuple(found)


def _calls(tokens: int, device: torch.device) -> dict[str, Callable[[], object]]:
    g = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).mul(0.3).to(device).requires_grad_()

    q, k, o, v = (leaf(BATCH, HEADS, tokens, WIDTH) for _ in range(4))
    m = leaf(HEADS, INDUCING, WIDTH)
    return {
        "softmax": lambda: scaled_dot_product_attention(q, k, v).sum().backward(),
        "direct": lambda: _both(gp.direct_posterior(q, k, v, noise=NOISE)).backward(),
        "cgp": lambda: _both(gp.cgp_posterior(q, k, o, v, noise=NOISE)).backward(),
        "scgp": lambda: _both(gp.scgp_posterior(q, k, o, v, m, noise=NOISE)).backward(),
        "cgp by inverses": lambda: _explicit(q, k, o, v).backward(),
    }


def _both(posterior: gp.Posterior) -> Tensor:
    """One number from mean and variance."""
    return posterior.mean.sum() + posterior.variance.sum()


def _explicit(q: Tensor, k: Tensor, o: Tensor, v: Tensor) -> Tensor:
    """The same from the definition."""
    mean, covariance = reference.cgp_moments(q, k, o, v, noise=NOISE)
    return mean.sum() + covariance.diagonal(dim1=-2, dim2=-1).sum()
