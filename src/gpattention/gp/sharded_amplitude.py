"""`sparse_row_log_amplitude` for tokens spread over processes (sections 12 and 13)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpattention.gp.cholesky import solve
from gpattention.gp.inputs import Scalar, keep_rows, prepare
from gpattention.gp.kernels import cross_gram
from gpattention.gp.precision import full_precision
from gpattention.gp.sharding import check_group, sum_over_shards
from gpattention.gp.sparse_features import inducing_root

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FLOOR, DELTA = 1e-3, 1e-6  # those of `sparse_row_log_amplitude`


@full_precision
def sharded_row_log_amplitude(
    q: Tensor,  # [..., Q, C] of this process
    k: Tensor,  # [..., K, C] of this process
    inducing: Tensor,  # [..., l, C]
    *,
    group: "ProcessGroup",
    scale: Scalar = 1.0,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    max_log_amplitude: float,
) -> Tensor:
    """Eq. 25 for this process's queries, from row sums over the keys of all.  [..., Q]

    The l numbers sum_j kappa(l, k_j) take an all-reduce of their own each way: the sums of the posterior
    need the amplitudes already.
    """
    check_group(group)
    t = prepare(
        q, k, k, inducing={"inducing": inducing}, noise=1.0, scale_q=scale, mask=mask,
        query_mask=query_mask, scale_name="scale",
    )  # fmt: skip
    (l,) = t.inducing  # noqa: E741 - the paper's letter
    total = keep_rows(cross_gram(t.k, l), t.mask).sum(-2)[..., None]  # [..., l, 1]
    (total,) = sum_over_shards([total], group)
    weights = solve(total, inducing_root(l, DELTA))  # [..., l, 1]
    row_sum = (cross_gram(t.q, l) @ weights)[..., 0]  # [..., Q]
    log_amplitude = t.scale_q[..., 0].log() - row_sum.clamp_min(FLOOR).log()
    log_amplitude = log_amplitude.clamp_max(max_log_amplitude)
    return log_amplitude if t.query_mask is None else torch.where(t.query_mask, log_amplitude, 0.0)
