"""The evaluation of runs: predictions once, every suite from them, results in the run's folder.

What is finished with the same settings is read, not computed again; what was stopped goes on at the set
where it stopped.  An evaluation is of the weights that it read, whatever the trainer writes meanwhile.
"""

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

import gpattention
from gpattention.checks import check_count, did_you_mean
from gpattention.data import TEXT_SHIFTS
from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES
from gpattention.evaluation.corrupted import PREFIX, CorruptedSource
from gpattention.evaluation.last_layers import LastLayerPredictor
from gpattention.evaluation.predictions import (
    CHUNK,
    CacheKey,
    ItemSet,
    Predicted,
    PredictionCache,
    RawPrediction,
    predict_items,
    row_digests,
)
from gpattention.evaluation.predictors import (
    DEFAULT_PREDICTORS,
    PREDICTOR_NAMES,
    PREDICTORS,
    ModelPredictor,
    NamedPredictor,
    UnavailablePredictorError,
    build_predictor,
    fit_temperature,
    temperature_profile,
)
from gpattention.evaluation.sets import RunSets, idle_shifts, run_sets, shift_places, shifted_items
from gpattention.evaluation.suites import SUITES
from gpattention.evaluation.suites.findings import Findings, Progress, Steps, Subject
from gpattention.files import StrPath, remove_leftovers
from gpattention.gp import NumericalError
from gpattention.models import Signals
from gpattention.models.predict import Inputs
from gpattention.numerics import choose_device
from gpattention.runs import Run, RunData, SuiteResult, group, open_run, recorded_settings, write_suite
from gpattention.runs.records import digest_of_weights, read_suite
from gpattention.runs.results import UNSEEN
from gpattention.strangeness import AdaptiveTemperature, Head

M = TypeVar("M", bound=Callable[..., Any])
READINGS = 5  # of weights that are replaced while they are read, which a trainer does once an epoch
HEATS = ("shift_temperature", "adaptive_temperature")  # settings, and with a plus after a predictor's name
TEMPERATURE, SHIFT_TEMPERATURE = "+temperature", "+shift_temperature"
ADAPTIVE_TEMPERATURE = "+adaptive_temperature"
REDUCING = ("limit", "types", "severities")  # recorded settings that leave items out; None is all


@dataclass(frozen=True)
class EvaluationSettings:
    """How runs are evaluated, checked when it is made.

    Args:
        suites: of clean, corrupted, ood, selective, oversmoothing, efficiency; or "all" of these; and
            criterion, which plans choose by.
        predictors: of model, mean, moments, mc_dropout, dropout_draws, laplace, gp_layer; each also with
            temperature.
        samples: draws of a prediction.
        seed: of the draws.
        batch_size: items times draws that run at once; 256 on a CPU and 2000 on a GPU if not given.
        limit: at most so many items of each set, evenly spread over those of other kinds (see `run_sets`);
            the results say that they are reduced.
        corrupted_limit: at most so many items of each corrupted set alone, the first ones.
        corruptions: types of them; all if not given.
        severities: of corruptions, 1 to 5; all if not given.
        held_corruptions: that the suite ood tells from the test items at severity 5, as sets of another
            kind; none if not given.
        shift_temperature: each also with a temperature fitted under shift (`gpattention.data.shifts`; of
            texts, `gpattention.data.TEXT_SHIFTS`).
        adaptive_temperature: each also with a temperature that rises with how strange an item is, fitted
            under the same shifts (`AdaptiveTemperature`).
        fresh: compute everything anew, also where it is finished or damaged.
        device: auto, cpu, cuda, ...
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.

    Raises:
        ValueError: an unknown name or a number that cannot be.
    """

    suites: Sequence[str] = ("all",)
    predictors: Sequence[str] = DEFAULT_PREDICTORS
    samples: int = 10
    seed: int = 0
    batch_size: int | None = None
    limit: int | None = None
    corrupted_limit: int | None = None
    corruptions: Sequence[str] | None = None
    severities: Sequence[int] | None = None
    held_corruptions: Sequence[str] | None = None
    shift_temperature: bool = False
    adaptive_temperature: bool = False
    fresh: bool = False
    device: torch.device | str = "auto"
    root: StrPath | None = None

    def __post_init__(self) -> None:
        if "all" in self.suites:
            named = [name for name in self.suites if name in SUITES and not SUITES[name].usual]
            usual = [name for name, suite in SUITES.items() if suite.usual]
            object.__setattr__(self, "suites", (*usual, *named))
        offered: dict[str, Sequence[Any]] = {
            "suites": tuple(SUITES), "predictors": PREDICTOR_NAMES, "corruptions": tuple(CORRUPTIONS),
            "severities": SEVERITIES, "held_corruptions": tuple(CORRUPTIONS),
        }  # fmt: skip
        for name, known in offered.items():
            values = getattr(self, name)
            if values is None:
                continue
            if not values:
                raise ValueError(f"expected at least one of {name}, got none")
            for value in values:
                if value not in known:
                    among = ", ".join(map(str, known))
                    raise ValueError(
                        f"expected {name} to be among {among}, got {value!r}{did_you_mean(value, known)}"
                    )
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        for name, least in (("samples", 0), ("batch_size", 1), ("limit", 1), ("corrupted_limit", 1)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_count(name, getattr(self, name), least=least))


