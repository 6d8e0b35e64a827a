"""The one call behind which a model and all its competitors stand."""

from dataclasses import dataclass
from typing import Protocol

from gpattention.attention.output import Draw
from gpattention.models.prediction import Classifier, Prediction, predict
from gpattention.models.rows import Inputs, Progress


class Predictor(Protocol):
    """Anything that predicts items as `gpattention.models.prediction.predict` does.

    The draws of an item depend on `seed` and its number `first_item` + position alone; `samples=0` is
    the prediction without draws.  `batch_size=None` leaves the rows that run at once to the predictor.
    """

    def predict(
        self,
        inputs: Inputs,
        *,
        samples: int = ...,
        seed: int = ...,
        batch_size: int | None = ...,
        first_item: int = ...,
        progress: Progress | None = ...,
    ) -> Prediction:
        """The prediction of every item."""
        ...


@dataclass(frozen=True)
class ModelPredictor:
    """A model as a predictor: it draws its own attention outputs, if it can.

    >>> ModelPredictor(model).predict(images, samples=10).confidence
    """

    model: Classifier
    draw: Draw = "independent"
    variances: bool = False  # whether predictions tell the layers' variances

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
        """As `gpattention.models.prediction.predict`."""
        return predict(
            self.model,
            inputs,
            samples=samples,
            seed=seed,
            draw=self.draw,
            batch_size=batch_size,
            variances=self.variances,
            first_item=first_item,
            progress=progress,
        )
