"""The tokens of one call: who attends to whom, and which of them are padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.gp.inputs import keep_rows


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Queries, keys and values with the batch first, checked; masks are True at real tokens."""

    query: Tensor  # [B, Q, E]
    key: Tensor  # [B, K, E]
    value: Tensor  # [B, K, E]
    mask: Tensor | None  # [B, 1, K]
    query_mask: Tensor | None  # [B, 1, Q]
    one_set: bool  # queries are the keys, under one mask
    values_are_keys: bool
    unbatched: bool  # they came as [N, E]


def call_tokens(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_padding: Tensor | None,
    query_padding: Tensor | None,
    *,
    embed_dim: int,
    batch_first: bool,
    causal: bool,
) -> CallTokens:
    """What `Attention.forward` was given; the query itself as key is self-attention, as no key is."""
    if value is not None and key is None:
        raise ValueError("a value without a key: pass the key too")
    one_set = attends_to_itself(query, key) and (query_padding is None or query_padding is key_padding)
    values_are_keys = value is None or value is key
    key = query if key is None else key
    value = key if value is None else value
    unbatched = query.ndim == 2
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.ndim != (2 if unbatched else 3) or x.shape[-1] != embed_dim:
            raise ValueError(
                f"expected {name} of shape [B, N, {embed_dim}] (or all unbatched), got {tuple(x.shape)}"
            )
    if unbatched:
        query, key, value = (x[None] for x in (query, key, value))
        key_padding = None if key_padding is None else key_padding[None]
        query_padding = None if query_padding is None else query_padding[None]
    elif not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    _check_counts(query, key, value, causal=causal)
    mask = _as_real(key_padding, key, "key_padding_mask")
    if one_set:
        query_mask = mask
    elif query_padding is None and mask is not None:
        # said in full: the GP functions read None as the keys' mask where the numbers agree
        query_mask = mask.new_ones(query.shape[0], 1, query.shape[1])
    else:
        query_mask = _as_real(query_padding, query, "query_padding_mask")
    keys = _real_rows(key, mask)
    return CallTokens(
        query=keys if one_set else _real_rows(query, query_mask),
        key=keys,
        value=keys if values_are_keys else _real_rows(value, mask),
        mask=mask,
        query_mask=query_mask,
        one_set=one_set,
        values_are_keys=values_are_keys,
        unbatched=unbatched,
    )


def attends_to_itself(query: Tensor, key: Tensor | None) -> bool:
    """`attention(x)`, or `attention(x, x, x)` as `nn.MultiheadAttention` is called."""
    return key is None or key is query


def _check_counts(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> None:
    if key.shape[0] != query.shape[0] or value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"expected one batch size, and as many values as keys, got query of {list(query.shape[:2])}, "
            f"key of {list(key.shape[:2])} and value of {list(value.shape[:2])} sequences and tokens"
        )
    if causal and query.shape[1] != key.shape[1]:
        # fewer queries may be the last tokens of the key or the first: nothing here tells which
        raise ValueError(
            f"expected query with as many tokens as key, since causal=True lets token i of query see key up "
            f"to i, got query of {query.shape[1]} tokens and key of {key.shape[1]}"
        )


def _as_real(padding: Tensor | None, tokens: Tensor, name: str) -> Tensor | None:
    """True = ignore [B, N] becomes True = real [B, 1, N]."""
    if padding is None:
        return None
    if padding.dtype != torch.bool or padding.shape != tokens.shape[:2]:
        raise ValueError(
            f"expected {name} to be bool (True = ignore) of shape {list(tokens.shape[:2])}, "
            f"got shape {tuple(padding.shape)} and {padding.dtype}"
        )
    return ~padding[:, None]


def _real_rows(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Padding overwritten before it is projected: a weight's gradient is 0 times what is written there."""
    return tokens if mask is None else keep_rows(tokens, mask[:, 0])
