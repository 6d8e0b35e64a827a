"""The health of a model: how near each layer is to collapse, and whether uncertainty ranks errors.

A layer may be off, collapsed to its noise, or oversmoothed, with tokens that have become alike.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gpattention.attention import Attention, Heads, Positive
from gpattention.checks import check_labels
from gpattention.concurrency import Handler, handling
from gpattention.gp import Posterior, keep_rows, noise_floor, rbf
from gpattention.models.predict import Inputs, count_items, evaluating, predict


@dataclass(frozen=True)
class AttentionHealth:
    """Measurements of a layer: means over batch, heads and real tokens; None if the kind has no such number.

    Attributes:
        kind: of attention.
        kappa_qk: mean kernel of queries and keys; near 0 attention is off, near 1 every token is the same.
        kappa_qq: the same of queries; near 1 they have merged.
        mean_ratio: ||mean|| / ||v||
        amplitude: prior standard deviation of the process.
        noise: sigma^2
        prior_stddev: of the outputs.
        posterior_stddev: the same, given the keys.
        stddev_ratio: posterior / prior; near 1 the keys do not change the variance.
        floor_share: exp(floor - U), with U the negative log density of the layer's own outputs per token and
            dimension and `floor` its least value; 1 means collapsed to the noise.
    """

    kind: str
    kappa_qk: float
    kappa_qq: float
    mean_ratio: float
    amplitude: float | None
    noise: float | None
    prior_stddev: float | None
    posterior_stddev: float | None
    stddev_ratio: float | None
    floor_share: float | None

    def problems(self) -> list[str]:
        """Sentences about numbers that point to problems."""
        found = []
        if self.kappa_qk < 0.02:
            found.append(f"attention is nearly off: mean kappa(q, k) is {self.kappa_qk:.3f}")
        if self.kappa_qq > 0.95:
            found.append(f"queries have merged: mean kappa(q, q) is {self.kappa_qq:.3f}")
        if self.stddev_ratio is not None and self.stddev_ratio > 0.98:
            found.append(f"the variance is the prior's: posterior/prior is {self.stddev_ratio:.3f}")
        if self.floor_share is not None and self.floor_share > 0.9:
            found.append(f"the density sits at its noise floor: share {self.floor_share:.2f}")
        return found


@torch.no_grad()
def diagnose(
    attention: Attention, query: Tensor, *, key_padding_mask: Tensor | None = None,
    inducing: Tensor | None = None,
) -> AttentionHealth:  # fmt: skip
    """Measure a layer in self-attention.

    Args:
        attention: the layer.
        query: tokens [B, N, E].
        key_padding_mask: [B, N] True = ignore.
        inducing: [H, m, E], for kinds that take inducing inputs from outside.

    Returns:
        Kernel, scales and distance from collapse of the layer on these tokens.
    """
    heads, _ = attention._heads(query, key_padding=key_padding_mask, inducing=inducing)
    q, k = attention._kernel_inputs(heads)
    posterior = attention._posterior(heads) if attention.draws else None
    mean = attention._mean(heads) if posterior is None else posterior.mean  # [B, H, N, D]
    values = keep_rows(heads.v, heads.mask)
    prior = stddev = ratio = None
    if posterior is not None:
        prior, stddev = posterior.prior_stddev, posterior.stddev
        stddev = stddev.square().mean(-1).sqrt() if stddev.ndim == mean.ndim else stddev
        ratio = _mean(stddev / torch.where(prior > 0, prior, 1.0), heads)
    noise = getattr(attention, "noise", None)
    return AttentionHealth(
        kind=attention.kind, kappa_qk=_pair_mean(rbf(q, k), heads), kappa_qq=_pair_mean(rbf(q, q), heads),
        mean_ratio=float(mean.norm() / values.norm().clamp_min(1e-12)), amplitude=_amplitude(attention),
        noise=float(noise().mean()) if isinstance(noise, Positive) else None,
        prior_stddev=None if prior is None else _mean(prior, heads),
        posterior_stddev=None if stddev is None else _mean(stddev, heads), stddev_ratio=ratio,
        floor_share=_floor_share(attention, heads, posterior),
    )  # fmt: skip


def _amplitude(attention: Attention) -> float | None:
    # in rows divided by their sums the variance of a kernel cancels
    by_sums = getattr(attention, "normalize", "none") == "rows"
    for name in ("prior_scale", "scale_q", *(() if by_sums else ("variance",))):
        parameter = getattr(attention, name, None)
        if isinstance(parameter, Positive):
            found = parameter()  # [H]
            return float((found.sqrt() if name == "variance" else found).mean())
    return None


def _floor_share(attention: Attention, heads: Heads, posterior: Posterior | None) -> float | None:
    density = None if posterior is None else attention._log_density(heads, posterior)
    noise = getattr(attention, "noise", None)
    if density is None or not isinstance(noise, Positive):
        return None
    above = -density.per_token().query - noise_floor(noise())  # [B, H] nats above the floor
    # rounding may put a collapsed layer below its floor
    return float((-above.clamp_min(0)).exp().mean())


def _mean(x: Tensor, heads: Heads) -> float:
    """Mean over real queries of [B, H, N]."""
    return float(x.mean()) if heads.query_mask is None else _mean_where(x, heads.query_mask)


def _pair_mean(kappa: Tensor, heads: Heads) -> float:
    """Mean over pairs of different real tokens of [B, H, N, N]."""
    pairs = ~torch.eye(kappa.shape[-1], dtype=torch.bool, device=kappa.device)
    if heads.mask is not None:
        pairs = pairs & heads.mask[..., None, :] & heads.mask[..., None]
    return _mean_where(kappa, pairs)


def _mean_where(x: Tensor, kept: Tensor) -> float:
    kept = kept.expand_as(x)
    return float(torch.where(kept, x, 0.0).sum() / kept.sum().clamp_min(1))


@dataclass(frozen=True)
class HealthReport:
    """The result of `model.health(batch)`.

    Attributes:
        layers: measurements of each layer.
        error_correlation: Spearman's rank correlation of uncertainty with errors.
        variance_correlation: the same of each layer's mean variance.
    """

    layers: tuple[AttentionHealth, ...]
    error_correlation: float | None
    variance_correlation: tuple[float | None, ...]

    def problems(self) -> list[str]:
        """Sentences about problems, layer by layer."""
        return [f"layer {i}: {text}" for i, layer in enumerate(self.layers) for text in layer.problems()]

    def table(self) -> str:
        """A table for a terminal."""
        names = [each.name for each in fields(AttentionHealth) if each.name != "kind"]
        lines = ["layer  kind        " + "".join(f"{name:>17}" for name in names)]
        for i, layer in enumerate(self.layers):
            values = (getattr(layer, name) for name in names)
            cells = "".join(f"{'-':>17}" if x is None else f"{x:17.4g}" for x in values)
            lines.append(f"{i:5d}  {layer.kind:<12}{cells}")
        if self.error_correlation is not None:
            lines.append(f"rank correlation of predictive entropy with error: {self.error_correlation:.3f}")
        return "\n".join(lines)


def measure_health(model: Any, inputs: Inputs, labels: Tensor | None = None) -> HealthReport:
    """Measure every layer in one mean forward pass; with labels, also how uncertainty ranks errors.

    The uncertainty is the entropy of the prediction (of 10 draws if the model draws), that of a layer its
    variance averaged over heads and real tokens.

    Args:
        model: a transformer of ours, or one with the same methods.
        inputs: a batch.
        labels: [B] class numbers.

    Returns:
        Measurements of each layer and, with labels, the correlations.

    Raises:
        ValueError: there is no item, or labels are not one class number per item.
    """
    count = count_items(inputs)
    if labels is not None:
        check_labels(labels, count)
    calls: list[tuple[Attention, Tensor, dict[str, Any]]] = []

    def remember(module: Attention, own: Handler, *args: Any, **kwargs: Any) -> Any:
        calls.append((module, args[0], kwargs))
        return own(*args, **kwargs)

    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    with evaluating(model), handling({(each, "forward"): partial(remember, each) for each in attentions}):
        model(inputs)
    layers = tuple(
        diagnose(attention, x, key_padding_mask=given.get("key_padding_mask"), inducing=given.get("inducing"))
        for attention, x, given in calls
    )
    nothing: tuple[Any, ...] = (None,) * len(layers)
    if labels is None:
        return HealthReport(layers, None, nothing)
    prediction = predict(model, inputs, samples=10, variances=model.draws)
    wrong = (prediction.label != labels.to(prediction.label.device)).double()

    def correlation(variance: Tensor | None, padding: Tensor | None) -> float | None:
        if variance is None:
            return None
        # SGPA has a variance for every channel
        variance = variance.mean(-1) if variance.ndim == 4 else variance  # [B, H, N]
        real = variance.shape[-1] if padding is None else (~padding).sum(-1).clamp_min(1).to(variance.device)
        return rank_correlation(variance.mean(1).sum(-1) / real, wrong)  # padded tokens have a variance of 0

    paddings = [given.get("key_padding_mask") for _, _, given in calls]
    by_layer = map(correlation, prediction.variances or nothing, paddings)
    return HealthReport(layers, rank_correlation(prediction.entropy, wrong), tuple(by_layer))


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of ranks, with average ranks for ties; 0 if one of them is constant."""
    a, b = (ranks - ranks.mean() for ranks in (_ranks(x), _ranks(y)))
    scale = a.norm() * b.norm()
    return float((a @ b) / scale) if float(scale) > 0 else 0.0


