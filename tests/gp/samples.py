"""Seeded random inputs for the tests of the mathematics, and their way to the NumPy oracles."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

SHARED = ("inducing_q", "inducing_k", "inducing_v", "scale_tril")  # by all sequences and heads


@dataclass(frozen=True)
class Sample:
    """One attention problem; all but what is shared carry the same leading axes."""

    q: Tensor  # [..., Q, C]
    k: Tensor  # [..., K, C]
    o: Tensor  # [..., K, C]
    v: Tensor  # [..., K, D]
    inducing_q: Tensor  # [m, C]
    inducing_k: Tensor  # [l, C]
    log_amplitude: Tensor  # [..., Q]
    mask: Tensor  # [..., K]
    query_mask: Tensor  # [..., Q]
    inducing_v: Tensor  # [l, D] values and factors of SGPA
    scale_tril: Tensor  # [D, l, l]

    def to(self, dtype: torch.dtype) -> "Sample":
        """The same numbers in another floating-point type."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Sample(**{n: x.to(dtype) if x.is_floating_point() else x for n, x in moved.items()})

    def at(self, *index: int) -> dict[str, np.ndarray]:
        """One sequence and head as NumPy float64, for an oracle."""
        found = {}
        for f in fields(self):
            x = getattr(self, f.name)
            x = x if f.name in SHARED else x[index]
            found[f.name] = x.detach().double().numpy() if x.is_floating_point() else x.numpy()
        return found


def sample(
    *lead: int,
    queries: int = 7,
    keys: int = 7,
    width: int = 3,
    channels: int = 4,
    inducing: tuple[int, int] = (5, 6),
    spread: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Sample:
    """Standard normal tokens times `spread`; masks keep about two thirds, at least one token."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def kept(n: int) -> Tensor:
        mask = torch.rand(*lead, n, generator=g) > 0.35
        mask[..., 0] = True
        return mask

    found = Sample(
        q=spread * normal(*lead, queries, width),
        k=spread * normal(*lead, keys, width),
        o=spread * normal(*lead, keys, width),
        v=normal(*lead, keys, channels),
        inducing_q=spread * normal(inducing[0], width),
        inducing_k=spread * normal(inducing[1], width),
        log_amplitude=0.3 * normal(*lead, queries),
        mask=kept(keys),
        query_mask=kept(queries),
        inducing_v=normal(inducing[1], channels),
        scale_tril=0.3 * normal(channels, inducing[1], inducing[1]).tril(-1),
    )
    found.scale_tril.diagonal(dim1=-2, dim2=-1).copy_((0.3 * normal(channels, inducing[1])).exp())
    return found
