"""Temperatures that rise with how strange an item is, as under distribution shift.

    log T_i = clip(c + sum_k b_k z_ik)      z_k parts of `strangeness`, in units of held-out items

c and b minimise the negative log-likelihood, averaged over the clean items and each synthetic shift of them
with equal weights, subject to

    NLL(clean, T) <= NLL(clean, T_0) + bound        T_0 the constant temperature of `fit_temperature`

so that it costs little without shift.  A density may only raise T: b_k >= 0.  T is at least min(1, T_0), as
sharpening needs evidence.  Beyond the z that were seen T is constant.

Densities are fitted to 40 % of the clean items, their units to 20 %, c and b to the other 40 %, since items
that a density was fitted to look less strange than new ones.  Each draw is divided by T before probabilities
are averaged, so that MC dropout and ensembles can have such temperatures too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpattention.checks import check_labels
from gpattention.files import StrPath
from gpattention.models import Signals
from gpattention.models.prediction import (
    LIMIT,
    check_logits,
    label_curves,
    label_log_likelihoods,
    profile_temperature,
)
from gpattention.strangeness import strangeness
from gpattention.strangeness.strangeness import PARTS, PartScores, Strangeness

FORMAT = "gpattention-adaptive-temperature-1"
UNUSED = ("energy", "vim")  # they need one logit, and draws have mean probabilities instead
STEP = 0.1  # of log T between the points of an item's curve
COMPARED = 500  # most items of every set to choose signals by
GAIN = 5e-4  # least gain of a signal on left-out shifts, in nats
CLEAN_BOUND = 0.005  # nats that clean items may lose
RIDGE = 1e-4  # on b, so that it is finite if all items are right
EMPHASES = (1.0, 4.0, 16.0)  # weights of clean items, in search of the best fit within the bound
_EVERY = slice(None)
Items = tuple[Tensor, Signals, Tensor]  # logits [B, C] or draws [S, B, C], signals, labels [B]


@dataclass(frozen=True, eq=False)
class AdaptiveTemperature:
    """A temperature for every item; created by `fit`, and immutable.

    >>> adaptive = AdaptiveTemperature.fit(logits, signals, labels, shifted={"blur": (...), "noise": (...)})
    >>> adaptive.temperature(logits, signals)  # [B]

    Attributes:
        scores: of the parts that were chosen.
        coefficients: [1 + K] c and b.
        reach: [2, K] least and largest z in the fit.
        constant: T_0.
        judged: by shift, its NLL by a fit to the others.
    """

    scores: PartScores
    coefficients: Tensor
    reach: Tensor
    constant: float
    judged: Mapping[str, float]

    @classmethod
    def fit(
        cls, logits: Tensor, signals: Signals, labels: Tensor, *, shifted: Mapping[str, Items],
        parts: Sequence[str] | None = None, clean_bound: float = CLEAN_BOUND, regress_length: bool = True,
        seed: int = 0,
    ) -> "AdaptiveTemperature":  # fmt: skip
        """Choose signals by cross-validation over shifts, and fit the temperature under the bound.

        Args:
            logits: [B, C], or draws [S, B, C], of clean items that the model was not trained on.
            signals: of the same items.
            labels: [B].
            shifted: logits or draws, signals and labels of synthetically shifted items, by the names of at
                least two shifts.
            parts: names of `PARTS` to choose from; all available ones, except energy and ViM, if not given.
            clean_bound: how many nats the NLL of clean items may be above that of the constant temperature.
            regress_length: whether to remove the effect of the number of tokens from the signals.
            seed: of the split.

        Returns:
            The fitted temperature.

        Raises:
            ValueError: there are fewer than two classes, items or shifts, or the bound is negative.
        """
        prepared = _Prepared.make(
            {"clean": (logits, signals, labels), **{f"shift {k}": v for k, v in shifted.items()}},
            parts, clean_bound, regress_length, seed,
        )  # fmt: skip
        return prepared.fit(tuple(shifted))

    @classmethod
    def cross_fit(
        cls, logits: Tensor, signals: Signals, labels: Tensor, *, shifted: Mapping[str, Items]
    ) -> tuple["AdaptiveTemperature", dict[str, "AdaptiveTemperature"]]:
        """The temperature as `fit` makes it, and for every shift the one that is fitted to the others.

        Densities and the curves of items are made once for all of them.

        Args:
            logits: as of `fit`.
            signals: likewise.
            labels: likewise.
            shifted: likewise, of at least three shifts.

        Returns:
            The temperature fitted to all shifts, and by the names of the shifts those without one.

        Raises:
            ValueError: as of `fit`, or there are fewer than three shifts.
        """
        if len(shifted) < 3:
            raise ValueError(f"expected shifted to be at least three shifts, got {sorted(shifted)}")
        sets = {"clean": (logits, signals, labels), **{f"shift {k}": v for k, v in shifted.items()}}
        prepared, names = _Prepared.make(sets), tuple(shifted)
        return prepared.fit(names), {
            name: prepared.without(1 + i).fit((*names[:i], *names[i + 1 :])) for i, name in enumerate(names)
        }

    def temperature(self, logits: Tensor, signals: Signals) -> Tensor:
        """The temperature of each item, which divides its logits, or those of every draw.

        Args:
            logits: [B, C], or draws [S, B, C].
            signals: of the same items.

        Returns:
            T, from min(1, T_0) to 100.  [B]

        Raises:
            ValueError: signals are of another model or other items.
        """
        draws = _checked("logits", (logits, signals, None))
        z = self.scores(_predicting(signals, draws)).clamp(*self.reach)  # [B, K]
        found = _log_temperatures(z, self.coefficients, self.constant).exp()
        return found.clamp(min(1.0, self.constant), LIMIT).to(logits.device)

    def save(self, folder: StrPath) -> None:
        """Write `adaptive_temperature.json` and `adaptive_temperature.safetensors`, each completely."""
        tensors = {**self.scores.to_tensors(), "coefficients": self.coefficients, "reach": self.reach}
        record = {
            "parts": self.scores.parts, "reads": self.scores.reads, "judged": self.judged,
            "constant": self.constant,
        }  # fmt: skip
        strangeness.save_fitted(Path(folder), "adaptive_temperature", FORMAT, record, tensors)

    @classmethod
    def load(cls, folder: StrPath) -> "AdaptiveTemperature":
        """Read what `save` wrote.

        Raises:
            ValueError: files are damaged, or hold something else.
        """
        keys = ("parts", "reads", "judged", "constant")
        record, tensors = strangeness.load_fitted(Path(folder), "adaptive_temperature", FORMAT, keys)
        scores = PartScores.from_tensors(record["parts"], record["reads"], tensors)
        return cls(scores, tensors["coefficients"], tensors["reach"], record["constant"], record["judged"])


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What fits to any of the same shifts share: densities, which see clean items alone, and curves."""

    scores: PartScores
    problem: "_Problem"
    thinned: "_Problem"  # to choose signals by

    @classmethod
    def make(
        cls, sets: Mapping[str, Items], parts: Sequence[str] | None = None, clean_bound: float = CLEAN_BOUND,
        regress_length: bool = True, seed: int = 0,
    ) -> "_Prepared":  # fmt: skip
        """Of sets of which the first is clean."""
        if not (math.isfinite(clean_bound) and clean_bound >= 0):
            raise ValueError(f"expected clean_bound to be finite and >= 0, got {clean_bound}")
        if len(sets) < 3:
            shifts = sorted(name.removeprefix("shift ") for name in [*sets][1:])
            raise ValueError(f"expected shifted to be at least two shifts, got {shifts}")
        (_, signals, labels), *_ = sets.values()
        draws = {name: _checked(name, items) for name, items in sets.items()}
        densities, scaling, fitting = Strangeness.split(len(signals), seed)
        seen = {name: _predicting(items[1], draws[name]) for name, items in sets.items()}
        classes = len(labels[densities.to(labels.device)].unique())
        offered = [name for name in strangeness.available_parts(signals, classes) if name not in UNUSED]
        scores = PartScores.fit(
            seen["clean"], labels, offered if parts is None else parts, densities, scaling,
            regress_length=regress_length,
        )  # fmt: skip
        z = {name: scores(items) for name, items in seen.items()}  # [m, K] each
        profile = profile_temperature(draws["clean"], labels.cpu())
        problem = _Problem.make(
            [(draws[name], z[name], items[2].cpu()) for name, items in sets.items()], fitting,
            profile.temperature, clean_bound,
        )  # fmt: skip
        return cls(scores, problem, problem.thinned())

    def without(self, place: int) -> "_Prepared":
        """The same without one of the shifts."""
        return replace(self, problem=self.problem.without(place), thinned=self.thinned.without(place))

    def fit(self, shifts: Sequence[str]) -> AdaptiveTemperature:
        """Choose signals, and fit to all sets."""
        problem, one_sided = self.problem, [PARTS[name].reads == "logits" for name in self.scores.parts]
        chosen, judged = _choose(self.thinned, one_sided)
        coefficients = problem.solve(chosen, one_sided)  # [1 + K]
        kept = coefficients[1:].nonzero()[:, 0].tolist()
        every = problem.z[:, kept]
        reach = torch.stack([every.amin(0), every.amax(0)])
        found = torch.cat([coefficients[:1], coefficients[1:][kept]])
        by_shift = dict(zip(shifts, judged.tolist(), strict=True))
        return AdaptiveTemperature(self.scores.only(kept), found, reach, problem.constant, by_shift)


