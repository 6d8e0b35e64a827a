"""The predictors an evaluation knows by name: a run's model, and its competitors on the same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpattention.evaluation.gp_layer import GPLastLayer
from gpattention.evaluation.laplace import LaplaceLastLayer
from gpattention.evaluation.mc_dropout import MCDropout
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.metrics.checks import check_choice
from gpattention.models.rows import Inputs

PREDICTORS = ("model", "mean", "mc_dropout", "dropout_draws", "laplace", "gp_layer")
LAST_LAYERS = ("laplace", "gp_layer")  # fitted to the training items
DEFAULT_PREDICTORS = ("model", "mean", "mc_dropout")  # laplace and gp_layer see the training data again

TrainingItems = Callable[[], tuple[Inputs, Tensor]]  # model inputs and labels, brought when needed


class UnavailablePredictorError(ValueError):
    """A predictor that this model cannot have; the message says why."""


@dataclass(frozen=True)
class NamedPredictor:
    """A predictor, and what its draws are."""

    name: str
    predictor: Predictor
    samples: int  # 0: it does not draw
    draw: str  # what is drawn: none, independent (attention outputs), dropout, both of them, weights


def build_predictor(
    name: str, model: Any, samples: int, training: TrainingItems | None = None
) -> NamedPredictor:
    """`model` draws its attention outputs where it can; `mean` never; the rest are competitors.

    `mc_dropout` draws masks without attention outputs, `dropout_draws` both at once.

    `laplace` and `gp_layer` are fitted on the training items at once, without random choices but those of
    their fixed seed.
    """
    check_choice("predictor", name, PREDICTORS)
    if name == "model":
        drawing = model.draws and samples > 0
        predictor = ModelPredictor(model, variances=model.draws)
        return NamedPredictor(
            name, predictor, samples if drawing else 0, "independent" if drawing else "none"
        )
    if name == "mean":
        if not model.draws:
            raise UnavailablePredictorError("mean is left out: the model does not draw and is its own mean")
        return NamedPredictor(name, ModelPredictor(model, draw="none", variances=True), 0, "none")
    if samples == 0:
        raise UnavailablePredictorError(f"{name} is left out: it draws, and 0 samples were asked for")
    if name in ("mc_dropout", "dropout_draws"):
        return _with_masks(name, model, samples)
    if training is None:
        raise UnavailablePredictorError(f"{name} is left out: it needs the training items")
    inputs, labels = training()
    last = LaplaceLastLayer(model, hessian="kron") if name == "laplace" else GPLastLayer(model)
    return NamedPredictor(name, last.fit(inputs, labels), samples, "weights")


def _with_masks(name: str, model: Any, samples: int) -> NamedPredictor:
    both = name == "dropout_draws"
    if both and not model.draws:
        raise UnavailablePredictorError(f"{name} is left out: the model does not draw, see mc_dropout")
    try:
        predictor = MCDropout(model, draw="independent" if both else "none")
    except ValueError as error:
        raise UnavailablePredictorError(f"{name} is left out: {error}") from error
    return NamedPredictor(name, predictor, samples, "dropout+independent" if both else "dropout")
