"""Temperature scaling (Guo et al. 2017): one number, fitted on held-out items, that softens all logits."""

from torch import Tensor

from gpattention.evaluation.checks import check_predictor, not_fitted
from gpattention.evaluation.predictor import Predictor
from gpattention.gp import NumericalError
from gpattention.metrics.checks import check_labels
from gpattention.models.prediction import Prediction, check_logits
from gpattention.models.rows import Inputs, Progress
from gpattention.models.temperature import TemperatureProfile, profile_temperature


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature of least negative log-likelihood, but for one below 1 that the items do not show.

    Sharpening makes foreign items surer too, so that a temperature below 1 is taken only where its 95 %
    profile-likelihood interval excludes 1, and is 1 otherwise; `temperature_profile` tells the optimum, the
    interval and the reason.  A `NumericalError` tells that there is no optimum: if every item is classified
    right, the likelihood grows for ever as T goes to 0; if the logits are worse than guessing, as T goes to
    infinity.
    """
    profile = temperature_profile(logits, labels)
    if bool((logits.argmax(-1) == labels.to(logits.device)).all()):
        raise NumericalError(
            f"all {len(labels)} items are classified right, so that no temperature minimises the negative "
            "log-likelihood: fit on more held-out items"
        )
    if profile.on_bound:
        raise NumericalError(
            f"no temperature minimises the negative log-likelihood of these {len(labels)} items: it falls up "
            f"to the limit, {profile.on_bound:.3g}. The logits may be worse than guessing"
        )
    return profile.temperature


def temperature_profile(logits: Tensor, labels: Tensor) -> TemperatureProfile:
    """What labels [B] say about the temperature of logits [S, B, C]: optimum, 95 % interval, what to take."""
    check_logits(logits)
    check_labels(labels, logits.shape[1], logits.shape[2])
    return profile_temperature(logits.detach(), labels)


class TemperatureScaling:
    """A predictor whose logits are divided by one fitted temperature, each sample's on its own.

    The most probable class of a prediction without samples stays; those of averaged samples may change.

    >>> scaled = TemperatureScaling(ModelPredictor(model)).fit(held_out, labels)
    >>> scaled.predict(images, samples=10)
    """

    def __init__(self, predictor: Predictor) -> None:
        check_predictor(predictor)
        self._predictor = predictor
        self._temperature: float | None = None

    @property
    def temperature(self) -> float:
        """What the logits are divided by."""
        if self._temperature is None:
            raise not_fitted(self)
        return self._temperature

    def fit(
        self,
        inputs: Inputs,
        labels: Tensor,  # [B]
        *,
        samples: int = 10,
        seed: int = 0,
        batch_size: int | None = None,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> "TemperatureScaling":
        """On items not trained on, with as many samples as will be predicted with."""
        prediction = self._predictor.predict(
            inputs,
            samples=samples,
            seed=seed,
            batch_size=batch_size,
            first_item=first_item,
            progress=progress,
        )
        self._temperature = fit_temperature(prediction.logits, labels)
        return self

    def predict(
        self,
        inputs: Inputs,
        *,
        samples: int = 10,
        seed: int = 0,
        batch_size: int | None = None,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> Prediction:
        """The predictor's own, tempered; `logits` are the tempered ones."""
        temperature = self.temperature
        prediction = self._predictor.predict(
            inputs,
            samples=samples,
            seed=seed,
            batch_size=batch_size,
            first_item=first_item,
            progress=progress,
        )
        return Prediction.from_logits(
            prediction.logits / temperature, prediction.variances, drawn=prediction.drawn
        )
