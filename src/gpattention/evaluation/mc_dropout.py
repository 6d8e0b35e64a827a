"""MC dropout (Gal and Ghahramani 2016): dropout stays on at prediction, and every mask is a draw."""

from functools import partial

from torch import Tensor

from gpattention.attention.output import DRAWS, Draw
from gpattention.checks import check_count, check_whole
from gpattention.metrics.checks import check_choice
from gpattention.models.item_dropout import Dropout, calls_of_items, find_dropouts, hooked, item_masks
from gpattention.models.prediction import Classifier, Prediction, predict
from gpattention.models.rows import Inputs, Progress, Rows, collect, evaluating, model_device
from gpattention.models.rows_at_once import run_rows


class MCDropout:
    """A predictor whose samples are forward passes with drawn dropout masks.

    Every dropout module with a rate above 0 drops, at its own rate or at `p` if given; the rest of the
    model is in evaluation mode.  Masks belong to items, so that `batch_size` changes nothing.  Two kinds
    of dropout stay off: what is no module (`F.dropout`, the attention dropout of
    `nn.MultiheadAttention`), and calls on what all items share, such as SGPA's inducing inputs.  `draw`
    says whether layers that can draw their attention outputs do so too.  `samples=0` is the prediction
    without dropout.
    """

    def __init__(self, model: Classifier, *, p: float | None = None, draw: Draw = "none") -> None:
        if p is not None and not 0 < p <= 1:
            raise ValueError(f"expected p in (0, 1], got {p}")
        check_choice("draw", draw, DRAWS)
        self._model, self._p, self._draw = model, p, draw
        self._dropouts()  # a model without dropout is refused at once

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
        """`samples` masks for every item; the model is left as it was."""
        samples = check_count("samples", samples, least=0)
        seed = check_whole("seed", seed)
        model = self._model
        if samples == 0:
            return predict(model, inputs, samples=0, batch_size=batch_size, progress=progress)
        dropouts = self._dropouts()
        drawing: Draw = self._draw if model.draws else "none"

        def forward(rows: Rows) -> Tensor:
            noise = rows.noise
            with hooked(model, dropouts, item_masks(noise, own)):
                generator = None if drawing == "none" else noise
                return model(rows.inputs, draw=drawing, generator=generator, need=("logits",)).logits

        with evaluating(model):
            own = calls_of_items(model, partial(_plain, model), dropouts, inputs)
            device = model_device(model, inputs)
            logits = run_rows(
                lambda rows_at_once: collect(
                    forward,
                    inputs,
                    samples=samples,
                    seed=seed,
                    batch_size=rows_at_once,
                    device=device,
                    first_item=first_item,
                    progress=progress,
                ),
                batch_size,
                device,
            )
        return Prediction.from_logits(logits, drawn=True)

    def _dropouts(self) -> dict[str, Dropout]:
        """Read anew at every prediction: rates may be set at any time."""
        found = find_dropouts(self._model, self._p)
        if not found:
            raise ValueError(
                f"expected a model with dropout modules of p > 0, got none in {type(self._model).__name__}: "
                "MC dropout would draw nothing"
            )
        return found


def _plain(model: Classifier, inputs: Inputs) -> object:
    return model(inputs, draw="none", generator=None, need=("logits",))
