"""Upper confidence bounds of an error rate from counts: exact (Clopper-Pearson) and Hoeffding's."""

import math

import torch
from torch import Tensor

BOUNDS = ("clopper-pearson", "hoeffding")


def upper_bound(errors: Tensor, accepted: Tensor, delta: float, *, bound: str) -> Tensor:
    """Rates that the true ones exceed with probability at most `delta` each.  [K] from counts [K]"""
    if bound == "hoeffding":
        counts = accepted.double()
        return (errors / counts + (math.log(1 / delta) / (2 * counts)).sqrt()).clamp(max=1)
    return _clopper_pearson(errors, accepted, delta)


def _clopper_pearson(errors: Tensor, accepted: Tensor, delta: float) -> Tensor:
    """The rate at which so few errors have probability `delta`, by bisection.  [K]"""
    low, high = errors / accepted.double(), torch.ones_like(errors, dtype=torch.float64)
    for _ in range(60):
        middle = 0.5 * (low + high)
        likely = _log_binomial_cdf(errors, accepted, middle) > math.log(delta)
        low, high = torch.where(likely, middle, low), torch.where(likely, high, middle)
    return torch.where(errors == accepted, 1.0, high)


def _log_binomial_cdf(errors: Tensor, accepted: Tensor, rate: Tensor) -> Tensor:
    """log P(Binomial(accepted, rate) <= errors).  [K]"""
    n, j = accepted.double()[:, None], torch.arange(int(errors.max()) + 1, device=errors.device).double()
    left = (n - j).clamp(min=0)  # [K, J]; terms beyond `errors` are dropped below
    choose = (n + 1).lgamma() - (j + 1).lgamma() - (left + 1).lgamma()  # [K, J] log of n over j
    terms = choose + torch.xlogy(j, rate[:, None]) + torch.special.xlog1py(left, -rate[:, None])
    return terms.masked_fill(j > errors[:, None], -torch.inf).logsumexp(-1)
