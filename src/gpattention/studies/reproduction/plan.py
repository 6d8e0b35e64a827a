"""A plan as frozen data: which recipes are trained, with which changes and seeds, how they are judged, and
what they are measured against: figures to beat, and rivals of one's own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gpattention.data.places import check_name
from gpattention.evaluation.named_predictors import FITTED, PREDICTOR_NAMES
from gpattention.evaluation.suites import SUITES
from gpattention.experiments.runs import CARD_RECIPE
from gpattention.metrics import METRICS
from gpattention.reading import read_toml
from gpattention.training import Recipe, load_recipe, with_seed
from gpattention.training.build import needs_warm_start
from gpattention.training.first_phase import first_phase

AGGREGATIONS = ("pooled", "batch-mean")
BATCHED = ("ece", "mce")  # measures that the paper averages over batches; the others are the same both ways
SETS = {"clean": "test", "corrupted": "corrupted/mean"}  # what a suite's goal is about unless it says so


@dataclass(frozen=True)
class Goal:
    """A figure that the chosen model is to beat."""

    name: str
    suite: str
    measure: str  # accuracy, nll, ece, ...
    value: float
    source: str  # whose figure it is
    better: str  # higher or lower
    aggregation: str = "pooled"
    set: str = ""  # of the suite

    @property
    def metric(self) -> str:
        """As records call it."""
        batched = self.aggregation == "batch-mean" and self.measure in BATCHED
        return f"batch_{self.measure}" if batched else self.measure

    @property
    def larger(self) -> bool:
        """Whether larger is better."""
        return self.better == "higher"


@dataclass(frozen=True)
class Candidate:
    """A model of a plan with one way to predict, written MODEL:PREDICTOR."""

    model: str
    predictor: str

    @staticmethod
    def parse(text: Any) -> "Candidate":
        """The inverse of `str`."""
        model, colon, predictor = str(text).rpartition(":")
        if not (model and colon and predictor):
            raise ValueError(f"expected MODEL:PREDICTOR, got {text!r}")
        return Candidate(model, predictor)

    def __str__(self) -> str:
        return f"{self.model}:{self.predictor}"

    @property
    def is_ensemble(self) -> bool:
        """Whether it takes several runs to predict."""
        return self.predictor.partition("+")[0] == "ensemble"


def read_goals(entries: Sequence[Mapping[str, Any]], where: str) -> tuple[Goal, ...]:
    """The `[[goals]]` of a plan file, checked."""
    known = {field.name for field in fields(Goal)}
    optional = {"aggregation", "set"}
    found = []
    for entry in entries:
        unknown, missing = sorted(set(entry) - known), sorted(known - optional - set(entry))
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r} in {where}; known: {', '.join(sorted(known))}")
        if missing:
            raise ValueError(f"expected {missing[0]} in {where}, got {dict(entry)!r}")
        found.append(_goal(entry, where))
    return tuple(found)


def read_rivals(entries: Sequence[Any], models: Sequence[str], where: str) -> tuple[Candidate, ...]:
    """The `rivals` of a plan file; their models must be of the plan."""
    found = tuple(Candidate.parse(entry) for entry in entries)
    for rival in found:
        if rival.model not in models:
            raise ValueError(f"{where}: expected rivals among {', '.join(models)}, got {rival.model!r}")
    return found


def read_choose(entries: Sequence[Any], where: str) -> tuple[str, ...]:
    """The predictors that may be chosen, each with a temperature or without."""
    for entry in entries:
        base, plus, more = str(entry).partition("+")
        if base not in PREDICTOR_NAMES or (plus and more not in FITTED):
            known = ", ".join(PREDICTOR_NAMES)
            raise ValueError(
                f"{where}: expected choose among {known}, or with +temperature or +shift_temperature, "
                f"got {entry!r}"
            )
    return tuple(entries)


def _goal(entry: Mapping[str, Any], where: str) -> Goal:
    suite, measure = entry["suite"], entry["measure"]
    if suite not in SUITES:
        raise ValueError(f"{where}: expected suite to be one of {', '.join(SUITES)}, got {suite!r}")
    if measure not in METRICS or measure.startswith("batch_"):
        raise ValueError(f"{where}: expected measure to be a metric, e.g. nll, got {measure!r}")
    if entry.get("aggregation", "pooled") not in AGGREGATIONS:
        known = ", ".join(AGGREGATIONS)
        raise ValueError(f"{where}: expected aggregation to be one of {known}, got {entry['aggregation']!r}")
    right = "higher" if METRICS[measure].larger else "lower"
    if entry["better"] != right:
        raise ValueError(f"{where}: expected better = {right!r} for {measure}, got {entry['better']!r}")
    place = entry.get("set", SETS.get(suite))
    if place is None:
        raise ValueError(f"{where}: expected set, as {suite} has several, got none")
    return Goal(**{**entry, "value": float(entry["value"]), "set": place})


_KEYS = {"name", "seeds", "changes", "train", "suites", "evaluate", "runs", "goals", "rivals", "choose"}
_RUN_KEYS = {"recipe", "name", "changes", "seeds", "evaluate"}
_SHARED_KEYS = {"shared", "name", "evaluate"}


@dataclass(frozen=True)
class PlannedTraining:
    """One run of a plan."""

    model: str  # the name that its seeds share
    seed: int
    recipe: Recipe
    evaluate: tuple[str, ...] = ()  # arguments of `gpattention evaluate` for this model, after the plan's
    shared: Path | None = None  # a shared model's folder: nothing is trained then

    @property
    def folder(self) -> str:
        """Below the folder of the plan's runs."""
        return f"{self.model}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What a plan file says, recipes read and checked."""

    name: str
    trainings: tuple[PlannedTraining, ...]
    suites: tuple[str, ...]  # how runs are judged
    evaluate: tuple[str, ...]  # further arguments of `gpattention evaluate`
    train: tuple[str, ...] = ()  # and of `gpattention train`
    goals: tuple[Goal, ...] = ()  # figures that the chosen model is to beat
    rivals: tuple[Candidate, ...] = ()  # what it is to beat of our own; their models are not chosen
    choose: tuple[str, ...] = ()  # predictors that may be chosen; all where none is named
    part: tuple[str, ...] = ()  # arguments of `gpattention reproduce` that name this part of it

    @property
    def models(self) -> tuple[str, ...]:
        """Names in the order of the file, each once."""
        return tuple(dict.fromkeys(training.model for training in self.trainings))

    def only(self, models: Sequence[str] = (), seeds: Sequence[int] = ()) -> "Plan":
        """A part of it; everything where nothing is named."""
        for model in models:
            if model not in self.models:
                raise ValueError(f"expected models of the plan ({', '.join(self.models)}), got {model!r}")
        known = sorted({training.seed for training in self.trainings})
        for seed in seeds:
            if seed not in known:
                raise ValueError(f"expected seeds of the plan ({', '.join(map(str, known))}), got {seed}")
        chosen = [
            t for t in self.trainings if (not models or t.model in models) and (not seeds or t.seed in seeds)
        ]
        named = {"--models": ",".join(models), "--seeds": ",".join(map(str, seeds))}
        part = tuple(word for option, names in named.items() if names for word in (option, names))
        return replace(self, trainings=tuple(chosen), part=part)

    def sources(self) -> dict[str, str]:
        """Folder of each run whose first phase another run trains too, and that run's folder."""
        first: dict[str, str] = {}
        found: dict[str, str] = {}
        for training in self.trainings:
            recipe = training.recipe
            trained = training.shared is None and recipe.phases.kernel_epochs >= 1
            if not trained or not needs_warm_start(recipe):
                continue
            key = json.dumps(first_phase(recipe), sort_keys=True)
            source = first.setdefault(key, training.folder)
            if source != training.folder:
                found[training.folder] = source
        return found


