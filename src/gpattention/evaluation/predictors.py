"""Predictors: a model itself, its competitors with the same weights, and the registry of all predictors.

To add a predictor to evaluations, write a class with `predict` and one line in `PREDICTORS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpattention.attention import DRAWS, Draw
from gpattention.checks import check_choice, check_fraction, check_labels
from gpattention.evaluation.last_layers import GPLastLayer, LaplaceLastLayer
from gpattention.evaluation.predictions import BasePredictor, Predictor, Request, check_predictor, not_fitted
from gpattention.gp import NumericalError
from gpattention.models import Prediction, Transformer, predict
from gpattention.models.dropout import Dropout, calls_of_items, find_dropouts, hooked, item_masks
from gpattention.models.predict import Average, Classifier, Inputs, Progress, Rows, evaluating, predict_rows
from gpattention.models.prediction import TemperatureProfile, check_logits, profile_temperature


@dataclass(frozen=True)
class ModelPredictor(BasePredictor):
    """A model as a predictor, which draws its attention outputs if it can.

    >>> ModelPredictor(model).predict(images, samples=10).confidence

    Args:
        model: a classifier, which may be able to draw.
        draw: independent, joint or none.
        variances: whether predictions have the variances of the layers.
        average: what is averaged over the draws, probabilities or logits.
    """

    model: Classifier
    draw: Draw = "independent"
    variances: bool = False
    average: Average = "probabilities"

    def _predict(self, inputs: Inputs, request: Request) -> Prediction:
        options = {"draw": self.draw, "variances": self.variances, "average": self.average}
        return predict(self.model, inputs, **options, **vars(request))  # type: ignore[arg-type]


@dataclass(frozen=True)
class MomentsPredictor(BasePredictor):
    """One pass of one of our transformers instead of draws: see `gpattention.models.moments`.

    Args:
        model: a transformer whose layers have posteriors.
    """

    model: Transformer

    def _predict(self, inputs: Inputs, request: Request) -> Prediction:
        rows, progress = request.batch_size, request.progress
        return self.model.predict(inputs, method="moments", batch_size=rows, progress=progress)


class MCDropout(BasePredictor):
    """MC dropout (Gal and Ghahramani 2016): dropout stays on at prediction, and every mask is a draw.

    Every dropout module with a rate above 0 is active, at its own rate or at `p` if given; the rest of the
    model is in evaluation mode.  Each item has its own masks, so that `batch_size` changes nothing.  Two
    kinds of dropout stay off: dropout that is not a module (`F.dropout`, the attention dropout of
    `nn.MultiheadAttention`), and calls on tensors that all items share, such as SGPA's inducing inputs.
    `samples=0` is the prediction without dropout.

    Args:
        model: has dropout modules; it is not changed.
        p: the rate of all of them, instead of their own.
        draw: whether layers that can draw their attention outputs do so too.

    Raises:
        ValueError: a rate outside (0, 1], an unknown draw, or a model without dropout.
    """

    def __init__(self, model: Classifier, *, p: float | None = None, draw: Draw = "none") -> None:
        if p is not None:
            check_fraction("p", p, one=True)
        check_choice("draw", draw, DRAWS)
        self._model, self._p, self._draw = model, p, draw
        self._dropouts()  # refuses a model without dropout

    def _predict(self, inputs: Inputs, request: Request) -> Prediction:
        model = self._model
        if request.samples == 0:
            return predict(model, inputs, **vars(request))
        dropouts = self._dropouts()
        drawing: Draw = self._draw if model.draws else "none"

        def forward(rows: Rows) -> Tensor:
            with hooked(model, dropouts, item_masks(rows.noise, own)):
                generator = None if drawing == "none" else rows.noise
                return model(rows.inputs, draw=drawing, generator=generator, need=("logits",)).logits

        with evaluating(model):
            plain = partial(model, draw="none", generator=None, need=("logits",))
            # found in a pass without draws, as a parameter may have as many rows as a batch has items
            own = calls_of_items(model, plain, dropouts, inputs)
            logits = predict_rows(model, forward, inputs, **vars(request))  # [S, B, C]
        return Prediction.from_logits(logits, drawn=True)

    def _dropouts(self) -> dict[str, Dropout]:
        """The dropout modules, found anew for every prediction, as rates may change."""
        found = find_dropouts(self._model, self._p)
        if not found:
            got = f"none in {type(self._model).__name__}: MC dropout would draw nothing"
            raise ValueError(f"expected a model with dropout modules of p > 0, got {got}")
        return found


class DeepEnsemble(BasePredictor):
    """Deep ensembles (Lakshminarayanan et al. 2017): predictors of the same kind, with equal weights.

    The logits of the members are stacked along the sample axis.  M members that do not draw, or `samples=0`,
    give S = M; M members that draw `samples` each give S = M * `samples`, in the order of the members.
    Members draw with different noise.

    Args:
        members: at least one predictor.

    Raises:
        ValueError: there is no member, or one that does not predict.
    """

    def __init__(self, members: Sequence[Predictor]) -> None:
        if not members:
            raise ValueError("expected at least one member, got none")
        for member in members:
            check_predictor(member)
        self._members = tuple(members)

    def __len__(self) -> int:
        return len(self._members)

    def _predict(self, inputs: Inputs, request: Request) -> Prediction:
        parts = []
        for number, member in enumerate(self._members):
            seed = request.seed * len(self) + number  # differs between all pairs (seed, member)
            own = replace(request, seed=seed, progress=self._part(request, number))
            parts.append(member.predict(inputs, **vars(own)))
        sizes = [(part.samples, part.classes) for part in parts]
        if len(set(sizes)) > 1:
            wanted = "members of one (samples, classes), so that all weigh the same"
            raise ValueError(f"expected {wanted}, got {sizes}: with samples=0 no member draws")
        logits = torch.cat([part.logits for part in parts])  # [M S, B, C]
        return Prediction.from_logits(logits)

    def _part(self, request: Request, number: int) -> Progress | None:
        """The progress of one member as that of the ensemble."""
        whole = request.progress
        return None if whole is None else lambda done, total: whole(number * total + done, len(self) * total)


# Temperature scaling (Guo et al. 2017): one number, fitted to held-out items, that softens all logits


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature with the least negative log-likelihood, or 1 if the items do not support one below 1.

    A temperature below 1 makes predictions of out-of-distribution items more certain too.  It is used only if
    its 95 % profile-likelihood interval excludes 1.  `temperature_profile` has the optimum, the interval and
    the reason.

    Args:
        logits: [S, B, C] of S draws.
        labels: [B].

    Returns:
        The divisor of the logits.

    Raises:
        NumericalError: there is no optimum.  If every item is classified correctly, the likelihood grows
            without end as T goes to 0; if the logits are worse than guessing, as T goes to infinity.
    """
    profile = temperature_profile(logits, labels)
    none = "no temperature minimises the negative log-likelihood"
    if bool((logits.argmax(-1) == labels.to(logits.device)).all()):
        right = f"all {len(labels)} items are classified right"
        raise NumericalError(f"{right}, so that {none}: fit on more held-out items")
    if profile.on_bound:
        falls = f"it falls up to the limit, {profile.on_bound:.3g}"
        raise NumericalError(
            f"{none} of these {len(labels)} items: {falls}. The logits may be worse than guessing"
        )
    return profile.temperature


