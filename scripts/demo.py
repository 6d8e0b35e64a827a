"""A first look: attention outputs with error bars, near the keys and far from them.

Training and the paper's experiments are not part of the library yet; this computes a small exact
posterior, checks it against its definition and prints what a query far from every key looks like.
"""

import torch

from gpattention import gp
from gpattention.gp import reference


def main() -> None:
    """Move one query away from 16 keys and print mean and standard deviation."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    k, o, v = 0.5 * normal(16, 2), 0.5 * normal(16, 2), normal(16, 1)
    distance = torch.linspace(0, 4, 9, dtype=torch.float64)
    q = torch.stack([distance, torch.zeros_like(distance)], -1)  # [9, 2]
    posterior = gp.cgp_posterior(q, k, o, v, noise=0.01)
    mean, covariance = reference.cgp_moments(q, k, o, v, noise=0.01)
    gap = max(
        float((posterior.mean - mean).abs().max()),
        float((posterior.covariance() - covariance).abs().max()),
    )
    print("CGP attention of one query that walks away from 16 keys (unit prior, noise 0.01)\n")
    print("  distance     mean   std. dev.")
    for d, m, s in zip(distance, posterior.mean[:, 0], posterior.stddev, strict=True):
        print(f"  {d:8.1f} {m:8.3f}   {s:8.3f}  {'#' * round(40 * float(s))}")
    print("\nFar from the keys the output falls to 0 and its standard deviation rises to 1.")
    print(f"Largest difference from the definition (explicit inverses): {gap:.1e}")
    print("This is a small real computation; training arrives with a later version.")


if __name__ == "__main__":
    main()
