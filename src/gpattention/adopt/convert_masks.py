"""The masks of hosts as padding, True = ignore; what is more than padding is refused."""

import torch
from torch import Tensor

from gpattention.adopt.attended import SHUT
from gpattention.gp.precision import is_mapped


def ignored_keys(mask: Tensor, name: str) -> Tensor:
    """Padding [B or 1, K] from a mask a host adds to logits (0 or very negative), or from a bool one.

    `mask` is [B, K] or pairs [B or 1, 1 or H, Q or 1, K]; a bool one says True = attend.  While a model is
    exported, or mapped by `torch.func.vmap`, the values cannot be read, and are believed.
    """
    attend = mask
    if mask.dtype != torch.bool:
        attend = mask == 0
        least = SHUT if mask.is_floating_point() else 0
        _refuse((mask != 0) & (mask > least), name, "one that adds numbers to the logits")
    while attend.ndim not in (2, 4):
        attend = attend[None]
    if attend.ndim == 4:
        keys = attend[:, :1, :1]  # [B, 1, 1, K]
        _refuse(attend != keys, name, "one that differs between queries or heads (causal or windowed?)")
        attend = keys[:, 0, 0]
    return ~attend


def _refuse(wrong: Tensor, name: str, found: str) -> None:
    if torch.compiler.is_compiling() or is_mapped():
        return
    if bool(wrong.any()):
        raise ValueError(
            f"{name}: expected a mask of padding, the same for every query and head, got {found}: every "
            "query would need a posterior of its own"
        )