def temperature_profile(logits: Tensor, labels: Tensor) -> TemperatureProfile:
    """The likelihood of temperatures of labelled logits.

    Args:
        logits: [S, B, C] of S draws.
        labels: [B].

    Returns:
        The optimum, its 95 % interval, and the temperature to use.

    Raises:
        ValueError: logits or labels of another shape or type.
    """
    check_logits(logits)
    check_labels(labels, logits.shape[1], logits.shape[2])
    return profile_temperature(logits.detach(), labels)


class TemperatureScaling(BasePredictor):
    """A predictor whose logits are divided by a fitted temperature, sample by sample.

    The most probable class of a prediction without samples stays; that of averaged samples may change.

    >>> scaled = TemperatureScaling(ModelPredictor(model)).fit(held_out, labels)
    >>> scaled.predict(images, samples=10)

    Args:
        predictor: makes the logits.
    """

    def __init__(self, predictor: Predictor) -> None:
        check_predictor(predictor)
        self._predictor = predictor
        self._temperature: float | None = None

    @property
    def temperature(self) -> float:
        """The divisor of the logits."""
        if self._temperature is None:
            raise not_fitted(self)
        return self._temperature

    def fit(
        self, inputs: Inputs, labels: Tensor, *, samples: int = 10, seed: int = 0,
        batch_size: int | None = None, first_item: int = 0, progress: Progress | None = None,
    ) -> "TemperatureScaling":  # fmt: skip
        """Fit the temperature.

        Args:
            inputs: of items that were not trained on.
            labels: [B].
            samples: as many as in later calls of `predict`.
            seed: of the draws.
            batch_size: rows that run at once.
            first_item: number of the first item.
            progress: called with the amount done and the total.

        Returns:
            This object.

        Raises:
            NumericalError: no temperature is best.
        """
        request = Request(samples, seed, batch_size, first_item, progress)
        prediction = self._predictor.predict(inputs, **vars(request))
        self._temperature = fit_temperature(prediction.logits, labels)
        return self

    def _predict(self, inputs: Inputs, request: Request) -> Prediction:
        temperature = self.temperature
        found = self._predictor.predict(inputs, **vars(request))
        return Prediction.from_logits(found.logits / temperature, found.variances, drawn=found.drawn)


# The predictors of evaluations by name

TrainingItems = Callable[[], tuple[Inputs, Tensor]]  # loads model inputs and labels
FITTED = {
    "temperature": "temperature fitted", "shift_temperature": "temperature fitted under shift",
    "adaptive_temperature": "temperature by strangeness",
}  # fmt: skip


class UnavailablePredictorError(ValueError):
    """The error for a predictor that a model cannot have; the message says why."""


