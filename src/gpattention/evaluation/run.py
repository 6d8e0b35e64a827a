"""The evaluation of runs: each set is predicted once for all suites; results go to the folder of the run.

Finished results with the same settings are read, not computed again, and an interrupted evaluation continues
at the set where it stopped.  An evaluation uses the weights that it has read, even if the trainer writes
others meanwhile.
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
READINGS = 5  # attempts to read weights that are replaced meanwhile; a trainer does it once an epoch
HEATS = ("shift_temperature", "adaptive_temperature")  # settings; after a plus, part of predictors' names
TEMPERATURE, SHIFT_TEMPERATURE = "+temperature", "+shift_temperature"
ADAPTIVE_TEMPERATURE = "+adaptive_temperature"
REDUCING = ("limit", "types", "severities")  # recorded settings that leave out items; None means all


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation.

    Args:
        suites: of clean, corrupted, ood, selective, oversmoothing, efficiency; "all" for all of these; or
            criterion, by which plans choose.
        predictors: of model, mean, moments, mc_dropout, dropout_draws, laplace, gp_layer; each is also
            evaluated with a fitted temperature.
        samples: draws of a prediction.
        seed: of the draws.
        batch_size: items times draws that run at once; 256 on a CPU and 2000 on a GPU if not given.
        limit: most items of each set, spread evenly over sets of other kinds (see `run_sets`); results say
            that they are reduced.
        corrupted_limit: most items of each corrupted set, the first ones; other sets stay whole.
        corruptions: types of corruptions; all if not given.
        severities: of corruptions, 1 to 5; all if not given.
        held_corruptions: corruptions that the suite ood adds, at severity 5, as sets of other kinds; none if
            not given.
        shift_temperature: whether to add each predictor with a temperature fitted under shifts
            (`gpattention.data.shifts`, or `gpattention.data.TEXT_SHIFTS` for texts).
        adaptive_temperature: whether to add each predictor with a temperature that grows with the
            strangeness of an item, fitted under the same shifts (`AdaptiveTemperature`).
        fresh: whether to compute everything anew, even if it is finished or damaged.
        device: auto, cpu, cuda, ...
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.

    Raises:
        ValueError: an unknown name, or a number out of its range.
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
    """Evaluate one run; each finished suite is written to RUN/evaluation/SUITE.json.

    >>> evaluate_run("runs/cgp", EvaluationSettings(suites=["clean", "ood"], samples=20))

    Args:
        folder: of the run.
        settings: of the evaluation; all suites and usual predictors if not given.
        progress: called with the name of the current work, the amount done and the total.

    Returns:
        The results by suite.

    Raises:
        ValueError: figures of more items would be replaced by figures of fewer, a file is damaged, or the
            data are not those that the run was trained on.
        FileNotFoundError: there is no run.
    """
    evaluation = Evaluation(folder, settings or EvaluationSettings())
    return {name: evaluation.suite(name, progress) for name in evaluation.settings.suites}


def evaluate_runs(
    folders: Sequence[StrPath],
    settings: EvaluationSettings | None = None,
    *,
    progress: Progress | None = None,
) -> dict[Path, dict[str, SuiteResult]]:
    """Evaluate each run, and the ensembles of runs that differ only in their seed.

    The records of an ensemble are part of the results of its first run, with the predictor "ensemble".

    Args:
        folders: of the runs.
        settings: of the evaluation; all suites and usual predictors if not given.
        progress: called with the names of run and suite, the amount done and the total.

    Returns:
        The results by folder and suite.

    Raises:
        ValueError: as in `evaluate_run`.
        FileNotFoundError: likewise.
    """
    settings = settings or EvaluationSettings()
    # all folders are opened first, so that a wrong one costs no work
    runs = [RunData(str(folder), open_run(folder).recipe.to_dict()) for folder in folders]

    def named(name: str) -> Progress | None:
        if progress is None:
            return None
        return lambda what, done, total: progress(f"{name} {what}", done, total)

    found: dict[Path, dict[str, SuiteResult]] = {}
    for folder in map(Path, folders):
        found[folder] = evaluate_run(folder, settings, progress=named(folder.name))
    for same in group(runs) if len(runs) > 1 else ():
        seeds = {run.seed: Path(run.name) for run in same.runs}  # by rising seed; the last of equal ones
        if len(seeds) > 1:
            members = [Evaluation(folder, replace(settings, fresh=False)) for folder in seeds.values()]
            first, count = next(iter(seeds.values())), named(f"{ENSEMBLE} of {len(seeds)}")
            found[first] |= add_ensemble(members, settings, progress=count)
    return found


# Parts of an evaluation, for processes that share the work


def open_corruptions(folder: StrPath, settings: EvaluationSettings) -> None:
    """Make the corrupted images of a run's test set that all runs share, if they are missing.

    Args:
        folder: of the run.
        settings: of the evaluation.
    """
    evaluation = Evaluation(folder, replace(settings, suites=(PREFIX,)))
    if evaluation.sets.corruptions is not None and not evaluation.is_finished(PREFIX):
        evaluation.sets.corruptions.open(evaluation.device)


def predict_corruption(folder: StrPath, settings: EvaluationSettings, corruption: str) -> None:
    """Predict the test items of a run under one corruption, at all severities, for the cache in its folder.

    Args:
        folder: of the run.
        settings: of the evaluation.
        corruption: its type; nothing is done if the data do not have it.
    """
    evaluation = Evaluation(folder, replace(settings, suites=(PREFIX,)))
    if evaluation.sets.corruptions is None or evaluation.is_finished(PREFIX):
        return
    source = evaluation.sets.corruptions.open(evaluation.device)
    for severity in source.severities if corruption in source.types else ():
        items = evaluation.corrupted(source, corruption, severity)
        for name in evaluation.names:
            evaluation.raw(name, items)


# The weights of an evaluation


def open_with_digest(folder: StrPath) -> tuple[Run, str]:
    """Open a run whose trainer may replace the weights at the same time.

    Args:
        folder: of the run.

    Returns:
        The run and the SHA-256 of its weights, whose file was the same before and after reading.

    Raises:
        RuntimeError: the weights were replaced during every attempt.
    """
    for _ in range(READINGS):
        before = digest_of_weights(folder)
        run = open_run(folder)  # raises if something is missing
        after = digest_of_weights(folder)
        if after is not None and after == before:
            return run, after
    raise RuntimeError(
        f"expected the weights of {folder} to stay while they are read, got others in each of {READINGS} "
        "readings: is something writing them all the time?"
    )


# Earlier evaluations of the same weights, whose figures must not get lost


def check_as_much(
    asked: Mapping[str, Any], earlier: Mapping[str, Any], path: Path, again: str = "evaluate"
) -> None:
    """Refuse settings with fewer items than the figures in a file were computed with.

    Args:
        asked: settings of a new evaluation.
        earlier: settings of the figures in the file.
        path: of the file.
        again: the command to run instead, for the error.

    Raises:
        ValueError: figures of more items would be replaced by figures of fewer.
    """
    for name in REDUCING:
        new, old = asked.get(name), earlier.get(name)
        if new is not None and (old is None or (new < old if isinstance(new, int) else {*old} - {*new})):
            now, had = (
                "all" if x is None else x if isinstance(x, int) else ",".join(map(str, x)) for x in (new, old)
            )
            raise ValueError(
                f"{path} has figures of the same weights with more items ({name}: {had}), which {name} {now} "
                f"would replace: {again} as it was, or with --fresh (fresh=True) to replace them"
            )


def made_once(method: M) -> M:
    """Cache the results of a method for each combination of arguments, as long as its object lives."""

    # functools.cache would keep the models of all runs alive as long as the process
    @wraps(method)
    def kept(self: Any, *arguments: Any) -> Any:
        made, key = vars(self).setdefault("_made", {}), (method.__name__, *arguments)
        if key not in made:
            made[key] = method(self, *arguments)
        return made[key]

    return cast(M, kept)


class Evaluation(Subject):
    """The evaluation of one run: its data, predictors and predictions, each made once.

    Args:
        folder: of the run.
        settings: predictors of an earlier evaluation are added to them, and evaluated from its predictions.

    Raises:
        ValueError: figures of more items would be replaced by figures of fewer.
    """

    def __init__(self, folder: StrPath, settings: EvaluationSettings) -> None:
        super().__init__()
        self.run: Run
        self.weights: str  # SHA-256 of the weights in `run`, even if the file has others by now
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
        """The settings, extended so that no finished figure is lost."""
        predictors = dict.fromkeys(asked.predictors)
        heats = {name: getattr(asked, name) for name in HEATS}
        # the file of a suite is replaced as a whole, without predictors that are not evaluated again
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
        """The results of a suite: read if it is finished, else computed and written."""
        if not self.is_finished(name):
            self._earlier[name] = self._compute(name, self._identity(name), progress)
        return self._earlier[name]

    def is_finished(self, name: str) -> bool:
        """Whether there are results of the suite with these settings."""
        found = self._earlier.get(name)
        return found is not None and recorded_settings(found) == json.loads(self._identity(name))

    def _compute(self, name: str, identity: str, progress: Progress | None) -> SuiteResult:
        start, suite = time.perf_counter(), SUITES[name]
        self.progress = progress
        found = suite.evaluate(self)
        self.steps = Steps()  # later predictions do not belong to the progress bar
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
        """Everything that the numbers of a suite depend on, as JSON."""
        s, suite, epoch = self.settings, SUITES[name], self.run.unfinished_epoch
        found: dict[str, Any] = {
            "gpattention": gpattention.__version__, "model": self.weights, "limit": _limit_of(name, s),
            "samples": s.samples,
        }  # fmt: skip
        if epoch is not None:  # named in a note, which changes even if the best weights stay the same
            found["epoch"] = epoch
        if suite.predictions:
            found |= {"seed": s.seed, "predictors": list(s.predictors)}
            found |= {heat: True for heat in HEATS if getattr(s, heat)}
            if self.sets.kind == "texts" and any(heat in found for heat in HEATS):
                found["shifts"] = list(TEXT_SHIFTS)  # older results were fitted without them
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
        """Weight and bias of the linear head; None if the model has another head."""
        found = getattr(self._model, "head", None)
        if not isinstance(found, nn.Linear) or found.bias is None:
            return None
        return found.weight.detach(), found.bias.detach()

    @made_once
    def _built(self, name: str) -> NamedPredictor | None:
        """The predictor of that name; None, with a note, if this model cannot have it."""
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
        """Of the predictors that this model can have."""
        return tuple(name for name in self.settings.predictors if self._built(name) is not None)

    @cached_property
    def _config(self) -> str:
        described = {"model": type(self._model).__name__, "config": self._model.config.to_dict()}
        return json.dumps(described, sort_keys=True)

    @property
    def heats(self) -> tuple[str, ...]:  # type: ignore[override]
        """The usual kind of temperature and those of the settings."""
        return (TEMPERATURE[1:], *(heat for heat in HEATS if getattr(self.settings, heat)))

    def logits(self, name: str, items: ItemSet) -> Tensor:
        """Draws of a predictor without temperature.  [S, B, C]"""
        return self._labelled(name, items)[0]

    def raw(self, name: str, items: ItemSet, *, aside: Path | None = None) -> RawPrediction:
        """Logits of a set, from memory, from the folder of the run, or computed.

        `aside` is the folder for predictions of items that are not this run's own.
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
        # predictions of a last layer depend on the items it was fitted to, which the weights do not show
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
            predictor = replace(predictor, variances=False)  # no score needs them there
        return predict_items(
            predictor, items, samples=built.samples, seed=self.settings.seed, device=self.device,
            batch_size=self.settings.batch_size, progress=self.steps.part,
        )  # fmt: skip

    def variants(self, name: str, items: ItemSet) -> list[tuple[str, Predicted]]:
        """The prediction, unchanged and at each temperature that could be fitted."""
        raw = self.raw(name, items)
        plain = Predicted.from_logits(raw.logits, raw.labels, raw.layer_variance)
        heats = self.temperatures(name, items, raw.logits)
        return [(name, plain), *((f"{name}{suffix}", plain.tempered(heat)) for suffix, heat in heats.items())]

    def signals(self, items: ItemSet) -> Signals:
        """Signals of the model itself, the same for all predictors."""
        if items.digest in self._signals:
            return self._signals[items.digest]
        chunks = (inputs for _, inputs in items.chunks(CHUNK, self.device))
        found = Signals.cat([self._model.signals(inputs).to("cpu") for inputs in chunks])
        if not items.name.startswith(f"{PREFIX}/"):
            self._signals[items.digest] = found
        return found

    @cached_property
    def _fitted_on(self) -> dict[str, ItemSet]:
        """The items to which temperatures are fitted: validation items and, if asked for, shifted ones."""
        found = {TEMPERATURE: self.sets.validation}
        if self.settings.shift_temperature and self._shifted is not None:
            found[SHIFT_TEMPERATURE] = self._shifted
        return found

    @cached_property
    def _shifted(self) -> ItemSet | None:
        """Validation items under shifts; None, with a note, if they cannot be shifted."""
        try:
            found = shifted_items(self.sets.validation, self.sets.encoder)
        except ValueError as error:
            self.notes.append(f"no temperature under shift: {error}")
            return None
        idle = idle_shifts(found, self.sets.validation) if self.sets.kind == "texts" else ()
        self.notes += [f"temperatures under shift: {name} changes no input of the model" for name in idle]
        return found

    def temperatures(self, name: str, items: ItemSet, logits: Tensor) -> dict[str, float | Tensor]:
        """Temperatures of items by the suffix of the predictor's name, as far as they could be fitted."""
        fitted = {suffix: self._temperature(name, suffix) for suffix in self._fitted_on}
        found: dict[str, float | Tensor] = {k: value for k, value in fitted.items() if value is not None}
        adaptive = self._adaptive_temperature(name) if self.settings.adaptive_temperature else None
        if adaptive is not None:
            found[ADAPTIVE_TEMPERATURE] = adaptive.temperature(logits, self.signals(items))
        return found

    @made_once
    def _adaptive_temperature(self, name: str) -> AdaptiveTemperature | None:
        """None, with a note, if none can be fitted."""
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
        """None, with a note, if no temperature is best."""
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
        """Logits and labels of a prediction that the progress bar does not count."""
        steps, self.steps = self.steps, Steps()
        raw = self.raw(name, items)
        self.steps = steps
        assert raw.labels is not None
        return raw.logits, raw.labels