def _checked(name: str, items: tuple[Tensor, Signals, Tensor | None]) -> Tensor:
    """Draws in float64 on the CPU.  [S, B, C]"""
    logits, signals, labels = items
    draws = logits[None] if isinstance(logits, Tensor) and logits.ndim == 2 else logits
    check_logits(draws)
    if draws.shape[1] != len(signals) or draws.shape[2] < 2:
        expected = f"expected logits of {name} to be of {len(signals)} items, as its signals"
        raise ValueError(f"{expected}, and of at least 2 classes, got shape {tuple(logits.shape)}")
    if labels is not None:
        check_labels(labels, draws.shape[1], draws.shape[2])
    return draws.detach().cpu().double()


def _predicting(signals: Signals, draws: Tensor) -> Signals:
    """The signals with the log mean probabilities of the draws as logits."""
    log_probs = draws.log_softmax(-1).logsumexp(0) - math.log(len(draws))  # [B, C]
    # densities need finite numbers; e^-10000 is 0
    return replace(signals.to("cpu"), logits=log_probs.clamp_min(-1e4))


def _log_temperatures(z: Tensor, coefficients: Tensor, constant: float) -> Tensor:
    """log T of every item, within its limits.  [B]"""
    return (coefficients[0] + z @ coefficients[1:]).clamp(min(0.0, math.log(constant)), math.log(LIMIT))