def evaluate_run(
    folder: StrPath, settings: EvaluationSettings | None = None, *, progress: Progress | None = None
) -> dict[str, SuiteResult]:
    """Evaluate one run; each suite is written to RUN/evaluation/SUITE.json as it is done.

    >>> evaluate_run("runs/cgp", EvaluationSettings(suites=["clean", "ood"], samples=20))

    Args:
        folder: a run with a model.
        settings: what is evaluated and how; everything if not given.
        progress: called with what is being done, how much of it is done, and how much there is.

    Returns:
        The results by the names of their suites.

    Raises:
        ValueError: fewer items would replace figures of more, a damaged file, or other data than the run was
            trained on.
        FileNotFoundError: no run there.
    """
    evaluation = Evaluation(folder, settings or EvaluationSettings())
    return {name: evaluation.suite(name, progress) for name in evaluation.settings.suites}


def evaluate_runs(
    folders: Sequence[StrPath],
    settings: EvaluationSettings | None = None,
    *,
    progress: Progress | None = None,
) -> dict[Path, dict[str, SuiteResult]]:
    """Evaluate each run; then, of those that differ by their seed alone, the ensemble.

    The ensemble's records stand in the results of its first run, under the predictor "ensemble".

    Args:
        folders: runs with models.
        settings: what is evaluated and how; everything if not given.
        progress: called with the run's name and the suite's, how much is done, and how much there is.

    Returns:
        The results by folder and suite.

    Raises:
        ValueError: as `evaluate_run` does.
        FileNotFoundError: likewise.
    """
    settings = settings or EvaluationSettings()
    # a bad folder costs no work
    runs = [RunData(str(folder), open_run(folder).recipe.to_dict()) for folder in folders]

    def named(name: str) -> Progress | None:
        if progress is None:
            return None
        return lambda what, done, total: progress(f"{name} {what}", done, total)

    found: dict[Path, dict[str, SuiteResult]] = {}
    for folder in map(Path, folders):
        found[folder] = evaluate_run(folder, settings, progress=named(folder.name))
    for same in group(runs) if len(runs) > 1 else ():
        seeds = {run.seed: Path(run.name) for run in same.runs}  # by rising seed; of one seed the last
        if len(seeds) > 1:
            members = [Evaluation(folder, replace(settings, fresh=False)) for folder in seeds.values()]
            first, count = next(iter(seeds.values())), named(f"{ENSEMBLE} of {len(seeds)}")
            found[first] |= add_ensemble(members, settings, progress=count)
    return found


# Parts of an evaluation, for processes that share the work


def open_corruptions(folder: StrPath, settings: EvaluationSettings) -> None:
    """Make the corrupted images of a run's test set that are kept for everybody, where they are missing.

    Args:
        folder: of the run.
        settings: of the evaluation.
    """
    evaluation = Evaluation(folder, replace(settings, suites=(PREFIX,)))
    if evaluation.sets.corruptions is not None and not evaluation.is_finished(PREFIX):
        evaluation.sets.corruptions.open(evaluation.device)