def _limit_of(suite: str, settings: EvaluationSettings) -> int | None:
    """The most items of every set of a suite."""
    limits = [settings.limit, settings.corrupted_limit if suite == PREFIX else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _environment(device: torch.device) -> dict[str, str]:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}"
    return {
        "gpattention": gpattention.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "device": where, "threads": str(torch.get_num_threads()),
    }  # fmt: skip


# Ensembles of runs that differ only in their seed.  Runs of different seeds may have different splits: a test
# item of one may have been used by another for training, for the choice of its weights or for its
# temperature.  An ensemble is therefore evaluated on items of the first run that no other member has used.

ENSEMBLE = "ensemble"
FEWEST = 20  # validation items needed for thresholds and templates; conformal sets of 95 % need 19
KNOWN = {"test": "trained or validated on", "validation": "trained on"}  # by other members: `unseen_items`
COUNTS = {"test": UNSEEN, "validation": "unseen_validation_items"}  # keys in details of records
NOTES = (f"{ENSEMBLE} of ", f"no {ENSEMBLE}", f"no conformal sets of {ENSEMBLE}")  # beginnings of its notes


class Ensemble(Subject):
    """The models of several evaluations, mixed with equal weights.

    Each member has its own temperature, fitted to its own validation items.
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
        """The unseen validation items of the first run; None if they are too few."""
        enough = self._left["validation"] >= min(FEWEST, self._all["validation"])
        return self.sets.validation.select(self._unseen["validation"]) if enough else None

    @cached_property
    def test(self) -> ItemSet | None:
        """The unseen test items of the first run; None if there are none."""
        return self.sets.test.select(self._unseen["test"]) if self._left["test"] else None

    def findings(self, suite: str, progress: Progress | None) -> Findings:
        """Of a suite, with the number of unseen items in records of sets that are not complete."""
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
        """Notes about the items of a suite."""
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
        """The number of unseen items in the set of a record, if some are left out."""
        part = "validation" if set == "validation" else "test"
        whole = suite == "clean" and set not in ("validation", "test")  # sentences out of domain, all unseen
        return {} if whole or not self._is_reduced(part) else {COUNTS[part]: self._left[part]}

    def _is_reduced(self, part: str) -> bool:
        return self._left[part] < self._all[part]

    def corrupted(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        items, kept = super().corrupted(source, corruption, severity), self._unseen["test"]
        return items.select(kept[kept < len(items)]) if self._is_reduced("test") else items

    def variants(self, name: str, items: ItemSet) -> list[tuple[str, Predicted]]:
        """The draws of all members, unchanged and at the temperatures of the members."""
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
    """Places of the validation and test items of the first run that no other member has used.  [k] each

    Validation items are used by training on them, and test items also by the validation split, which chooses
    the weights.
    """
    known = {digest for other in others for digest in _fingerprints(other.train)}
    validation = _places(first.validation, known)
    known |= {digest for other in others for digest in _fingerprints(other.chose_weights)}
    return {"validation": validation, "test": _places(first.test, known)}


def _fingerprints(items: ItemSet) -> list[bytes]:
    """Of the items themselves, which may be encoded by different vocabularies."""
    if items.words is not None:
        return [" ".join(words).encode() for words in items.words]
    return row_digests(items.stored)


def _places(items: ItemSet, known: set[bytes]) -> Tensor:
    return torch.tensor([digest not in known for digest in _fingerprints(items)]).nonzero()[:, 0]


def add_ensemble(
    members: Sequence[Evaluation], settings: EvaluationSettings, progress: Progress | None = None
) -> dict[str, SuiteResult]:
    """Add the records of the ensemble to the results of the first run, for suites of predictions."""
    weights = [member.weights for member in members]
    identity = json.dumps({"members": weights, "known": KNOWN, "fewest": FEWEST})
    # these belong to no run, so that a member's evaluation with `fresh` has left them
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
    """The findings of the run itself, without those of an earlier ensemble."""

    def own(name: str) -> bool:
        return name.partition("+")[0] != ENSEMBLE  # the name may end in a temperature

    curves = {
        name: {key: x for key, x in curve.items() if own(key)} if isinstance(curve, Mapping) else curve
        for name, curve in result.curves.items()
    }
    records = tuple(record for record in result.records if own(record.predictor))
    return Findings(records, curves, tuple(note for note in result.notes if not note.startswith(NOTES)))


def _aside(first: Evaluation, member: Evaluation) -> Path:
    """The folder for a member's predictions of items that only the first run has."""
    return first.folder / "predictions" / f"of-{member.weights[:12]}"
