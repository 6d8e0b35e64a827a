"""How much a metric would change with other items of the same kind."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.checks import check_count
from gpattention.metrics.checks import check_fraction


@dataclass(frozen=True)
class Estimate:
    """A metric and how sure it is."""

    value: float  # on the items as they are
    standard_error: float  # standard deviation of the resampled values
    low: float  # ends of the percentile interval
    high: float


def bootstrap(
    metric: Callable[..., float],
    *tensors: Tensor,  # each [items, ...]
    replicates: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    paired: bool = True,
) -> Estimate:
    """`metric(*tensors)` with items drawn anew, with replacement, `replicates` times.

    Paired tensors describe the same items, as probabilities and labels do; with `paired=False` each is
    drawn on its own, as scores inside and outside are.  Metrics that are biased for few items, such as
    calibration errors, are more so when resampled: their interval lies too high.

    >>> bootstrap(ece, probs, labels)
    >>> bootstrap(auroc, scores_in, scores_out, paired=False)
    """
    replicates = check_count("replicates", replicates, least=2)
    check_fraction("level", level)
    sizes = [len(tensor) for tensor in tensors]
    if not sizes or min(sizes) == 0 or (paired and len(set(sizes)) > 1):
        raise ValueError(f"expected tensors of at least one item{', all alike' * paired}, got sizes {sizes}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(replicates, dtype=torch.float64)
    for number in range(replicates):
        if paired:
            chosen = [torch.randint(sizes[0], sizes[:1], generator=generator)] * len(sizes)
        else:
            chosen = [torch.randint(size, (size,), generator=generator) for size in sizes]
        drawn[number] = metric(*(t[c.to(t.device)] for t, c in zip(tensors, chosen, strict=True)))
    tail = (1 - level) / 2
    low, high = drawn.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(float(metric(*tensors)), float(drawn.std()), low, high)
