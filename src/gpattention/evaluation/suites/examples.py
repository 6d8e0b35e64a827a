"""Items to look at: the answers of the model, and its attention and uncertainty for each token.

A suite keeps a few items of its sets in the curve "gallery".  The groups hold items worth a look, and
"answers" holds the answers to the first items of every set, so that models can be compared on the mistakes of
others.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.attention import Attention
from gpattention.concurrency import Handler, handling
from gpattention.evaluation.predictions import ItemSet, Predicted, padding_of, token_means
from gpattention.evaluation.suites.findings import rounded
from gpattention.models import predict
from gpattention.models.predict import Inputs, count_items, evaluating

COUNT = 8  # items of each group
ANSWERED = 400  # first items of a set, whose answers are all kept
Entry = dict[str, Any]


def gallery(
    model: Any, items: ItemSet, predicted: Predicted, classes: Sequence[str], device: torch.device,
    count: int = COUNT,
) -> dict[str, Any]:  # fmt: skip
    """The most certain, the least certain and the most wrong items, with numbers for their tokens.

    Certainty is measured by the confidence.  The most wrong items are those predicted wrongly that give their
    class the least probability; items without labels have no "most_wrong".  `uncertainty` is the entropy of
    the prediction in nats; `token_variance` is the mean over heads and layers in the mean pass, and
    `token_attention` the share of a token in the absolute attention weights.

    Args:
        model: made the prediction.
        items: of one set.
        predicted: the prediction of these items.
        classes: their names.
        device: of the model.
        count: most items of each group.

    Returns:
        Items by group; "sure_and_wrong" has some of the first items, "answers" the answers to these.
    """
    prediction, labels = predicted.prediction, predicted.labels
    chosen = {
        "most_certain": prediction.confidence.argsort(descending=True, stable=True)[:count],
        "least_certain": prediction.confidence.argsort(stable=True)[:count],
    }
    first = prediction.confidence[:ANSWERED]
    by_confidence = first.argsort(descending=True, stable=True)
    if labels is not None:
        right = prediction.probs.gather(1, labels[:, None])[:, 0]  # [B]
        wrong = (prediction.label != labels).nonzero()[:, 0]
        chosen["most_wrong"] = wrong[right[wrong].argsort(stable=True)][:count]
        by_confidence = by_confidence[(prediction.label != labels)[by_confidence]]
    chosen["sure_and_wrong"] = by_confidence[:count]
    places = {kind: found.cpu() for kind, found in chosen.items()}
    shown = {kind: entries(model, items, predicted, at, classes, device) for kind, at in places.items()}
    answers = {
        "items": items.digest, "set": items.name, "predicted": prediction.label[:ANSWERED].tolist(),
        "labels": None if labels is None else labels[:ANSWERED].tolist(),
        "confidence": rounded(first.tolist()),
    }  # fmt: skip
    return {**shown, "answers": answers}


def entries(
    model: Any, items: ItemSet, predicted: Predicted, places: Tensor, classes: Sequence[str],
    device: torch.device,
) -> list[Entry]:  # fmt: skip
    """What a report shows of some items.

    Args:
        model: made the prediction.
        items: of one set.
        predicted: the prediction of these items.
        places: [k] of the items to show.
        classes: their names.
        device: of the model.

    Returns:
        One entry for each.
    """
    if len(places) == 0:
        return []
    some, prediction = items.select(places), predicted.prediction
    vision = getattr(model, "vision", None)
    grid = None if vision is None else [side // vision.patch for side in vision.sides]  # rows, columns
    variances, attentions = token_maps(model, some.inputs(0, len(some), device))
    return [
        {
            "index": place, "set": items.name,
            "label": None if predicted.labels is None else classes[int(predicted.labels[place])],
            "predicted": classes[int(prediction.label[place])],
            "confidence": float(prediction.confidence[place]),
            "uncertainty": float(prediction.entropy[place]), "image": stored_image(some.stored, number),
            "words": None if some.words is None else list(some.words[number]),
            "token_variance": variances[number], "token_attention": attentions[number], "grid": grid,
        }
        for number, place in enumerate(places.tolist())
    ]  # fmt: skip


def token_maps(model: Any, inputs: Inputs) -> tuple[list[list[float] | None], list[list[float] | None]]:
    """Variance and attention of the real tokens of each item, in one pass without draws.

    The variance is the mean over heads and layers.  The attention to token j is the sum of |W_ij| over real
    tokens i, heads and layers, as a share of that of all real tokens; the weights of a posterior mean may be
    negative.

    Args:
        model: one of our transformers.
        inputs: a batch.

    Returns:
        A list for each item; None if no layer has any.
    """
    received: list[Tensor] = []
    padding = padding_of(inputs)

    def remember(own: Handler, *args: Any, **kwargs: Any) -> Any:
        found = own(*args, **{**kwargs, "need": (*kwargs.get("need", ("output",)), "weights")})
        weights = found.weights.detach().double().abs().sum(1)  # [B, Q, K]
        real = weights if padding is None else weights * ~padding[:, :, None]
        received.append(real.sum(1))  # [B, K]
        return found

    attentions = (each for each in model.modules() if isinstance(each, Attention) and each.weighs)
    handlers: dict[tuple[nn.Module, str], Any] = {(each, "forward"): partial(remember) for each in attentions}
    with torch.no_grad(), evaluating(model), handling(handlers):
        model(inputs)
    total = torch.stack(received).sum(0) if received else None  # [B, K]
    shares = None if total is None else total / total.sum(-1, keepdim=True).clamp_min(1e-300)  # [B, N]
    variance = None
    if model.draws:
        layers = predict(model, inputs, samples=0, variances=True).variances or ()
        variance = torch.stack([token_means(v) for v in layers if v is not None]).mean(0)  # [B, N]
    return tuple(_rows(x, padding, count_items(inputs)) for x in (variance, shares))  # type: ignore[return-value]


def _rows(values: Tensor | None, padding: Tensor | None, count: int) -> list[list[float] | None]:
    if values is None:
        return [None] * count
    hidden = torch.zeros_like(values, dtype=torch.bool) if padding is None else padding
    return [rounded(row[~out].tolist()) for row, out in zip(values, hidden, strict=True)]


def stored_image(stored: Inputs, item: int) -> Mapping[str, Any] | None:
    """An image as its shape [H, W, C] and its 8-bit pixels in base64; None for other items."""
    if not isinstance(stored, Tensor) or stored.ndim != 4:
        return None
    image = stored[item]
    if image.is_floating_point():
        image = (image.clamp(0, 1) * 255).round()
    pixels = image.to(torch.uint8).permute(1, 2, 0).contiguous().cpu()
    return {"shape": list(pixels.shape), "pixels": b64encode(pixels.numpy().tobytes()).decode()}
