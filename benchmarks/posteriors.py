"""Times of the exact and sparse posteriors against softmax attention and their slow references.

Prints ratios measured in the same run; absolute times mean little between machines.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpattention import gp
from gpattention.gp import reference

BATCH, HEADS, WIDTH, INDUCING, REPEATS = 8, 4, 32, 16, 5


def main() -> None:
    """Mean and variance, forward and backward, for a few lengths."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {BATCH}, {HEADS} heads, ")
    print(f"width {WIDTH}, {INDUCING} inducing inputs, float32; median of {REPEATS}, ratio to softmax\n")
    print("  tokens   softmax      direct         cgp        scgp   cgp by inverses")
    for n in (64, 128, 256):
        q, k, o, v = (torch.randn(BATCH, HEADS, n, WIDTH).mul(0.3).requires_grad_() for _ in range(4))
        m = torch.randn(HEADS, INDUCING, WIDTH).mul(0.3).requires_grad_()
        calls: list[Callable[[], Tensor]] = [
            lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v).sum(),
            lambda q=q, k=k, v=v: both(gp.direct_posterior(q, k, v, noise=0.01)),
            lambda q=q, k=k, o=o, v=v: both(gp.cgp_posterior(q, k, o, v, noise=0.01)),
            lambda q=q, k=k, o=o, v=v, m=m: both(gp.scgp_posterior(q, k, o, v, m, noise=0.01)),
            lambda q=q, k=k, o=o, v=v: explicit(q, k, o, v),
        ]
        times = [seconds(call) for call in calls]
        ratios = "".join(f"{t / times[0]:11.1f}x" for t in times)
        print(f"  {n:6d}{ratios}")


def both(posterior: gp.Posterior) -> Tensor:
    """One number from mean and variance."""
    return posterior.mean.sum() + posterior.variance.sum()


def explicit(q: Tensor, k: Tensor, o: Tensor, v: Tensor) -> Tensor:
    """The same from the definition."""
    mean, covariance = reference.cgp_moments(q, k, o, v, noise=0.01)
    return mean.sum() + covariance.diagonal(dim1=-2, dim2=-1).sum()


def seconds(call: Callable[[], Tensor]) -> float:
    """Median time of a forward and backward pass."""
    call().backward()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call().backward()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
