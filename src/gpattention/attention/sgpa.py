"""SGPA: sparse, symmetric GP attention with a free variational posterior (eq. 19-20)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gpattention.attention.base import Attention, Heads
from gpattention.attention.initialisation import spread_
from gpattention.attention.kernel import KERNELS, KernelName, kernel_parameters
from gpattention.attention.parameters import Positive
from gpattention.attention.registry import register_attention
from gpattention.checks import check_count
from gpattention.gp import NoiseSource, Posterior, exp_dot, rbf, sgpa_posterior
from gpattention.gp.checks import check_choice, check_jitter
from gpattention.gp.fused.sgpa.triangle import fused_triangle
from gpattention.gp.fused.switch import why_not_fused_on
from gpattention.gp.kernels import ArdRbf
from gpattention.gp.precision import compute_dtype
from gpattention.gp.variational import SGPAPosterior

Kernel = Callable[[Tensor, Tensor], Tensor]


@register_attention("sgpa")
class SGPAAttention(Attention):
    """Self-attention with queries as keys, inducing keys, and one variational covariance per channel.

    Its raw inducing inputs `.inducing` [H, m, E] live where the tokens live: a model passes them through
    the layer before (`forward(..., inducing=...)`) and gets the ones used back in
    `AttentionOutput.inducing`; on its own the module uses them as they are.

    Options beside those of `Attention`: `num_inducing`, `kernel` ("rbf", "ard_rbf", "exp_dot"), `jitter`.
    """

    draws = True
    crosses = False
    projections = ("query", "value")
    regularizers = ("kl", "none")
    default_regularizer = "kl"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_inducing: int = 32,
        kernel: KernelName = "rbf",
        jitter: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        num_inducing = check_count("num_inducing", num_inducing)
        check_choice("kernel", kernel, KERNELS)
        check_jitter(jitter)
        self.kernel: KernelName = kernel
        self.jitter = jitter
        self.query = self._linear()
        spread_(self.query, num_heads)
        made, H, D, m = self._made_with, num_heads, self.head_dim, num_inducing
        # like LayerNorm'ed tokens; every projection then treats them as it treats tokens
        self.inducing = nn.Parameter(torch.randn(H, m, embed_dim).to(**made))
        self.inducing_values = nn.Parameter(torch.zeros(H, m, D, **made))
        lower = torch.zeros(H, D, m, m, **made)
        self.scale_lower = nn.Parameter(lower)  # [H, D, m, m], its strict lower part
        self.scale_diagonal = Positive((H, D, m), 0.5, floor=1e-4, **made)
        if kernel != "rbf":
            self.lengthscale, self.variance = kernel_parameters(kernel, H, D, **made)

    def scale_tril(self) -> Tensor:
        """Factors of the variational covariances.  [H, D, m, m]"""
        lower, diagonal = self.scale_lower, self.scale_diagonal
        single = lower.dtype == diagonal.raw.dtype == torch.float32
        if single and self.kernel != "exp_dot" and why_not_fused_on(lower.device, lower.dtype) is None:
            return fused_triangle(lower, diagonal.raw, diagonal.floor)
        return lower.tril(-1) + torch.diag_embed(diagonal()).to(lower.dtype)

    def _kernel(self) -> Kernel:
        if self.kernel == "rbf":
            return rbf
        lengthscale, variance = self.lengthscale(), self.variance()
        if self.kernel == "ard_rbf":
            return ArdRbf(lengthscale, variance)
        return lambda x, y: exp_dot(x, y, lengthscale, variance)

    def _inducing_inputs(self, inducing: Tensor | None) -> Tensor:
        inducing = self.inducing if inducing is None else inducing
        if inducing.shape != self.inducing.shape:
            raise ValueError(
                f"expected inducing of shape {tuple(self.inducing.shape)}, got {tuple(inducing.shape)}"
            )
        return inducing

    def _arguments(self, heads: Heads) -> tuple[Tensor, ...]:
        q = self._projection("query", heads)  # [B, H, N, D]
        weight = self.query.weight.unflatten(0, (self.num_heads, self.head_dim))  # [H, D, E]
        raw = self._inducing_inputs(heads.inducing)
        keys = raw.to(weight.dtype) @ weight.mT  # [H, m, D]
        if self.query.bias is not None:
            keys = keys + self.query.bias.unflatten(0, (self.num_heads, 1, self.head_dim))
        return q, heads.v, keys, self.inducing_values, self.scale_tril()

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q = self._split(self.query(heads.queries))
        if self.kernel != "rbf":
            q = q.to(compute_dtype(q.dtype)) / self.lengthscale()[:, None]  # [H, 1, D]
        return q, q

    def _options(self, heads: Heads) -> dict[str, Any]:
        return {"kernel": self._kernel(), "jitter": self.jitter, "mask": heads.one_mask("'sgpa'")}

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        return sgpa_posterior(*self._arguments(heads), **self._options(heads), with_variance=with_variance)

    def _regularizer(
        self, heads: Heads, posterior: Posterior, generator: Generator | NoiseSource | None
    ) -> Tensor:
        kl = _variational(posterior).kl()  # [B, H]
        if heads.mask is None:
            return kl
        # a sequence of padding alone is no example, but has the terms of eq. 20 that know no token
        return torch.where(heads.mask.any(-1), kl, 0.0)

    def _weights(self, heads: Heads) -> Tensor:
        f = _variational(self._posterior(heads)).factors()
        return (f.K_qq - f.Phi @ f.Phi.mT).to(heads.v.dtype)


def _variational(posterior: Posterior) -> SGPAPosterior:
    if not isinstance(posterior, SGPAPosterior):
        raise TypeError(f"expected SGPA's posterior, got {type(posterior).__name__}")
    return posterior
