"""Per-token query amplitudes that normalise the rows of kernel attention (section 13).

    log a_i = log t - logsumexp_j(-1/2 |q_i - k_j|^2)                                         (25)

Row sums are those of kappa(q, k), which are positive; the sums of the CGP surrogate may not be.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from gpattention.gp.inputs import Scalar, check_delta, keep_real, keep_rows, masked, prepare
from gpattention.gp.kernels import cross_gram, log_kappa
from gpattention.gp.softmax import log_sum_exp, sees_a_key
from gpattention.gp.sparse import inducing_root
from gpattention.numerics import Tokens, full_precision, solve
from gpattention.ops import check_group, sum_over_shards, why_not_fused
from gpattention.ops.exact import fused_row_log_amplitude
from gpattention.ops.sparse import fused_sparse_row_sum, why_not_fused_sparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@full_precision
def row_log_amplitude(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    *,
    scale: Scalar = 1.0,  # t of eq. 25
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    causal: bool = False,
    max_log_amplitude: float | None = None,
) -> Tensor:
    """log a_i of eq. 25, to be passed as `log_amplitude`.

    With `log_amplitude=row_log_amplitude(q, k)` the mean of `direct_posterior` is softmax attention
    over -1/2 |q_i - k_j|^2.  A prior scale t that leaves the mean alone needs the values divided by
    t as well.

    Args:
        q: queries.
        k: keys.
        scale: the prior scale t.
        mask: which keys are real.
        query_mask: which queries are real; `mask` when None and the numbers agree.
        causal: query i sees keys up to i only.
        max_log_amplitude: caps the amplitude of queries far from every key; capped rows shrink towards 0
            instead of being normalised.

    Returns:
        [..., Q]; 0 at padded queries and at queries that see no real key.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart.
    """
    t = prepare(
        q, k, k, noise=1.0, scale_q=scale, mask=mask, query_mask=query_mask, causal=causal,
        scale_name="scale", mask_tokens=False,
    )  # fmt: skip
    sizes = {"tokens": max(t.q.shape[-2], t.k.shape[-2]), "channels": t.q.shape[-1]}
    if not causal and why_not_fused(t.q, **sizes) is None:
        return fused_row_log_amplitude(t, max_log_amplitude)
    t = masked(t)
    log_sum = log_sum_exp(t.q, t.k, mask=t.mask, causal=causal, logits=log_kappa)
    # a query that sees no key has no row sum: amplitude 1 leaves it the prior
    return _finish(t.scale_q[..., 0].log() - log_sum, sees_a_key(t, causal), max_log_amplitude)


@full_precision
def sparse_row_log_amplitude(
    q: Tensor,  # [..., Q, C]
    k: Tensor,  # [..., K, C]
    inducing: Tensor,  # [..., l, C]
    *,
    scale: Scalar = 1.0,
    mask: Tensor | None = None,  # [..., K] True = real
    query_mask: Tensor | None = None,  # [..., Q]
    floor: float = 1e-3,
    delta: float = 1e-6,
    max_log_amplitude: float | None = None,
    group: "ProcessGroup | None" = None,
) -> Tensor:
    """Eq. 25 from the Nystrom estimate of the row sums, clamped at `floor` (section 13).

    O(N l) time and memory: kappa(q, l) (K_ll + delta I)^-1 sum_j kappa(l, k_j).

    Args:
        q: queries.
        k: keys.
        inducing: inducing inputs l.
        scale: the prior scale t.
        mask: which keys are real.
        query_mask: which queries are real; `mask` when None and the numbers agree.
        floor: the least a row sum counts for.
        delta: perturbation of the inducing Gram matrix.
        max_log_amplitude: the most that is returned.
        group: the processes that share the tokens, as in `scgp_posterior`: the row sums run over the keys of
            all.  Their l numbers take an all-reduce of their own each way: the sums of the posterior need the
            amplitudes already.

    Returns:
        [..., Q]; 0 at padded queries.

    Raises:
        ValueError: an argument does not fit the others, or is out of its range.
        NumericalError: tokens are not finite or too far apart, or a covariance has no factor.
    """
    check_group(group)
    if not floor > 0:
        raise ValueError(f"expected floor > 0, got {floor}")
    check_delta(delta)
    t = prepare(
        q, k, k, inducing={"inducing": inducing}, noise=1.0, scale_q=scale, mask=mask,
        query_mask=query_mask, scale_name="scale", mask_tokens=False,
    )  # fmt: skip
    fused = group is None and why_not_fused_sparse(t) is None  # the kernel sums and solves in one go
    row_sum = fused_sparse_row_sum(t, delta) if fused else _sparse_row_sum(masked(t), delta, group)
    log_amplitude = t.scale_q[..., 0].log() - row_sum.clamp_min(floor).log()
    return _finish(log_amplitude, t.query_mask, max_log_amplitude)


def _sparse_row_sum(t: Tokens, delta: float, group: "ProcessGroup | None") -> Tensor:
    """kappa(q, l) (K_ll + delta I)^-1 sum_j kappa(l, k_j), over the keys of all processes.  [..., Q]"""
    (l,) = t.inducing  # noqa: E741 - the paper's letter
    L = inducing_root(l, delta)  # [..., l, l]
    total = keep_rows(cross_gram(t.k, l), t.mask).sum(-2)[..., None]  # [..., l, 1]
    if group is not None:
        (total,) = sum_over_shards([total], group)
    weights = solve(total, L)  # [..., l, 1]
    return (cross_gram(t.q, l) @ weights)[..., 0]


def _finish(log_amplitude: Tensor, keep: Tensor | None, most: float | None) -> Tensor:
    if most is not None:
        log_amplitude = log_amplitude.clamp_max(most)
    return keep_real(log_amplitude, keep)