def predict_corruption(folder: StrPath, settings: EvaluationSettings, corruption: str) -> None:
    """Predict a run's test items under one corruption, at all severities; the predictions stay in its folder.

    Args:
        folder: of the run.
        settings: of the evaluation.
        corruption: its type; nothing is done where the data have none of it.
    """
    evaluation = Evaluation(folder, replace(settings, suites=(PREFIX,)))
    if evaluation.sets.corruptions is None or evaluation.is_finished(PREFIX):
        return
    source = evaluation.sets.corruptions.open(evaluation.device)
    for severity in source.severities if corruption in source.types else ():
        items = evaluation.corrupted(source, corruption, severity)
        for name in evaluation.names:
            evaluation.raw(name, items)


# The weights that numbers are of


def open_with_digest(folder: StrPath) -> tuple[Run, str]:
    """Open a run whose trainer may replace the weights meanwhile.

    Args:
        folder: of the run.

    Returns:
        The run, and the SHA-256 of the very weights in it: the file was the same before and after reading.

    Raises:
        RuntimeError: the weights were replaced in every reading.
    """
    # the same digest before and after: nobody wrote in between
    for _ in range(READINGS):
        before = digest_of_weights(folder)
        run = open_run(folder)  # says what is missing
        after = digest_of_weights(folder)
        if after is not None and after == before:
            return run, after
    raise RuntimeError(
        f"expected the weights of {folder} to stay while they are read, got others in each of {READINGS} "
        "readings: is something writing them all the time?"
    )


# What an earlier evaluation of the same weights holds, and a new one must not lose


def check_as_much(
    asked: Mapping[str, Any], earlier: Mapping[str, Any], path: Path, again: str = "evaluate"
) -> None:
    """Refuse settings that leave out items that the figures in a file were computed with.

    Args:
        asked: settings of a new evaluation.
        earlier: settings of the figures.
        path: of the file.
        again: the command to give instead.

    Raises:
        ValueError: fewer items would replace more.
    """
    for name in REDUCING:
        new, old = asked.get(name), earlier.get(name)
        if new is None:
            continue
        if old is None or (new < old if isinstance(new, int) else {*old} - {*new}):
            now, had = (
                "all" if x is None else x if isinstance(x, int) else ",".join(map(str, x)) for x in (new, old)
            )
            raise ValueError(
                f"{path} has figures of the same weights with more items ({name}: {had}), which {name} {now} "
                f"would replace: {again} as it was, or with --fresh (fresh=True) to replace them"
            )


def made_once(method: M) -> M:
    """Let a method do its work once for any arguments; what it made lives as long as its object."""

    # not functools.cache, which would keep every run's model alive as long as the process
    @wraps(method)
    def kept(self: Any, *arguments: Any) -> Any:
        made, key = vars(self).setdefault("_made", {}), (method.__name__, *arguments)
        if key not in made:
            made[key] = method(self, *arguments)
        return made[key]

    return cast(M, kept)


