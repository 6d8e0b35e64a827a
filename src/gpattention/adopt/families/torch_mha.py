"""`nn.MultiheadAttention`, alone or inside `nn.TransformerEncoderLayer`.

In evaluation mode PyTorch runs whole encoder layers as one fused operation that never calls their attention;
where a site listens they run their plain pass (`models.torch_encoders`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, scaled_dot_product_attention

from gpattention.adopt.attended import Attended, Listener, key_mask
from gpattention.adopt.sites import Site
from gpattention.gp.concurrency import Handler, handling
from gpattention.models.torch_encoders import plain_passes


@contextmanager
def intercepting(model: nn.Module, sites: Sequence[Site], listener: Listener) -> Iterator[None]:
    """Forward passes of the instances are answered here, those of encoders around them by their modules."""
    around = plain_passes(model, [site.module for site in sites])
    with handling(
        {**around, **{(site.module, "forward"): partial(_forward, site, listener) for site in sites}}
    ):
        yield


def _forward(
    site: Site,
    listener: Listener,
    own: Handler,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    module = site.module
    assert isinstance(module, nn.MultiheadAttention)
    batched = query.ndim == 3
    tokens: list[Any] = [query, key, value]
    if not batched:
        tokens = [x[None] for x in tokens]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not module.batch_first:
        tokens = [x.transpose(0, 1) for x in tokens]
    mask = _real_keys(site, key_padding_mask, attn_mask, is_causal)  # [B, 1, K] or None
    q, k, v = (_heads(x, module.num_heads) for x in _projected(module, *tokens))  # [B, H, N, D]
    attend = None if mask is None else mask[:, :, None]  # [B, 1, 1, K]
    rate = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        logits = logits if attend is None else logits.masked_fill(~attend, -torch.inf)
        weights = dropout(logits.softmax(-1), rate)  # [B, H, Q, K]
        mean = weights @ v
    else:
        mean = scaled_dot_product_attention(q, k, v, attn_mask=attend, dropout_p=rate)
    shrink = q.shape[-1] ** -0.25
    drawn = listener(site, Attended(mean, q * shrink, k * shrink, v, mask))
    # tokens first in memory, as PyTorch leaves it: dropout after it then hits the same entries
    output = module.out_proj(drawn.permute(2, 0, 1, 3).flatten(2))  # [Q, B, E]
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return output[:, 0], None if weights is None else weights[0]
    return output.transpose(0, 1) if module.batch_first else output, weights


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N, E] each."""
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    maps: tuple[Tensor, ...]
    if not module._qkv_same_embed_dim:
        maps = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        if query is key and key is value:  # one product, as PyTorch itself makes it
            q, k, v = linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
            return q, k, v
        maps = module.in_proj_weight.chunk(3)
    q, k, v = (linear(x, w, b) for x, w, b in zip((query, key, value), maps, biases, strict=True))
    return q, k, v


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, E] -> [B, H, N, D]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _real_keys(
    site: Site, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool
) -> Tensor | None:
    """[B, 1, K]"""
    if attn_mask is not None or is_causal:
        if attn_mask is None or attn_mask.ndim > 2:
            raise ValueError(
                f"{site.name or 'the model'}: expected a key_padding_mask, got "
                f"{'is_causal=True' if attn_mask is None else 'an attn_mask per head'}: "
                "every query would need a posterior of its own"
            )
        pairs = key_mask(~attn_mask if attn_mask.dtype == torch.bool else attn_mask, site)  # [1, 1, K]
    else:
        pairs = None
    if padding is None:
        return pairs
    attend = ~padding if padding.dtype == torch.bool else padding
    real = key_mask(attend[:, None, None], site)
    return real if pairs is None else real & pairs