def _ranks(x: Tensor) -> Tensor:
    """Average ranks.  [n]"""
    _, group, counts = torch.unique(x.double(), return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts.double() - 1) / 2)[group]


@dataclass(frozen=True)
class Similarity:
    """Mean cosine similarity between different real tokens of a sequence, averaged over sequences.

    Attributes:
        embedded: before the first block.
        attended: after each attention.
        tokens: after each block.
    """

    embedded: float
    attended: tuple[float, ...]
    tokens: tuple[float, ...]


@torch.no_grad()
def token_similarity(model: Any, inputs: Inputs) -> Similarity:
    """Cosine similarity between tokens, layer by layer; 1 is total oversmoothing.

    Args:
        model: a transformer of ours.
        inputs: a batch.

    Returns:
        The similarity of the embedded tokens, and of those after each attention and each block.
    """
    with evaluating(model):
        embedded, padding = model.embed(inputs)
        layers = model(inputs, need=("logits", "tokens")).layers
    return Similarity(
        embedded=cosine_similarity(embedded, padding),
        attended=tuple(cosine_similarity(layer.attended, padding) for layer in layers),
        tokens=tuple(cosine_similarity(layer.tokens, padding) for layer in layers),
    )


def cosine_similarity(tokens: Tensor, padding: Tensor | None = None) -> float:
    """Mean cosine similarity between different tokens of a sequence, averaged over sequences.

    Args:
        tokens: [B, N, E]
        padding: [B, N] True = ignore.

    Returns:
        The mean over sequences with two tokens at least; NaN without any.
    """
    unit = normalize(tokens.double(), dim=-1)
    if padding is None:
        padding = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    unit = torch.where(padding[..., None], 0.0, unit)
    count = (~padding).sum(-1).double()  # [B]
    total = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))  # sum over pairs i != j
    pairs = count * (count - 1)
    some = pairs > 0
    return float((total[some] / pairs[some]).mean())
