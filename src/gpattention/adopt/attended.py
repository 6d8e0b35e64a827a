"""What an intercepted attention tells, whatever library it comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gpattention.adopt.sites import Site

SHUT = -9e3  # hosts add -10,000, -1e9 or their least number to logits of padding: its weight is 0 in any type
Form: TypeAlias = Literal["softmax", "rows", "rbf", "exp_dot"]


@dataclass(frozen=True, eq=False)
class Attended:
    """One call of one site, in the units in which its weights are a function of q and k alone.

    The weights of `form` "softmax" are softmax_j(q_i . k_j), of "rows" softmax_j(-1/2 |q_i - k_j|^2), of
    "rbf" exp(-1/2 |q_i - k_j|^2) and of "exp_dot" exp(q_i . k_j), the last two not normalised.
    """

    mean: Tensor  # [B, H, Q, D] the host's own, before its output projection
    q: Tensor  # [B, H, Q, C]
    k: Tensor  # [B, H, K, C]
    v: Tensor  # [B, H, K, D]
    mask: Tensor | None = None  # [B, 1, K] True = real
    form: Form = "softmax"
    amplitude: Tensor | None = None  # [H] a factor of the weights of "rbf" and "exp_dot", None is 1


# takes a call and gives what the host goes on with, [B, H, Q, D]
Listener: TypeAlias = Callable[[Site, Attended], Tensor]


def key_mask(attend: Tensor, site: Site) -> Tensor:
    """Real keys [B, 1, K] from pairs [B or 1, 1 or H, Q or 1, K], boolean (True = attend) or added to logits.

    A mask that differs between queries or heads, or that adds finite numbers, has no such form; while a
    model is exported nobody can look.
    """
    if attend.dtype != torch.bool:
        biased = (attend != 0) & (attend > SHUT)
        if not torch.compiler.is_compiling() and bool(biased.any()):
            raise ValueError(
                f"{site.name or 'the model'}: expected a mask of padding, got one that adds numbers to the "
                "logits (relative positions or ALiBi?): that attention cannot be read as one posterior"
            )
        attend = attend == 0
    while attend.ndim < 4:
        attend = attend[None]
    keys = attend[:, :1, :1]  # [B, 1, 1, K]
    if not torch.compiler.is_compiling() and bool((attend != keys).any()):
        raise ValueError(
            f"{site.name or 'the model'}: expected a mask of padding, the same for every query and head, got "
            "one that differs (causal or windowed attention?): every query would need a posterior of its own"
        )
    return keys[:, :, 0]
