"""The sparse model's mean, variance, DTC densities and divergence, and Nystrom row sums, on Triton kernels.

Short and long sequences take the same way: the long axis is cut into splits whose sums are added in a
fixed order, features are recomputed from tokens wherever they are needed, and nothing with a token axis
is kept but the inputs.  The factors of small matrices are kept for the backward pass up to `_KEPT` inducing
inputs, beyond that they are made again.  The slow references are in `gp.sparse` and `gp.softmax`.

Other processes may hold other tokens (section 12): in the backward pass one all-reduce brings the sums over
the queries of all processes.  The objectives' cotangents would have to be summed before that, because
gradients of queries need them: instead every process takes its own times the number of processes, and squares
that travel with the sums tell whether they were the same.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor
from torch import distributed as dist

from gpattention.numerics import Tokens, broadcast, checks_are_deferred, report_failures
from gpattention.ops.draws import draw_with_lead, noise_of_draw, with_draw
from gpattention.ops.launching import counter_for, kernels_of
from gpattention.ops.layout import (
    Arrays,
    Room,
    View,
    allocator,
    as_two,
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
from gpattention.ops.sharding import sum_in_place
from gpattention.ops.switch import why_not_fused_on

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Options", "SparseMoments", "fused_scgp", "fused_sparse_row_sum", "why_not_fused_sparse"]

_SCALARS = 16  # room for a few numbers beside the matrices
# enough programs to fill a GPU, for which long sequences are split: rows need no sums over their splits
_PROGRAMS, _ROW_PROGRAMS = 512, 4096
# Inducing inputs up to which the forward pass keeps its factors, which the backward pass then need not make
# again: 19 KiB of a sequence and head for 16 and 56 for 32, with 32 channels; for 64 it would be 184.
_KEPT = 32

# Where packed matrices begin, each behind the one before it; the first begins at 0 and has no name.
# Sums over tokens: G_o, G_k, P, C (for two sets), G_q, then |V|^2 and the numbers of tokens
Sums = namedtuple("Sums", "K P C Q N SIZE")
# Factors: R, R_l, T, y^T, z, c, R_c, R_N, N, then products for the backward pass: c^T W, R_c^T W, e, U_q
# and U_q W; for the divergence U_kl, U_kl W and Q_kl; last the log determinants.  R_q, which no gradient
# needs, lies where a matrix will be written when it has been read.
Factors = namedtuple("Factors", "RL T YT Z C RC RN N CW RW E UQ UQW UK UKW QK DET SIZE RQ")
# Backward sums over queries: M, dc, then the sums of dvar and of dvar s_q^2 a^2
RowSums = namedtuple("RowSums", "C N SIZE")
# Gradients of the sums: A_o, A_k, dP, dP^T W_l; for two sets dC W_m, dC^T W_l
Adjoints = namedtuple("Adjoints", "K P PW CM CL SIZE")

# tokens a program takes at a time and its launch options, for up to 16, 32 and 64 inducing inputs
_Launch = tuple[int, dict[str, int]]
LAUNCHES: dict[str, tuple[_Launch, _Launch, _Launch]] = {
    "inducing": ((0, {"num_warps": 1}), (0, {"num_warps": 2}), (0, {"num_warps": 4})),
    "sums": ((32, {"num_warps": 4}), (32, {"num_warps": 4}), (32, {"num_warps": 8})),
    # other numbers of warps change nothing but the order in which some scalars are added
    "roots": ((0, {"num_warps": 1}), (0, {"num_warps": 1}), (0, {"num_warps": 4})),
    # between calls of one product (`product_apart`) few registers are enough, and more programs fit
    "small": ((0, {"num_warps": 4}), (0, {"num_warps": 4, "maxnreg": 128}), (0, {"num_warps": 8})),
    "rows": ((32, {"num_warps": 4}), (32, {"num_warps": 4}), (16, {"num_warps": 8})),
    "rows_backward": ((32, {"num_warps": 4}), (32, {"num_warps": 8}), (16, {"num_warps": 8})),
    "small_backward": ((0, {"num_warps": 4}), (0, {"num_warps": 4, "maxnreg": 128}), (0, {"num_warps": 8})),
    "keys_backward": ((32, {"num_warps": 4}), (16, {"num_warps": 4, "maxnreg": 128}), (16, {"num_warps": 8})),
    "inducing_backward": ((0, {"num_warps": 1}), (0, {"num_warps": 2}), (0, {"num_warps": 8})),
    "row_sums_backward": ((32, {"num_warps": 4}), (32, {"num_warps": 8}), (16, {"num_warps": 8})),
}


@dataclass(frozen=True)
class Sizes:
    """Of one call, and how its matrices are padded and packed."""

    B: int
    H: int
    NQ: int
    N: int
    m: int
    l: int  # noqa: E741 - the paper's letter
    C: int
    D: int
    two: bool  # two sets of inducing inputs
    pooled: bool  # inducing inputs of every sequence's own

    @property
    def heads(self) -> int:
        """Sequences times heads."""
        return self.B * self.H

    @property
    def sets(self) -> int:
        """Inducing sets of one kind: one per head, or one per sequence and head."""
        return self.heads if self.pooled else self.H

    @cached_property
    def padded(self) -> dict[str, int]:
        """Sides of padded matrices, as kernels name them."""
        names = {"MP": self.m, "LP": self.l, "CP": self.C, "DP": self.D}
        return {name: padded(n) for name, n in names.items()}

    @cached_property
    def scratch(self) -> int:
        """Room for a root and its transpose, for a product and what it is of, or for a factor's transpose."""
        side = max(self.padded.values())
        return 3 * side**2 if self.apart else 16 * max(32, side)

    @cached_property
    def apart(self) -> bool:
        """Whether products of small matrices may go through memory: never where all are one block."""
        return self._side > 16

    @property
    def keeps_factors(self) -> bool:
        """Whether the forward pass keeps them, or the backward pass makes them again."""
        return self._side <= _KEPT

    @cached_property
    def sums(self) -> Sums:
        """Where the sums over tokens lie."""
        MP, LP, _, DP = self.padded.values()
        both = LP * MP if self.two else 0
        return Sums(*accumulate((MP * MP, LP * LP, LP * DP, both, MP * MP, _SCALARS)))

    @cached_property
    def factors(self) -> tuple[Factors, Factors]:
        """Where the factors lie, without and with those of the divergence."""
        MP, LP, _, DP = self.padded.values()
        square, cross, wide, high = MP * MP, LP * MP, MP * DP, LP * DP
        plain, kl = (
            Factors._make([*accumulate((
                square, LP * LP, cross, wide, high, wide, square, square, square, wide, square, wide, square,
                square, extra, extra, extra, _SCALARS,
            )), 0])
            for extra in (0, square)
        )  # fmt: skip
        return plain._replace(RQ=plain.UQ), kl._replace(RQ=kl.QK)

    @cached_property
    def row_sums(self) -> RowSums:
        """Where the backward sums over queries lie."""
        MP, _, _, DP = self.padded.values()
        return RowSums(*accumulate((MP * MP, MP * DP, _SCALARS)))

    @cached_property
    def adjoints(self) -> Adjoints:
        """Where the gradients of the sums lie."""
        MP, LP, _, DP = self.padded.values()
        both = LP * MP if self.two else 0
        return Adjoints(*accumulate((MP * MP, LP * LP, LP * DP, LP * DP, both, both)))

    def kept(self, *, train: bool, kl: bool) -> Arrays:
        """What the backward pass needs beside the inputs."""
        E, (MP, LP, CP, _) = self.sets, self.padded.values()
        sizes = {"centres": E * CP, "points_m": 2 * E * MP * CP, "W_m": 2 * E * MP * MP}
        if self.two:
            sizes |= {"points_l": 2 * E * LP * CP, "W_l": 2 * E * LP * LP}
        sizes["sums"] = self.heads * self.sums.SIZE
        if train and self.keeps_factors:
            sizes["factors"] = self.heads * self.factors[kl].SIZE
        return Arrays(sizes)

    @cached_property
    def kept_of_rows(self) -> Arrays:
        """The same for the row sums, which have one inducing set."""
        E, (_, LP, CP, _) = self.sets, self.padded.values()
        sizes = {"centres": E * CP, "points": 2 * E * LP * CP, "W": 2 * E * LP * LP}
        return Arrays(sizes | {"totals": self.heads * LP})

    def launch(self, kernel: str) -> dict[str, int]:
        """Tile (if the kernel has one) and launch options."""
        tile, options = LAUNCHES[kernel][self._column]
        return {**({"ROWS": tile} if tile else {}), "num_stages": 1, **options}

    def cut(self, kernel: str, tokens: int) -> tuple[int, int]:
        """Splits of the long axis and how many tokens each takes, a multiple of the tile."""
        tile = LAUNCHES[kernel][self._column][0]
        tiles = -(-tokens // tile)
        programs = _ROW_PROGRAMS if kernel == "rows" else _PROGRAMS
        wanted = max(1, min(tiles, programs // self.heads))
        each = -(-tiles // wanted)
        return -(-tiles // each), each * tile

    def cut_both(self, kernel: str, tokens: int, queries: int) -> tuple[int, int, int]:
        """One number of splits for keys and queries, and the tokens each split takes of either."""
        splits, _ = self.cut(kernel, max(tokens, queries))
        tile = LAUNCHES[kernel][self._column][0]
        length, query_length = (-(-n // (splits * tile)) * tile for n in (tokens, queries))
        return splits, length, query_length

    @cached_property
    def _column(self) -> int:
        return {16: 0, 32: 1}.get(self._side, 2)

    @cached_property
    def _side(self) -> int:
        """Of the larger inducing set, padded."""
        return max(self.padded["MP"], self.padded["LP"])


def _sizes(
    q: Sequence[int],
    k: Sequence[int],
    width: int,
    m: Sequence[int],
    l: Sequence[int] = (),  # noqa: E741
) -> Sizes:
    """Of a call with tensors of these shapes; `l` is empty where there is one set of inducing inputs."""
    (B, H, NQ, C), two = q, len(l) > 0
    return Sizes(B, H, NQ, k[2], m[2], (l if two else m)[2], C, width, two, m[0] > 1)


def per_head(x: Tensor, lead: torch.Size) -> Tensor:
    """A parameter [..., 1, 1] as [B, H], or [1, H] where all sequences share it."""
    if x.ndim > 2 and x.numel() == x.shape[-3] == as_two(lead)[1]:
        return x.reshape(1, -1)
    return shared_matrices(x, lead).squeeze(-1).squeeze(-1)  # whose gradient is a view, a selection's is not


def of_sequences(x: Tensor) -> View:
    """[B, H], or [1, H] for all sequences, as kernels take it."""
    by_sequence, by_head = x.stride()
    return x, 0 if x.shape[0] == 1 else by_sequence, by_head


def shared_matrices(x: Tensor, lead: torch.Size) -> Tensor:
    """[..., X, Y] as [B, H, X, Y], or [1, H, X, Y] where all sequences share it."""
    B, H = as_two(lead)
    if x.shape[:-3].numel() == 1:
        head = x.shape[-3] if x.ndim > 2 else 1
        return x.reshape(1, head, *x.shape[-2:]).expand(1, H, -1, -1)
    return x.expand(*lead, *x.shape[-2:]).reshape(B, H, *x.shape[-2:])


_COLUMNS = 32  # a program of the sums over splits and shares takes so many of each row
_SUMS = {"ROWS": 64, "COLUMNS": _COLUMNS, "num_warps": 4}


class Options(NamedTuple):
    """What is to be computed, beside the tensors.

    Attributes:
        dual: z_k = (Q_k + sigma^2 I) V instead of V.
        include_noise: whether the variance holds sigma^2.
        delta: perturbation of the inducing Gram matrices.
        density: whether the DTC densities are wanted.
        kl: whether the divergence is wanted.
        independent: whether a query keeps what the inducing values do not tell of it.
        group: whose processes hold the other tokens.
    """

    dual: bool
    include_noise: bool
    delta: float
    density: bool
    kl: bool
    independent: bool
    group: "ProcessGroup | None" = None


def scratch_for(sizes: Sizes, empty: Callable[..., Tensor], programs: int) -> Tensor:
    """Room for products alone, of which none goes through memory where matrices are one block."""
    return empty(programs, sizes.scratch) if sizes.apart else empty(1)


def small_factors(
    kept: Room,
    noise: Tensor,  # [B or 1, H]
    sizes: Sizes,
    options: Options,
    *,
    train: bool,
    again: bool = False,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Factors, which pivots failed [matrices, S], and the objectives: query, key, KL [B, H].

    The factors are written where they are kept, if they are.  To `train` is to make what the backward pass
    needs too; what is made `again` had its failures counted.
    """
    sums, factors = kept["sums"], kept.get("factors")
    S, P, empty = sizes.heads, sizes.padded, allocator(sums)
    packed = sizes.factors[options.kl]
    factors = empty(S * packed.SIZE) if factors is None else factors
    variance_of = of_sequences(noise)
    counter, counted = counter_for(sums.device)
    matrices = 3 + (options.density or options.kl) + options.kl
    info = torch.empty(matrices, S, dtype=torch.int32, device=sums.device)
    noted = info, counter, 0 if again else counted, S, sizes.H
    sides = {"MP": P["MP"], "LP": P["LP"], "SUM": sizes.sums, "FACTOR": packed}
    kernels_of("sparse").roots_kernel[(S, 2 + (options.density or options.kl))](
        sums, variance_of, factors, *noted, **sides, **sizes.launch("roots")
    )
    found = empty(sizes.B, sizes.H), empty(sizes.B, sizes.H), empty(sizes.B, sizes.H)
    kernels_of("sparse").small_kernel[(S,)](
        sums, kept["W_m"], variance_of, factors, *found, empty(S, sizes.scratch), *noted, sizes.D,
        TWO=sizes.two, POOLED=sizes.pooled, DUAL=options.dual, DENSITY=options.density, KL=options.kl,
        TRAIN=train, DP=P["DP"], SCRATCH=sizes.scratch, **sides, **sizes.launch("small"),
    )  # fmt: skip
    return factors, info, found


def inducing_of(kept: Room) -> tuple[Tensor, ...]:
    """Centres, points and inverse roots of the inducing sets, of which both may be one."""
    points_m, W_m = kept["points_m"], kept["W_m"]
    return kept["centres"], points_m, kept.get("points_l", points_m), W_m, kept.get("W_l", W_m)


def summed_splits(x: Tensor, S: int, out: Tensor | None = None) -> Tensor:
    """[S, splits, X] summed over splits, perhaps into memory that is given.  [S, X]"""
    _, splits, columns = x.shape
    if splits == 1:
        return x.view(S, columns)
    out = torch.empty(S, columns, dtype=x.dtype, device=x.device) if out is None else out
    kernels_of("sparse").splits_kernel[(S, -(-columns // _COLUMNS))](x, out, columns, splits, **_SUMS)
    return out


def summed_shares(shares: Tensor, turned: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """[roles, S, splits, X] and [S, Y], each summed into one row per inducing set."""
    (roles, _, splits, X), Y = shares.shape, turned.shape[1]
    moved = torch.empty(sizes.sets, X, dtype=shares.dtype, device=shares.device)
    outer, few = (roles, 1) if sizes.pooled else (roles * sizes.B, sizes.B)
    total = moved if sizes.pooled else torch.empty(sizes.sets, Y, dtype=shares.dtype, device=shares.device)
    kernels_of("sparse").shares_kernel[(sizes.sets, (X + (0 if sizes.pooled else Y)) // _COLUMNS)](
        shares, moved, X, outer, sizes.sets * splits * X, splits, turned, total, Y, few, sizes.sets * Y,
        **_SUMS,
    )  # fmt: skip
    return moved, turned if sizes.pooled else total


def report_inducing(info: Tensor, sizes: Sizes, delta: float, dtype: torch.dtype) -> None:
    """Raise if an inducing set has no factor."""
    if checks_are_deferred(info):
        return
    for found, count in zip(info, (sizes.m, sizes.l), strict=False):
        found = found.view(-1, sizes.H) if sizes.pooled else found
        report_failures(found, count, dtype, name="K_mm + delta I", noise=delta)


def report_small(info: Tensor, sizes: Sizes, noise: Tensor, dtype: torch.dtype) -> None:
    """Raise if a small matrix has no factor."""
    if checks_are_deferred(info):
        return
    names = (
        "I + Phi^T Phi / noise", "I + Psi^T Psi / noise", "2I - B^-1 + T^T T", "I + Phi_q^T Phi_q / noise",
        "I + R_c^T G R_c / noise",
    )  # fmt: skip
    for which, found in enumerate(info):
        side = sizes.l if which == 1 else sizes.m
        report_failures(found.view(sizes.B, sizes.H), side, dtype, name=names[which], noise=noise)


TOLERANCE = 1e-4  # of the squares: cotangents a hundredth apart are refused


@dataclass(frozen=True)
class Shards:
    """Of one backward pass."""

    options: Options
    count: int  # of processes
    own: Tensor  # [3, B, H] this process's cotangents of query, key and KL

    @classmethod
    def of(cls, options: Options, *grads: Tensor | None, like: Tensor) -> Self:
        """A process without a gradient counts as one with 0."""
        nothing = like.new_zeros(like.shape[:2])
        own = torch.stack([nothing if grad is None else grad.to(nothing) for grad in grads])
        return cls(options, dist.get_world_size(options.group), own)

    @property
    def cotangents(self) -> list[Tensor | None]:
        """Of the sum of all processes' losses, for the objectives that were computed.  [B, H] each"""
        asked = (self.options.density, self.options.density, self.options.kl)
        return [self.count * own if wanted else None for own, wanted in zip(self.own, asked, strict=True)]

    def summed(self, rows: Tensor) -> Tensor:
        """[S, X] over the processes, in one all-reduce with what tells whether all had the same cotangents.

        Where they had not, an error says so, or, with deferred checks, gradients of keys and parameters are
        NaN.
        """
        sent = torch.cat([rows.flatten(), self.own.flatten(), self.own.square().flatten()])
        total, ones, squares = sum_in_place(sent, self.options.group).split(
            [rows.numel(), self.own.numel(), self.own.numel()]
        )
        differ = (self.count * squares - ones.square() > TOLERANCE * self.count * squares).any()
        if checks_are_deferred():
            total = torch.where(differ, torch.nan, total)
        elif bool(differ):
            raise ValueError(
                "expected the gradient of a regulariser to be the same on every process of a group, got "
                "others: add it to every process's loss with the same weight, or switch the fused kernels off"
            )
        return total.view(rows.shape)


class SparseMoments(NamedTuple):
    """What the kernels give, amplified and masked; None is what was not asked for.

    Attributes:
        mean: [..., Q, D].
        variance: [..., Q].
        query: log N(N; 0, sigma^2 I + Phi_q Phi_q^T).  [...]
        key: the same of z_k.  [...]
        kl: eq. 24.  [...]
        real_keys: under a group, of all processes, where an objective was asked for.  [...]
        real_queries: likewise.  [...]
        draw: one of every token, if it was asked for.  [1, ..., Q, D]
    """

    mean: Tensor
    variance: Tensor
    query: Tensor | None
    key: Tensor | None
    kl: Tensor | None
    real_keys: Tensor | None = None
    real_queries: Tensor | None = None
    draw: Tensor | None = None


def why_not_fused_sparse(t: Tokens) -> str | None:
    """Why the kernels do not take these tokens, of which there may be any number, also on other processes.

    Args:
        t: checked inputs.

    Returns:
        None if they do, else the reason.
    """
    channels, inducing = max(t.q.shape[-1], t.v.shape[-1]), max(x.shape[-2] for x in t.inducing)
    return why_not_fused_on(t.q.device, t.q.dtype, channels=channels, inducing=inducing)


def fused_scgp(t: Tokens, options: Options, *, draw: bool = False) -> SparseMoments:
    """Mean and variance (eq. 15) of the sparse model, and the objectives asked for.

    Args:
        t: checked inputs, which need not be masked nor centred.
        options: which model, and what is wanted of it.
        draw: whether to draw every token once, with numbers of torch's own generator; not under a group.

    Returns:
        The moments.

    Raises:
        NotPositiveDefiniteError: a matrix has no factor.
    """
    lead = broadcast(*(x.shape[:-2] for x in (t.q, t.k, t.latent, t.v, *t.inducing)))
    m, l = t.inducing[0], t.inducing[-1]  # noqa: E741 - the paper's letter
    found = (_DRAWN_SCGP if draw else _SCGP)(
        *(matrices(x, lead) for x in (t.q, t.k, t.latent, t.v)),
        *_points(m, l, lead),
        *(per_head(x, lead) for x in (t.noise, t.scale_q, t.scale_k)),
        *(vectors(x, lead) for x in (t.log_amplitude, t.mask, t.query_mask)),
        *options[:-1],
        *([noise_of_draw(t.q, t.v, lead)] if draw else []),
        options.group,
    )
    drawn = draw_with_lead(found[0], lead) if draw else None
    mean, variance, query, key, kl, counts = found[draw:]
    numbers = (None, None) if counts is None else counts.detach().unbind(-1)
    moments = SparseMoments(*(with_lead(x, lead) for x in (mean, variance, query, key, kl, *numbers)))
    return moments._replace(draw=drawn)


def _points(m: Tensor, l: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor | None]:  # noqa: E741
    """Both sets with the same leading axes; None for a second set that is the first."""
    first, second = shared_matrices(m, lead), None if l is m else shared_matrices(l, lead)
    if second is None:
        return first, None
    B = max(first.shape[0], second.shape[0])
    return first.expand(B, -1, -1, -1), second.expand(B, -1, -1, -1)


def _scgp(
    q: Tensor,  # [B, H, Q, C]
    k: Tensor,  # [B, H, K, C]
    o: Tensor,  # [B, H, K, C]
    v: Tensor,  # [B, H, K, D]
    m: Tensor,  # [B or 1, H, m, C]
    l: Tensor | None,  # [B or 1, H, l, C]  # noqa: E741
    noise: Tensor,  # [B or 1, H]
    scale_q: Tensor,  # [B or 1, H]
    scale_k: Tensor,  # [B or 1, H]
    log_amplitude: Tensor | None,  # [B, H, Q]
    mask: Tensor | None,  # [B, H, K]
    query_mask: Tensor | None,  # [B, H, Q]
    dual: bool,
    include_noise: bool,
    delta: float,
    density: bool,
    kl: bool,
    independent: bool,
    group: "ProcessGroup | None" = None,
    *,
    train: bool,
) -> Made:
    options = Options(dual, include_noise, delta, density, kl, independent, group)
    found, second = kernels_of("sparse"), m if l is None else l
    sizes = _sizes(q.shape, k.shape, v.shape[3], m.shape, () if l is None else l.shape)
    B, H, NQ, N, C, D = sizes.B, sizes.H, sizes.NQ, sizes.N, sizes.C, sizes.D
    S, E, P, empty = sizes.heads, sizes.sets, sizes.padded, allocator(q)
    MP, LP, CP = P["MP"], P["LP"], P["CP"]
    state, kept = room(q, sizes.kept(train=train, kl=kl))
    centres, points_m, points_l, W_m, W_l = inducing_of(kept)
    inducing_failed = torch.empty(1 + sizes.two, E, dtype=torch.int32, device=q.device)
    found.inducing_kernel[(E, 1 + sizes.two)](
        *views(m, second), centres, points_m, points_l, W_m, W_l, inducing_failed, *counter_for(q.device),
        delta, E, H, sizes.m, sizes.l, C,
        MP=MP, LP=LP, CP=CP, **sizes.launch("inducing"),
    )  # fmt: skip
    report_inducing(inducing_failed, sizes, delta, q.dtype)
    of_noise, of_scale_q, of_scale_k = map(of_sequences, (noise, scale_q, scale_k))
    wanted = density or kl
    splits, length, query_length = sizes.cut_both("sums", N, NQ if wanted else 0)
    whole = kept["sums"][: S * sizes.sums.SIZE].view(S, -1)  # without what aligns the next array
    sums = empty(S, splits, sizes.sums.SIZE) if splits > 1 else whole[:, None]
    found.sums_kernel[(S, splits, 2 + wanted)](
        *views(q, k, o, v, mask, query_mask), of_scale_q, of_scale_k, view(log_amplitude),
        centres, points_m, points_l, W_m, W_l, sums,
        splits, length, query_length, H, NQ, N, sizes.m, sizes.l, C, D,
        TWO=sizes.two, POOLED=sizes.pooled, **P, SUM=sizes.sums, **sizes.launch("sums"),
    )  # fmt: skip
    sums = sum_in_place(summed_splits(sums, S, whole), group)
    factors, failed, (query, key, divergence) = small_factors(
        kept, noise, sizes, options, train="factors" in kept
    )
    report_small(failed, sizes, noise, q.dtype)
    mean, variance = token_major(B, H, NQ, D, q), empty(B, H, NQ)
    splits, length = sizes.cut("rows", NQ)
    found.rows_kernel[(S, splits)](
        *views(q, query_mask), of_noise, of_scale_q, view(log_amplitude), centres, points_m, W_m, factors,
        view(mean), variance, length, H, NQ, sizes.m, C, D,
        POOLED=sizes.pooled, INCLUDE=include_noise, INDEPENDENT=independent,
        MP=MP, CP=CP, DP=P["DP"], FACTOR=sizes.factors[kl], **sizes.launch("rows"),
    )  # fmt: skip
    counts = None
    if wanted and group is not None:  # one process counts its masks itself
        at = sizes.sums.N
        counts = sums.view(B, H, -1)[..., at + 1 : at + 3].clone()  # [B, H, 2] keys, queries
    return {
        "mean": mean, "variance": variance, "query": query if density else None,
        "key": key if density else None, "divergence": divergence if kl else None, "counts": counts,
        "state": state,
    }  # fmt: skip


def _scgp_backward(
    by_mean: Tensor | None, by_variance: Tensor | None, by_query: Tensor | None, by_key: Tensor | None,
    by_divergence: Tensor | None, q: Tensor, k: Tensor, o: Tensor, v: Tensor, m_shape: Sequence[int],
    noise: Tensor, scale_q: Tensor, scale_k: Tensor, log_amplitude: Tensor | None, mask: Tensor | None,
    query_mask: Tensor | None, state: Tensor, l_shape: Sequence[int], dual: bool, include_noise: bool,
    delta: float, density: bool, kl: bool, independent: bool, group: "ProcessGroup | None" = None,
) -> Made:  # fmt: skip
    options = Options(dual, include_noise, delta, density, kl, independent, group)
    found = kernels_of("sparse")
    sizes = _sizes(q.shape, k.shape, v.shape[3], m_shape, l_shape)
    kept = rooms(state, sizes.kept(train=True, kl=kl))
    (centres, points_m, points_l, W_m, W_l), sums = inducing_of(kept), kept["sums"]
    factors = kept.get("factors")
    if factors is None:
        factors, _, _ = small_factors(kept, noise, sizes, options, train=True, again=True)
    by_kl = by_divergence
    shards = None
    if group is not None:  # the other processes may have gradients where this one has none
        shards = Shards.of(options, by_query, by_key, by_kl, like=q)
        by_query, by_key, by_kl = shards.cotangents
        by_mean = q.new_zeros(*q.shape[:3], sizes.D) if by_mean is None else by_mean
        by_variance = q.new_zeros(q.shape[:3]) if by_variance is None else by_variance
    B, H, NQ, N, C, D = sizes.B, sizes.H, sizes.NQ, sizes.N, sizes.C, sizes.D
    S, E, P, empty = sizes.heads, sizes.sets, sizes.padded, allocator(q)
    MP, LP, CP = P["MP"], P["LP"], P["CP"]
    two = {"TWO": sizes.two, "POOLED": sizes.pooled, "DUAL": dual}
    of_query, of_key, of_kl = views(by_query, by_key, by_kl)
    of_noise, of_scale_q, of_scale_k = map(of_sequences, (noise, scale_q, scale_k))
    packed = sizes.factors[kl]
    d_q, d_k, d_o = (token_major(B, H, n, C, q) for n in (NQ, N, N))
    d_v, d_log = token_major(B, H, N, D, q), empty(B, H, NQ) if log_amplitude is not None else None
    # whose tile is never smaller than that of `keys_backward`: no program has half a tile for its share
    splits, length, query_length = sizes.cut_both("rows_backward", N, NQ)
    shares_m = empty(3 - sizes.two, S, splits, MP * CP)
    shares_l = empty(2, S, splits, LP * CP) if sizes.two else shares_m[2:]
    rows, scalars = empty(S, splits, sizes.row_sums.SIZE), empty(3, B, H)
    found.rows_backward_kernel[(S, splits)](
        *views(q, query_mask), of_scale_q, view(log_amplitude), centres, points_m, W_m, factors,
        view(by_mean), None if by_variance is None else by_variance.contiguous(), of_query, of_kl,
        view(d_q), d_log, rows, shares_m, splits, query_length, H, NQ, sizes.m, C, D,
        POOLED=sizes.pooled, INDEPENDENT=independent, MP=MP, CP=CP, DP=P["DP"], FACTOR=packed,
        ROW=sizes.row_sums, **sizes.launch("rows_backward"),
    )  # fmt: skip
    adjoints, turned_m = empty(S, sizes.adjoints.SIZE), empty(S, MP * MP)
    turned_l = empty(S, LP * LP) if sizes.two else turned_m
    rows = summed_splits(rows, S) if shards is None else shards.summed(summed_splits(rows, S))
    found.small_backward_kernel[(S,)](
        sums, factors, rows, W_m, W_l, of_noise, of_scale_q, of_scale_k, of_query, of_key, of_kl,
        adjoints, turned_m, turned_l, scalars[0], scalars[1], scalars[2],
        empty(S, sizes.scratch), H, D,
        **two, INCLUDE=include_noise, INDEPENDENT=independent,
        MEAN=by_mean is not None, VARIANCE=by_variance is not None,
        MP=MP, LP=LP, DP=P["DP"], SCRATCH=sizes.scratch, SUM=sizes.sums, FACTOR=packed,
        ROW=sizes.row_sums, BACK=sizes.adjoints, **sizes.launch("small_backward"),
    )  # fmt: skip
    if shards is not None:  # these are of all tokens; the processes' gradients of parameters are added up
        for whole in (turned_m, turned_l, scalars) if sizes.two else (turned_m, scalars):
            whole.div_(shards.count)
    found.keys_backward_kernel[(S, splits, 2)](
        *views(k, o, v, mask), of_noise, of_scale_k, of_key, centres, points_m, points_l, W_m, W_l,
        adjoints, *views(d_k, d_o, d_v), shares_m, shares_l, splits, length, S, H, N, sizes.m, sizes.l,
        C, D, **two, **P, BACK=sizes.adjoints, **sizes.launch("keys_backward"),
    )  # fmt: skip
    d_m, totals = empty(E // H, H, sizes.m, C), empty(3, H)
    d_l = empty(E // H, H, sizes.l, C) if sizes.two else d_m
    moved_m, turned_m = summed_shares(shares_m, turned_m, sizes)
    moved_l, turned_l = summed_shares(shares_l, turned_l, sizes) if sizes.two else (moved_m, turned_m)
    found.inducing_backward_kernel[(E, 1 + sizes.two)](
        points_m, points_l, W_m, W_l, moved_m, moved_l, turned_m, turned_l, d_m, d_l,
        scratch_for(sizes, empty, 2 * E), delta,
        scalars, totals, B, H, sizes.m, sizes.l, C,
        SHARED=not sizes.pooled, BATCH=128, MP=MP, LP=LP, CP=CP, SCRATCH=sizes.scratch,
        **sizes.launch("inducing_backward"),
    )  # fmt: skip
    if sizes.pooled:
        totals = scalars.sum(1)
    parameters: Made = {"together": totals[:, None]}
    if B in {x.shape[0] for x in (noise, scale_q, scale_k)}:  # some have a number for every sequence
        parameters = {
            name: scalars[i] if x.shape[0] == B else totals[i, None]
            for i, (name, x) in enumerate(zip(_PARAMETERS, (noise, scale_q, scale_k), strict=True))
        }
    return {
        "q": d_q, "k": d_k, "o": d_o, "v": d_v, "m": d_m, "l": d_l if sizes.two else None,
        "log_amplitude": d_log, **parameters,
    }  # fmt: skip


_PARAMETERS = ("noise", "scale_q", "scale_k")
_SCGP = Fused(
    "scgp", _scgp, ("mean", "variance", "query", "key", "divergence", "counts"), _scgp_backward,
    together=_PARAMETERS)  # fmt: skip
_DRAWN_SCGP = with_draw(_SCGP, "variance", squared=True)


def fused_sparse_row_sum(t: Tokens, delta: float) -> Tensor:
    """Nystrom row sums kappa(q, l) (K_ll + delta I)^-1 sum_j kappa(l, k_j) (section 13).

    Args:
        t: checked inputs with one set of inducing inputs, which need not be masked nor centred.
        delta: perturbation of the inducing Gram matrix.

    Returns:
        [..., Q]; 1 at padded queries.

    Raises:
        NotPositiveDefiniteError: the inducing Gram matrix has no factor.
    """
    (l,) = t.inducing  # noqa: E741 - the paper's letter
    lead = broadcast(t.q.shape[:-2], t.k.shape[:-2], l.shape[:-2])
    (row_sum,) = _ROW_SUM(
        matrices(t.q, lead), matrices(t.k, lead), shared_matrices(l, lead),
        vectors(t.mask, lead), vectors(t.query_mask, lead), delta,
    )  # fmt: skip
    found: Tensor = with_lead(row_sum, lead)
    return found


def _row_sum(
    q: Tensor,  # [B, H, Q, C]
    k: Tensor,  # [B, H, K, C]
    l: Tensor,  # [B or 1, H, l, C]  # noqa: E741
    mask: Tensor | None,  # [B, H, K]
    query_mask: Tensor | None,  # [B, H, Q]
    delta: float,
) -> Made:
    found, sizes = kernels_of("sparse"), _sizes(q.shape, k.shape, 1, l.shape)
    B, H, NQ, N, count, C = sizes.B, sizes.H, sizes.NQ, sizes.N, sizes.l, sizes.C
    S, E, empty = sizes.heads, sizes.sets, allocator(q)
    LP, CP = sizes.padded["LP"], sizes.padded["CP"]
    state, kept = room(q, sizes.kept_of_rows)
    centres, points, W, totals = kept.values()
    whole = totals[: S * LP].view(S, LP)  # without what aligns
    info = torch.empty(1, E, dtype=torch.int32, device=q.device)
    found.inducing_kernel[(E, 1)](
        *views(l, l), centres, points, points, W, W, info, *counter_for(q.device),
        delta, E, H, count, count, C, MP=LP, LP=LP, CP=CP, **sizes.launch("inducing"),
    )  # fmt: skip
    report_inducing(info, sizes, delta, q.dtype)
    sides = {"POOLED": sizes.pooled, "LP": LP, "CP": CP}
    splits, length, _ = sizes.cut_both("sums", N, 0)
    totals, row_sum = empty(S, splits, LP) if splits > 1 else whole[:, None], empty(B, H, NQ)
    found.totals_kernel[(S, splits)](
        *views(k, mask), centres, points, totals, splits, length, H, N, count, C,
        **sides, **sizes.launch("sums"),
    )  # fmt: skip
    totals = summed_splits(totals, S, whole)
    splits, length = sizes.cut("rows", NQ)
    found.row_sums_kernel[(S, splits)](
        *views(q, query_mask), centres, points, W, totals, row_sum, length, H, NQ, count, C,
        **sides, **sizes.launch("rows"),
    )  # fmt: skip
    return {"row_sum": row_sum, "state": state}


def _row_sum_backward(
    by_row_sum: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, query_mask: Tensor | None,
    state: Tensor, l_shape: Sequence[int], delta: float,
) -> Made:  # fmt: skip
    found, sizes = kernels_of("sparse"), _sizes(q.shape, k.shape, 1, l_shape)
    B, H, NQ, N, count, C = sizes.B, sizes.H, sizes.NQ, sizes.N, sizes.l, sizes.C
    S, E, empty = sizes.heads, sizes.sets, allocator(q)
    LP, CP = sizes.padded["LP"], sizes.padded["CP"]
    sides = {"POOLED": sizes.pooled, "LP": LP, "CP": CP}
    centres, points, W, totals = rooms(state, sizes.kept_of_rows).values()
    splits, length, query_length = sizes.cut_both("row_sums_backward", N, NQ)
    d_q, d_k = token_major(B, H, NQ, C, q), token_major(B, H, N, C, q)
    by_weights, shares, turned = empty(S, splits, LP), empty(2, S, splits, LP * CP), empty(S, LP * LP)
    found.row_sums_backward_kernel[(S, splits)](
        *views(q, query_mask), centres, points, W, totals, by_row_sum.contiguous(), view(d_q),
        by_weights, shares, splits, query_length, H, NQ, count, C,
        **sides, **sizes.launch("row_sums_backward"),
    )  # fmt: skip
    found.totals_backward_kernel[(S, splits)](
        *views(k, mask), centres, points, W, totals, summed_splits(by_weights, S), view(d_k),
        shares[1], turned, splits, length, H, N, count, C,
        **sides, **sizes.launch("row_sums_backward"),
    )  # fmt: skip
    moved, turned = summed_shares(shares, turned, sizes)
    d_l = empty(E // H, H, count, C)
    found.inducing_backward_kernel[(E, 1)](
        points, points, W, W, moved, moved, turned, turned, d_l, d_l,
        scratch_for(sizes, empty, 2 * E), delta, moved, moved, B, H, count, count, C,
        SHARED=False, BATCH=128, MP=LP, LP=LP, CP=CP, SCRATCH=sizes.scratch,
        **sizes.launch("inducing_backward"),
    )  # fmt: skip
    return {"q": d_q, "k": d_k, "l": d_l}


_ROW_SUM = Fused("sparse_row_sum", _row_sum, ("row_sum",), _row_sum_backward)
