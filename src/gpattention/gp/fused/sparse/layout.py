"""How the sparse model's kernels cut the long axis, pack their small matrices and are launched."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gpattention.gp.fused.layout import as_two, padded

_SCALARS = 16  # room for a few numbers beside the matrices
# enough programs to fill a GPU, for which long sequences are split: rows need no sums over their splits
_PROGRAMS, _ROW_PROGRAMS = 512, 4096

# tokens a program takes at a time and its launch options, for up to 16, 32 and 64 inducing inputs
_Launch = tuple[int, dict[str, int]]
LAUNCHES: dict[str, tuple[_Launch, _Launch, _Launch]] = {
    "inducing": ((0, {"num_warps": 1}), (0, {"num_warps": 2}), (0, {"num_warps": 4})),
    "sums": ((32, {"num_warps": 4}), (32, {"num_warps": 4}), (32, {"num_warps": 8})),
    # other numbers of warps change nothing but the order in which some scalars are added
    "roots": ((0, {"num_warps": 1}), (0, {"num_warps": 1}), (0, {"num_warps": 4})),
    "small": ((0, {"num_warps": 4}), (0, {"num_warps": 4}), (0, {"num_warps": 8})),
    "rows": ((32, {"num_warps": 4}), (32, {"num_warps": 4}), (16, {"num_warps": 8})),
    "rows_backward": ((32, {"num_warps": 4}), (32, {"num_warps": 8}), (16, {"num_warps": 8})),
    "small_backward": ((0, {"num_warps": 4}), (0, {"num_warps": 4, "maxnreg": 168}), (0, {"num_warps": 8})),
    "keys_backward": ((32, {"num_warps": 4}), (32, {"num_warps": 8}), (16, {"num_warps": 8})),
    "inducing_backward": ((0, {"num_warps": 1}), (0, {"num_warps": 2}), (0, {"num_warps": 4})),
}


@dataclass(frozen=True)
class Sizes:
    """Of one call, and how its matrices are padded and packed.

    `sizes_of` makes them: a call of the same shapes gets the same one, with all that it has worked out.
    """

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
        """Room for a root and its transpose, or for both factors of a product that takes steps."""
        side = max(self.padded.values()) if self.stepwise else 16
        return 2 * side**2

    @cached_property
    def stepwise(self) -> bool:
        """Whether products of small matrices may take steps through memory: never where all are one block."""
        return max(self.padded["MP"], self.padded["LP"]) > 16

    @cached_property
    def sums(self) -> dict[str, int]:
        """Where the sums over tokens lie: G_o, G_k, P, C, G_q, then |V|^2 and the numbers of tokens."""
        p = self.padded
        MP, LP, DP = p["MP"], p["LP"], p["DP"]
        return _packed("SUM", K=MP * MP, P=LP * LP, C=LP * DP, Q=LP * MP, N=MP * MP, SIZE=_SCALARS)

    def factors(self, *, kl: bool) -> dict[str, int]:
        """Of the divergence too, or not."""
        return self._factors[kl]

    @cached_property
    def _factors(self) -> tuple[dict[str, int], dict[str, int]]:
        return self._packed_factors(kl=False), self._packed_factors(kl=True)

    def _packed_factors(self, *, kl: bool) -> dict[str, int]:
        """Where the factors lie: R, R_l, R_q, T, y^T, z, c, R_c, R_N, N, then products for the backward pass.

        These are c^T W, R_c^T W, e, U_q and U_q W; for the divergence U_kl, U_kl W and Q_kl.  Behind R,
        T, z, c and R_c are their transposes; last come the log determinants of the first three.
        """
        p = self.padded
        MP, LP, DP = p["MP"], p["LP"], p["DP"]
        square, extra = MP * MP, MP * MP if kl else 0
        return _packed(
            "FACTOR", RT=square, RL=square, RQ=LP * LP, T=square, TT=LP * MP, YT=LP * MP, Z=MP * DP,
            ZT=LP * DP, C=LP * DP, CT=MP * DP, RC=MP * DP, RCT=square, RN=square, N=square, CW=square,
            RW=MP * DP, E=square, UQ=MP * DP, UQW=square, UK=square, UKW=extra, QK=extra, DET=extra,
            SIZE=_SCALARS,
        )  # fmt: skip

    @cached_property
    def row_sums(self) -> dict[str, int]:
        """Where the backward sums over queries lie: M, dc, then the sums of dvar and of dvar s_q^2 a^2."""
        p = self.padded
        return _packed("ROW", C=p["MP"] ** 2, N=p["MP"] * p["DP"], SIZE=_SCALARS)

    @cached_property
    def adjoints(self) -> dict[str, int]:
        """Where the gradients of the sums lie: A_o, A_k, dP, dP^T W_l; for two sets dC W_m, dC^T W_l."""
        p = self.padded
        MP, LP, DP = p["MP"], p["LP"], p["DP"]
        both = LP * MP if self.two else 0
        return _packed("BACK", K=MP * MP, P=LP * LP, PW=LP * DP, CM=LP * DP, CL=both, SIZE=both)

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

    @cached_property
    def _column(self) -> int:
        side = max(self.padded["MP"], self.padded["LP"])
        return {16: 0, 32: 1}.get(side, 2)


sizes_of = lru_cache(maxsize=256)(Sizes)  # Python is most of a short sequence's time


def _packed(name: str, **sizes: int) -> dict[str, int]:
    """Offsets that follow one another: each key is where the matrix after its size begins."""
    at, offsets = 0, {}
    for key, size in sizes.items():
        at += size
        offsets[f"{name}_{key}"] = at
    return offsets


def per_head(x: Tensor, lead: torch.Size) -> Tensor:
    """A parameter [..., 1, 1] as [B, H], or [1, H] where all sequences share it."""
    if x.ndim > 2 and x.numel() == x.shape[-3] == as_two(lead)[1]:
        return x.reshape(1, -1)
    return shared_matrices(x, lead).squeeze(-1).squeeze(-1)  # whose gradient is a view, a selection's is not


def shared_matrices(x: Tensor, lead: torch.Size) -> Tensor:
    """[..., X, Y] as [B, H, X, Y], or [1, H, X, Y] where all sequences share it."""
    B, H = as_two(lead)
    if x.shape[:-3].numel() == 1:
        head = x.shape[-3] if x.ndim > 2 else 1
        return x.reshape(1, head, *x.shape[-2:]).expand(1, H, -1, -1)
    return x.expand(*lead, *x.shape[-2:]).reshape(B, H, *x.shape[-2:])