def load_plan(path: str | Path) -> Plan:
    """Read a plan; its recipes are files beside it, in the folder above, or named by their path."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no plan {path}")
    plain = read_toml(path)
    _check_keys(plain, _KEYS, str(path))
    if not plain.get("runs"):
        raise ValueError(f"expected [[runs]] in {path}, got none")
    suites = tuple(plain.get("suites", ("clean",)))
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"{path}: expected suites among {', '.join(SUITES)}, got {suite!r}")
    trainings: list[PlannedTraining] = []
    for entry in plain["runs"]:
        trainings += _trainings(entry, plain, path)
    names = [training.folder for training in trainings]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: two runs are called {twice}; give one of them another name")
    for name in names:  # with the longest that is put around it
        check_name(f"{path}: the file of a run", f"training-{name}.toml")
    models = list(dict.fromkeys(training.model for training in trainings))
    return Plan(
        name=check_name(f"name of {path}", plain.get("name", path.stem)),
        trainings=tuple(trainings),
        suites=suites,
        evaluate=tuple(plain.get("evaluate", ())),
        train=tuple(plain.get("train", ())),
        goals=read_goals(plain.get("goals", ()), f"[[goals]] of {path}"),
        rivals=read_rivals(plain.get("rivals", ()), models, str(path)),
        choose=read_choose(plain.get("choose", ()), str(path)),
    )


def _trainings(entry: Mapping[str, Any], plain: Mapping[str, Any], path: Path) -> list[PlannedTraining]:
    if "shared" in entry:
        return [_shared(entry, path)]
    _check_keys(entry, _RUN_KEYS, f"[[runs]] of {path}")
    if "recipe" not in entry:
        raise ValueError(f"{path}: expected recipe or shared in every [[runs]], got {dict(entry)!r}")
    recipe = load_recipe(
        _recipe_file(entry["recipe"], path), [*plain.get("changes", ()), *entry.get("changes", ())]
    )
    model = check_name(f"name in [[runs]] of {path}", entry.get("name", recipe.name))
    seeds = entry.get("seeds", plain.get("seeds", [0]))
    evaluate = tuple(entry.get("evaluate", ()))
    return [PlannedTraining(model, s, with_seed(replace(recipe, name=model), s), evaluate) for s in seeds]


def _shared(entry: Mapping[str, Any], path: Path) -> PlannedTraining:
    """A model that is judged as it was shared: its recipe and seed are those that it was trained with."""
    _check_keys(entry, _SHARED_KEYS, f"[[runs]] of {path} with a shared model, which is not trained")
    places = (path.parent / entry["shared"], Path(entry["shared"]))
    folder = next((place for place in places if (place / CARD_RECIPE).is_file()), None)
    if folder is None:
        raise FileNotFoundError(f"{path}: no shared model {entry['shared']!r}, seen from it or from here")
    recipe = load_recipe(folder / CARD_RECIPE)
    evaluate = tuple(entry.get("evaluate", ()))
    model = check_name(f"name in [[runs]] of {path}", entry.get("name", recipe.name))
    return PlannedTraining(model, recipe.seed, recipe, evaluate, folder)


def _recipe_file(name: str, plan: Path) -> Path:
    for place in (plan.parent / f"{name}.toml", plan.parent.parent / f"{name}.toml", Path(name)):
        if place.is_file():
            return place
    raise FileNotFoundError(f"{plan}: no recipe {name!r} beside it or in the folder above")


def _check_keys(plain: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(plain) - known)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} in {where}; known: {', '.join(sorted(known))}")
