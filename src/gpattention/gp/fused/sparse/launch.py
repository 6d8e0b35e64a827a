"""What the sparse model's autograd function does beside launching its kernels: cuts, sums, reports."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gpattention.gp.cholesky import failure_counter, report_failures
from gpattention.gp.fused.layout import allocator, by_heads
from gpattention.gp.fused.sparse.layout import Sizes
from gpattention.gp.precision import checks_are_deferred

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_COLUMNS = 32  # a program of the sums over splits and shares takes so many of each row
_SUMS = {"ROWS": 64, "COLUMNS": _COLUMNS, "num_warps": 4}


class Options(NamedTuple):
    """What is to be computed, beside the tensors."""

    dual: bool  # z_k = (Q_k + sigma^2 I) V instead of V
    include_noise: bool
    delta: float
    density: bool
    kl: bool
    independent: bool = False  # whether a query keeps what the inducing values do not tell of it
    group: "ProcessGroup | None" = None  # whose processes hold the other tokens


def batched(x: Tensor, B: int) -> Tensor:
    """[B or 1, H] as [B, H]."""
    return x.expand(B, -1)


def cut(sizes: Sizes, kernel: str, tokens: int, queries: int) -> tuple[int, int, int]:
    """One number of splits for keys and queries, and the tokens each split takes of either."""
    splits, _ = sizes.cut(kernel, max(tokens, queries))
    tile = sizes.launch(kernel)["ROWS"]
    length, query_length = (-(-n // (splits * tile)) * tile for n in (tokens, queries))
    return splits, length, query_length


def scratch_for(sizes: Sizes, empty: Callable[..., Tensor], programs: int) -> Tensor:
    """Room for products in steps, of which there are none where matrices are one block."""
    return empty(programs, sizes.scratch) if sizes.stepwise else empty(1)


def small_factors(
    sums: Tensor,  # [S, SUM_SIZE]
    W_m: Tensor,  # [sets, MP, MP]
    noise: Tensor,  # [B or 1, H]
    info: Tensor,  # [5, programs] which pivots failed
    sizes: Sizes,
    options: Options,
    *,
    train: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Factors and the objectives: query, key, KL.  [B, H]

    To `train` is to make what the backward pass needs too, and not to count failures a second time.
    """
    from gpattention.gp.fused.sparse.roots import roots_kernel
    from gpattention.gp.fused.sparse.small import small_kernel

    S, P, empty = sizes.heads, sizes.padded, allocator(sums)
    packed = sizes.factors(kl=options.kl)
    factors = empty(S, packed["FACTOR_SIZE"])
    variance_of = by_heads(batched(noise, sizes.B))
    noted = (
        info,
        failure_counter(sums.device),
        int(not train and checks_are_deferred()),
        info.shape[1],
        sizes.H,
    )
    roots_kernel[(S, 2 + (options.density or options.kl))](
        sums, *variance_of, factors, *noted, MP=P["MP"], LP=P["LP"],
        **only(sizes.sums, "SUM_K", "SUM_Q", "SUM_SIZE"),
        **only(packed, "FACTOR_RT", "FACTOR_RL", "FACTOR_RQ", "FACTOR_DET", "FACTOR_SIZE"),
        **sizes.launch("roots"),
    )  # fmt: skip
    found = empty(sizes.B, sizes.H), empty(sizes.B, sizes.H), empty(sizes.B, sizes.H)
    small_kernel[(S,)](
        sums, W_m, *variance_of, factors, *found, empty(S, sizes.scratch), *noted, sizes.D,
        TWO=sizes.two, POOLED=sizes.pooled, DUAL=options.dual, DENSITY=options.density, KL=options.kl,
        TRAIN=train, MP=P["MP"], LP=P["LP"], DP=P["DP"], SCRATCH=sizes.scratch,
        **sizes.sums, **packed, **sizes.launch("small"),
    )  # fmt: skip
    return factors, found


def summed_splits(x: Tensor, S: int) -> Tensor:
    """[S, splits, X] summed over splits.  [S, X]"""
    from gpattention.gp.fused.sparse.blocks import splits_kernel

    _, splits, columns = x.shape
    if splits == 1:
        return x.view(S, columns)
    out = torch.empty(S, columns, dtype=x.dtype, device=x.device)
    splits_kernel[(S, -(-columns // _COLUMNS))](x, out, columns, splits, **_SUMS)
    return out


def summed_shares(shares: Tensor, turned: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """[roles, S, splits, X] and [S, Y], each summed into one row per inducing set."""
    from gpattention.gp.fused.sparse.blocks import shares_kernel

    (roles, _, splits, X), Y = shares.shape, turned.shape[1]
    moved = torch.empty(sizes.sets, X, dtype=shares.dtype, device=shares.device)
    outer, few = (roles, 1) if sizes.pooled else (roles * sizes.B, sizes.B)
    total = moved if sizes.pooled else torch.empty(sizes.sets, Y, dtype=shares.dtype, device=shares.device)
    shares_kernel[(sizes.sets, (X + (0 if sizes.pooled else Y)) // _COLUMNS)](
        shares,
        moved,
        X,
        outer,
        sizes.sets * splits * X,
        splits,
        turned,
        total,
        Y,
        few,
        sizes.sets * Y,
        **_SUMS,
    )
    return moved, turned if sizes.pooled else total


def report_inducing(info: Tensor, sizes: Sizes, delta: float, dtype: torch.dtype) -> None:
    """Raise if an inducing set has no factor."""
    for found, count in zip(info[: 1 + sizes.two, : sizes.sets], (sizes.m, sizes.l), strict=False):
        found = found.view(-1, sizes.H) if sizes.pooled else found
        report_failures(found, count, dtype, name="K_mm + delta I", noise=delta)


def report_small(info: Tensor, sizes: Sizes, options: Options, noise: Tensor, dtype: torch.dtype) -> None:
    """Raise if a small matrix has no factor."""
    used = 3 + (options.density or options.kl) + options.kl
    names = (
        "I + Phi^T Phi / noise", "I + Psi^T Psi / noise", "2I - B^-1 + T^T T", "I + Phi_q^T Phi_q / noise",
        "I + R_c^T G R_c / noise",
    )  # fmt: skip
    for which, found in enumerate(info[:used, : sizes.heads]):
        side = sizes.l if which == 1 else sizes.m
        report_failures(found.view(sizes.B, sizes.H), side, dtype, name=names[which], noise=noise)


def only(offsets: dict[str, int], *wanted: str) -> dict[str, int]:
    """The numbers a kernel asks for."""
    return {name: offsets[name] for name in wanted}


def without(offsets: dict[str, int], *unwanted: str) -> dict[str, int]:
    """All numbers but those a kernel does not ask for."""
    return {name: at for name, at in offsets.items() if name not in unwanted}
