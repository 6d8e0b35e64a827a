"""The predictors an evaluation knows by name: a run's model, and its competitors on the same weights.

A new one is one line of `PREDICTORS` with the function that makes it.
"""

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

TrainingItems = Callable[[], tuple[Inputs, Tensor]]  # model inputs and labels, brought when needed
FITTED = {"temperature": "temperature fitted", "shift_temperature": "temperature fitted under shift"}


class UnavailablePredictorError(ValueError):
    """A predictor that this model cannot have; the message says why."""


@dataclass(frozen=True)
class NamedPredictor:
    """A predictor, and what its draws are."""

    name: str
    predictor: Predictor
    samples: int  # 0: it does not draw
    draw: str  # what is drawn: none, independent (attention outputs), dropout, both of them, weights


@dataclass(frozen=True)
class PredictorKind:
    """One kind of predictor."""

    label: str  # as a reader knows it
    # of the name, a model, the number of draws and the training items; None: of several runs together
    build: Callable[[str, Any, int, TrainingItems | None], NamedPredictor] | None
    usual: bool = False  # whether it is judged unless others are asked for


def build_predictor(
    name: str, model: Any, samples: int, training: TrainingItems | None = None
) -> NamedPredictor:
    """`model` draws its attention outputs where it can; `mean` never; the rest are competitors.

    `mc_dropout` draws masks without attention outputs, `dropout_draws` both at once.

    `laplace` and `gp_layer` are fitted on the training items at once, without random choices but those of
    their fixed seed.
    """
    check_choice("predictor", name, PREDICTOR_NAMES)
    build = PREDICTORS[name].build
    assert build is not None
    return build(name, model, samples, training)


def predictor_name(predictor: str) -> str:
    """Whose prediction, and whether and where its temperature was fitted."""
    base, _, fitted = predictor.partition("+")
    label = PREDICTORS[base].label if base in PREDICTORS else base.replace("_", " ")
    return f"{label}, {FITTED[fitted]}" if fitted in FITTED else label


def predictor_order(predictor: str) -> tuple[int, str, bool, bool]:
    """To sort by: as in `PREDICTORS`, each before its temperatures."""
    base, _, fitted = predictor.partition("+")
    place = list(PREDICTORS).index(base) if base in PREDICTORS else len(PREDICTORS)
    return (place, base, bool(fitted), fitted != "temperature")


def _model(name: str, model: Any, samples: int, training: TrainingItems | None) -> NamedPredictor:
    drawing = model.draws and samples > 0
    predictor = ModelPredictor(model, variances=model.draws)
    return NamedPredictor(name, predictor, samples if drawing else 0, "independent" if drawing else "none")


def _mean(name: str, model: Any, samples: int, training: TrainingItems | None) -> NamedPredictor:
    if not model.draws:
        raise UnavailablePredictorError("mean is left out: the model does not draw and is its own mean")
    return NamedPredictor(name, ModelPredictor(model, draw="none", variances=True), 0, "none")


def _with_masks(name: str, model: Any, samples: int, training: TrainingItems | None) -> NamedPredictor:
    _check_drawing(name, samples)
    both = name == "dropout_draws"
    if both and not model.draws:
        raise UnavailablePredictorError(f"{name} is left out: the model does not draw, see mc_dropout")
    try:
        predictor = MCDropout(model, draw="independent" if both else "none")
    except ValueError as error:
        raise UnavailablePredictorError(f"{name} is left out: {error}") from error
    return NamedPredictor(name, predictor, samples, "dropout+independent" if both else "dropout")


def _last_layer(name: str, model: Any, samples: int, training: TrainingItems | None) -> NamedPredictor:
    _check_drawing(name, samples)
    if training is None:
        raise UnavailablePredictorError(f"{name} is left out: it needs the training items")
    inputs, labels = training()
    last = LaplaceLastLayer(model, hessian="kron") if name == "laplace" else GPLastLayer(model)
    return NamedPredictor(name, last.fit(inputs, labels), samples, "weights")


def _check_drawing(name: str, samples: int) -> None:
    if samples == 0:
        raise UnavailablePredictorError(f"{name} is left out: it draws, and 0 samples were asked for")


PREDICTORS = {  # in the order of tables
    "model": PredictorKind("own prediction", _model, usual=True),
    "mean": PredictorKind("mean, without draws", _mean, usual=True),
    "mc_dropout": PredictorKind("MC dropout", _with_masks, usual=True),
    "dropout_draws": PredictorKind("draws and MC dropout", _with_masks),
    "laplace": PredictorKind("last-layer Laplace", _last_layer),  # these two see the training data again
    "gp_layer": PredictorKind("GP last layer", _last_layer),
    "ensemble": PredictorKind("ensemble", None),
}
PREDICTOR_NAMES = tuple(name for name, kind in PREDICTORS.items() if kind.build is not None)
DEFAULT_PREDICTORS = tuple(name for name, kind in PREDICTORS.items() if kind.usual)
LAST_LAYERS = tuple(name for name, kind in PREDICTORS.items() if kind.build is _last_layer)
