"""Predictions of classifiers and their uncertainty: class probabilities from draws of the logits.

Draws split the uncertainty in two: the entropy of the mean prediction is the mean entropy of the draws plus
their disagreement, the mutual information.

Logits are divided by a temperature, which labels determine up to an interval:

    NLL(T) = - sum_i log (1/S) sum_s softmax(z_si / T)[y_i]      z [S, M, C], y [M]

With one sample it has at most one minimum; with several it is not convex and may have more, so that the
search begins on a coarse grid.  The 95 % profile-likelihood interval is the set of T with
2 (NLL(T) - NLL(T*)) <= 3.84.

All fits of temperatures follow one rule.  Sharpening makes predictions more certain also for items unlike the
labelled ones, so that it needs evidence:

- if no item is wrong, T = 1, as the likelihood would grow without end as T falls;
- an optimum below 1 is taken only if the interval excludes 1; else T = 1;
- an optimum on the upper limit is no estimate, and is taken only if the interval excludes 1; else T = 1.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpattention.checks import check_tensor, require
from gpattention.gp import NonFiniteError
from gpattention.numerics import checks_are_deferred

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 8  # items of a prediction that is printed


class Items:
    """Base of frozen dataclasses whose tensors, alone or in tuples, have the items first.

    Indexing with a slice, a mask, item numbers or one number gives the object of those items.
    """

    _axes: ClassVar[Mapping[str, int]] = {}  # axes of the items, in fields where it is not the first
    _padded: ClassVar[tuple[str, ...]] = ()  # fields with an axis of tokens, behind that of the items

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> Self:
        where = places_of(index, len(self))

        def part(x: Tensor, axis: int) -> Tensor:
            place = where.to(x.device) if isinstance(where, Tensor) else where
            return x[:, place] if axis else x[place]

        return self._changed(part)

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return self._changed(lambda x, _: x.to(device))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The items of all parts, in order; the parts must agree in everything else.

        Fields with tokens are padded to the longest part.
        """
        if not parts:
            raise ValueError(f"expected at least one {cls.__name__}, got none")
        return cls(**{name: cls._joined(name, [vars(p)[name] for p in parts]) for name in vars(parts[0])})

    @classmethod
    def _joined(cls, name: str, found: Sequence[Any]) -> Any:
        """One field of all parts."""
        first, axis = found[0], cls._axes.get(name, 0)
        forms = {(type(x), len(x) if isinstance(x, tuple) else None) for x in found}
        plain = not isinstance(first, bool | tuple | Tensor)
        if len(forms) > 1 or (plain and any(x != first for x in found)):
            raise ValueError(f"expected parts with the same {name}, got {[str(x)[:40] for x in found]}")
        if isinstance(first, bool):  # drawn if all are
            return all(found)
        if isinstance(first, tuple):
            return tuple(cls._joined(name, each) for each in zip(*found, strict=True))
        if plain:
            return first
        if name in cls._padded:
            longest = max(x.shape[1] for x in found)
            found = [pad(x, (0,) * (2 * x.ndim - 3) + (longest - x.shape[1],)) for x in found]
        sizes = sorted({(*x.shape[:axis], *x.shape[axis + 1 :]) for x in found})
        if len(sizes) > 1:
            raise ValueError(f"expected parts of {name} of one size, but for the items, got {sizes}")
        return torch.cat(list(found), axis)

    def _changed(self, change: Callable[[Tensor, int], Tensor]) -> Self:
        """The object with `change(tensor, axis of the items)` in place of every tensor."""

        def of(x: Any, axis: int) -> Any:
            if isinstance(x, tuple):
                return tuple(of(each, axis) for each in x)
            return change(x, axis) if isinstance(x, Tensor) else x

        return replace(self, **{n: of(x, self._axes.get(n, 0)) for n, x in vars(self).items()})  # type: ignore[type-var]