class Evaluation(Subject):
    """A run being evaluated: its data, its predictors, and their predictions, each made once.

    Args:
        folder: of the run.
        settings: of which predictors of an earlier evaluation stay: they are evaluated again with the new
            ones, of the predictions that are kept.

    Raises:
        ValueError: fewer items would replace figures of more.
    """

    def __init__(self, folder: StrPath, settings: EvaluationSettings) -> None:
        super().__init__()
        self.run: Run
        self.weights: str  # SHA-256 of those in `run`, also when the file has others by now
        self.run, self.weights = open_with_digest(folder)
        self.folder = self.run.folder / "evaluation"
        remove_leftovers(self.folder)
        paths = {name: self.folder / f"{name}.json" for name in settings.suites}
        self._earlier = {
            name: read_suite(path) for name, path in paths.items() if path.exists() and not settings.fresh
        }
        self.settings = self._with_earlier(settings)
        self.sets = run_sets(
            self.run, settings.root, limit=settings.limit, types=settings.corruptions,
            severities=settings.severities, corrupted_limit=settings.corrupted_limit,
        )  # fmt: skip
        self.held = tuple(settings.held_corruptions or ())
        self.device, self.samples, self.seed = choose_device(settings.device), settings.samples, settings.seed
        self.cache = PredictionCache(self.folder / "predictions", fresh=settings.fresh)
        self.notes: list[str] = []
        self._kept: dict[tuple[str, str], RawPrediction] = {}
        self._signals: dict[str, Signals] = {}

    def _with_earlier(self, asked: EvaluationSettings) -> EvaluationSettings:
        """Settings under which no finished figure is lost."""
        predictors = dict.fromkeys(asked.predictors)
        heats = {name: getattr(asked, name) for name in HEATS}
        # results are replaced whole: what is not asked for again would be gone
        for suite, result in self._earlier.items():
            earlier = recorded_settings(result)
            if not SUITES[suite].items or earlier.get("model") != self.weights:
                continue
            some = {"types": asked.corruptions, "severities": asked.severities} if suite == PREFIX else {}
            limit = _limit_of(suite, asked)
            check_as_much({"limit": limit, **some}, earlier, self.folder / f"{suite}.json")
            alike = earlier.get("limit") == limit
            alike &= all(earlier.get(name) == getattr(asked, name) for name in ("samples", "seed"))
            if SUITES[suite].predictions and alike:
                predictors |= dict.fromkeys(earlier.get("predictors", ()))
                heats = {heat: on or earlier.get(heat, False) for heat, on in heats.items()}
        return replace(asked, predictors=tuple(predictors), **heats)

    def suite(self, name: str, progress: Progress | None = None) -> SuiteResult:
        """Read what is finished, else compute and write it."""
        if not self.is_finished(name):
            self._earlier[name] = self._compute(name, self._identity(name), progress)
        return self._earlier[name]

    def is_finished(self, name: str) -> bool:
        """Whether there are results of a suite with these settings."""
        found = self._earlier.get(name)
        return found is not None and recorded_settings(found) == json.loads(self._identity(name))

    def _compute(self, name: str, identity: str, progress: Progress | None) -> SuiteResult:
        start, suite = time.perf_counter(), SUITES[name]
        self.progress = progress
        found = suite.evaluate(self)
        self.steps = Steps()  # what else is predicted is not for the bar
        limit, recipe, epoch = _limit_of(name, self.settings), self.run.recipe, self.run.unfinished_epoch
        notes = []
        if limit is not None and suite.items:
            notes.append(f"reduced: at most {limit} items of each set")
        if epoch is not None:
            notes.append(f"reduced: training has come to epoch {epoch} of {recipe.epochs}")
        notes += [*found.notes, *(self.notes if suite.predictions else ())]
        result = SuiteResult(
            suite=name, run=recipe.name, data=self.sets.data, seed=recipe.seed,
            attention=recipe.model.attention, samples=self.samples, records=found.records,
            curves=found.curves, notes=tuple(dict.fromkeys(notes)),
            environment={**_environment(self.device), "settings": identity},
            seconds=time.perf_counter() - start,
        )  # fmt: skip
        write_suite(self.run.folder, result)
        return result

    def _identity(self, name: str) -> str:
        """Everything that a suite's numbers depend on, as JSON."""
        s, suite, epoch = self.settings, SUITES[name], self.run.unfinished_epoch
        found: dict[str, Any] = {
            "gpattention": gpattention.__version__, "model": self.weights, "limit": _limit_of(name, s),
            "samples": s.samples,
        }  # fmt: skip
        # an epoch changes the notes and not the numbers, and notes are results too
        if epoch is not None:  # which a note names, also where the weights stay the best
            found["epoch"] = epoch
        if suite.predictions:
            found |= {"seed": s.seed, "predictors": list(s.predictors)}
            found |= {heat: True for heat in HEATS if getattr(s, heat)}
            if self.sets.kind == "texts" and any(heat in found for heat in HEATS):
                found["shifts"] = list(TEXT_SHIFTS)  # results of before there were any are not these
            fitted = any(PREDICTORS[each].fitted for each in s.predictors)
            found |= {"train": self.sets.train.digest} if fitted else {}
        found |= self.sets.described(name) if suite.items else {"device": _environment(self.device)["device"]}
        if name == PREFIX and (s.corruptions, s.severities) != (None, None):
            found |= {"types": s.corruptions, "severities": s.severities}
        if name == "ood" and self.held:
            found["held_corruptions"] = self.held
        return json.dumps(found, sort_keys=True)

    # Predictions

    @cached_property
    def _model(self) -> Any:
        return self.run.model.to(self.device)

    @cached_property
    def head(self) -> Head | None:  # type: ignore[override]
        """Weight and bias of the model's linear head; None where it has another one."""
        found = getattr(self._model, "head", None)
        if not isinstance(found, nn.Linear) or found.bias is None:
            return None
        return found.weight.detach(), found.bias.detach()

    @made_once
    def _built(self, name: str) -> NamedPredictor | None:
        """Of an ensemble `model` also if not asked for; None, with a note, where it cannot be."""
        try:
            return build_predictor(name, self._model, self.samples, self._training)
        except (UnavailablePredictorError, NumericalError) as error:
            self.notes.append(str(error))
            return None

    def _training(self) -> tuple[Inputs, Tensor]:
        train = self.sets.train
        assert train.labels is not None
        return train.inputs(0, len(train), self.device), train.labels

    @cached_property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Of the predictors."""
        return tuple(name for name in self.settings.predictors if self._built(name) is not None)

    @cached_property
    def _config(self) -> str:
        described = {"model": type(self._model).__name__, "config": self._model.config.to_dict()}
        return json.dumps(described, sort_keys=True)

    @property
    def heats(self) -> tuple[str, ...]:  # type: ignore[override]
        """Kinds of temperatures, those that were asked for after the usual one."""
        return (TEMPERATURE[1:], *(heat for heat in HEATS if getattr(self.settings, heat)))

    def logits(self, name: str, items: ItemSet) -> Tensor:
        """Of a predictor, without temperature.  [S, B, C]"""
        return self._labelled(name, items)[0]

    def raw(self, name: str, items: ItemSet, *, aside: Path | None = None) -> RawPrediction:
        """Logits of a set: kept in memory, in the run's folder, or computed.

        `aside` is the folder to keep predictions in that are not of this run's own items.
        """
        found = self._kept.get((name, items.digest))
        if found is None:
            key, caches = self._key(name, items), [self.cache]
            caches += [] if aside is None else [PredictionCache(aside)]
            found = next((x for cache in caches if (x := cache.read(items.name, key)) is not None), None)
            if found is None:
                found = self._predict(name, items)
                caches[-1].write(items.name, key, found)
            found = found.to(self.device)
            if not items.name.startswith(f"{PREFIX}/"):  # too many to keep
                self._kept[name, items.digest] = found
        self.steps.finish_one()
        return found

    def _key(self, name: str, items: ItemSet) -> CacheKey:
        built, fitted = self._built(name), ""
        assert built is not None
        # its predictions change with the items that it was fitted to, which the weights do not tell
        if isinstance(built.predictor, LastLayerPredictor):
            of = {"items": self.sets.train.digest, **built.predictor.options}
            fitted = json.dumps(of, sort_keys=True)
        return CacheKey(
            name, built.samples, self.settings.seed, built.draw, self.weights, self._config, items.digest,
            gpattention.__version__, fitted,
        )  # fmt: skip

    def _predict(self, name: str, items: ItemSet) -> RawPrediction:
        built = self._built(name)
        assert built is not None
        predictor = built.predictor
        if isinstance(predictor, ModelPredictor) and items.name.startswith(f"{PREFIX}/"):
            predictor = replace(predictor, variances=False)  # no score asks for them there
        return predict_items(
            predictor, items, samples=built.samples, seed=self.settings.seed, device=self.device,
            batch_size=self.settings.batch_size, progress=self.steps.part,
        )  # fmt: skip

    def variants(self, name: str, items: ItemSet) -> list[tuple[str, Predicted]]:
        """The prediction as it is and, where temperatures could be fitted, at these."""
        raw = self.raw(name, items)
        plain = Predicted.from_logits(raw.logits, raw.labels, raw.layer_variance)
        heats = self.temperatures(name, items, raw.logits)
        return [(name, plain), *((f"{name}{suffix}", plain.tempered(heat)) for suffix, heat in heats.items())]

    def signals(self, items: ItemSet) -> Signals:
        """Of the model, whatever predicts."""
        if items.digest in self._signals:
            return self._signals[items.digest]
        chunks = (inputs for _, inputs in items.chunks(CHUNK, self.device))
        found = Signals.cat([self._model.signals(inputs).to("cpu") for inputs in chunks])
        if not items.name.startswith(f"{PREFIX}/"):
            self._signals[items.digest] = found
        return found

    @cached_property
    def _fitted_on(self) -> dict[str, ItemSet]:
        """Where temperatures are fitted: on validation items and, where asked for, under shift."""
        found = {TEMPERATURE: self.sets.validation}
        if self.settings.shift_temperature and self._shifted is not None:
            found[SHIFT_TEMPERATURE] = self._shifted
        return found

    @cached_property
    def _shifted(self) -> ItemSet | None:
        """Validation items under shift; None, with a note, where what they become cannot be encoded."""
        try:
            found = shifted_items(self.sets.validation, self.sets.encoder)
        except ValueError as error:
            self.notes.append(f"no temperature under shift: {error}")
            return None
        idle = idle_shifts(found, self.sets.validation) if self.sets.kind == "texts" else ()
        self.notes += [f"temperatures under shift: {name} changes no input of the model" for name in idle]
        return found

    def temperatures(self, name: str, items: ItemSet, logits: Tensor) -> dict[str, float | Tensor]:
        """Of items and their logits, by what is added to the predictor's name; without those with no best."""
        fitted = {suffix: self._temperature(name, suffix) for suffix in self._fitted_on}
        found: dict[str, float | Tensor] = {k: value for k, value in fitted.items() if value is not None}
        adaptive = self._adaptive_temperature(name) if self.settings.adaptive_temperature else None
        if adaptive is not None:
            found[ADAPTIVE_TEMPERATURE] = adaptive.temperature(logits, self.signals(items))
        return found

    @made_once
    def _adaptive_temperature(self, name: str) -> AdaptiveTemperature | None:
        """None, with a note, where there can be none."""
        if self._shifted is None:
            return None
        logits, labels = self._labelled(name, self._shifted)
        own, known = self._labelled(name, self.sets.validation)
        signals, places = self.signals(self._shifted), shift_places(self._shifted).items()
        shifted = {shift: (logits[:, at], signals[at], labels[at]) for shift, at in places}
        try:
            return AdaptiveTemperature.fit(own, self.signals(self.sets.validation), known, shifted=shifted)
        except (ValueError, NumericalError) as error:
            self.notes.append(f"no adaptive temperature for {name}: {error}")
            return None

    @made_once
    def _temperature(self, name: str, suffix: str) -> float | None:
        """None, with a note, where there is no best one."""
        logits, labels = self._labelled(name, self._fitted_on[suffix])
        what = suffix[1:].replace("_", " ")
        try:
            fitted = fit_temperature(logits, labels)
        except NumericalError as error:
            self.notes.append(f"no {what} for {name}: {error}")
            return None
        if fitted == 1:
            self.notes.append(f"{what} of {name}: {temperature_profile(logits, labels).reason}")
        return fitted

    def _labelled(self, name: str, items: ItemSet) -> tuple[Tensor, Tensor]:
        """Logits and labels of a prediction that is none of those that the bar counts."""
        steps, self.steps = self.steps, Steps()
        raw = self.raw(name, items)
        self.steps = steps
        assert raw.labels is not None
        return raw.logits, raw.labels


