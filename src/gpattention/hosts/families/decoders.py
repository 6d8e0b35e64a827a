"""Attention of decoders in Hugging Face's transformers: the keys that each row sees.

A row of a decoder conditions on the keys up to its own, possibly in windows or segments, and several heads of
queries may share a head of keys.  `causal_call` finds this from one call of the attention function: from its
mask, or from the rule of the function if it has none.

    softmax over visible keys, and over a sink s_h where the head has one:  w_ij = exp(q_i . k_j - lse_i),
    lse_i = log(sum_j exp(q_i . k_j) + exp(s_h))

A sink has weight but no value: the weights are a_i b_j kappa as in eq. 21, with the sink in a_i.
Soft-capped logits, c tanh(q . k / c), are not dot products: then the process is that of the logits before the
cap, around the mean of those after it, and has no `process_mean`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gpattention.gp import Sight
from gpattention.hosts.families import base
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.models.converted import MASKED_LOGIT, refused_call

Attends: TypeAlias = Literal["all", "causal", "cross"]

# reasons against encoders with which decoders can be read
_READABLE = {base.CAUSAL, base.GROUPED, base.SLIDING, base.CROSS, base.CAPPED, base.SINKS}
_ROWS = 1024  # queries whose logits are in memory at once


def decoding(module: nn.Module, reasons: Sequence[str]) -> Attends | None:
    """How a decoder's module attends, by the reasons against reading it as an encoder's; None if unreadable.

    Args:
        module: the attention module.
        reasons: refusals of `base`.

    Returns:
        "causal" for keys up to the query's own, "cross" for all keys of another sequence.
    """
    if not reasons or not _READABLE.issuperset(reasons):
        return None
    decodes = base.is_set(module, "is_decoder")
    if base.CROSS in reasons or (decodes and getattr(module, "is_causal", None) is False):
        return "cross"
    return "causal" if base.CAUSAL in reasons else None


class Past:
    """The keys that rows of causal attention see, for all calls of a pass with one mask.

    Args:
        visible: [B or 1, Q, K] True = seen; None for rows that end with the last key.
        queries: Q.
        keys: K.
        device: of the tokens.
    """

    def __init__(self, visible: Tensor | None, queries: int, keys: int, device: torch.device) -> None:
        self.visible, self.queries, self.keys, self.device = visible, queries, keys, device
        self._sights: dict[tuple[int, int], Sight] = {}

    def sight(self, max_keys: int, times: int = 1) -> Sight:
        """Groups of rows that can share a factor, for all sites, `times` of which are computed together."""
        visible = self.visible
        times = 1 if visible is None or len(visible) == 1 else times
        if (max_keys, times) not in self._sights:
            numbers: dict[str, Any] = {"queries": self.queries, "keys": self.keys, "device": self.device}
            visible = visible.repeat(times, 1, 1) if visible is not None and times > 1 else visible
            self._sights[max_keys, times] = Sight(visible, max_keys=max_keys, **numbers)
        return self._sights[max_keys, times]

    def rows(self, start: int, stop: int) -> Tensor:
        """The keys that some rows see.  [B or 1, 1, rows, K]"""
        if self.visible is not None:
            return self.visible[:, None, start:stop]
        place = torch.arange(self.keys, device=self.device)
        own = torch.arange(start, stop, device=self.device) + self.keys - self.queries
        return (place <= own[:, None])[None, None]

    @property
    def seen(self) -> Tensor:
        """Rows that see a key.  [B or 1, 1, Q]"""
        return self.rows(0, self.queries).any(-1)

    @cached_property
    def real(self) -> Tensor | None:
        """Keys that some row sees, None if all are.  [B or 1, 1, K]"""
        return None if self.visible is None else self.visible.any(-2)[:, None]

    def log_sum_exp(self, call: AttentionCall, q: Tensor, k: Tensor) -> Tensor:
        """lse_i over the keys that row i sees, and its sink; finite if it sees none.  [B, H, Q]"""
        k = call.per_query_head(k)
        parts = [self._masked(call, rows, k, start).logsumexp(-1) for start, rows in _blocks(q)]
        return torch.cat(parts, -1)

    def entropy(self, call: AttentionCall) -> Tensor:
        """The entropy of the weights, including a sink's, in nats.  [B, H, Q]"""
        parts, k = [], call.per_query_head(call.k.float())
        for start, rows in _blocks(call.q.float()):
            z = self._masked(call, rows, k, start)
            z = z - z.amax(-1, keepdim=True)
            w = z.softmax(-1)
            parts.append(-(w * z).sum(-1) - w.amax(-1).log())
        return torch.cat(parts, -1)

    def log_unit(self, v: Tensor) -> Tensor:
        """log of the root mean square of the values that each row sees: nothing looks ahead.  [B, G, Q]"""
        power = v.square().mean(-1)[..., None]  # [B, G, K, 1]
        visible = self.rows(0, self.queries).to(v.dtype)  # [B, 1, Q, K]
        mean = (visible @ power)[..., 0] / visible.sum(-1).clamp_min(1)  # [B, G, Q]
        return 0.5 * mean.clamp_min(1e-12).log()

    def _masked(self, call: AttentionCall, rows: Tensor, k: Tensor, start: int) -> Tensor:
        """Logits of some rows, then the sink's; those of keys that are not seen are very small."""
        logits = rows @ k.mT  # [B, H, rows, K]
        if call.cap is not None:
            logits = call.cap * (logits / call.cap).tanh()
        logits = logits.masked_fill(~self.rows(start, start + rows.shape[-2]), -1e30)
        if call.sink is None:
            return logits
        sink = call.sink.to(logits)[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1)


