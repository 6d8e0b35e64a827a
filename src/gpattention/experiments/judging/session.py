"""One run being evaluated: its predictors and their predictions, each made once."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpattention
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.last_layer import LastLayerPredictor
from gpattention.evaluation.named_predictors import (
    NamedPredictor,
    UnavailablePredictorError,
    build_predictor,
)
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.predicting import predict_items
from gpattention.evaluation.prediction_cache import CacheKey, PredictionCache, RawPrediction
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.evaluation.temperature import fit_temperature, temperature_profile
from gpattention.experiments.judging.corrupted_source import CorruptedSource
from gpattention.experiments.judging.run_sets import RunSets
from gpattention.experiments.runs import Run
from gpattention.gp import NumericalError
from gpattention.models.rows import Inputs

Progress = Callable[[str, int, int], object]  # what is done, how much of it, of how much
CORRUPTED = "corrupted/"
STEP = 1000  # parts of the progress of one prediction of one set
TEMPERATURE, SHIFT_TEMPERATURE = "+temperature", "+shift_temperature"  # after a predictor's name


class Steps:
    """Predictions as one count, for a bar."""

    def __init__(self, report: Progress | None = None, what: str = "", total: int = 0) -> None:
        self._report, self._what, self._total, self._done = report, what, total, 0

    def part(self, done: int, total: int) -> None:
        """Inside of a prediction."""
        self._tell(self._done + min(STEP - 1, STEP * done // max(total, 1)))

    def finish_one(self) -> None:
        """A prediction is there."""
        self._done += STEP
        self._tell(self._done)

    def _tell(self, done: int) -> None:
        if self._report is not None and self._total:
            self._report(self._what, min(done, STEP * self._total), STEP * self._total)


class Session:
    """Predictions of a run's model and of its competitors on the same weights."""

    def __init__(
        self,
        run: Run,
        weights: str,  # SHA-256 of those in `run`
        sets: RunSets,
        names: tuple[str, ...],
        *,
        samples: int,
        seed: int,
        device: torch.device,
        batch_size: int | None = None,
        fresh: bool = False,
        shift_temperature: bool = False,
    ) -> None:
        self.run, self.sets, self.device = run, sets, device
        self.samples, self.seed = samples, seed
        self.model: Any = run.model.to(device)
        self.weights = weights
        described = {"model": type(self.model).__name__, "config": self.model.config.to_dict()}
        self._config = json.dumps(described, sort_keys=True)
        self.cache = PredictionCache(run.folder / "evaluation" / "predictions", fresh=fresh)
        self.steps = Steps()
        self.notes: list[str] = []
        self._batch_size = batch_size
        self._predictors: dict[str, NamedPredictor | None] = {}
        self._kept: dict[tuple[str, str], RawPrediction] = {}
        self._fitted_on: dict[str, ItemSet] = {TEMPERATURE: sets.validation}
        if shift_temperature and sets.shifted is None:
            self.notes.append(f"no temperature under shift: there are no shifts of {sets.kind}")
        elif shift_temperature and sets.shifted is not None:
            self._fitted_on[SHIFT_TEMPERATURE] = sets.shifted()
        self._temperatures: dict[tuple[str, str], float | None] = {}
        self.names = tuple(name for name in names if self._built(name) is not None)

    @property
    def validation(self) -> ItemSet:
        """What thresholds, temperatures and templates come from."""
        return self.sets.validation

    @property
    def test(self) -> ItemSet:
        """What they are judged on."""
        return self.sets.test

    def corrupted(self, source: CorruptedSource, corruption: str, severity: int) -> ItemSet:
        """The test items under a corruption."""
        return self.sets.corrupted_items(source, corruption, severity)

    def raw(self, name: str, items: ItemSet, *, aside: Path | None = None) -> RawPrediction:
        """Logits of a set: kept in memory, in the run's folder, or computed.

        `aside` is the folder to keep predictions in that are not of this run's own items.
        """
        key = self._key(name, items)
        if (name, items.digest) in self._kept:
            self.steps.finish_one()
            return self._kept[name, items.digest]
        cache = self.cache
        found = cache.read(items.name, key)
        if found is None and aside is not None:
            cache = PredictionCache(aside)
            found = cache.read(items.name, key)
        if found is None:
            found = self._predict(name, items)
            cache.write(items.name, key, found)
        self.steps.finish_one()
        found = found.to(self.device)
        if not items.name.startswith(CORRUPTED):  # too many to keep
            self._kept[name, items.digest] = found
        return found

    def predicted(self, name: str, items: ItemSet) -> Predicted:
        """A predictor's prediction as it is."""
        raw = self.raw(name, items)
        return Predicted.from_logits(raw.logits, raw.labels, raw.layer_variance)

    def variants(self, name: str, items: ItemSet) -> list[tuple[str, Predicted]]:
        """The prediction as it is and, where temperatures could be fitted, at these."""
        plain = self.predicted(name, items)
        found = [(name, plain)]
        for suffix, temperature in self.temperatures(name).items():
            found.append((f"{name}{suffix}", plain.tempered(temperature)))
        return found

    def temperatures(self, name: str) -> dict[str, float]:
        """Fitted on validation items and, where asked for, under shift; without those that have no best."""
        fitted = {suffix: self._temperature(name, suffix) for suffix in self._fitted_on}
        return {suffix: value for suffix, value in fitted.items() if value is not None}

    def _temperature(self, name: str, suffix: str) -> float | None:
        if (name, suffix) not in self._temperatures:
            raw = self._unseen(name, self._fitted_on[suffix])
            assert raw.labels is not None
            try:
                fitted = fit_temperature(raw.logits, raw.labels)
                self._temperatures[name, suffix] = fitted
                if fitted == 1:
                    why = temperature_profile(raw.logits, raw.labels).reason
                    self.notes.append(f"{suffix[1:].replace('_', ' ')} of {name}: {why}")
            except NumericalError as error:
                self._temperatures[name, suffix] = None
                self.notes.append(f"no {suffix[1:].replace('_', ' ')} for {name}: {error}")
        return self._temperatures[name, suffix]

    def _unseen(self, name: str, items: ItemSet) -> RawPrediction:
        """A prediction that is not one of those that the bar counts."""
        steps, self.steps = self.steps, Steps()
        try:
            return self.raw(name, items)
        finally:
            self.steps = steps

    def _key(self, name: str, items: ItemSet) -> CacheKey:
        built = self._built(name)
        assert built is not None
        return CacheKey(
            name, built.samples, self.seed, built.draw, self.weights, self._config, items.digest,
            gpattention.__version__, self._fitted_to(built.predictor),
        )  # fmt: skip

    def _fitted_to(self, predictor: Predictor) -> str:
        if not isinstance(predictor, LastLayerPredictor):
            return ""
        return json.dumps({"items": self.sets.train.digest, **predictor.options}, sort_keys=True)

    def _predict(self, name: str, items: ItemSet) -> RawPrediction:
        built = self._built(name)
        assert built is not None
        predictor = built.predictor
        if isinstance(predictor, ModelPredictor) and items.name.startswith(CORRUPTED):
            predictor = replace(predictor, variances=False)  # no score asks for them there
        return predict_items(
            predictor,
            items,
            samples=built.samples,
            seed=self.seed,
            device=self.device,
            batch_size=self._batch_size,
            progress=self.steps.part,
        )

    def _built(self, name: str) -> NamedPredictor | None:
        """Made once; None, with a note, where the model cannot have it."""
        if name not in self._predictors:
            try:
                built = build_predictor(name, self.model, self.samples, self._training)
            except (UnavailablePredictorError, NumericalError) as error:
                self.notes.append(str(error))
                self._predictors[name] = None
            else:
                self._predictors[name] = built
        return self._predictors[name]

    def _training(self) -> tuple[Inputs, Tensor]:
        train = self.sets.train
        assert train.labels is not None
        return train.inputs(0, len(train), self.device), train.labels
