"""THE table of results: one row for every number of every run, and what several seeds say together.

Runs that differ by their seed (and name) alone are one group.  "±" is the standard error of the mean over
seeds everywhere, s / sqrt(n) with n - 1 in s.  A difference is *clear* if Student's t test says so at 95 %:
seed by seed where one side has all seeds of the other, as a seed also decides the split; else Welch's; and
where one side is a single figure, as an ensemble's or the paper's, against that figure as it is.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpattention.metrics import Metric, metric_of
from gpattention.runs.recipe import Recipe, flat, recipe_from_dict
from gpattention.runs.records import SuiteResult, recorded_settings

if TYPE_CHECKING:
    from pandas import DataFrame

Plain = Mapping[str, Any]
Seed = int | str  # of a run; its name where nobody says, and `ALL` of an ensemble
Interval = tuple[float, float]
Sets = tuple[tuple[str, int | None], ...]  # names of sets, and their items; None where nobody says how many
COLUMNS = (
    "run", "recipe", "seed", "data", "attention", "suite", "set", "severity", "predictor", "metric", "score",
    "detail", "value", "items", "low", "high",
)  # fmt: skip
KEY = ("recipe", "suite", "set", "predictor", "metric")  # of a number over seeds; several differ by detail
CONFIDENCE = 0.95  # of what is called clear
HOW_CLEAR = "Student's t, 95 %"
UNSEEN = "unseen_test_items"  # in the detail of an ensemble's records that leave test items out
ALL = "all"  # the seed of what is predicted by several runs together
DIFFERING = 3  # most values of a recipe in the name of a group


# One number over seeds


@dataclass(frozen=True)
class OverSeeds:
    """One number of several runs that differ only in their seed.

    Attributes:
        values: the number of each seed.
        sets: what each was computed on; numbers on other sets are not to be compared.
        resampled: the interval of each over its items, by the bootstrap, where the evaluation has one.
    """

    values: Mapping[Seed, float]
    sets: Mapping[Seed, Sets] = field(default_factory=dict)
    resampled: Mapping[Seed, Interval] = field(default_factory=dict)

    @classmethod
    def of(cls, values: "Iterable[float | None]") -> "OverSeeds | None":
        """The number of runs whose seeds do not matter; None where there is no value."""
        known = [value for value in values if value is not None]
        return cls(dict(enumerate(known))) if known else None

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Standard deviation of single runs, with n - 1; None for one run."""
        return stdev(self.values.values()) if self.count > 1 else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for one run."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)

    @property
    def interval(self) -> "Interval | None":
        """Interval of 95 %: Student's t over several seeds; of one seed the bootstrap over items, if any."""
        if self.error is None:
            return next(iter(self.resampled.values()), None)
        half = t_quantile(self.count - 1) * self.error
        return self.mean - half, self.mean + half

    @property
    def count(self) -> int:
        """Number of seeds."""
        return len(self.values)

    @property
    def items(self) -> str:
        """Number of items of its set, in words; empty if unknown."""
        counts = {sets[0][1] for sets in self.sets.values() if sets and sets[0][1] is not None}
        return " or ".join(f"{count:,}" for count in sorted(counts))

    @property
    def basis(self) -> frozenset[Sets]:
        """The sets that it was computed on, of every run."""
        return frozenset(self.sets.values())

    def basis_text(self) -> str:
        """The number of items that it was computed on, such as "31 items" or "90 items of 3 sets"."""
        return " or ".join(
            f"{f'{count:,}' if count else 'unknown'} items{f' of {many} sets' if many > 1 else ''}"
            for count, many in sorted({(_items(sets), len(sets)) for sets in self.basis})
        )

    def times(self, scale: float) -> "OverSeeds":
        """The figure in another unit."""
        ends = {seed: (low * scale, high * scale) for seed, (low, high) in self.resampled.items()}
        return OverSeeds({seed: value * scale for seed, value in self.values.items()}, self.sets, ends)

    def text(self, digits: int | None = 3, scale: float = 1.0) -> str:
        """Mean ± standard error; `digits` after the point, with None four digits in all."""
        return _text(self.mean * scale, None if self.error is None else self.error * scale, digits)


