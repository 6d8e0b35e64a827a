"""Telling items of another kind from those trained on, by scores that are larger for the other kind.

All are exact for ties and depend on the ranks of the scores alone.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from gpattention.checks import check_choice, check_fraction
from gpattention.metrics.classification import read_scores

POSITIVES = ("in", "out")


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """The probability that an out-of-distribution item scores above an in-distribution one; ties count half.

    The area under the ROC curve; which of the two is called positive makes no difference.

    Args:
        scores_in: of in-distribution items, [n].
        scores_out: of out-of-distribution items, [m].

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: there is no score, or one is NaN.
    """
    inside, outside = _read(scores_in, scores_out)
    ranked = inside.sort().values  # [n]
    below = int(torch.searchsorted(ranked, outside).sum())  # pairs with in < out
    upto = int(torch.searchsorted(ranked, outside, right=True).sum())  # and with in <= out
    return (below + upto) / (2 * len(inside) * len(outside))


def aupr_in(scores_in: Tensor, scores_out: Tensor) -> float:
    """Average precision of finding the in-distribution items, by low scores.

    The step sum over thresholds of (recall gained) x precision, without interpolation.

    Args:
        scores_in: of in-distribution items, [n].
        scores_out: of out-of-distribution items, [m].

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: there is no score, or one is NaN.
    """
    inside, outside = _read(scores_in, scores_out)
    return _average_precision(-inside, -outside)


def aupr_out(scores_in: Tensor, scores_out: Tensor) -> float:
    """Average precision of finding the out-of-distribution items, by high scores.

    The step sum over thresholds of (recall gained) x precision, without interpolation.

    Args:
        scores_in: of in-distribution items, [n].
        scores_out: of out-of-distribution items, [m].

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: there is no score, or one is NaN.
    """
    inside, outside = _read(scores_in, scores_out)
    return _average_precision(outside, inside)


def fpr_at_tpr(scores_in: Tensor, scores_out: Tensor, *, tpr: float = 0.95, positive: str = "in") -> float:
    """FPR@95: the false-positive rate at the strictest threshold that keeps a `tpr` of the positives.

    With `positive="in"`, as in Hendrycks and Gimpel (2017) and Liang et al. (2018), the fraction of
    out-of-distribution items taken for in-distribution ones when at least 95 % of the latter are
    accepted; with `"out"`, the fraction of in-distribution items flagged when at least 95 % of the others
    are.  Nothing is interpolated, and an item on the threshold is positive.

    Args:
        scores_in: of in-distribution items, [n].
        scores_out: of out-of-distribution items, [m].
        tpr: the true-positive rate, in (0, 1].
        positive: "in" or "out".

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: there is no score, or one is NaN.
    """
    check_fraction("tpr", tpr, one=True)
    check_choice("positive", positive, POSITIVES)
    inside, outside = _read(scores_in, scores_out)
    kept, other = (inside, outside) if positive == "in" else (-outside, -inside)  # low scores are positive
    enough = math.ceil(Fraction(str(float(tpr))) * len(kept))  # exact: 0.95 of 20 is 19
    threshold = kept.sort().values[enough - 1]
    return float((other <= threshold).double().mean())


def _read(scores_in: Tensor, scores_out: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, beside each other.  [n], [m]"""
    inside, outside = read_scores("scores_in", scores_in), read_scores("scores_out", scores_out)
    return inside, outside.to(inside.device)


def _average_precision(positive: Tensor, negative: Tensor) -> float:
    """Of scores [n] and [m] that are larger for positives."""
    # one threshold for each score, so that equal scores enter together
    values, repeats = positive.unique(return_counts=True)  # [K], rising
    found = repeats.flip(0).cumsum(0).flip(0)  # [K] positives of at least this score
    below = torch.searchsorted(negative.sort().values, values)  # [K] negatives of lower score
    mistaken = len(negative) - below  # [K]
    return float((repeats * (found / (found + mistaken).double())).sum()) / len(positive)
