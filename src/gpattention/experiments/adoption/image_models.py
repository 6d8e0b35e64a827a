"""The models of a run on images: the host, the host tuned on, and converted kinds tuned on."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gpattention.adopt.convert import convert
from gpattention.data.places import StrPath
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.predicting import predict_items
from gpattention.evaluation.predictor import Predictor
from gpattention.evaluation.temperature import fit_temperature
from gpattention.experiments.adoption.earlier import DATA
from gpattention.experiments.adoption.finetuning import Finetuning
from gpattention.experiments.adoption.image_tuning import tune_on
from gpattention.experiments.adoption.kept_weights import KeptWeights
from gpattention.experiments.adoption.predictors import ConvertedPredictor
from gpattention.experiments.adoption.trained import OPTIONS
from gpattention.experiments.adoption.trainings import HOST, Further, Training
from gpattention.experiments.inputs.preparation import prepare
from gpattention.experiments.judging.run_sets import RunSets
from gpattention.experiments.runs import Run
from gpattention.gp import NumericalError
from gpattention.metrics import nll
from gpattention.models import Transformer
from gpattention.training import TrainingData

PRIOR_SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of which one is chosen
CHOOSE_BY = 500  # validation images
EXAMPLE = 64  # training images at whose tokens inducing inputs start


@dataclass(frozen=True)
class ImageModels:
    """Those of one run.

    Args:
        run: its weights are the host's.
        weights: SHA-256 of these, whatever the file holds by now.
        sets: brings its images.
        root: folder of the datasets.
        further: how the host is tuned on.
        samples: draws by which a prior scale is chosen.
        seed: of these draws.
        device: where all of it happens.
        folder: where weights are kept, in the run's folder.
        progress: is told how many steps of how many are done.
        fresh: whether kept weights do not count.
    """

    run: Run
    weights: str
    sets: Callable[[], RunSets]
    root: StrPath | None
    further: Further
    samples: int
    seed: int
    device: torch.device
    folder: str
    progress: Callable[[int, int], object]
    fresh: bool = False

    def trained(self, training: Training) -> tuple[Transformer, dict[str, Any]]:
        """The model of a training, in evaluation mode, and what is to be told of it."""
        model = deepcopy(self.run.model).to(self.device).eval()
        if training == HOST:
            return model, {}
        kept, settings = KeptWeights(self.run.folder / self.folder), self._all_settings(training)
        told = None if self.fresh else kept.record(training.name, settings)
        if told is not None:
            if training.kind is not None:
                self._convert(model, training.kind, 1.0)
            model.load_state_dict(kept.tensors(training.name))
            return model.eval(), told
        start: dict[str, Any] = {}
        if training.kind is not None:
            model, start = self._converted(training.kind)
        epochs = tune_on(
            model, self.run.recipe, self._data, self.sets().chose_weights, self._schedule,
            device=self.device, progress=self.progress,
        )  # fmt: skip
        told = {**start, "epochs": epochs}
        kept.write(training.name, settings, model, told)
        return model, told

    def settings(self, training: Training) -> dict[str, Any]:
        """How a training goes on from the host; nothing for the host itself."""
        found = self.further.described(training)
        if found:
            found["further"]["batch_size"] = self._schedule.batch_size
        return found

    def data(self, training: Training) -> dict[str, str]:
        """What the items hold that it is tuned on and chosen by, whatever the limit of those judged."""
        if training == HOST:
            return {}
        sets = self.sets()
        return {"train": sets.train.digest, "chosen_on": sets.chose_weights.digest}

    def _all_settings(self, training: Training) -> dict[str, Any]:
        """Everything that its weights depend on."""
        host = {"host": self.weights, DATA: self.data(training)}
        chosen = training.kind is not None and self.further.prior_scale is None
        draws = {"samples": self.samples, "seed": self.seed} if chosen else {}
        return {**self.settings(training), **host, **draws}

    @property
    def _schedule(self) -> Finetuning:
        """As sentences are fine-tuned further, in batches of the run."""
        return self.further.after(Finetuning(batch_size=self.run.recipe.optimizer.batch_size))

    @cached_property
    def _data(self) -> TrainingData:
        return prepare(self.run.recipe, self.root).training

    def _converted(self, kind: str) -> tuple[Transformer, dict[str, Any]]:
        """At the prior scale wanted, or at the one whose draws are best before any tuning."""
        given = self.further.prior_scale
        scales = PRIOR_SCALES if given is None else (given,)
        models = {
            scale: self._convert(deepcopy(self.run.model).to(self.device).eval(), kind, scale)
            for scale in scales
        }
        if given is not None:
            return models[given], {"prior_scale": given}
        found = {scale: self._drawn_nll(ConvertedPredictor(model)) for scale, model in models.items()}
        best = min(found, key=lambda scale: found[scale])
        return models[best], {"prior_scale": best, "nll_before": {str(s): x for s, x in found.items()}}

    def _convert(self, model: Transformer, kind: str, scale: float) -> Transformer:
        options: dict[str, Any] = {"prior_scale": scale, **OPTIONS.get(kind, {})}
        if kind == "scgp":
            options["example"] = self.sets().train.inputs(0, EXAMPLE, self.device)
        return convert(model, kind, seed=self.run.recipe.seed, **options)

    def _drawn_nll(self, predictor: Predictor) -> float:
        """Of the draws at their best temperature."""
        some = self.sets().chose_weights.first(CHOOSE_BY)
        raw = predict_items(predictor, some, samples=self.samples, seed=self.seed, device=self.device)
        assert raw.labels is not None
        try:
            heat = fit_temperature(raw.logits, raw.labels)
        except NumericalError as error:
            error.add_note("no prior scale can be chosen by these draws: name it (--further-prior-scale)")
            raise
        told = Predicted.from_logits(raw.logits, raw.labels, temperature=heat)
        return nll(told.prediction.probs, told.known_labels)