@dataclass(frozen=True)
class Difference:
    """A difference of two figures.

    Attributes:
        mean: the difference.
        error: its standard error; None where it is not known.
        freedom: degrees of it, of Student's t.
        basis: how it was computed.
    """

    mean: float
    error: float | None
    freedom: float
    basis: Literal["paired", "unpaired", "one side", "unknown"]

    @property
    def in_errors(self) -> float | None:
        """The difference over its standard error: Student's t; None if the error is nothing but rounding."""
        return self.mean / self.error if self.error and self.error > 1e-12 * abs(self.mean) else None

    @property
    def clear(self) -> bool:
        """Whether it differs from 0 by Student's t test at 95 %; never clear without a standard error."""
        return self.chance < 1 - CONFIDENCE

    @property
    def chance(self) -> float:
        """The two-sided p-value of Student's t test; 1 without a standard error."""
        if self.error is None or self.mean == 0:
            return 1.0
        return beyond_chance(self.mean / self.error, self.freedom) if self.error else 0.0

    def text(self, digits: int | None = 3, scale: float = 1.0) -> str:
        """The difference with its sign, ± its standard error."""
        return _text(self.mean * scale, None if self.error is None else self.error * scale, digits, sign="+")


def average(several: Sequence[OverSeeds]) -> OverSeeds | None:
    """The mean of several numbers of the same runs, seed by seed.

    Args:
        several: numbers.

    Returns:
        Their mean for each seed that has them all; None where no seed has.  Its interval over items is the
        mean of theirs: at most too wide.
    """
    first = several[0].values if several else ()
    seeds = [seed for seed in first if all(seed in each.values for each in several)]
    if not seeds:
        return None
    return OverSeeds(
        {seed: fmean(each.values[seed] for each in several) for seed in seeds},
        {seed: tuple(s for each in several for s in each.sets.get(seed, ())) for seed in seeds},
        {
            seed: (fmean(low for low, _ in ends), fmean(high for _, high in ends))
            for seed in seeds
            if all(seed in each.resampled for each in several)
            for ends in [[each.resampled[seed] for each in several]]
        },
    )


def difference(one: OverSeeds, other: OverSeeds) -> Difference:
    """Subtract figures: seed by seed where one side has all seeds of the other, else by Welch's test.

    Args:
        one: the figure.
        other: what is taken from it.

    Returns:
        Their difference, with its standard error and whether it is clear.
    """
    shared = [seed for seed in one.values if seed in other.values]
    # a few seeds in common would throw the others away
    if shared and len(shared) in (one.count, other.count):
        gaps = OverSeeds({seed: one.values[seed] - other.values[seed] for seed in shared})
        return Difference(gaps.mean, gaps.error, gaps.count - 1, "paired" if len(shared) > 1 else "unknown")
    return _unpaired(one.mean - other.mean, (one.error, one.count), (other.error, other.count))


def difference_from(
    one: OverSeeds, value: float, deviation: float | None = None, count: int | None = None
) -> Difference:
    """Subtract somebody else's figure, such as one of the paper.

    Args:
        one: the figure.
        value: what is taken from it.
        deviation: its standard deviation over runs, where it is known.
        count: its number of runs; with the deviation, Welch's test takes it into account.

    Returns:
        Their difference.
    """
    error = deviation / math.sqrt(count) if deviation is not None and count and count > 1 else None
    return _unpaired(one.mean - value, (one.error, one.count), (error, count or 1))


def _unpaired(mean: float, *sides: tuple[float | None, int]) -> Difference:
    known = [(error, count) for error, count in sides if error is not None]
    if not known:
        return Difference(mean, None, 0, "unknown")
    error = math.hypot(*(error for error, _ in known))
    if error == 0:
        freedom = float(sum(count - 1 for _, count in known))
    else:  # Welch and Satterthwaite
        freedom = 1 / sum((each / error) ** 4 / (count - 1) for each, count in known)
    return Difference(mean, error, freedom, "unpaired" if len(known) == 2 else "one side")


