"""Split-conformal prediction sets: sets of classes that hold the right one with a stated probability.

The threshold is the ceil((n + 1)(1 - alpha))-th smallest score of n held-out items; for a new item of the
same kind the set holds its class with probability at least 1 - alpha, whatever the model.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.gp import ItemNoise
from gpattention.metrics.checks import check_choice, check_fraction, check_labels, check_probs

SCORES = ("lac", "aps")
_FITTING, _PREDICTING = 0, 1  # which noise: held-out and new items must not share any


@dataclass(frozen=True)
class ConformalSets:
    """A threshold on the scores of classes; made by `fit`."""

    score: str
    alpha: float
    threshold: float
    items: int  # held-out items it was fitted on
    classes: int
    never_empty: bool = False
    seed: int | None = None  # of the randomised sets

    @classmethod
    def fit(
        cls,
        probs: Tensor,  # [n, C]
        labels: Tensor,  # [n]
        alpha: float,
        *,
        score: str = "lac",
        never_empty: bool = False,
        seed: int | None = None,
    ) -> "ConformalSets":
        """On held-out items.

        `"lac"` scores a class by 1 - p (Sadinle et al. 2019): the smallest sets on average, which may be
        empty.  `"aps"` scores it by the probability of all classes at least as probable, itself
        included (Romano et al. 2020): larger for hard items.  `never_empty` adds the most probable class
        to empty sets.  A `seed` randomises "aps", counting only a drawn part of the class itself: then the
        coverage is not above 1 - alpha by more than 1 / (n + 1).
        """
        check_choice("score", score, SCORES)
        check_fraction("alpha", alpha)
        check_probs(probs, least=0)  # too few for alpha are told of below
        check_labels(labels, len(probs), probs.shape[1])
        if seed is not None and score != "aps":
            raise ValueError(f"expected seed only with score='aps', got seed={seed} with score={score!r}")
        rank = math.ceil((len(probs) + 1) * (1 - alpha) - 1e-9)  # 10 * (1 - 0.1) must not round up to 10
        if rank > len(probs):
            raise ValueError(
                f"expected at least {math.ceil(1 / alpha - 1 - 1e-9)} held-out items for alpha={alpha}, "
                f"got {len(probs)}"
            )
        noise = _uniform(seed, len(probs), 0, _FITTING, probs.device)
        scores = _scores(probs, score, noise)  # [n, C]
        right = scores.gather(1, labels.to(probs.device, torch.int64)[:, None])[:, 0]  # [n]
        threshold = float(right.sort().values[rank - 1])
        return cls(score, alpha, threshold, len(probs), probs.shape[1], never_empty, seed)

    def sets(self, probs: Tensor, *, first_item: int = 0) -> Tensor:
        """True for the classes in each item's set.  [B, C]

        `first_item` numbers the items of randomised sets, for callers that bring them in parts.
        """
        check_probs(probs, least=0)
        if probs.shape[1] != self.classes:
            raise ValueError(f"expected probs of {self.classes} classes as fitted on, got {probs.shape[1]}")
        noise = _uniform(self.seed, len(probs), first_item, _PREDICTING, probs.device)
        inside = _scores(probs, self.score, noise) <= self.threshold  # [B, C]
        if not self.never_empty:
            return inside
        best = torch.nn.functional.one_hot(probs.argmax(-1), self.classes).bool()  # [B, C]
        return inside | (best & ~inside.any(-1, keepdim=True))


def _scores(probs: Tensor, score: str, noise: Tensor | None) -> Tensor:
    """How ill each class fits each item, in float64; `noise` [B] randomises "aps".  [B, C]"""
    p = probs.double()
    if score == "lac":
        return 1 - p
    falling, order = p.sort(dim=-1, descending=True, stable=True)  # [B, C]
    before = falling.cumsum(-1) - falling  # [B, C] of the more probable classes
    part = falling if noise is None else noise[:, None] * falling
    return torch.empty_like(p).scatter_(-1, order, before + part)


def _uniform(seed: int | None, count: int, first: int, kind: int, device: torch.device) -> Tensor | None:
    """A number in (0, 1) for every item.  [B]"""
    if seed is None:
        return None
    items = torch.arange(first, first + count, device=device)
    return ItemNoise(seed, items, torch.full_like(items, kind)).uniform((count, 1), torch.float64, device)[
        :, 0
    ]