def _limit_of(suite: str, settings: EvaluationSettings) -> int | None:
    """At most so many items of every set of a suite."""
    limits = [settings.limit, settings.corrupted_limit if suite == PREFIX else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _environment(device: torch.device) -> dict[str, str]:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}"
    return {
        "gpattention": gpattention.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "device": where, "threads": str(torch.get_num_threads()),
    }  # fmt: skip


# Ensembles of runs that differ by their seed alone.  Runs of other seeds may have other splits: an item that
# one of them tests on, another may have been trained on, or its weights may have been chosen and its
# temperature fitted on it.  An ensemble is evaluated on items of the first run that no other member knows.

ENSEMBLE = "ensemble"
FEWEST = 20  # validation items to take thresholds and templates from; conformal sets of 95 % need 19
KNOWN = {"test": "trained or validated on", "validation": "trained on"}  # by others: see `unseen_items`
COUNTS = {"test": UNSEEN, "validation": "unseen_validation_items"}  # in the detail of records on fewer items
NOTES = (f"{ENSEMBLE} of ", f"no {ENSEMBLE}", f"no conformal sets of {ENSEMBLE}")  # how those of one begin


class Ensemble(Subject):
    """The models of several evaluations, mixed with equal weights.

    With temperature, each member has its own, fitted on its own validation items.
    """

    def __init__(self, members: Sequence[Evaluation]) -> None:
        super().__init__()
        self.members, self.names = tuple(members), (ENSEMBLE,)
        self.label = f"{ENSEMBLE} of {len(members)} runs"
        self.sets, self.device = members[0].sets, members[0].device
        self._unseen = unseen_items(self.sets, [member.sets for member in members[1:]])
        self._left = {part: len(places) for part, places in self._unseen.items()}
        self._all = {"validation": len(self.sets.validation), "test": len(self.sets.test)}

    @cached_property
    def validation(self) -> ItemSet | None:
        """What is left of the first run's; None where it is too little."""
        enough = self._left["validation"] >= min(FEWEST, self._all["validation"])
        return self.sets.validation.select(self._unseen["validation"]) if enough else None

    @cached_property
    def test(self) -> ItemSet | None:
        """What is left of the first run's; None where it is nothing."""
        return self.sets.test.select(self._unseen["test"]) if self._left["test"] else None

    def findings(self, suite: str, progress: Progress | None) -> Findings:
        """Of a suite; with, in every record, how many items are left where the set is not the run's."""
        if self.test is None:
            return Findings()
        self.progress = progress
        found = SUITES[suite].evaluate(self)
        records = [
            replace(record, detail={**record.detail, **self._counts(suite, record.set)})
            for record in found.records
        ]
        return replace(found, records=tuple(records))

    def notes(self, suite: str) -> tuple[str, ...]:
        """What is to be said about the items of a suite."""
        notes = []
        for part, known in KNOWN.items():
            if self._is_reduced(part) and (part == "test" or SUITES[suite].validation):
                few = part == "validation" and self.validation is None
                left = f"{self._left[part]} of {self._all[part]} {part} items, those that no other member was"
                notes.append(
                    f"{self.label}: {left} {known}{f'; at least {FEWEST} are needed' if few else ''}"
                )
        return tuple(notes)

    def _counts(self, suite: str, set: str) -> dict[str, int]:
        """How many items the set of a record has left, where some are left out."""
        part = "validation" if set == "validation" else "test"
        whole = suite == "clean" and set not in ("validation", "test")  # sentences out of domain are all left
        return {} if whole or not self._is_reduced(part) else {COUNTS[part]: self._left[part]}

    def _is_reduced(self, part: str) -> bool:
        return self._left[part] < self._all[part]

    def corrupted(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        items, kept = super().corrupted(source, corruption, severity), self._unseen["test"]
        return items.select(kept[kept < len(items)]) if self._is_reduced("test") else items

    def variants(self, name: str, items: ItemSet) -> list[tuple[str, Predicted]]:
        """All members' draws, as they are and at the members' temperatures."""
        first = self.members[0]
        logits, fitted = list[Tensor](), list[dict[str, float | Tensor]]()
        for member in self.members:
            own = items if member is first else member.sets.adopt(items)
            logits.append(member.raw("model", own, aside=_aside(first, member)).logits)
            fitted.append(member.temperatures("model", own, logits[-1]))
        self.steps.finish_one()
        found = [(name, Predicted.from_logits(torch.cat(logits), items.labels))]  # [M S, B, C]
        for suffix in fitted[0]:
            heat = [temperatures[suffix] for temperatures in fitted if suffix in temperatures]
            if len(heat) == len(logits):
                pairs = zip(logits, heat, strict=True)
                parts = [Predicted.from_logits(each, None, None, t).prediction.logits for each, t in pairs]
                tempered = Predicted.from_logits(torch.cat(parts), items.labels)
                mean = sum(heat) / len(heat)
                found.append((f"{name}{suffix}", replace(tempered, temperature=mean)))
        return found


def unseen_items(first: RunSets, others: Sequence[RunSets]) -> dict[str, Tensor]:
    """Places of the first run's items that no other member knows, of validation and test.  [k] each

    Validation items are known by training on them, test items also by the validation split, which chose the
    weights.
    """
    known = {digest for other in others for digest in _fingerprints(other.train)}
    validation = _places(first.validation, known)
    known |= {digest for other in others for digest in _fingerprints(other.chose_weights)}
    return {"validation": validation, "test": _places(first.test, known)}


def _fingerprints(items: ItemSet) -> list[bytes]:
    """Of what the items are, whatever the vocabulary that encodes them."""
    if items.words is not None:
        return [" ".join(words).encode() for words in items.words]
    return row_digests(items.stored)


def _places(items: ItemSet, known: set[bytes]) -> Tensor:
    return torch.tensor([digest not in known for digest in _fingerprints(items)]).nonzero()[:, 0]


def add_ensemble(
    members: Sequence[Evaluation], settings: EvaluationSettings, progress: Progress | None = None
) -> dict[str, SuiteResult]:
    """The first run's results with the ensemble's records, written again; those of predictions alone."""
    weights = [member.weights for member in members]
    identity = json.dumps({"members": weights, "known": KNOWN, "fewest": FEWEST})
    # these are no run's own: `fresh` of a member's evaluation did not see them
    if settings.fresh:
        for member in members:
            shutil.rmtree(_aside(members[0], member), ignore_errors=True)
    ensemble: Ensemble | None = None
    changed = {}
    for suite in (name for name in settings.suites if SUITES[name].predictions):
        changed[suite] = before = members[0].suite(suite)
        if before.environment.get(ENSEMBLE) == identity and not settings.fresh:
            continue
        start = time.perf_counter()
        ensemble = Ensemble(members) if ensemble is None else ensemble
        own, found = _without_ensemble(before), ensemble.findings(suite, progress)
        further = tuple(f"{ensemble.label}: {note}" for note in found.notes if note not in own.notes)
        both = Findings.merge([own, replace(found, notes=(*further, *ensemble.notes(suite)))])
        changed[suite] = replace(
            before, records=both.records, curves=both.curves, notes=both.notes,
            environment={**before.environment, ENSEMBLE: identity},
            seconds=before.seconds + time.perf_counter() - start,
        )  # fmt: skip
        write_suite(members[0].run.folder, changed[suite])
    return changed


def _without_ensemble(result: SuiteResult) -> Findings:
    """What the run has by itself, without an ensemble of other members that was evaluated before."""

    def own(name: str) -> bool:
        return name.partition("+")[0] != ENSEMBLE  # with or without temperature

    curves = {
        name: {key: x for key, x in curve.items() if own(key)} if isinstance(curve, Mapping) else curve
        for name, curve in result.curves.items()
    }
    records = tuple(record for record in result.records if own(record.predictor))
    return Findings(records, curves, tuple(note for note in result.notes if not note.startswith(NOTES)))


def _aside(first: Evaluation, member: Evaluation) -> Path:
    """Where a member's predictions of the first run's items are kept that are not its own items."""
    return first.folder / "predictions" / f"of-{member.weights[:12]}"
