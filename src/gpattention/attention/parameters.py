"""Parameters that are positive by construction, one per head."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

NOISE_FLOOR = 1e-4  # the least sigma^2 at which float32 is safe up to 1024 tokens


class Positive(nn.Module):
    """floor + softplus(raw): learned, or fixed when `learned=False`.

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
        name: str = "the initial value",  # what the caller calls it
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kept_as = dtype or torch.get_default_dtype()
        if not floor < initial <= torch.finfo(kept_as).max:
            raise ValueError(
                f"expected {name} to be finite and above the floor {floor}, got {initial} as {kept_as}"
            )
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

    @torch.no_grad()
    def set(self, value: Tensor | float) -> None:
        """Give it a value, e.g. a warm start's."""
        excess = torch.as_tensor(value, dtype=torch.float64, device=self.raw.device) - self.floor
        if not bool((excess > 0).all()):
            raise ValueError(f"expected values above the floor {self.floor}, got {value}")
        self.raw.copy_((excess + (-(-excess).expm1()).log()).expand(self.raw.shape))

    def extra_repr(self) -> str:
        """Shape and floor in the module's print-out."""
        fixed = "" if isinstance(self.raw, nn.Parameter) else ", fixed"
        return f"{tuple(self.raw.shape)}, floor={self.floor}{fixed}"
