"""SGPA on Triton kernels: mean, variance per channel and KL, and triangular factors with a positive diagonal.

The slow reference of the first is `gp.variational`, of the second
lower.tril(-1) + diag(floor + softplus(raw)).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gpattention.numerics import broadcast, report_failures
from gpattention.ops.draws import draw_with_lead, noise_of_draw, with_draw
from gpattention.ops.launching import counter_for, kernels_of
from gpattention.ops.layout import (
    Arrays,
    allocator,
    as_two,
    launch,
    matrices,
    padded,
    room,
    rooms,
    token_major,
    vectors,
    view,
    views,
    with_lead,
)
from gpattention.ops.operators import Fused, Made

__all__ = ["SGPAMoments", "fused_sgpa", "fused_triangle", "has_no_batch"]

CHUNK = 32  # of tokens and of packed places, as in the kernels
_SPLITS = 13  # parts of a sum over the batch


class SGPAMoments(NamedTuple):
    """What the kernels give, masked.

    Attributes:
        mean: [..., N, D].
        variance: [..., N, D], None if it was not asked for.
        kl: [...].
        draw: one of every token, if it was asked for.  [1, ..., N, D]
    """

    mean: Tensor
    variance: Tensor | None
    kl: Tensor
    draw: Tensor | None = None


def has_no_batch(x: Tensor, axes: int) -> bool:
    """Whether what is left of the last axes is at most one axis of heads.

    Args:
        x: a parameter.
        axes: of one head.

    Returns:
        False where sequences differ.
    """
    return all(n == 1 for n in x.shape[: -axes - 1])


def fused_sgpa(
    x: Tensor,
    v: Tensor,
    inducing_k: Tensor,
    inducing_v: Tensor,
    scale_tril: Tensor,
    *,
    variance: Tensor | None,
    jitter: float,
    mask: Tensor | None,
    with_variance: bool,
    draw: bool = False,
) -> SGPAMoments:
    """Mean, variance (eq. 19) and KL (eq. 20) with the kernel variance * exp(-1/2 |x - y|^2).

    Args:
        x: tokens.  [..., N, C]
        v: values.  [..., N, D]
        inducing_k: inducing inputs; the heads' axis may be missing, as in the next three.  [H, m, C]
        inducing_v: their values.  [H, m, D]
        scale_tril: factors of the variational covariances.  [H, D, m, m]
        variance: of the kernel; None is 1.  [H]
        jitter: on the diagonal of the inducing Gram matrix.
        mask: which tokens are real.  [..., N]
        with_variance: whether the variance is wanted.
        draw: whether to draw every token once, with numbers of torch's own generator.

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: the inducing Gram matrix has no factor.
    """
    lead = broadcast(x.shape[:-2], v.shape[:-2])
    _, H = as_two(lead)
    made = (_DRAWN_SGPA if draw else _SGPA)(
        matrices(x, lead),
        matrices(v, lead),
        *(_per_head(t, H, axes) for t, axes in ((inducing_k, 2), (inducing_v, 2), (scale_tril, 3))),
        None if variance is None else _per_head(variance, H, 0).contiguous(),
        vectors(mask, lead),
        jitter,
        with_variance or draw,
        *([noise_of_draw(x, v, lead)] if draw else []),
    )
    drawn = draw_with_lead(made[0], lead) if draw else None
    moments = SGPAMoments(*(with_lead(part, lead) for part in made[draw:]))
    return moments._replace(draw=drawn)


def _per_head(x: Tensor, H: int, axes: int) -> Tensor:
    """[..., rest] without a batch as [H, rest], rows contiguous."""
    rest = x.shape[x.ndim - axes :]
    x = x.reshape(-1, *rest).expand(H, *rest)
    return x if axes == 0 or x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True)
class _Sizes:
    """Of the problem, of its padded matrices, of the sums over the batch and of what a call needs."""

    B: int
    H: int
    N: int
    M: int
    C: int
    D: int
    with_variance: bool

    @cached_property
    def padded(self) -> dict[str, int]:
        return {"MP": padded(self.M), "CP": padded(self.C), "DP": padded(self.D)}

    @cached_property
    def NP(self) -> int:
        return max(CHUNK, padded(self.N))

    @cached_property
    def kept(self) -> Arrays:
        """What the backward pass needs."""
        S, H, NP, (MP, CP, DP) = self.B * self.H, self.H, self.NP, self.padded.values()
        sizes = {
            "tokens_b": H * MP * CP, "origin": H * CP, "gram": H * MP * MP, "root": H * MP * MP,
            "turned": H * (CP + MP + DP) * MP, "S": H * self.D * MP * MP, "phi": S * NP * MP,
        }  # fmt: skip
        return Arrays(sizes | ({"columns": S * MP * NP} if self.with_variance else {}))

    @cached_property
    def forward(self) -> Arrays:
        """Scratch memory of the forward pass."""
        H, (MP, CP, DP) = self.H, self.padded.values()
        return Arrays({
            "packed": H * MP * (MP + 1) // 2 * DP, "terms": H * (self.D + 1),
            "tokens": self.B * H * CP * self.NP,
        })  # fmt: skip

    @cached_property
    def backward(self) -> Arrays:
        """Scratch memory of the backward pass."""
        S, NP, (MP, CP, DP) = self.B * self.H, self.NP, self.padded.values()
        record, splits, _ = self.record
        return Arrays({
            "d_phi": S * NP * MP, "weights": S * NP * MP, "cross": S * NP * MP, "tokens": S * CP * NP,
            "values": S * 2 * DP * NP, "projections": S * 3 * DP * MP,
            "token_variance": S * (NP // self.tiles("tokens_backward")["T"]),
            "sums": splits * self.H * record["RECORD"],
        })  # fmt: skip

    def tiles(self, kernel: str) -> dict[str, int]:
        """Launch options, the rows of a tile and of all tiles."""
        found = self.launch(kernel)
        return {**found, "T": min(found["T"], self.NP), "NP": self.NP}

    def launch(self, kernel: str) -> dict[str, int]:
        """Launch options; matrices wider than a chunk count as large."""
        return launch(kernel, 64 if max(self.padded.values()) <= CHUNK and self.NP <= 64 else 128)

    @cached_property
    def record(self) -> tuple[dict[str, int], int, int]:
        """Places of the sums over the batch: w^T (phi_r phi_c), three matrices; splits and their size."""
        P, tile = self.padded, self.launch("sums")["PLACES"]
        packed = -(-P["MP"] * (P["MP"] + 1) // 2 // tile) * tile
        width = max(P.values())
        length = self.with_variance * P["DP"] * packed + 3 * P["MP"] * width
        each = -(-self.B // _SPLITS)
        return {"FP": packed, "WIDTH": width, "RECORD": length}, -(-self.B // each), each


def _forward(
    x: Tensor,  # [B, H, N, C]
    v: Tensor,  # [B, H, N, D]
    b: Tensor,  # [H, m, C]
    v_b: Tensor,  # [H, m, D]
    s: Tensor,  # [H, D, m, m]
    variance: Tensor | None,  # [H] of the kernel
    mask: Tensor | None,  # [B, H, N]
    jitter: float,
    with_variance: bool,
) -> Made:
    found = kernels_of("sgpa")
    (B, H, N, C), D, m = x.shape, v.shape[3], b.shape[1]
    sizes = _Sizes(B, H, N, m, C, D, with_variance)
    P, NP, kl = sizes.padded, sizes.NP, allocator(x)(B, H)
    (state, kept), (_, scratch) = room(x, sizes.kept), room(x, sizes.forward)
    origin, turned, phi, packed = kept["origin"], kept["turned"], kept["phi"], scratch["packed"]
    info = torch.empty(H, dtype=torch.int32, device=x.device)
    mean, spread = token_major(B, H, N, D, x), token_major(B, H, N, D, x)
    found.inducing_kernel[(H, D + 1)](
        *views(b, v_b, s), variance, jitter, kept["tokens_b"], origin, kept["gram"], kept["root"], turned,
        kept["S"], packed, scratch["terms"], info, *counter_for(x.device), m, C, D,
        **P, **sizes.launch("inducing"),
    )  # fmt: skip
    report_failures(info, m, x.dtype, name="K_bb + jitter I", noise=jitter)
    tiles = sizes.tiles("features")
    found.features_kernel[(B * H, NP // tiles["T"])](
        *views(x, mask), variance, turned, origin, packed, phi, kept.get("columns", phi), view(spread),
        H, N, m, C, D, VARIANCE=with_variance, **P, **tiles,
    )  # fmt: skip
    found.mean_kernel[(B * H,)](
        *views(x, v, v_b, mask), variance, turned, origin, phi, scratch["terms"], scratch["tokens"],
        view(mean), kl, H, N, m, C, D, **P, **sizes.tiles("mean"),
    )  # fmt: skip
    return {"mean": mean, "spread": spread if with_variance else None, "kl": kl, "state": state}


def _backward(
    by_mean: Tensor | None, by_spread: Tensor | None, by_kl: Tensor | None, x: Tensor, v: Tensor,
    v_b: Tensor, s: Tensor, variance: Tensor | None, mask: Tensor | None, state: Tensor, jitter: float,
    with_variance: bool,
) -> Made:  # fmt: skip
    found = kernels_of("sgpa")
    (B, H, N, C), (m, D) = x.shape, v_b.shape[1:]
    sizes = _Sizes(B, H, N, m, C, D, with_variance)
    P, NP, empty = sizes.padded, sizes.NP, allocator(x)
    kept, (_, scratch) = rooms(state, sizes.kept), room(x, sizes.backward)
    tokens_b, origin, phi, root = kept["tokens_b"], kept["origin"], kept["phi"], kept["root"]
    d_phi, weights, cross, tokens, values, projections, token_variance, sums = scratch.values()
    by_mean = token_major(B, H, N, D, x).zero_() if by_mean is None else by_mean
    by_kl = empty(B, H).zero_() if by_kl is None else by_kl
    if with_variance and by_spread is None:
        by_spread = token_major(B, H, N, D, x).zero_()
    to_mean, to_spread, to_kl = views(by_mean, by_mean if by_spread is None else by_spread, by_kl)
    d_x, d_v = token_major(B, H, N, C, x), token_major(B, H, N, D, x)
    d_b, d_v_b, d_s, d_variance = empty(H, m, C), empty(H, m, D), empty(H, D, m, m), empty(H)
    if with_variance:
        tiles = sizes.tiles("features_backward")
        found.features_backward_kernel[(B * H, NP // tiles["T"])](
            to_spread, view(mask), variance, kept["S"], kept["columns"], d_phi, H, N, D,
            MP=P["MP"], DP=P["DP"], **tiles,
        )  # fmt: skip
    found.turns_kernel[(B * H,)](
        to_mean, to_kl, *views(x, v, mask), phi, tokens, values, projections, H, N, C, D,
        NP=NP, **P, **sizes.launch("turns"),
    )  # fmt: skip
    tiles = sizes.tiles("tokens_backward")
    parts = NP // tiles["T"]
    found.tokens_backward_kernel[(B * H, parts)](
        to_mean, to_spread, to_kl, *views(x, v, mask), variance, tokens_b, kept["turned"], origin, root, phi,
        tokens, values, projections, d_phi, weights, cross, token_variance, *views(d_x, d_v),
        H, N, m, C, D, VARIANCE=with_variance, **P, **tiles,
    )  # fmt: skip
    (record, splits, per_split), options = sizes.record, sizes.launch("sums")
    tasks = with_variance * record["FP"] // options["PLACES"]
    found.sums_kernel[(H, tasks + 3, splits)](
        to_mean, to_spread, *views(x, mask), tokens_b, origin, phi, d_phi, weights, cross, sums,
        B, per_split, H, N, C, D, TILES=tasks, NP=NP, **record, **P, **options,
    )  # fmt: skip
    found.inducing_backward_kernel[(H, D + 1)](
        *views(v_b, s), variance, jitter, tokens_b, kept["gram"], root, sums, to_kl, token_variance,
        d_b, d_v_b, d_s, d_variance, B, B * parts, splits, H, m, C, D,
        VARIANCE=with_variance, **record, **P, **sizes.launch("inducing_backward"),
    )  # fmt: skip
    return {
        "x": d_x, "v": d_v, "b": d_b, "v_b": d_v_b, "s": d_s,
        "variance": None if variance is None else d_variance,
    }  # fmt: skip


_SGPA = Fused("sgpa", _forward, ("mean", "spread", "kl"), _backward)
_DRAWN_SGPA = with_draw(_SGPA, "spread", squared=True)


_COUNT = 512


def fused_triangle(lower: Tensor, raw: Tensor, floor: float) -> Tensor:
    """Lower triangular matrices whose diagonal is floor + softplus(raw).

    Args:
        lower: what lies below the diagonal counts.  [..., m, m]
        raw: [..., m].
        floor: the least a diagonal holds.

    Returns:
        [..., m, m].
    """
    found: Tensor
    (found,) = _TRIANGLE(lower, raw, floor)
    return found


def _triangle(lower: Tensor, raw: Tensor, floor: float) -> Made:
    lower, raw = lower.contiguous(), raw.contiguous()
    out = torch.empty_like(lower)
    kernels_of("sgpa").triangle_kernel[(-(-lower.numel() // _COUNT),)](
        lower, raw, out, floor, lower.shape[-1], lower.numel(), COUNT=_COUNT
    )
    return {"triangle": out}


def _triangle_backward(by_triangle: Tensor, raw: Tensor) -> Made:
    g, raw = by_triangle.contiguous(), raw.contiguous()
    d_lower, d_raw = torch.empty_like(g), torch.empty_like(raw)
    kernels_of("sgpa").triangle_backward_kernel[(-(-g.numel() // _COUNT),)](
        g, raw, d_lower, d_raw, g.shape[-1], g.numel(), COUNT=_COUNT
    )
    return {"lower": d_lower, "raw": d_raw}


_TRIANGLE = Fused("triangle", _triangle, ("triangle",), _triangle_backward)
