"""One number per item and layer: how uncertain its attention is, whatever the number of heads and tokens."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpattention.models.rows import Inputs


def layer_means(variances: Sequence[Tensor | None], padding: Tensor | None) -> Tensor | None:
    """Means over heads, real tokens and dimensions of those layers that have a variance.  [B, L]

    Variances are [B, H, N] or [B, H, N, D], and 0 at padded tokens; `padding` [B, N] is True there.
    """
    told = [token_means(variance) for variance in variances if variance is not None]
    if not told:
        return None
    each = torch.stack(told, 1)  # [B, L, N]
    if padding is None:
        return each.mean(-1)
    return each.sum(-1) / (~padding).sum(-1, keepdim=True).clamp_min(1).to(each)


def token_means(variance: Tensor) -> Tensor:
    """Mean over heads, and over dimensions where there are any.  [B, N]"""
    return (variance.mean(-1) if variance.ndim == 4 else variance).mean(1)


def padding_of(inputs: Inputs) -> Tensor | None:
    """Which tokens of sentences are padding; images have none.  [B, N]"""
    if not isinstance(inputs, Mapping) or "tokens" not in inputs:
        return None
    padding = inputs.get("padding_mask")
    return inputs["tokens"] == 0 if padding is None else padding