def _blocks(q: Tensor) -> list[tuple[int, Tensor]]:
    """Some rows at a time, with the number of the first."""
    return [(start, q[..., start : start + _ROWS, :]) for start in range(0, q.shape[-2], _ROWS)]


# by shapes and by mask, which is kept as long as its id is used
Pasts: TypeAlias = dict[tuple[int, int, int, bool], tuple[Tensor | None, Past]]


def causal_call(
    site: Site,
    pasts: Pasts,
    mean: Tensor,  # [B, H, Q, D]
    query: Tensor,  # [B, H, Q, C]
    key: Tensor,  # [B, G, K, C]
    value: Tensor,  # [B, G, K, D]
    attention_mask: Tensor | None,
    arguments: Mapping[str, Any],
) -> AttentionCall:
    """One call of a decoder's attention function.

    Args:
        site: of the call.
        pasts: of this pass, shared by calls with the same mask.
        mean: the host's result.
        query: as it attends, after any rotation.
        key: likewise, those of a cache among them.
        value: likewise.
        attention_mask: None, or of pairs.
        arguments: further ones of the function.

    Returns:
        The call, with its past.

    Raises:
        ValueError: the mask adds numbers to the logits, or differs between heads.
    """
    if arguments.get("position_bias") is not None:
        raise refused_call(site.title, "attention of queries and keys alone", "a position bias")
    queries, groups, all_seen = query.shape[2], query.shape[1] // key.shape[1], False
    if attention_mask is None:
        causal = arguments.get("is_causal")
        causal = getattr(site.module, "is_causal", True) if causal is None else causal
        fused = getattr(site.module.config, "_attn_implementation", None) == "sdpa"
        all_seen = not (fused and causal)
        if queries > 1 and not all_seen:  # a cache may hold room for tokens that are still to come
            key, value = key[:, :, :queries], value[:, :, :queries]
    named = (id(attention_mask), queries, key.shape[2], all_seen)
    if named not in pasts:
        visible = None
        if attention_mask is not None:
            visible = visible_pairs(attention_mask, site.title).expand(-1, queries, -1)
        elif all_seen and queries > 1:
            visible = torch.ones(1, queries, key.shape[2], dtype=torch.bool, device=key.device)
        pasts[named] = (attention_mask, Past(visible, queries, key.shape[2], query.device))
    past = pasts[named][1]
    sink = arguments.get("s_aux")
    sink = getattr(site.module, "sinks", None) if sink is None else sink
    call = AttentionCall.scaled(mean, query, key, value, None, arguments.get("scaling"))
    extra: dict[str, Any] = {"groups": groups, "sink": sink, "cap": arguments.get("softcap")}
    extra["window"] = arguments.get("sliding_window")
    return replace(call, mask=past.real, past=past, **extra)


def visible_pairs(mask: Tensor, name: str) -> Tensor:
    """The keys that every query sees, from a mask of pairs in any of the forms that hosts use.

    Args:
        mask: [B, K], [B or 1, 1 or H, Q or 1, K]; True = attend if it is bool, else added to logits, 0 or
            very negative.
        name: of the site, for errors.

    Returns:
        [B or 1, Q or 1, K] True = seen.

    Raises:
        ValueError: for a mask that adds numbers to the logits, or differs between heads.
    """
    attend = mask
    if mask.dtype != torch.bool:
        attend = mask == 0
        if not mask.is_floating_point():
            attend = ~attend  # 1 = attend
        elif bool(((mask != 0) & (mask > MASKED_LOGIT)).any()):
            expected = f"{name}: expected a mask that hides keys or shows them"
            raise ValueError(f"{expected}, got one that adds numbers to the logits")
    if attend.ndim == 2:
        return attend[:, None]
    if attend.ndim != 4:
        raise ValueError(f"{name}: expected a mask of 2 or 4 axes, got shape {tuple(mask.shape)}")
    if attend.shape[1] > 1 and bool((attend != attend[:, :1]).any()):
        raise ValueError(f"{name}: expected one mask for all heads, got one that differs between them")
    return attend[:, 0]