@dataclass(frozen=True, eq=False)
class _Problem:
    """Items of all sets, the clean ones first, and the NLL of each as a function of its log T.

    The curve of every item is tabulated once, at points with a distance of STEP, and interpolated by cubics,
    so that the time of a fit depends on neither draws nor classes.
    """

    z: Tensor  # [N, K]
    place: Tensor  # [N] number of the set; 0 is clean
    fitted: Tensor  # [N] bool: all shifted items, and the clean ones that no density was fitted to
    rows: Tensor  # [N] which curve is whose
    cubics: Tensor  # [M, G - 1, 4] coefficients from each point to the next, in units of the distance
    constant: float
    bound: float
    exact: Callable[[Tensor], Tensor] | None = None  # NLL of every clean item at its log T, without the table
    sets: tuple[int, ...] = ()  # their numbers before some were left out
    known: dict[Any, Tensor] = field(
        default_factory=dict
    )  # fits by sets and columns, shared with those parts

    @classmethod
    def make(
        cls, sets: Sequence[tuple[Tensor, Tensor, Tensor]], fitting: Tensor, constant: float, bound: float
    ) -> "_Problem":
        grid = _grid(constant)
        cubics = torch.cat([_cubics(draws, labels, grid) for draws, _, labels in sets])
        sizes = torch.tensor([len(labels) for _, _, labels in sets])
        place = torch.repeat_interleave(torch.arange(len(sets)), sizes)
        fitted = place > 0
        fitted[fitting] = True
        clean, _, labels = sets[0]

        def exact(u: Tensor) -> Tensor:
            return -label_log_likelihoods(clean, labels, u[:, None])

        return cls(
            torch.cat([z for _, z, _ in sets]), place, fitted, torch.arange(len(place)), cubics, constant,
            bound, exact, tuple(range(len(sets))),
        )  # fmt: skip

    def without(self, place: int) -> "_Problem":
        """The same without the items of one set, which is not the clean one."""
        kept = self.place != place
        return replace(
            self, z=self.z[kept], place=(self.place - (self.place > place).long())[kept],
            fitted=self.fitted[kept], rows=self.rows[kept],
            sets=(*self.sets[:place], *self.sets[place + 1 :]),
        )  # fmt: skip

    def thinned(self) -> "_Problem":
        """The same with at most COMPARED items of every set, only of those that are fitted to."""
        fitted = [(self.place == s) & self.fitted for s in range(int(self.place.max()) + 1)]
        some = torch.cat([one.nonzero()[:COMPARED, 0] for one in fitted])
        return replace(
            self, z=self.z[some], place=self.place[some], fitted=self.fitted[some], rows=self.rows[some],
            exact=None, known={},
        )  # fmt: skip

    def nll(self, coefficients: Tensor, items: Tensor | slice = _EVERY) -> Tensor:
        """The NLL of every item, or of some.  [N]"""
        return self._at(_log_temperatures(self.z[items], coefficients, self.constant), items)[0]

    def solve(self, columns: Sequence[int], free: Sequence[bool], start: Tensor | None = None) -> Tensor:
        """c and b, 0 outside `columns`; b >= 0 unless `free`.  [1 + K]

        `start` are coefficients of a similar problem, for fewer steps.
        """
        sizes = torch.bincount(self.place[self.fitted], minlength=int(self.place.max()) + 1)
        weight = torch.where(self.fitted, 1 / sizes[self.place], 0.0).double()  # [N]
        found, fit = [], self._constant() if start is None else start
        # first without the bound; if it is exceeded, fits with more weight on clean items may be better
        for emphasis in EMPHASES:
            emphasised = torch.where(self.place == 0, emphasis * weight, weight)
            fit = self._non_negative(emphasised / emphasised.sum(), list(columns), free, fit)
            bounded = self._within_bound(fit)
            found.append((float(weight @ self.nll(bounded)), bounded))
            if bounded.equal(fit):
                break
        return min(found, key=lambda pair: pair[0])[1]

    def _constant(self) -> Tensor:
        """The coefficients of the constant temperature.  [1 + K]"""
        found = self.z.new_zeros(1 + self.z.shape[1])
        found[0] = math.log(self.constant)
        return found

    def _non_negative(self, weight: Tensor, columns: list[int], free: Sequence[bool], fit: Tensor) -> Tensor:
        while True:
            fit = self._newton(weight, columns, fit)
            below = [k for k in columns if not free[k] and fit[1 + k] < 0]
            if not below:
                return fit
            columns.remove(min(below, key=lambda k: float(fit[1 + k])))

    def _newton(self, weight: Tensor, columns: list[int], start: Tensor) -> Tensor:
        """Minimise the weighted NLL by damped Newton steps, as the curves are not convex everywhere."""
        x = torch.cat([torch.ones_like(self.z[:, :1]), self.z[:, columns]], 1)  # [N, 1 + k]
        places = [0, *(1 + k for k in columns)]
        theta = start[places]
        ridge = torch.full_like(theta, RIDGE)
        ridge[0] = 0
        low, high = min(0.0, math.log(self.constant)), math.log(LIMIT)

        def terms(theta: Tensor) -> tuple[float, Tensor, Tensor]:
            u = x @ theta
            value, slope, bend = self._at(u.clamp(low, high))
            inside = weight * ((u >= low) & (u <= high))  # with the limits, as T_0 may be one
            # with negative curvature a Newton step would go uphill
            hessian = (x * (inside * bend.clamp_min(0))[:, None]).mT @ x + torch.diag(ridge)
            loss = float(weight @ value + 0.5 * (ridge * theta.square()).sum())
            return loss, x.mT @ (inside * slope) + ridge * theta, hessian

        loss, slope, hessian = terms(theta)
        damping = 1e-2
        for _ in range(60):
            step = torch.linalg.solve(hessian + damping * torch.eye(len(theta), dtype=x.dtype), slope)
            after = terms(theta - step)
            if after[0] < loss:
                theta, gained, damping = theta - step, loss - after[0], damping / 4
                loss, slope, hessian = after
                if gained < 1e-9:
                    break
            else:
                damping *= 8
                if damping > 1e8:
                    break
        whole = torch.zeros_like(start)
        whole[places] = theta
        return whole

    def _within_bound(self, fit: Tensor) -> Tensor:
        """The fit, or the point on the way from the constant temperature to it where the bound is met."""
        if self._allowed(fit):
            return fit
        start = self._constant()
        # by bisection, as the NLL of clean items rises on the way
        share, beyond = 0.0, 1.0
        for _ in range(12):
            middle = (share + beyond) / 2
            allowed = self._allowed(start + middle * (fit - start))
            share, beyond = (middle, beyond) if allowed else (share, middle)
        return start + share * (fit - start)

    def _allowed(self, coefficients: Tensor) -> bool:
        """Whether the bound holds for all clean items, and for those that no density was fitted to."""
        z, fitted, before = self._clean
        lost = self._clean_nll(_log_temperatures(z, coefficients, self.constant)) - before
        return max(float(lost.mean()), float(lost[fitted].mean())) <= self.bound

    @cached_property
    def _clean(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of clean items: z, whether they are fitted to, and the NLL at the constant.  [n, K], [n], [n]"""
        count = int((self.place == 0).sum())
        constant = self.z.new_full((count,), math.log(self.constant))
        return self.z[:count], self.fitted[:count], self._clean_nll(constant)

    def _clean_nll(self, u: Tensor) -> Tensor:
        return self._at(u, slice(len(u)))[0] if self.exact is None else self.exact(u)

    @cached_property
    def _pieces(self) -> tuple[float, float, Tensor, Tensor]:
        """First point, distance to the next, places of the items' first cubics, all cubics.  [N], [M', 4]"""
        grid, pieces = _grid(self.constant), self.cubics.shape[1]
        return float(grid[0]), float(grid[1] - grid[0]), self.rows * pieces, self.cubics.flatten(0, 1)

    def _at(self, u: Tensor, items: Tensor | slice = _EVERY) -> tuple[Tensor, Tensor, Tensor]:
        """Value, slope and curvature of every curve, or of some, at log temperatures u [n].  [n] each"""
        low, step, first, cubics = self._pieces
        t = (u - low) / step
        left = t.floor().clamp_(0, self.cubics.shape[1] - 1)  # [n]
        t -= left
        rows = first[items] + left.long()
        a, da, p, q = cubics.index_select(0, rows).unbind(1)
        value = a + t * (da + t * (p + t * q))
        return value, (da + t * (2 * p + 3 * t * q)) / step, (2 * p + 6 * t * q) / step**2


def _grid(constant: float) -> Tensor:
    low, high = min(0.0, math.log(constant)), math.log(LIMIT)
    return torch.linspace(low, high, math.ceil((high - low) / STEP) + 2, dtype=torch.float64)  # [G]


def _cubics(draws: Tensor, labels: Tensor, grid: Tensor) -> Tensor:
    """The NLL of every item between neighbouring log T, from its values and slopes there.  [n, G - 1, 4]"""
    curve = label_curves(draws, labels)
    likelihood, slopes = (torch.stack(x, 1) for x in zip(*map(curve, grid.tolist()), strict=True))  # [n, G]
    values, slopes = math.log(len(draws)) - likelihood, slopes * (grid[1] - grid[0])
    a, b, da, db = values[:, :-1], values[:, 1:], slopes[:, :-1], slopes[:, 1:]
    # a + da t + p t^2 + q t^3
    return torch.stack([a, da, 3 * (b - a) - 2 * da - db, 2 * (a - b) + da + db], -1)


def _choose(problem: _Problem, free: Sequence[bool]) -> tuple[list[int], Tensor]:
    """Add the signals, one by one, that lower the NLL of left-out shifts; returns columns and that NLL [S].

    A signal must gain more than two standard errors, so that the best of many useless ones is not taken.
    """
    shifts = range(1, int(problem.place.max()) + 1)

    parts = [problem.without(s) for s in shifts]
    items = [(problem.place == s).nonzero()[:, 0] for s in shifts]

    def fitted(part: _Problem, columns: list[int], start: Tensor | None) -> Tensor:
        key = (part.sets, *columns)  # which decide the start too
        if key not in part.known:
            part.known[key] = part.solve(columns, free, start)
        return part.known[key]

    def judge(columns: list[int], starts: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """NLL of the items of every shift by a fit to the others, and these fits."""
        fits = [fitted(part, columns, start) for part, start in zip(parts, starts, strict=True)]
        return [problem.nll(fit, some) for fit, some in zip(fits, items, strict=True)], fits

    def mean(each: list[Tensor]) -> float:
        return float(torch.stack([x.mean() for x in each]).mean())

    chosen: list[int] = []
    judged, fits = judge(chosen, [None] * len(shifts))
    while rest := [k for k in range(problem.z.shape[1]) if k not in chosen]:
        trials = {k: judge([*chosen, k], fits) for k in rest}
        best = min(trials, key=lambda k: mean(trials[k][0]))
        gains = [before - after for before, after in zip(judged, trials[best][0], strict=True)]
        error = float(torch.stack([x.var(correction=0) / len(x) for x in gains]).sum().sqrt()) / len(gains)
        if not mean(gains) > max(GAIN, 2 * error):
            break
        chosen, (judged, fits) = [*chosen, best], trials[best]
    return chosen, torch.stack([x.mean() for x in judged])
