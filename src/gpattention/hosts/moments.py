"""Moments through `nn.TransformerEncoder`: one pass of a host instead of its draws (`models.moments`).

The host runs as ever but for its encoder, which is answered for: layer by layer its own mean, and beside it
the variance.  What follows the encoder, say pooling and a classifier, is taken as it is: the gradients of the
logits with respect to the encoder's output are the Jacobian of eq. M6.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gpattention.concurrency import Handler, handling
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.models import LogitGaussian, Prediction
from gpattention.models.converted import ATTRIBUTE, converted_layers
from gpattention.models.dropout import dropped_tokens
from gpattention.models.moments import (
    Moments,
    activation_moments,
    attention_variance,
    gaussian_of,
    layer_norm_moments,
    linear_moments,
    linear_variance,
    predict_moments,
)
from gpattention.models.multihead import ConvertedMultihead, answer_call, split_projections
from gpattention.models.predict import Inputs
from gpattention.models.projected import is_plain_linear

# log standard deviations of a call of a site [B, H, Q]; None of one that does not draw
Spread = Callable[[Site, AttentionCall], Tensor | None]
_FORM = "method='moments' knows our own transformers and hosts around one nn.TransformerEncoder"


def find_encoder(model: nn.Module, attention: Sequence[nn.Module]) -> nn.TransformerEncoder:
    """The encoder that holds all of a host's attention, in layers whose parts are known.

    Args:
        model: the host.
        attention: modules that attend.

    Returns:
        The encoder.

    Raises:
        ValueError: for other hosts, by name.
    """
    found = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    if len(found) != 1 or type(found[0]).forward is not nn.TransformerEncoder.forward:
        raise ValueError(f"{_FORM}, got {type(model).__name__} with {len(found)} of them: draw instead")
    (encoder,) = found
    inside = {layer.self_attn for layer in encoder.layers if isinstance(layer, nn.TransformerEncoderLayer)}
    for module in attention:
        if module not in inside:
            got = f"{type(module).__name__} outside of the encoder of {type(model).__name__}"
            raise ValueError(f"{_FORM}, got attention, {got}: draw instead")
    for number, layer in enumerate(encoder.layers):
        _check_layer(f"layer {number} of the encoder of {type(model).__name__}", layer)
    if encoder.norm is not None and type(encoder.norm) is not nn.LayerNorm:
        raise ValueError(f"{_FORM}, got {type(encoder.norm).__name__} as its norm: draw instead")
    return encoder


def _check_layer(name: str, layer: Any) -> None:
    """Refuse what is no layer of PyTorch's with known parts."""
    usual = isinstance(layer, nn.TransformerEncoderLayer)
    wrong: str | None = None
    if not usual or layer.activation_relu_or_gelu not in (1, 2):
        wrong = "another activation than relu and gelu" if usual else type(layer).__name__
    elif not all(is_plain_linear(x) for x in (layer.linear1, layer.linear2, layer.self_attn.out_proj)):
        wrong = "linear maps with something added"
    elif not all(type(x) is nn.LayerNorm for x in (layer.norm1, layer.norm2)):
        wrong = "other norms than nn.LayerNorm"
    if wrong is not None:
        raise ValueError(f"{_FORM}, got {wrong} as {name}: draw instead")


