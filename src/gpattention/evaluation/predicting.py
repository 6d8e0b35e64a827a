"""Predict a whole set in chunks, on the model's device, without waiting for it."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.layer_variance import layer_means, padding_of
from gpattention.evaluation.prediction_cache import RawPrediction
from gpattention.evaluation.predictor import Predictor
from gpattention.gp import check_health, deferred_checks
from gpattention.models.rows import Progress

CHUNK = 2000  # items that are prepared at once


def predict_items(
    predictor: Predictor,
    items: ItemSet,
    *,
    samples: int,
    seed: int,
    device: torch.device,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> RawPrediction:
    """Logits of all draws, and the layers' variances where the predictor tells them, on `device`.

    An item's noise belongs to its number in the set, so neither chunks nor `batch_size` change a draw.  On a
    GPU nothing is read back before the end of a chunk.
    """
    logits, variances = [], []
    # on a CPU a failed factorisation can say at once which one it was
    with deferred_checks() if device.type == "cuda" else nullcontext():
        for start, inputs in items.chunks(CHUNK, device):
            told = predictor.predict(
                inputs,
                samples=samples,
                seed=seed,
                batch_size=batch_size,
                first_item=start,
                progress=_shifted(progress, start, len(items)),
            )
            logits.append(told.logits.float())
            means = None if told.variances is None else layer_means(told.variances, padding_of(inputs))
            variances.append(means)
    if device.type == "cuda":
        check_health()
    told_all = [variance.float() for variance in variances if variance is not None]
    return RawPrediction(
        torch.cat(logits, 1),
        None if items.labels is None else items.labels.to(device),
        torch.cat(told_all) if len(told_all) == len(variances) else None,
    )


def _shifted(progress: Progress | None, start: int, items: int) -> Callable[[int, int], object] | None:
    """A chunk's progress as that of the set, in thousandths of an item."""
    if progress is None:
        return None

    def told(done: int, total: int) -> None:
        here = min(CHUNK, items - start)
        progress(1000 * start + 1000 * here * done // total, 1000 * items)

    return told
