"""What tokens are to inducing inputs: their whitened features, and the variance that these miss."""

from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.gp.cholesky import cholesky
from gpattention.gp.inputs import Tokens, keep_columns, keep_rows, with_diagonal
from gpattention.gp.kernels import cross_gram, gram


def inducing_root(m: Tensor, delta: float) -> Tensor:
    """chol(K_mm + delta I).  [..., m, m]"""
    return cholesky(with_diagonal(gram(m), delta), name="K_mm + delta I", noise=delta)


def features(x: Tensor, m: Tensor, L: Tensor, mask: Tensor | None) -> Tensor:
    """Whitened inducing features kappa(x, m) L^-T, zero at padded tokens.  [..., N, m]"""
    phi = solve_triangular(L.mT, cross_gram(x, m), upper=True, left=False)
    return keep_rows(phi, mask)


def missed_variance(t: Tokens, Phi_q: Tensor) -> Tensor:
    """diag(K_q - Phi_q Phi_q^T), 0 at padded queries: what z_m leaves open of each query.  [..., Q]"""
    prior = t.amplify(Phi_q.new_ones(*Phi_q.shape[:-1], 1)).square()[..., 0]  # (s_q a_i)^2, as kappa = 1
    missed = prior - Phi_q.square().sum(-1)
    # never negative but for rounding, since K_mm + delta I >= K_mm: lifted in value, with its own gradient
    missed = missed + (-missed).clamp_min(0.0).detach()
    return keep_columns(missed[..., None, :], t.query_mask)[..., 0, :]