def places_of(index: int | slice | Tensor | Sequence[int], items: int) -> slice | Tensor:
    """Item numbers [n], a slice, or a mask [B], which differs from numbers by type: True is not item 1."""
    if isinstance(index, slice):
        return index
    if isinstance(index, int):
        if not -items <= index < items:
            raise IndexError(f"expected an item below {items}, got {index}")
        return slice(index, index + 1 or None)
    where = torch.as_tensor(index)
    if where.ndim == 1 and len(where) == 0 and not isinstance(index, Tensor):
        where = where.long()  # an empty list has no type of its own
    mask = where.dtype == torch.bool
    if where.is_floating_point() or where.ndim > 1 or (mask and where.shape != (items,)):
        got = f"shape {tuple(where.shape)} and {where.dtype}"
        raise IndexError(f"expected item numbers or a mask of {items} items, got {got}")
    # a lone number gives a prediction of one item; torch would read bytes as a mask
    return where if mask else where.reshape(-1).long()


LIMIT = 100.0  # temperatures lie between 1 / LIMIT and LIMIT
QUANTILE = 3.84  # of chi-squared with one degree of freedom, at 95 %
_GRID = 31  # points of the coarse grid over logarithms

Curve: TypeAlias = Callable[[float], tuple[float, float]]  # a number to a value and its slope there


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Items):
    """Predicted classes of B items from S draws of their logits; created by `from_logits`.

    Entropies are in nats.  It prints as a short table.  Indexing with a slice, a mask, item numbers or one
    number gives the prediction of those items.

    `drawn` says whether the logits are draws: of attention outputs, of dropout masks, of the weights of a
    last layer, or members of an ensemble.  If it is False, the samples are copies of one another, and a
    mutual information of 0 means nothing.

    Attributes:
        logits: [S, B, C]
        probs: [B, C] mean of the draws' softmax.
        label: [B] the most probable class.
        confidence: [B] its probability.
        entropy: [B] of `probs`: the total uncertainty.
        expected_entropy: [B] mean entropy of the draws, which more training data would not remove.
        variances: per layer [B, H, N] or [B, H, N, D], mean over the draws; None for a layer without one.
        drawn: whether the logits are draws.
        logit_variance: [B, C] of a prediction by moments, whose logits are the mean-field ones.
    """

    logits: Tensor
    probs: Tensor
    label: Tensor
    confidence: Tensor
    entropy: Tensor
    expected_entropy: Tensor
    variances: tuple[Tensor | None, ...] | None = None
    drawn: bool = True
    logit_variance: Tensor | None = None
    _axes = {"logits": 1}  # noqa: RUF012

    @classmethod
    def from_logits(
        cls, logits: Tensor, variances: tuple[Tensor | None, ...] | None = None, *, drawn: bool | None = None
    ) -> "Prediction":
        """The prediction of draws [S, B, C]; without draws S = 1.

        `drawn` says whether they are draws; with None they are if there are several that differ.
        """
        check_logits(logits)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        each = logits.softmax(-1)  # [S, B, C]
        probs = each.mean(0)  # [B, C]
        confidence, label = probs.max(-1)  # [B], [B]
        entropy = torch.special.entr(probs).sum(-1)  # [B]
        expected = torch.special.entr(each).sum(-1).mean(0)  # [B]
        drawn = differ(logits) if drawn is None else drawn
        return cls(logits, probs, label, confidence, entropy, expected, variances, drawn)

    @property
    def mutual_information(self) -> Tensor:
        """How much the draws disagree, `entropy` - `expected_entropy`, >= 0.  [B]

        With fewer than two draws it is 0 and means nothing: a warning is given then, by default once for
        every line of code.
        """
        return self.disagreement(stacklevel=3)

    def disagreement(self, stacklevel: int = 2) -> Tensor:
        """The mutual information; a warning names the caller that many calls up."""
        warn_undrawn("mutual_information", self.samples, self.drawn, stacklevel)
        if not self.drawn:
            return torch.zeros_like(self.entropy)
        return (self.entropy - self.expected_entropy).clamp(min=0)  # negative only by rounding

    @property
    def log_probs(self) -> Tensor:
        """log of `probs`, without underflow.  [B, C]"""
        return self.logits.log_softmax(-1).logsumexp(0) - math.log(self.samples)

    @property
    def samples(self) -> int:
        """Number of draws S."""
        return self.logits.shape[0]

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return self.logits.shape[-1]

    def to_frame(self, *, probs: bool = False) -> "DataFrame":
        """A table of pandas with a line for each item.

        Args:
            probs: whether to add the probability of every class.

        Returns:
            Columns item, label, confidence, entropy, expected_entropy and, if there are draws,
            mutual_information; entropies are in nats.

        Raises:
            ImportError: pandas is not installed.
        """
        columns: dict[str, Any] = {"item": range(len(self)), **self._columns()}
        if probs:
            columns |= {f"probs_{c}": p for c, p in enumerate(self.probs.T.tolist())}
        return make_frame(columns)

    def _columns(self) -> dict[str, list[Any]]:
        """The columns of a table of items, without a mutual information that means nothing."""
        names = ("label", "confidence", "entropy", "expected_entropy")
        found = {name: getattr(self, name).tolist() for name in names}
        if self.drawn and self.samples > 1:
            found["mutual_information"] = self.disagreement().tolist()
        return found

    def __repr__(self) -> str:
        draws = f"{self.samples} draws" if self.drawn else "no draws"
        head = f"Prediction of {len(self)} items, {self.classes} classes, {draws} (entropies in nats)"
        columns = {"item": list(range(SHOWN)), **self[:SHOWN]._columns()}
        shown = [[name.replace("_", " ") for name in columns]]
        for row in zip(*columns.values(), strict=False):
            shown.append([f"{x:.3f}" if isinstance(x, float) else str(x) for x in row])
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in shown]
        more = [f"... and {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n".join([head, *lines, *more])

    def __len__(self) -> int:
        return self.logits.shape[1]


def make_frame(columns: Mapping[str, Any]) -> "DataFrame":
    """A table of pandas, which is imported only here."""
    pandas: Any = require("pandas", extra="train", user="to_frame")
    frame: DataFrame = pandas.DataFrame(columns)
    return frame


def differ(draws: Tensor) -> bool:
    """Whether several draws [S, ...] differ; without items, whether there are several."""
    return len(draws) > 1 and (draws.numel() == 0 or bool((draws[1:] != draws[:1]).any()))


def warn_undrawn(name: str, samples: int, drawn: bool, stacklevel: int) -> None:
    """Warn that a spread of 0 is not certainty, if there are fewer than two draws."""
    if drawn and samples > 1:
        return
    why = (
        "one draw cannot differ from itself: predict with samples >= 2"
        if drawn
        else "nothing was drawn (samples=0, attention without a variance, or a fit that chose no draws)"
    )
    message = f"{name} is 0 because there are not two draws, which is not certainty: {why}"
    warnings.warn(message, stacklevel=stacklevel + 1)


def check_logits(logits: Tensor) -> None:
    """Refuse anything but finite draws of logits [S, B, C]."""
    check_tensor("logits", logits)
    if logits.ndim != 3 or not logits.is_floating_point() or 0 in (logits.shape[0], logits.shape[2]):
        wanted = "floating-point [samples, items, classes] with at least one sample and class"
        got = f"shape {tuple(logits.shape)} and {logits.dtype}"
        raise ValueError(f"expected logits to be {wanted}, got {got}")
    finite = logits.isfinite()
    if not checks_are_deferred(logits) and not bool(finite.all()):
        raise NonFiniteError(f"logits hold {int((~finite).sum())} non-finite numbers")


@dataclass(frozen=True)
class TemperatureProfile:
    """The temperature of logits by labelled items; created by `profile_temperature`."""

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
        """The temperature by the rule of this module."""
        shown = self.excludes_one or 1 <= self.optimum < LIMIT
        return self.optimum if self.wrong and shown else 1.0

    @property
    def reason(self) -> str:
        """The reason for that temperature, as a sentence."""
        least, most = self.interval
        best, between = f"{self.optimum:.3g}", f"its 95 % interval, {least:.3g} to {most:.3g},"
        one = "excludes 1" if self.excludes_one else "holds 1"
        if not self.wrong:
            right = f"all {self.items} items are right"
            return f"The temperature is 1: {right}, which cannot tell how sure to be."
        if self.temperature == 1.0:
            where = f"the limit, {best}" if self.on_bound else best
            return (
                f"The temperature stays 1: on {self.items} items the best is {where}, but {between} holds 1."
            )
        if self.on_bound:
            return f"The temperature is at its limit, {best}: of {self.items} items none inside it is best."
        return f"The temperature is {best}, the best of {self.items} items; {between} {one}."


def label_log_likelihoods(logits: Tensor, labels: Tensor, log_temperature: Tensor) -> Tensor:
    """log of each label's sample-averaged probability; T divides each sample's logits.  [M]"""
    log_each = (logits / log_temperature.exp()).log_softmax(-1)  # [S, M, C]
    log_right = log_each.gather(-1, labels.expand(len(logits), -1)[..., None])[..., 0]  # [S, M]
    return log_right.logsumexp(0) - math.log(len(logits))


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
        # of one sample there is one minimum, which the two ends and 1 enclose
        best = least_of(curve, grid)

        def excess(x: float) -> float:
            """Above 0 outside the interval."""
            return 2 * len(labels) * (curve(x)[0] - lowest) - QUANTILE

        # `excess` reads it when it is called, below
        lowest = curve(best)[0]
        places = sorted({*grid, best})
        ends = (_first_inside(excess, places), _first_inside(excess, places[::-1]))
        return TemperatureProfile(
            items=len(labels), wrong=wrong, optimum=_within(best),
            interval=(_within(ends[0]), _within(ends[1])), excludes_one=excess(0.0) > 0,
        )  # fmt: skip


def temperature_curve(logits: Tensor, labels: Tensor) -> Curve:
    """Mean negative log-likelihood, and its slope, over the logarithm of the temperature."""
    curves = label_curves(logits, labels)

    @cache
    def curve(log_temperature: float) -> tuple[float, float]:
        likelihood, slope = curves(log_temperature)
        return float(math.log(len(logits)) - likelihood.mean()), float(slope.mean())

    return curve


def label_curves(logits: Tensor, labels: Tensor) -> Callable[[float], tuple[Tensor, Tensor]]:
    """Of every item over the logarithm of the temperature: log of the sum over samples of its label's
    probability, and the slope of minus that.  [M], [M]
    """
    # no exponential overflows, however small the temperature
    behind = logits - logits.amax(-1, keepdim=True)  # [S, M, C] the most probable class at 0
    right = behind.gather(-1, labels.expand(len(logits), -1)[..., None])[..., 0]  # [S, M]

    def curves(log_temperature: float) -> tuple[Tensor, Tensor]:
        inverse = math.exp(-log_temperature)
        each = (inverse * behind).exp()  # [S, M, C]
        total = each.sum(-1)  # [S, M]
        log_right = inverse * right - total.log()  # [S, M]
        mean = torch.linalg.vecdot(each, behind) / total  # [S, M]
        slope = inverse * (right - mean)  # [S, M] of -log_right
        return log_right.logsumexp(0), (log_right.softmax(0) * slope).sum(0)

    return curves


def least_of(curve: Curve, grid: list[float]) -> float:
    """The minimum of a function between the ends of a grid, which should separate its local minima."""
    points = [(x, *curve(x)) for x in grid]
    found = [(value, x) for x, value, _ in points]
    for (left, _, falling), (right, _, rising) in pairwise(points):
        if falling < 0 < rising:
            x = _root(lambda x: curve(x)[1], left, right)
            found.append((curve(x)[0], x))
    return min(found)[1]


def _within(log_temperature: float) -> float:
    """The temperature, within its limits in spite of rounding."""
    return min(max(math.exp(log_temperature), 1 / LIMIT), LIMIT)


def _first_inside(excess: Callable[[float], float], places: list[float]) -> float:
    """Where the excess ends, between the first of these places without any and the one before."""
    inside = next(i for i, x in enumerate(places) if excess(x) <= 0)
    return places[0] if inside == 0 else _root(excess, places[inside - 1], places[inside])


def _root(f: Callable[[float], float], a: float, b: float) -> float:
    """The root of a function between a and b, by false position (Illinois)."""
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
            at_a /= 2  # otherwise the far end would stay, with small steps
        b, at_b = x, at_x
    return b
