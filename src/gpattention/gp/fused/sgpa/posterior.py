"""SGPA's mean, variance per channel and KL as one autograd function on Triton kernels.

Its slow reference is `gp.variational`; `inducing`, `forward` and `backward` hold the
mathematics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpattention.gp.cholesky import failure_counter, report_failures
from gpattention.gp.differentiation import once_differentiable
from gpattention.gp.fused.layout import (
    allocator,
    as_two,
    by_entries,
    by_rows,
    launch,
    matrices,
    padded,
    token_major,
    vectors,
    with_lead,
)
from gpattention.gp.precision import checks_are_deferred
from gpattention.gp.shapes import broadcast

CHUNK = 32  # of tokens and of packed places, as in the kernels
_SPLITS = 13  # parts of a sum over the batch


class SGPAMoments(NamedTuple):
    """What the kernels give, masked."""

    mean: Tensor  # [..., N, D]
    variance: Tensor | None  # [..., N, D]
    kl: Tensor  # [...]


def has_no_batch(x: Tensor, axes: int) -> bool:
    """Whether what is left of the last axes is at most one axis of heads."""
    return all(n == 1 for n in x.shape[: -axes - 1])


def fused_sgpa(
    x: Tensor,  # [..., N, C]
    v: Tensor,  # [..., N, D]
    inducing_k: Tensor,  # [H, m, C], the heads' axis may be missing
    inducing_v: Tensor,  # [H, m, D]
    scale_tril: Tensor,  # [H, D, m, m]
    *,
    variance: Tensor | None,  # [H] of the kernel; None is 1
    jitter: float,
    mask: Tensor | None,  # [..., N] True = real
    with_variance: bool,
) -> SGPAMoments:
    """Mean, variance (eq. 19) and KL (eq. 20) with the kernel variance * exp(-1/2 |x - y|^2)."""
    lead = broadcast(x.shape[:-2], v.shape[:-2])
    _, H = as_two(lead)
    mean, found, kl = _SGPA.apply(  # type: ignore[no-untyped-call]
        matrices(x, lead),
        matrices(v, lead),
        *(_per_head(t, H, axes) for t, axes in ((inducing_k, 2), (inducing_v, 2), (scale_tril, 3))),
        None if variance is None else _per_head(variance, H, 0).contiguous(),
        None if mask is None else vectors(mask, lead),
        jitter,
        with_variance,
    )
    spread = with_lead(found, lead) if with_variance else found
    return SGPAMoments(with_lead(mean, lead), spread, with_lead(kl, lead))


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


class _SGPA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [B, H, N, C]
        v: Tensor,  # [B, H, N, D]
        b: Tensor,  # [H, m, C]
        v_b: Tensor,  # [H, m, D]
        s: Tensor,  # [H, D, m, m]
        variance: Tensor | None,  # [H]
        mask: Tensor | None,  # [B, H, N]
        jitter: float,
        with_variance: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        from gpattention.gp.fused.sgpa.forward import features_kernel, mean_kernel
        from gpattention.gp.fused.sgpa.inducing import inducing_kernel

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
        columns = empty(B * H, MP, NP) if with_variance else phi
        mean, spread = token_major(B, H, N, D, x), token_major(B, H, N, D, x)
        deferred = checks_are_deferred()
        amplitude = x if variance is None else variance
        flags = {"SCALED": variance is not None, "MASKED": mask is not None}
        inducing_kernel[(H, D + 1)](
            b, *b.stride()[:2], v_b, *v_b.stride()[:2], s, *s.stride()[:3], amplitude, jitter,
            tokens_b, origin, gram, root, turned, S, packed, terms, info,
            failure_counter(x.device), int(deferred),
            m, C, D, SCALED=flags["SCALED"], **P, **sizes.launch("inducing"),
        )  # fmt: skip
        if not deferred:
            report_failures(info, m, x.dtype, name="K_bb + jitter I", noise=jitter)
        tiles = sizes.tiles("features")
        features_kernel[(B * H, NP // tiles["T"])](
            *by_rows(x), *by_entries(mask, x), amplitude, turned, origin, packed, phi, columns,
            *by_rows(spread), H, N, m, C, D, VARIANCE=with_variance, **flags, **P, **tiles,
        )  # fmt: skip
        mean_kernel[(B * H,)](
            *by_rows(x), *by_rows(v), v_b, *v_b.stride()[:2], *by_entries(mask, x), amplitude,
            turned, origin, phi, terms, tokens, *by_rows(mean), kl,
            H, N, m, C, D, **flags, **P, **sizes.tiles("mean"),
        )  # fmt: skip
        ctx.sizes, ctx.jitter, ctx.with_variance = sizes, jitter, with_variance
        ctx.save_for_backward(
            x, v, v_b, s, variance, mask, tokens_b, turned, origin, gram, root, S, phi, columns
        )
        return mean, spread if with_variance else None, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from gpattention.gp.fused.sgpa.backward import (
            features_backward_kernel,
            sums_kernel,
            tokens_backward_kernel,
            turns_kernel,
        )
        from gpattention.gp.fused.sgpa.inducing import inducing_backward_kernel

        x, v, v_b, s, variance, mask, tokens_b, turned, origin, gram, root, S, phi, columns = (
            ctx.saved_tensors
        )
        sizes: _Sizes = ctx.sizes
        B, H, N, m, C, D = sizes
        P, NP, empty = sizes.padded, sizes.NP, allocator(x)
        by_mean, by_spread, by_kl = grads
        assert by_mean is not None  # gradients are materialised
        assert by_kl is not None
        spread = by_rows(by_mean if by_spread is None else by_spread)
        d_phi, weights, cross = (empty(B * H, NP, P["MP"]) for _ in range(3))
        tokens, values = empty(B * H, P["CP"], NP), empty(B * H, 2, P["DP"], NP)
        d_x, d_v = token_major(B, H, N, C, x), token_major(B, H, N, D, x)
        d_b, d_v_b, d_s = empty(H, m, C), empty(H, m, D), empty(H, D, m, m)
        projections, d_variance = empty(B * H, 3, P["DP"], P["MP"]), empty(H)
        amplitude = x if variance is None else variance
        flags = {"SCALED": variance is not None, "MASKED": mask is not None}
        variances: bool = ctx.with_variance
        masks, inducing_v = by_entries(mask, x), (v_b, *v_b.stride()[:2])
        if variances:
            tiles = sizes.tiles("features_backward")
            features_backward_kernel[(B * H, NP // tiles["T"])](
                *spread, *masks, amplitude, S, columns, d_phi, H, N, D,
                **flags, MP=P["MP"], DP=P["DP"], **tiles,
            )  # fmt: skip
        by_mean_rows, of_kl = by_rows(by_mean), (by_kl, *by_kl.stride())
        turns_kernel[(B * H,)](
            *by_mean_rows, *of_kl, *by_rows(x), *by_rows(v), *masks, phi, tokens, values, projections,
            H, N, C, D, MASKED=flags["MASKED"], NP=NP, **P, **sizes.launch("turns"),
        )  # fmt: skip
        tiles = sizes.tiles("tokens_backward")
        parts = NP // tiles["T"]
        token_variance = empty(B, parts, H)
        tokens_backward_kernel[(B * H, parts)](
            *by_mean_rows, *spread, *of_kl, *by_rows(x), *by_rows(v),
            *masks, amplitude, tokens_b, turned, origin, root, phi, tokens, values, projections,
            d_phi, weights, cross, token_variance,
            *by_rows(d_x), *by_rows(d_v), H, N, m, C, D,
            VARIANCE=variances, **flags, **P, **tiles,
        )  # fmt: skip
        record, per_split = sizes.record(variances), -(-B // _SPLITS)
        options = sizes.launch("sums")
        splits, tasks = -(-B // per_split), variances * record["FP"] // options["PLACES"]
        sums = empty(splits, H, record["RECORD"])
        sums_kernel[(H, tasks + 3, splits)](
            *by_mean_rows, *spread, *by_rows(x), *masks, tokens_b, origin,
            phi, d_phi, weights, cross, sums, B, per_split, H, N, C, D,
            MASKED=flags["MASKED"], TILES=tasks, NP=NP, **record, **P, **options,
        )  # fmt: skip
        inducing_backward_kernel[(H, D + 1)](
            *inducing_v, s, *s.stride()[:3], amplitude, ctx.jitter, tokens_b, gram, root,
            sums, *of_kl, token_variance, d_b, d_v_b, d_s, d_variance, B, B * parts, splits, H, m, C, D,
            SCALED=flags["SCALED"], VARIANCE=variances, **record, **P, **sizes.launch("inducing_backward"),
        )  # fmt: skip
        return d_x, d_v, d_b, d_v_b, d_s, None if variance is None else d_variance, None, None, None
