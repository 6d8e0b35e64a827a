"""Positive parameters, and initial projections that make attention say something at step 0.

With nn.Linear's own initialisation kappa(q, k) is about 1e-4 at head width 32: kernel attention is
switched off and its posterior is the prior.  Spreading queries and keys evenly over all d dimensions
cannot help: a distance in many dimensions concentrates, so kappa is the same for every pair.  Instead a
few `ACTIVE` dimensions per head carry standard deviation `SPREAD`, the rest a little, which training may
raise.  For LayerNorm'ed tokens then, whatever the width of the head:
    E kappa = (1 + 2 s^2)^(-r/2) = 0.11,   E kappa^2 / (E kappa)^2 = ((1 + 2 s^2)^2 / (1 + 4 s^2))^(r/2) = 3.2
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

NOISE_FLOOR = 1e-4  # the least sigma^2 at which float32 is safe up to 1024 tokens


class Positive(nn.Module):
    """floor + softplus(raw): positive by construction, learned or fixed.

    Args:
        shape: of the values.
        initial: all of them at first.
        floor: what they stay above.
        learned: whether they are trained.
        name: what errors call the initial value.
        device: where they live.
        dtype: their type.

    Raises:
        ValueError: if the initial value is not above the floor, or not finite in its type.

    >>> noise = Positive((heads,), 0.01, floor=1e-4)
    >>> noise()  # [H]
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        initial: float,
        *,
        floor: float = 0.0,
        learned: bool = True,
        name: str = "the initial value",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kept_as = dtype or torch.get_default_dtype()
        if not floor < initial <= torch.finfo(kept_as).max:
            expected = f"expected {name} to be finite and above the floor {floor}"
            raise ValueError(f"{expected}, got {initial} as {kept_as}")
        self.floor = floor
        excess = initial - floor
        raw = torch.full(shape, excess + math.log(-math.expm1(-excess)), device=device, dtype=dtype)
        if learned:
            self.raw = nn.Parameter(raw)
        else:
            self.register_buffer("raw", raw)

    def forward(self) -> Tensor:
        """The positive values, at least in float32: half precision would round them to the floor."""
        raw = self.raw.float() if self.raw.dtype in (torch.float16, torch.bfloat16) else self.raw
        return softplus(raw) if self.floor == 0 else self.floor + softplus(raw)

    def raw_of(self, value: Tensor | float) -> Tensor:
        """What `raw` has to be for these values, in float64: the inverse of `forward`."""
        excess = torch.as_tensor(value, dtype=torch.float64, device=self.raw.device) - self.floor
        if not bool((excess > 0).all()):
            raise ValueError(f"expected values above the floor {self.floor}, got {value}")
        return excess + (-(-excess).expm1()).log()

    @torch.no_grad()
    def set(self, value: Tensor | float) -> None:
        """Give it a value, e.g. a warm start's."""
        self.raw.copy_(self.raw_of(value).expand(self.raw.shape))

    def extra_repr(self) -> str:
        """Shape and floor in the module's print-out."""
        fixed = "" if isinstance(self.raw, nn.Parameter) else ", fixed"
        return f"{tuple(self.raw.shape)}, floor={self.floor}{fixed}"


ACTIVE = 4
SPREAD = 1.0
BACKGROUND = 0.1  # squared distance the other dimensions add, in all


@torch.no_grad()
def spread_(linear: nn.Linear, num_heads: int, *, scale: float = 1.0) -> None:
    """Initialise a projection to queries, keys or latent inputs of all heads; the bias is zero."""
    width, head_dim = linear.in_features, linear.out_features // num_heads
    weight = torch.randn(num_heads, head_dim, width) / math.sqrt(width)
    weight = scale * _deviation(head_dim)[:, None] * weight  # [H, D, E]
    linear.weight.copy_(weight.reshape(-1, width))
    if linear.bias is not None:
        linear.bias.zero_()


@torch.no_grad()
def latent_points(num_heads: int, count: int, head_dim: int) -> torch.Tensor:
    """Random inducing inputs where the projections of `spread_` put the tokens.  [H, m, D]"""
    return _deviation(head_dim) * torch.randn(num_heads, count, head_dim)


def _deviation(head_dim: int) -> torch.Tensor:
    """Standard deviations of a head's dimensions: few active ones, a little in the rest.  [D]"""
    active = min(ACTIVE, head_dim)
    deviation = torch.full((head_dim,), math.sqrt(BACKGROUND / (2 * head_dim)))
    deviation[:active] = SPREAD * math.sqrt(ACTIVE / active)
    return deviation


@torch.no_grad()
def preserve_(linear: nn.Linear) -> None:
    """Initialise a projection of values or outputs to keep the size of LayerNorm'ed tokens."""
    nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))
    if linear.bias is not None:
        linear.bias.zero_()


def refuse_unused(owner: type, when: str, /, **given: Any) -> None:
    """Refuse a value other than the one `owner`'s constructor has by itself; `when` names the mode.

    >>> refuse_unused(CGPAttention, "where regularizer is 'kl'", latent_prior=latent_prior)
    """
    known = inspect.signature(owner).parameters
    for name, value in given.items():
        usual = known[name].default
        if value != usual:
            expected = f"expected {name} to be {usual!r}, its default, {when}"
            raise ValueError(f"{expected}, since it would have no effect, got {value!r}")