@dataclass(eq=False)
class _Pass:
    """One pass of the encoder: its output as a leaf, and the variance of that."""

    spreads: dict[nn.Module, Callable[[AttentionCall], Tensor | None]]
    found: list[tuple[Tensor, Tensor | None, int]] = field(default_factory=list)

    def encoder(
        self,
        encoder: Any,
        own: Handler,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """What an encoder answers, as a leaf of the graph of what follows."""
        padding = src_key_padding_mask
        with torch.no_grad():
            dropped = None if mask is not None else dropped_tokens(encoder, src, padding)
            masks = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": bool(is_causal)}
            x = Moments(src.detach())
            for layer in encoder.layers:
                x = self._layer(layer, x, masks)
            if dropped is not None:
                v = x.variance
                v = None if v is None else v.masked_fill(dropped[..., None], 0.0)
                x = Moments(x.mean.masked_fill(dropped[..., None], 0.0), v)
            if encoder.norm is not None:
                x = _normed(encoder.norm, x)
        leaf = x.mean.clone().requires_grad_()
        self.found.append((leaf, x.variance, 0 if encoder.layers[0].self_attn.batch_first else 1))
        return leaf

    def _layer(self, layer: Any, x: Moments, masks: dict[str, Any]) -> Moments:
        if layer.norm_first:
            x = x + self._attention(layer.self_attn, _normed(layer.norm1, x), masks)
            return x + _feed_forward(layer, _normed(layer.norm2, x))
        x = _normed(layer.norm1, x + self._attention(layer.self_attn, x, masks))
        return _normed(layer.norm2, x + _feed_forward(layer, x))

    def _attention(self, module: Any, x: Moments, masks: dict[str, Any]) -> Moments:
        variances: list[Tensor | None] = []

        def attend(
            tokens: list[Tensor], q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, _: bool
        ) -> tuple[Tensor, None]:
            values = None
            if x.variance is not None:
                flat = x.variance if module.batch_first else x.variance.transpose(0, 1)
                values = linear(flat, split_projections(module)[0][2].square())
                values = values.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)  # [B, H, N, D]
                values = values if real is None else torch.where(real[:, None, :, None], values, 0.0)
            mean, own, weights = self._heads(module, tokens, q, k, v, real)
            variance = attention_variance(own, weights, values)
            if variance is not None:
                variance = variance.expand(mean.shape).transpose(1, 2).flatten(2)  # [B, N, E]
                variance = variance if module.batch_first else variance.transpose(0, 1)
            variances.append(variance)
            return mean.transpose(1, 2), None

        causal = isinstance(module, ConvertedMultihead) and getattr(module, ATTRIBUTE).attention.causal
        mean, _ = answer_call(
            module, "the encoder", attend, x.mean, x.mean, x.mean, need_weights=False, causal=causal, **masks
        )
        return Moments(mean, linear_variance(variances[0], module.out_proj.weight))

    def _heads(
        self, module: Any, tokens: list[Tensor], q: Tensor, k: Tensor, v: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Callable[[], Tensor]]:
        """Mean [B, H, Q, D], variance of the process [B, H, Q], and weights [B, H, Q, K] of one call."""
        if isinstance(module, ConvertedMultihead):
            layer = getattr(module, ATTRIBUTE)
            heads = layer._heads(q, k, v, queries=tokens[0], keys=tokens[1], real=real)
            attention = layer.attention
            if not attention.draws:
                return attention._mean(heads), None, lambda: attention._weights(heads)
            posterior = attention._posterior(heads, with_variance=True)
            return posterior.mean, posterior.variance, lambda: attention._weights(heads)
        shrink = q.shape[-1] ** -0.25
        # as the products below read them
        q, k = (torch.mul(x, shrink, out=x.new_empty(x.shape)) for x in (q, k))
        logits = q @ k.mT
        if real is not None:
            logits = logits.masked_fill(~real[:, None, None], -torch.inf)
        weights = logits.softmax(-1)  # [B, H, Q, K]
        mean = weights @ v
        spread = self.spreads.get(module)
        mask = None if real is None else real[:, None]
        log_std = None if spread is None else spread(AttentionCall(mean, q, k, v, mask))
        return mean, None if log_std is None else (2 * log_std).exp(), lambda: weights


def _normed(norm: Any, x: Moments) -> Moments:
    return layer_norm_moments(x, norm.weight, norm.bias, norm.eps)


def _feed_forward(layer: Any, x: Moments) -> Moments:
    hidden = linear_moments(x, layer.linear1.weight, layer.linear1.bias)
    hidden = activation_moments(hidden, "relu" if layer.activation_relu_or_gelu == 1 else "gelu")
    return linear_moments(hidden, layer.linear2.weight, layer.linear2.bias)


def host_moments(
    model: nn.Module,
    read: Callable[[Inputs], Tensor],
    inputs: Inputs,
    *,
    sites: Sequence[Site] = (),
    spread: Spread = lambda site, call: None,
    temperature: float = 1.0,
    **options: Any,
) -> Prediction:
    """The prediction of a host by moments.

    Args:
        model: around one `nn.TransformerEncoder`.
        read: the logits of a batch [B, C], by running the model.
        inputs: of any number of items.
        sites: where a handle draws; converted layers say it themselves.
        spread: of a call of a site.
        temperature: divides the logits.
        **options: of `predict_moments`.

    Returns:
        One sample, which is no draw.

    Raises:
        ValueError: for other hosts, and answers that are no logits of classes.
    """
    converted = set(converted_layers(model))
    holders = [m for m in model.modules() if not converted.isdisjoint(m.children())]
    encoder = find_encoder(model, [site.module for site in sites] or holders)

    def gaussian(part: Inputs) -> LogitGaussian:
        own = _Pass({site.module: partial(spread, site) for site in sites})
        with torch.inference_mode(False), torch.enable_grad():
            with handling({(encoder, "forward"): partial(own.encoder, encoder)}):
                logits = read(part)
            if len(own.found) != 1:
                got = f"{len(own.found)} calls of it in a pass"
                raise ValueError(f"{_FORM} that is called once, got {got}: draw instead")
            leaf, variance, axis = own.found[0]
            return gaussian_of(logits / temperature, leaf, variance, axis)

    return predict_moments(model, gaussian, inputs, **options)
