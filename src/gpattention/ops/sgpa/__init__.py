"""SGPA on Triton kernels: mean, variance per channel and KL, and triangular factors with a positive diagonal.

The slow reference of the first is `gp.variational`, of the second
lower.tril(-1) + diag(floor + softplus(raw)).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpattention.numerics import broadcast, report_failures
from gpattention.ops.layout import (
    allocator,
    as_two,
    launch,
    matrices,
    padded,
    token_major,
    vectors,
    view,
    views,
    with_lead,
)
from gpattention.ops.operators import Fused, Made, counter_for, kernels_of

__all__ = ["SGPAMoments", "fused_sgpa", "fused_triangle", "has_no_batch"]

CHUNK = 32  # of tokens and of packed places, as in the kernels
_SPLITS = 13  # parts of a sum over the batch


class SGPAMoments(NamedTuple):
    """What the kernels give, masked.

    Attributes:
        mean: [..., N, D].
        variance: [..., N, D], None if it was not asked for.
        kl: [...].
    """

    mean: Tensor
    variance: Tensor | None
    kl: Tensor


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

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: the inducing Gram matrix has no factor.
    """
    lead = broadcast(x.shape[:-2], v.shape[:-2])
    _, H = as_two(lead)
    mean, found, kl = _SGPA(
        matrices(x, lead),
        matrices(v, lead),
        *(_per_head(t, H, axes) for t, axes in ((inducing_k, 2), (inducing_v, 2), (scale_tril, 3))),
        None if variance is None else _per_head(variance, H, 0).contiguous(),
        vectors(mask, lead),
        jitter,
        with_variance,
    )
    return SGPAMoments(with_lead(mean, lead), with_lead(found, lead), with_lead(kl, lead))


def _per_head(x: Tensor, H: int, axes: int) -> Tensor:
    """[..., rest] without a batch as [H, rest], rows contiguous."""
    rest = x.shape[x.ndim - axes :]
    x = x.reshape(-1, *rest).expand(H, *rest)
    return x if axes == 0 or x.stride(-1) == 1 else x.contiguous()


