"""Risk and coverage: how wrong the answers are if only the surest items are answered."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.metrics.checks import read_items, read_scores
from gpattention.metrics.classification import hits
from gpattention.metrics.ties import share_among_equals


@dataclass(frozen=True)
class RiskCoverage:
    """Risk of answering the k surest of B items, for every k from 1 to B."""

    coverage: Tensor  # [B] k / B
    risk: Tensor  # [B] the fraction of wrong answers among them


def risk_coverage(probs: Tensor, labels: Tensor, *, certainty: Tensor | None = None) -> RiskCoverage:
    """The risk-coverage curve, surest items first.

    `certainty` [B] is larger for surer items; without it, it is the top-1 probability.  Where the k-th item
    has the certainty of others, the risk is its expectation over all their orders.  `probs` are [B, C]
    and `labels` [B].
    """
    probs, labels = read_items(probs, labels)
    return curve(read_certainty(probs, certainty), ~hits(probs, labels))


def aurc(probs: Tensor, labels: Tensor, *, certainty: Tensor | None = None) -> float:
    """Area under the risk-coverage curve as a step function (Geifman et al. 2019).

    The mean of the risks at the coverages 1 / B, 2 / B, ..., 1, without interpolation: 0 if nothing is
    wrong, 1 if everything is.  Arguments and ties as in `risk_coverage`.
    """
    return float(risk_coverage(probs, labels, certainty=certainty).risk.mean())


def read_certainty(probs: Tensor, certainty: Tensor | None) -> Tensor:
    """What the items are ranked by, in float64.  [B]"""
    if certainty is None:
        return probs.amax(-1).double()
    if certainty.shape != probs.shape[:1]:
        raise ValueError(
            f"expected certainty of shape [{len(probs)}], one per item, got {tuple(certainty.shape)}"
        )
    return read_scores("certainty", certainty, least=0).to(probs.device)


def curve(certainty: Tensor, wrong: Tensor) -> RiskCoverage:
    """From certainties [B] of answers that are `wrong` or not [B]."""
    ordered, order = certainty.sort(descending=True)  # [B]
    errors = share_among_equals(ordered, wrong[order].double()).cumsum(0)  # [B] expected among the first k
    answered = torch.arange(1, len(ordered) + 1, device=ordered.device)  # [B]
    return RiskCoverage(answered.double() / len(ordered), errors / answered)