def beyond_chance(t: float, freedom: float) -> float:
    """The probability of |T| >= |t| under Student's distribution.

    With T = sqrt(n) tan(a) the density is that of cos(a)^(n - 1), whose integral Gauss' rule takes.
    """
    end = math.atan(abs(t) / math.sqrt(freedom))
    nodes, weights = _gauss()
    inside = end / 2 * float(weights @ np.cos(end / 2 * (nodes + 1)) ** (freedom - 1))
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return max(0.0, 1 - inside / whole)


@lru_cache
def t_quantile(freedom: float, level: float = CONFIDENCE) -> float:
    """The t for which a share `level` of Student's distribution lies between -t and t."""
    low, high = 0.0, 2.0
    while beyond_chance(high, freedom) > 1 - level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond_chance(middle, freedom) > 1 - level else (low, middle)
    return high


@lru_cache
def _gauss() -> tuple[Any, Any]:
    return np.polynomial.legendre.leggauss(100)


def _text(mean: float, error: float | None, digits: int | None, sign: str = "") -> str:
    form, small = ("#.4g", ".2g") if digits is None else (f".{digits}f", f".{digits}f")
    text = f"{mean:{sign}{form}}"
    return text if error is None else f"{text} ± {error:{small}}"


# Which numbers may be compared


def compared(figures: Sequence[OverSeeds | None]) -> frozenset[int]:
    """The figures of a column that can be compared: most of them, all on the same items.

    Args:
        figures: figures of a column; None is a row without a figure.

    Returns:
        Their places.  Of groups of one size it is the one with most items.
    """
    bases = [None if figure is None else figure.basis for figure in figures]
    groups = Counter(basis for basis in bases if basis is not None)
    if not groups:
        return frozenset()
    main = max(groups, key=lambda basis: (groups[basis], max(map(_items, basis), default=0)))
    return frozenset(place for place, basis in enumerate(bases) if basis == main)


def _items(sets: Sets) -> int:
    """The number of items, as far as known."""
    return sum(count for _, count in sets if count is not None)


# Runs, and which of them are one


