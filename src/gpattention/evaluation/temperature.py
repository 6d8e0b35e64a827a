"""Temperature scaling (Guo et al. 2017): one number, fitted on held-out items, that softens all logits."""

import math

import torch
from torch import Tensor

from gpattention.evaluation.checks import check_predictor, not_fitted
from gpattention.evaluation.predictor import Predictor
from gpattention.gp import NumericalError
from gpattention.metrics.checks import check_labels
from gpattention.models.prediction import Prediction, check_logits
from gpattention.models.rows import Inputs, Progress

LIMIT = 100.0  # temperatures beyond this factor mean that the likelihood has no optimum


def temperature_nll(logits: Tensor, labels: Tensor, log_temperature: Tensor) -> Tensor:
    """Mean negative log-likelihood of the sample-averaged probabilities.

    `logits` are [S, B, C]; the temperature divides every sample's logits, before the average.
    """
    log_each = (logits / log_temperature.exp()).log_softmax(-1)  # [S, B, C]
    log_right = log_each.gather(-1, labels.expand(len(logits), -1)[..., None])[..., 0]  # [S, B]
    return math.log(len(logits)) - log_right.logsumexp(0).mean()


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature of least negative log-likelihood, by L-BFGS on its logarithm in float64.

    A `NumericalError` tells that there is none: if every item is classified right, the likelihood grows
    for ever as T goes to 0; if the logits are worse than guessing, as T goes to infinity.
    """
    check_logits(logits)
    check_labels(labels, logits.shape[1], logits.shape[2])
    if len(labels) == 0:
        raise ValueError(f"expected logits of at least one item, got shape {tuple(logits.shape)}")
    with torch.inference_mode(
        False
    ):  # copies made here can be differentiated, whatever mode made the tensors
        draws = logits.detach().to(torch.float64, copy=True)
        return _least_nll(draws, labels.to(logits.device, torch.int64, copy=True))


def _least_nll(logits: Tensor, labels: Tensor) -> float:
    if bool((logits.argmax(-1) == labels).all()):
        raise NumericalError(
            f"all {len(labels)} items are classified right, so that no temperature minimises the negative "
            "log-likelihood: fit on more held-out items"
        )
    log_temperature = torch.zeros((), dtype=torch.float64, device=logits.device, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [log_temperature],
        max_iter=200,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = temperature_nll(logits, labels, log_temperature)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
        closure()
    found, slope = float(log_temperature.detach().exp()), float(log_temperature.grad or 0.0)
    if not 1 / LIMIT < found < LIMIT or abs(slope) > 1e-4:
        raise NumericalError(
            f"no temperature minimises the negative log-likelihood of these {len(labels)} items: L-BFGS "
            f"stopped at {found:.3g} with slope {slope:.1e}. The logits may be worse than guessing"
        )
    return found


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
        return Prediction.from_logits(prediction.logits / temperature, prediction.variances)
