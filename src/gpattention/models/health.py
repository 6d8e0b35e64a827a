"""Is a model alive?  Per layer, how near it is to collapse, and whether its uncertainty tells errors."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpattention.attention import Attention, AttentionHealth, diagnose
from gpattention.gp.concurrency import Handler, handling
from gpattention.models.prediction import predict
from gpattention.models.rows import Inputs, count_items, evaluating


@dataclass(frozen=True)
class HealthReport:
    """What `model.health(batch)` found."""

    layers: tuple[AttentionHealth, ...]
    error_correlation: float | None  # Spearman's rank correlation of uncertainty with being wrong
    variance_correlation: tuple[float | None, ...]  # the same of each layer's mean variance

    def problems(self) -> list[str]:
        """What a person should look at, layer by layer."""
        return [f"layer {i}: {text}" for i, layer in enumerate(self.layers) for text in layer.problems()]

    def table(self) -> str:
        """A table for a terminal."""
        names = (
            "kappa_qk", "kappa_qq", "mean_ratio", "amplitude", "noise",
            "prior_stddev", "posterior_stddev", "stddev_ratio", "floor_share",
        )  # fmt: skip
        lines = ["layer  kind        " + "".join(f"{name:>17}" for name in names)]
        for i, layer in enumerate(self.layers):
            values = (getattr(layer, name) for name in names)
            cells = "".join(f"{'-':>17}" if x is None else f"{x:17.4g}" for x in values)
            lines.append(f"{i:5d}  {layer.kind:<12}{cells}")
        if self.error_correlation is not None:
            lines.append(f"rank correlation of predictive entropy with error: {self.error_correlation:.3f}")
        return "\n".join(lines)


def measure_health(model: Any, inputs: Inputs, labels: Tensor | None = None) -> HealthReport:
    """Run the mean forward pass once and look into every layer; with labels, also at the errors.

    Uncertainty is the entropy of the prediction (10 draws where the model draws), error is a wrong
    label; a layer's is its variance averaged over heads and real tokens.
    """
    _check_labels(labels, count_items(inputs))
    calls: list[tuple[Attention, Tensor, dict[str, Any]]] = []

    def remember(module: Attention, own: Handler, *args: Any, **kwargs: Any) -> Any:
        calls.append((module, args[0], kwargs))
        return own(*args, **kwargs)

    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    with evaluating(model), handling({(each, "forward"): partial(remember, each) for each in attentions}):
        model(inputs)
    layers = tuple(
        diagnose(
            attention,
            tokens,
            key_padding_mask=kwargs.get("key_padding_mask"),
            inducing=kwargs.get("inducing"),
        )
        for attention, tokens, kwargs in calls
    )
    if labels is None:
        return HealthReport(layers, None, tuple(None for _ in layers))
    prediction = predict(model, inputs, samples=10, variances=model.draws)
    wrong = (prediction.label != labels.to(prediction.label.device)).double()
    variances = prediction.variances or tuple(None for _ in layers)
    paddings = [kwargs.get("key_padding_mask") for _, _, kwargs in calls]
    return HealthReport(
        layers,
        rank_correlation(prediction.entropy, wrong),
        tuple(_layer_correlation(*pair, wrong) for pair in zip(variances, paddings, strict=True)),
    )


def _check_labels(labels: Tensor | None, items: int) -> None:
    """One class number for every item; a single label would be compared with all of them."""
    if labels is None:
        return
    if labels.shape != (items,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"expected labels to be whole numbers of shape [{items}], one per item, "
            f"got shape {tuple(labels.shape)} and {labels.dtype}"
        )


def _layer_correlation(variance: Tensor | None, padding: Tensor | None, wrong: Tensor) -> float | None:
    """Of the variance [B, H, N] or [B, H, N, D], 0 at padded tokens, averaged over heads and real ones."""
    if variance is None:
        return None
    variance = variance.mean(-1) if variance.ndim == 4 else variance  # [B, H, N]
    padding = torch.zeros_like(variance[:, 0], dtype=torch.bool) if padding is None else padding
    mean = variance.mean(1).sum(-1) / (~padding).sum(-1).clamp_min(1).to(variance.device)  # [B]
    return rank_correlation(mean, wrong)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's: the correlation of ranks, ties sharing theirs; 0 where one of them is constant."""
    a, b = (_ranks(t.double()) for t in (x, y))
    a, b = a - a.mean(), b - b.mean()
    scale = a.norm() * b.norm()
    return float((a @ b) / scale) if float(scale) > 0 else 0.0


def _ranks(x: Tensor) -> Tensor:
    """Average ranks.  [n]"""
    _, group, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() - 1) / 2)[group]