@dataclass(frozen=True)
class NamedPredictor:
    """A predictor with the number and kind of its draws."""

    name: str
    predictor: Predictor
    samples: int  # 0 if it does not draw
    draw: str  # none, independent (attention outputs), dropout, dropout+independent or weights


@dataclass(frozen=True)
class PredictorKind:
    """One kind of predictor."""

    label: str  # its name for readers
    build: Callable[[Any, Any], Predictor] | None  # from a model and `TrainingItems`; None: from several runs
    draw: str = "none"  # as in `NamedPredictor`; "independent" becomes "none" if the model cannot draw
    usual: bool = False  # whether it is evaluated by default
    fitted: bool = False  # whether it is fitted to the training items


def build_predictor(
    name: str, model: Any, samples: int, training: TrainingItems | None = None
) -> NamedPredictor:
    """Build one of `PREDICTORS` for a model.

    Args:
        name: `model` draws attention outputs if it can; `mean` never does; `moments` propagates their
            variances through one pass; `mc_dropout` draws masks without attention outputs, `dropout_draws`
            both; `laplace` and `gp_layer` are fitted to the training items here, and depend on no random
            numbers but those of their fixed seed.
        model: a classifier.
        samples: draws of a prediction.
        training: loads the training items.

    Returns:
        The predictor with the number and kind of its draws.

    Raises:
        ValueError: an unknown name.
        UnavailablePredictorError: the model cannot have this predictor, or it would draw nothing.
    """
    check_choice("predictor", name, PREDICTOR_NAMES)
    kind = PREDICTORS[name]
    assert kind.build is not None
    draw = kind.draw
    if draw == "independent" and not (model.draws and samples):
        draw = "none"  # a model that does not draw is its own mean
    try:
        if draw not in ("none", "independent") and samples == 0:
            raise UnavailablePredictorError("it draws, and 0 samples were asked for")
        if kind.fitted and training is None:
            raise UnavailablePredictorError("it needs the training items")
        predictor = kind.build(model, training)
    except UnavailablePredictorError as error:
        raise UnavailablePredictorError(f"{name} is left out: {error}") from error
    return NamedPredictor(name, predictor, 0 if draw == "none" else samples, draw)


def _mean(model: Any, _: object) -> Predictor:
    if not model.draws:
        raise UnavailablePredictorError("the model does not draw and is its own mean")
    return ModelPredictor(model, draw="none", variances=True)


def _moments(model: Any, _: object) -> Predictor:
    if not isinstance(model, Transformer):
        raise UnavailablePredictorError(f"{type(model).__name__} is no transformer of ours")
    if not model.draws:
        raise UnavailablePredictorError("the model does not draw and is its own mean")
    return MomentsPredictor(model)


def _mc_dropout(model: Any, _: object, draw: Draw = "none") -> Predictor:
    if draw != "none" and not model.draws:
        raise UnavailablePredictorError("the model does not draw, see mc_dropout")
    try:
        return MCDropout(model, draw=draw)
    except ValueError as error:
        raise UnavailablePredictorError(str(error)) from error


PREDICTORS = {  # in the order of tables
    "model": PredictorKind(
        "own prediction", lambda model, _: ModelPredictor(model, variances=model.draws), "independent",
        usual=True,
    ),
    "mean": PredictorKind("mean, without draws", _mean, usual=True),
    "moments": PredictorKind("moments, one pass", _moments),
    "mc_dropout": PredictorKind("MC dropout", _mc_dropout, "dropout", usual=True),
    "dropout_draws": PredictorKind(
        "draws and MC dropout", partial(_mc_dropout, draw="independent"), "dropout+independent"
    ),
    "laplace": PredictorKind(
        "last-layer Laplace", lambda model, items: LaplaceLastLayer(model, hessian="kron").fit(*items()),
        "weights", fitted=True,
    ),
    "gp_layer": PredictorKind(
        "GP last layer", lambda model, items: GPLastLayer(model).fit(*items()), "weights", fitted=True
    ),
    "ensemble": PredictorKind("ensemble", None),
}  # fmt: skip
PREDICTOR_NAMES = tuple(name for name, kind in PREDICTORS.items() if kind.build is not None)
DEFAULT_PREDICTORS = tuple(name for name, kind in PREDICTORS.items() if kind.usual)


def predictor_name(predictor: str) -> str:
    """The name of a predictor for readers.

    Args:
        predictor: its name in records, with or without a temperature.

    Returns:
        The name, with the kind of temperature if there is one.
    """
    base, _, fitted = predictor.partition("+")
    label = PREDICTORS[base].label if base in PREDICTORS else base.replace("_", " ")
    return f"{label}, {FITTED[fitted]}" if fitted in FITTED else label


def predictor_order(predictor: str) -> tuple[int, str, int]:
    """A key for sorting predictors.

    Args:
        predictor: its name in records, with or without a temperature.

    Returns:
        The place in `PREDICTORS`, and after it the kind of temperature.
    """
    base, _, fitted = predictor.partition("+")
    place = list(PREDICTORS).index(base) if base in PREDICTORS else len(PREDICTORS)
    suffixes = ("", *FITTED)
    return (place, base, suffixes.index(fitted) if fitted in suffixes else len(suffixes))