@dataclass(frozen=True)
class RunData:
    """One run: its recipe, its training, and the suites that were evaluated, as in their files.

    Attributes:
        name: unique name among the runs.
        recipe: as its file holds it.
        rows: rows of metrics.csv, numbers as numbers.
        events: events of events.jsonl.
        suites: by name: clean, corrupted, ood, ...
        folder: where it lies.
    """

    name: str
    recipe: Plain = field(default_factory=dict)
    rows: Sequence[Plain] = ()
    events: Sequence[Plain] = ()
    suites: Mapping[str, SuiteResult] = field(default_factory=dict)
    folder: str = ""

    @property
    def data(self) -> str:
        """The name of the data set."""
        return str(self._of_recipe("data", "name") or self._of_suites("data") or "unnamed data")

    @property
    def attention(self) -> str:
        """The kind of attention."""
        return str(self._of_recipe("model", "attention") or self._of_suites("attention") or "")

    @property
    def seed(self) -> int | None:
        """Seed of training and data."""
        seed = self.recipe.get("seed", self._of_suites("seed"))
        return seed if isinstance(seed, int) else None

    @property
    def texts(self) -> bool:
        """Whether it reads text rather than images."""
        return self._of_recipe("model", "type") == "text"

    @cached_property
    def parsed(self) -> Recipe:
        """The recipe with every value; `ValueError` if this version cannot read it."""
        try:
            return recipe_from_dict(self.recipe)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.folder or self.name} has no recipe of a run: {error}") from error

    @property
    def failure(self) -> Plain | None:
        """The event of a failed training that was not resumed."""
        return self.events[-1] if self.events and self.events[-1].get("event") == "failed" else None

    def curve(self, suite: str, name: str) -> Any:
        """A curve of a suite; None where there is none."""
        return self.suites[suite].curves.get(name) if suite in self.suites else None

    def _of_recipe(self, *keys: str) -> Any:
        found: Any = self.recipe
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def _of_suites(self, key: str) -> Any:
        return next((getattr(suite, key) for suite in self.suites.values()), None)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, sorted by seed.

    Attributes:
        name: name of the recipe without the seed, with values that distinguish it from others of that name.
        runs: at least one.
    """

    name: str
    runs: tuple[RunData, ...]


def name_without_seed(name: str) -> str:
    """A run's name without the seed at its end.

    Args:
        name: such as `cifar10-cgp-seed3`, `cifar10-cgp-s3` or `cifar10-cgp_seed-3`.

    Returns:
        `cifar10-cgp`.
    """
    return re.sub(r"[-_. ]+(seed|s)[-_. ]?\d+$", "", name)


def group(runs: Iterable[RunData]) -> list[Group]:
    """Runs whose recipes are the same but for the seed, and a seed at the end of the name.

    Args:
        runs: any.

    Returns:
        Groups in the order of their first runs.
    """
    found: dict[str, list[RunData]] = {}
    values: dict[str, dict[str, Any]] = {}
    for run in runs:
        own = _recipe_values(run)
        key = json.dumps(own, sort_keys=True, default=str)  # hashable, whatever options are
        values.setdefault(key, own)
        found.setdefault(key, []).append(run)
    names = {key: name_without_seed(_name(of[0])) for key, of in found.items()}
    labels: list[str] = []
    for key, name in names.items():
        namesakes = [values[other] for other in names if names[other] == name]
        differs = [
            f"{k}={v}"
            for k, v in values[key].items()
            if k != "name" and any(k not in x or x[k] != v for x in namesakes)
        ]
        more = " ..." if len(differs) > DIFFERING else ""
        label = " ".join([name, *differs[:DIFFERING]]) + more
        same = sum(other == label or other.startswith(f"{label} (") for other in labels)
        labels.append(f"{label} ({same + 1})" if same else label)
    ordered = (sorted(of, key=lambda run: 0 if run.seed is None else run.seed) for of in found.values())
    return [Group(label, tuple(of)) for label, of in zip(labels, ordered, strict=True)]


def _recipe_values(run: RunData) -> dict[str, Any]:
    """The values that runs of one recipe share; without a recipe those that their suites name."""
    if not run.recipe:
        name = name_without_seed(_name(run))
        return {"name": name, "data.name": run.data, "model.attention": run.attention}
    try:  # with every value, as seeds may have been written by two versions
        plain: Plain = recipe_from_dict(run.recipe).to_dict()
    except (ValueError, TypeError):
        plain = run.recipe
    values = {key: value for key, value in flat(plain).items() if key != "seed"}
    return {**values, "name": name_without_seed(str(run.recipe.get("name", "")))}


def _name(run: RunData) -> str:
    return str(run.recipe.get("name") or run._of_suites("run") or run.name)


# The table


class Results:
    """The table of some groups of runs.

    Args:
        frame: has `COLUMNS`; several rows of one seed, of runs that were trained twice, count as their mean.
    """

    def __init__(self, frame: "DataFrame") -> None:
        self.frame = frame

    @classmethod
    def of(cls, groups: Iterable[Group]) -> "Results":
        """The table of every number of every run."""
        return cls.from_rows(row for each in groups for run in each.runs for row in _rows(each.name, run))

    @classmethod
    def from_rows(cls, rows: Iterable[Plain]) -> "Results":
        """The table of rows, given as mappings by column; missing columns are empty.  Needs pandas."""
        try:
            from pandas import DataFrame, array
        except ImportError as error:
            raise ImportError("tables of results need pandas: pip install 'gpattention[train]'") from error
        known = list(rows)
        columns: dict[str, Any] = {name: [row.get(name) for row in known] for name in COLUMNS}
        columns |= {name: array(columns[name], dtype="Int64") for name in ("seed", "severity", "items")}
        return cls(DataFrame(columns))

    def find(
        self,
        recipe: str,
        suite: str,
        set: str,
        metric: str,
        predictor: str = "model",
        score: str | None = None,
        **detail: Any,
    ) -> OverSeeds | None:
        """One number of a group over its seeds; None where no seed has it.

        Args:
            recipe: recipe of the group.
            suite: clean, corrupted, ood, ...
            set: set of the suite; one with a star, such as `ood/*` or `corrupted/*/5`, is the mean over all
                that fit, seed by seed.
            metric: accuracy, nll, ece, auroc, ...
            predictor: model, mean, mc_dropout, ...; each may end in a temperature.
            score: score that recognises other items, in the suite ood; the first if not given.
            detail: detail of the record, e.g. `layer`, `inducing`.

        Returns:
            The number of each seed.
        """
        if score is not None:
            detail["score"] = score
        if "*" in set:
            places = [place for place in self.sets(recipe, suite) if fnmatchcase(place, set)]
            found = [self.find(recipe, suite, place, metric, predictor, **detail) for place in places]
            return average([each for each in found if each is not None])
        for what, figure in self._figures.get((recipe, suite, set, predictor, metric), ()):
            if all(what.get(key) == value for key, value in detail.items()):
                return figure
        return None

    def sets(self, recipe: str | None = None, suite: str | None = None) -> list[str]:
        """Sets that have any number, in the order of the records."""
        return self._listed("set", recipe, suite)

    def predictors(self, recipe: str | None = None, suite: str | None = None) -> list[str]:
        """Predictors that have any number, in the order of the records."""
        return self._listed("predictor", recipe, suite)

    def _listed(self, column: str, recipe: str | None, suite: str | None) -> list[str]:
        place = KEY.index(column)
        keys = (key for key in self._figures if recipe in (None, key[0]) and suite in (None, key[1]))
        return list(dict.fromkeys(key[place] for key in keys))

    def figures(self, **wanted: str) -> Iterator[tuple[dict[str, Any], OverSeeds]]:
        """Numbers over their seeds, with what each is: recipe, suite, set, predictor, metric and detail.

        >>> results.figures(recipe="cifar10-cgpt", suite="efficiency", metric="train_peak_mib")
        """
        for what, figure in self._all:
            if all(what[key] == value for key, value in wanted.items()):
                yield dict(what), figure

    def summary(self) -> "DataFrame":
        """One row for every number of every group, over its seeds."""
        from pandas import DataFrame

        return DataFrame(
            {
                **what, "mean": figure.mean, "standard_deviation": figure.deviation,
                "standard_error": figure.error, "seeds": figure.count,
            }
            for what, figure in self.figures()
        )  # fmt: skip

    @cached_property
    def _figures(self) -> dict[tuple[str, ...], list[tuple[dict[str, Any], OverSeeds]]]:
        """Figures by recipe, suite, set, predictor and metric; several differ in their detail."""
        found: dict[tuple[str, ...], list[tuple[dict[str, Any], OverSeeds]]] = {}
        for what, figure in self._all:
            found.setdefault(tuple(what[name] for name in KEY), []).append((what, figure))
        return found

    @cached_property
    def _all(self) -> list[tuple[dict[str, Any], OverSeeds]]:
        """All figures in the order of the records."""
        found: dict[tuple[str, ...], tuple[dict[Seed, list[float]], dict[Seed, Sets]]] = {}
        ends: dict[tuple[str, ...], dict[Seed, list[Interval]]] = {}
        parts: dict[tuple[Any, ...], dict[str, int | None]] = {}  # of a mean over corruptions
        for row in self.frame.astype(object).where(self.frame.notna(), None).itertuples(index=False):
            if row.value is None or not math.isfinite(row.value):
                continue
            seed: Seed = row.run if row.seed is None else int(row.seed)
            if row.predictor.partition("+")[0] == "ensemble":  # stands in the first run's results
                seed = ALL
            count, detail = None if row.items is None else int(row.items), row.detail or "{}"
            key = (row.recipe, row.suite, row.set, row.predictor, row.metric, row.score or "", detail)
            values, sets = found.setdefault(key, ({}, {}))
            values.setdefault(seed, []).append(float(row.value))  # trained twice: a seed counts once
            if row.low is not None and row.high is not None:
                ends.setdefault(key, {}).setdefault(seed, []).append((float(row.low), float(row.high)))
            unseen = _detail(detail).get(UNSEEN) if row.suite == "ood" else None  # the other set is whole
            sets[seed] = ((row.set, count), *((("test", unseen),) if unseen is not None else ()))
            if row.suite == "efficiency":  # is of no items
                sets[seed] = ()
            if row.severity is not None:
                parts.setdefault((row.recipe, seed, row.predictor), {})[row.set] = count
        figures = []
        for whole, (values, sets) in found.items():
            recipe, suite, place, predictor, metric, score, detail = whole
            if suite == "corrupted" and place.count("/") == 1:  # a mean over fewer is another
                for seed in values:
                    sets[seed] = tuple(sorted(parts.get((recipe, seed, predictor), {}).items())) or sets[seed]
            what = dict(zip(KEY, (recipe, suite, place, predictor, metric), strict=True))
            what |= {"score": score} if score else {}
            own = {
                s: (fmean(x for x, _ in of), fmean(x for _, x in of)) for s, of in ends.get(whole, {}).items()
            }
            figure = OverSeeds({seed: fmean(several) for seed, several in values.items()}, sets, own)
            figures.append(({**what, **_detail(detail)}, figure))
        return figures


@dataclass(frozen=True)
class Column:
    """One number of every row of a printed table: where it is in the table of results.

    Attributes:
        suite: clean, corrupted, ood, ...
        set: set of the suite; may have a star, see `Results.find`.
        metric: its name in `gpattention.metrics`.
        score: score of the suite ood.
        head: what it is called; as the metric if empty.
        group: name that columns which belong together share.
    """

    suite: str
    set: str
    metric: str
    score: str | None = None
    head: str = ""
    group: str = ""

    @property
    def shown(self) -> Metric:
        """How its metric is shown, and which way is better."""
        return metric_of(self.metric)

    def find(self, results: Results, recipe: str, predictor: str) -> OverSeeds | None:
        """The number of one row."""
        return results.find(recipe, self.suite, self.set, self.metric, predictor, self.score)


def _rows(recipe: str, run: RunData) -> Iterator[dict[str, Any]]:
    for name, suite in run.suites.items():
        settings = recorded_settings(suite)
        for record in suite.records:
            unseen = record.detail.get(UNSEEN) if name != "ood" else None  # there the other set is whole
            most = settings if unseen is None else {**settings, "limit": unseen}
            detail = {k: v for k, v in record.detail.items() if k not in ("score", "temperature", "interval")}
            low, high = _ends(record.detail.get("interval"))
            severity = re.fullmatch(r"corrupted/[^/]+/(\d+)", record.set)
            yield {
                "run": run.name, "recipe": recipe, "seed": run.seed, "data": run.data,
                "attention": run.attention, "suite": name, "set": record.set,
                "severity": int(severity[1]) if severity else None, "predictor": record.predictor,
                "metric": record.metric, "score": record.detail.get("score"),
                # temperatures differ between seeds, and are no part of what a number is
                "detail": json.dumps(detail, sort_keys=True), "value": record.value,
                "items": evaluated_items(suite, record.set, record.predictor, most), "low": low, "high": high,
            }  # fmt: skip


def _ends(interval: Any) -> tuple[float | None, float | None]:
    """The ends of a record's interval; files may contain anything."""
    good = isinstance(interval, Sequence) and len(interval) == 2
    numbers = [x for x in interval if isinstance(x, int | float) and math.isfinite(x)] if good else []
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (None, None)


def evaluated_items(
    suite: SuiteResult, place: str, predictor: str, settings: Plain | None = None
) -> int | None:
    """The number of items of a set that a predictor was evaluated on; None if unknown."""
    place = "corrupted/mean" if place.startswith("corrupted/") else place
    count = suite.curves.get("items", {}).get(predictor, {}).get(place)
    if count is None and (suite.suite, place) == ("clean", "test"):  # evaluations before items were counted
        count = sum(suite.curves.get("reliability", {}).get(predictor, {}).get("count", ())) or None
    if count is None:
        count = (recorded_settings(suite) if settings is None else settings).get("limit")
    return None if count is None else int(count)


@lru_cache(maxsize=4096)
def _detail(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found