class _Sizes(NamedTuple):
    """Of the problem, of its padded matrices and of the sums over the batch."""

    B: int
    H: int
    N: int
    M: int
    C: int
    D: int

    @property
    def padded(self) -> dict[str, int]:
        return {"MP": padded(self.M), "CP": padded(self.C), "DP": padded(self.D)}

    @property
    def NP(self) -> int:
        return max(CHUNK, padded(self.N))

    def tiles(self, kernel: str) -> dict[str, int]:
        """Launch options, the rows of a tile and of all tiles."""
        found = self.launch(kernel)
        return {**found, "T": min(found["T"], self.NP), "NP": self.NP}

    def launch(self, kernel: str) -> dict[str, int]:
        """Launch options; matrices wider than a chunk count as large."""
        return launch(kernel, 64 if max(self.padded.values()) <= CHUNK and self.NP <= 64 else 128)

    def record(self, with_variance: bool) -> dict[str, int]:
        """Places of the sums over the batch: w^T (phi_r phi_c), then three matrices."""
        P, tile = self.padded, self.launch("sums")["PLACES"]
        packed = -(-P["MP"] * (P["MP"] + 1) // 2 // tile) * tile
        width = max(P.values())
        length = with_variance * P["DP"] * packed + 3 * P["MP"] * width
        return {"FP": packed, "WIDTH": width, "RECORD": length}


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
    sizes = _Sizes(B, H, N, m, C, D)
    P, NP, empty = sizes.padded, sizes.NP, allocator(x)
    MP, CP, DP = P["MP"], P["CP"], P["DP"]
    tokens_b, origin = empty(H, MP, CP), empty(H, CP)
    gram, root, S = empty(H, MP, MP), empty(H, MP, MP), empty(H, D, MP, MP)
    turned, tokens = empty(H, CP + MP + DP, MP), empty(B * H, CP, NP)
    packed, terms = empty(H, MP * (MP + 1) // 2, DP), empty(H, D + 1)
    info = torch.empty(H, dtype=torch.int32, device=x.device)
    phi, kl = empty(B * H, NP, MP), empty(B, H)
    columns = empty(B * H, MP, NP) if with_variance else None
    mean, spread = token_major(B, H, N, D, x), token_major(B, H, N, D, x)
    found.inducing_kernel[(H, D + 1)](
        *views(b, v_b, s), variance, jitter, tokens_b, origin, gram, root, turned, S, packed, terms, info,
        *counter_for(x.device), m, C, D, **P, **sizes.launch("inducing"),
    )  # fmt: skip
    report_failures(info, m, x.dtype, name="K_bb + jitter I", noise=jitter)
    tiles = sizes.tiles("features")
    found.features_kernel[(B * H, NP // tiles["T"])](
        *views(x, mask), variance, turned, origin, packed, phi, phi if columns is None else columns,
        view(spread), H, N, m, C, D, VARIANCE=with_variance, **P, **tiles,
    )  # fmt: skip
    found.mean_kernel[(B * H,)](
        *views(x, v, v_b, mask), variance, turned, origin, phi, terms, tokens, view(mean), kl,
        H, N, m, C, D, **P, **sizes.tiles("mean"),
    )  # fmt: skip
    return {
        "mean": mean, "spread": spread if with_variance else None, "kl": kl,
        "tokens_b": tokens_b, "turned": turned, "origin": origin, "gram": gram, "root": root, "S": S,
        "phi": phi, "columns": columns,
    }  # fmt: skip


def _backward(
    by_mean: Tensor | None, by_spread: Tensor | None, by_kl: Tensor | None, x: Tensor, v: Tensor,
    v_b: Tensor, s: Tensor, variance: Tensor | None, mask: Tensor | None, tokens_b: Tensor, turned: Tensor,
    origin: Tensor, gram: Tensor, root: Tensor, S: Tensor, phi: Tensor, columns: Tensor | None,
    jitter: float, with_variance: bool,
) -> Made:  # fmt: skip
    found = kernels_of("sgpa")
    (B, H, N, C), (m, D) = x.shape, v_b.shape[1:]
    sizes = _Sizes(B, H, N, m, C, D)
    P, NP, empty = sizes.padded, sizes.NP, allocator(x)
    by_mean = token_major(B, H, N, D, x).zero_() if by_mean is None else by_mean
    by_kl = empty(B, H).zero_() if by_kl is None else by_kl
    if with_variance and by_spread is None:
        by_spread = token_major(B, H, N, D, x).zero_()
    to_mean, to_spread, to_kl = views(by_mean, by_mean if by_spread is None else by_spread, by_kl)
    d_phi, weights, cross = (empty(B * H, NP, P["MP"]) for _ in range(3))
    tokens, values = empty(B * H, P["CP"], NP), empty(B * H, 2, P["DP"], NP)
    d_x, d_v = token_major(B, H, N, C, x), token_major(B, H, N, D, x)
    d_b, d_v_b, d_s = empty(H, m, C), empty(H, m, D), empty(H, D, m, m)
    projections, d_variance = empty(B * H, 3, P["DP"], P["MP"]), empty(H)
    if with_variance:
        tiles = sizes.tiles("features_backward")
        found.features_backward_kernel[(B * H, NP // tiles["T"])](
            to_spread, view(mask), variance, S, columns, d_phi, H, N, D, MP=P["MP"], DP=P["DP"], **tiles
        )
    found.turns_kernel[(B * H,)](
        to_mean, to_kl, *views(x, v, mask), phi, tokens, values, projections, H, N, C, D,
        NP=NP, **P, **sizes.launch("turns"),
    )  # fmt: skip
    tiles = sizes.tiles("tokens_backward")
    parts = NP // tiles["T"]
    token_variance = empty(B, parts, H)
    found.tokens_backward_kernel[(B * H, parts)](
        to_mean, to_spread, to_kl, *views(x, v, mask), variance, tokens_b, turned, origin, root, phi,
        tokens, values, projections, d_phi, weights, cross, token_variance, *views(d_x, d_v),
        H, N, m, C, D, VARIANCE=with_variance, **P, **tiles,
    )  # fmt: skip
    record, per_split = sizes.record(with_variance), -(-B // _SPLITS)
    options = sizes.launch("sums")
    splits, tasks = -(-B // per_split), with_variance * record["FP"] // options["PLACES"]
    sums = empty(splits, H, record["RECORD"])
    found.sums_kernel[(H, tasks + 3, splits)](
        to_mean, to_spread, *views(x, mask), tokens_b, origin, phi, d_phi, weights, cross, sums,
        B, per_split, H, N, C, D, TILES=tasks, NP=NP, **record, **P, **options,
    )  # fmt: skip
    found.inducing_backward_kernel[(H, D + 1)](
        *views(v_b, s), variance, jitter, tokens_b, gram, root, sums, to_kl, token_variance,
        d_b, d_v_b, d_s, d_variance, B, B * parts, splits, H, m, C, D,
        VARIANCE=with_variance, **record, **P, **sizes.launch("inducing_backward"),
    )  # fmt: skip
    return {
        "x": d_x, "v": d_v, "b": d_b, "v_b": d_v_b, "s": d_s,
        "variance": None if variance is None else d_variance,
    }  # fmt: skip


_SGPA = Fused("sgpa", _forward, ("mean", "spread", "kl"), _backward)


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
