"""Everything sparse attention sums over tokens, as one small set of matrices (section 12).

Tokens of a sequence meet in these sums alone: what is computed from them is small and does not know how
many tokens there were, nor which process held them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gpattention.gp.inputs import Tokens
from gpattention.gp.shapes import broadcast
from gpattention.gp.sharding import sum_over_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class TokenSums:
    """The sums of mean, variance and draws."""

    Phi_oo: Tensor  # [..., m, m] Phi_o^T Phi_o
    Psi_kk: Tensor  # [..., l, l] Psi_k^T Psi_k
    Psi_Phi_oo: Tensor  # [..., l, m] Psi_o^T Phi_o; Phi_oo itself for one inducing set
    Psi_kV: Tensor  # [..., l, D] Psi_k^T V


@dataclass(frozen=True, slots=True)
class DensitySums:
    """What log densities and the KL need beside `TokenSums`."""

    Phi_qq: Tensor  # [..., m, m] Phi_q^T Phi_q
    VV: Tensor  # [...] |V|^2
    real_queries: Tensor  # [...]
    real_keys: Tensor  # [...]


def token_sums(
    Phi_o: Tensor,  # [..., K, m]
    Psi_o: Tensor,  # [..., K, l]
    Psi_k: Tensor,  # [..., K, l]
    v: Tensor,  # [..., K, D]
) -> TokenSums:
    """The sums over the tokens of this process."""
    Phi_oo = Phi_o.mT @ Phi_o
    return TokenSums(
        Phi_oo=Phi_oo,
        Psi_kk=Psi_k.mT @ Psi_k,
        Psi_Phi_oo=Phi_oo if Psi_o is Phi_o else Psi_o.mT @ Phi_o,
        Psi_kV=Psi_k.mT @ v,
    )


def density_sums(t: Tokens, Phi_q: Tensor) -> DensitySums:
    """The sums over the tokens of this process, from its features Phi_q [..., Q, m]."""
    return DensitySums(
        Phi_qq=Phi_q.mT @ Phi_q,
        VV=t.v.square().sum((-2, -1)),
        real_queries=t.real_queries(),
        real_keys=t.real_keys(),
    )


def over_shards(
    sums: TokenSums, densities: DensitySums, group: "ProcessGroup"
) -> tuple[TokenSums, DensitySums]:
    """Both over the tokens of all processes, in one all-reduce.

    Densities travel along because nobody knows yet whether they will be asked for, and a second round
    would cost more than their m^2 + 3 numbers per sequence and head.
    """
    matrices = (sums.Phi_oo, sums.Psi_kV, densities.Phi_qq)
    lead = broadcast(*(x.shape[:-2] for x in matrices))
    # one process may have a mask and another none: the counts take the same shape everywhere
    counts = [count.expand(lead) for count in (densities.real_queries, densities.real_keys)]
    one_set = sums.Psi_Phi_oo is sums.Phi_oo
    sent = [sums.Phi_oo, sums.Psi_kk, sums.Psi_kV, densities.Phi_qq, densities.VV, *counts]
    found = sum_over_shards(sent if one_set else [*sent, sums.Psi_Phi_oo], group)
    Phi_oo, Psi_kk, Psi_kV, Phi_qq, VV, real_queries, real_keys = found[:7]
    return (
        TokenSums(Phi_oo, Psi_kk, Phi_oo if one_set else found[7], Psi_kV),
        DensitySums(Phi_qq, VV, real_queries, real_keys),
    )
