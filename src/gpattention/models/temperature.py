"""The temperature that labels ask for: what logits are divided by, and how sure the labels are of it.

    NLL(T) = - sum_i log (1/S) sum_s softmax(z_si / T)[y_i]      z [S, M, C], y [M]

Of one sample it has one minimum at most; of several it is not convex and may have several, so that a coarse
grid comes first.  The 95 % profile-likelihood interval is the set of T with 2 (NLL(T) - NLL(T*)) <= 3.84.

One rule says what becomes of it, wherever a temperature is fitted.  Softening is what labels may ask for;
sharpening makes items surer that nobody has labels of, foreign ones most of all, so it must be shown:

- where no item is wrong, T = 1: their likelihood would grow for ever as T falls;
- below 1 the optimum is taken only where the interval excludes 1; else T = 1;
- an optimum on the upper limit is no estimate: it is taken only where the interval excludes 1; else T = 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

LIMIT = 100.0  # temperatures lie between 1 / LIMIT and LIMIT
QUANTILE = 3.84  # of chi-squared with one degree of freedom, at 95 %
_GRID = 31  # points of the coarse grid over logarithms

Curve: TypeAlias = Callable[[float], tuple[float, float]]  # a number to a value and its slope there


@dataclass(frozen=True)
class TemperatureProfile:
    """What labelled items say about the temperature of their logits; made by `profile_temperature`."""

    items: int
    wrong: int  # items whose most probable class at T = 1 is not their label
    optimum: float  # T of least negative log-likelihood, within the limits
    interval: tuple[float, float]  # 95 %: the least and the largest such T within the limits
    excludes_one: bool  # whether T = 1 is outside it

    @property
    def on_bound(self) -> float | None:
        """The limit that the optimum lies on, if it does."""
        return self.optimum if self.optimum in (1 / LIMIT, LIMIT) else None

    @property
    def temperature(self) -> float:
        """What to divide logits by, by the rule of this module."""
        shown = self.excludes_one or 1 <= self.optimum < LIMIT
        return self.optimum if self.wrong and shown else 1.0

    @property
    def reason(self) -> str:
        """Why that one, as a sentence."""
        least, most = self.interval
        best, between = f"{self.optimum:.3g}", f"its 95 % interval, {least:.3g} to {most:.3g},"
        if not self.wrong:
            return (
                f"The temperature is 1: all {self.items} items are right, which cannot tell how sure to be."
            )
        if self.temperature == 1.0:
            where = f"the limit, {best}" if self.on_bound else best
            return f"The temperature is 1: of {self.items} items the best is {where}, but {between} holds 1."
        if self.on_bound:
            return f"The temperature is at its limit, {best}: of {self.items} items none inside it is best."
        return f"The temperature is {best}, the best of {self.items} items; {between} {self._place}."

    @property
    def _place(self) -> str:
        return "excludes 1" if self.excludes_one else "holds 1"


def label_log_likelihoods(logits: Tensor, labels: Tensor, log_temperature: Tensor) -> Tensor:
    """log of each label's sample-averaged probability; T divides each sample's logits.  [M]"""
    log_each = (logits / log_temperature.exp()).log_softmax(-1)  # [S, M, C]
    log_right = log_each.gather(-1, labels.expand(len(logits), -1)[..., None])[..., 0]  # [S, M]
    return log_right.logsumexp(0) - math.log(len(logits))


def temperature_nll(logits: Tensor, labels: Tensor, log_temperature: Tensor) -> Tensor:
    """Mean negative log-likelihood of the sample-averaged probabilities."""
    return -label_log_likelihoods(logits, labels, log_temperature).mean()


def profile_temperature(logits: Tensor, labels: Tensor) -> TemperatureProfile:
    """Optimum and interval of the temperature of logits [S, M, C] with labels [M], in float64."""
    if len(labels) == 0:
        raise ValueError(f"expected logits of at least one item, got shape {tuple(logits.shape)}")
    with torch.no_grad():
        logits = logits.double()
        labels = labels.to(logits.device, torch.int64)
        wrong = int((logits.softmax(-1).mean(0).argmax(-1) != labels).sum())
        curve = temperature_curve(logits, labels)
        edge = math.log(LIMIT)
        grid = torch.linspace(-edge, edge, _GRID if len(logits) > 1 else 3, dtype=torch.float64).tolist()
        best = least_of(curve, grid)

        def excess(x: float) -> float:
            """Above 0 outside the interval."""
            return 2 * len(labels) * (curve(x)[0] - lowest) - QUANTILE

        lowest = curve(best)[0]
        places = sorted({*grid, best})
        ends = (_first_inside(excess, places), _first_inside(excess, places[::-1]))
        return TemperatureProfile(
            items=len(labels),
            wrong=wrong,
            optimum=_within(best),
            interval=(_within(ends[0]), _within(ends[1])),
            excludes_one=excess(0.0) > 0,
        )


def temperature_curve(logits: Tensor, labels: Tensor) -> Curve:
    """Mean negative log-likelihood, and its slope, over the logarithm of the temperature."""
    behind = logits - logits.amax(-1, keepdim=True)  # [S, M, C] the most probable class at 0
    right = behind.gather(-1, labels.expand(len(logits), -1)[..., None])[..., 0]  # [S, M]

    @cache
    def curve(log_temperature: float) -> tuple[float, float]:
        inverse = math.exp(-log_temperature)
        each = (inverse * behind).exp()  # [S, M, C]
        total = each.sum(-1)  # [S, M]
        log_right = inverse * right - total.log()  # [S, M]
        mean = torch.linalg.vecdot(each, behind) / total  # [S, M]
        slope = inverse * (right - mean)  # [S, M] of -log_right
        value = math.log(len(logits)) - log_right.logsumexp(0).mean()
        return float(value), float((log_right.softmax(0) * slope).sum(0).mean())

    return curve


def least_of(curve: Curve, grid: list[float]) -> float:
    """Where a function is least between the ends of a grid: all minima that its points tell apart compete."""
    told = [curve(x) for x in grid]
    found = [(value, x) for x, (value, _) in zip(grid, told, strict=True)]
    for place, (left, right) in enumerate(pairwise(told)):
        if left[1] < 0 < right[1]:
            x = _root(lambda x: curve(x)[1], grid[place], grid[place + 1])
            found.append((curve(x)[0], x))
    return min(found)[1]


def _within(log_temperature: float) -> float:
    """Rounding does not carry a temperature over its limits."""
    return min(max(math.exp(log_temperature), 1 / LIMIT), LIMIT)


def _first_inside(excess: Callable[[float], float], places: list[float]) -> float:
    """Where the first of these places with no excess begins, seen from the one before."""
    inside = next(i for i, x in enumerate(places) if excess(x) <= 0)
    return places[0] if inside == 0 else _root(excess, places[inside - 1], places[inside])


def _root(f: Callable[[float], float], a: float, b: float) -> float:
    """Where a function changes its sign between a and b, by false position (Illinois)."""
    at_a, at_b = f(a), f(b)
    for _ in range(200):
        if at_a == at_b or abs(b - a) < 1e-13:
            break
        x = b - at_b * (b - a) / (at_b - at_a)
        at_x = f(x)
        if at_x == 0:
            return x
        if (at_x < 0) != (at_b < 0):
            a, at_a = b, at_b
        else:
            at_a /= 2  # else the far end would stay, and the steps become small
        b, at_b = x, at_x
    return b
