"""SGPA: sparse, symmetric GP attention with a free variational posterior (eq. 19-20)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.attention.base import Attention, Heads, Source, register_attention
from gpattention.attention.kernel import KERNELS, KernelName, kernel_parameters
from gpattention.attention.parameters import Positive, spread_
from gpattention.checks import check_choice, check_count, check_fraction
from gpattention.gp import ArdRbf, Posterior, SGPAPosterior, exp_dot, rbf, sgpa_posterior
from gpattention.numerics import compute_dtype
from gpattention.ops import why_not_fused_on
from gpattention.ops.sgpa import fused_triangle

Kernel = Callable[[Tensor, Tensor], Tensor]


@register_attention("sgpa")
class SGPAAttention(Attention):
    """Self-attention with queries as keys, inducing keys, and one variational covariance per channel.

    The raw inducing inputs `.inducing` [H, m, E] are in the space of the tokens.  A model passes them through
    the layer below (`forward(..., inducing=...)`) and gets the used ones back in `AttentionOutput.inducing`;
    without a model the module uses them directly.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        num_inducing: inducing inputs per head.
        kernel: "rbf", "ard_rbf" or "exp_dot".
        jitter: added to the diagonal of the inducing Gram matrix.
        **options: those of `Attention`.

    Raises:
        ValueError: an option is unknown.
    """

    draws = True
    crosses = False
    converts_from = ("softmax", "kernel")
    has_inducing = True
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
        check_fraction("jitter", jitter)
        self.kernel: KernelName = kernel
        self.jitter = jitter
        self.query = self._linear()
        spread_(self.query, num_heads)
        made, H, D, m = self._made_with, num_heads, self.head_dim, num_inducing
        # distributed like tokens after LayerNorm, so that projections treat them like tokens
        self.inducing = nn.Parameter(torch.randn(H, m, embed_dim).to(**made))
        self.inducing_values = nn.Parameter(torch.zeros(H, m, D, **made))
        lower = torch.zeros(H, D, m, m, **made)
        self.scale_lower = nn.Parameter(lower)  # [H, D, m, m], its strict lower part
        self.scale_diagonal = Positive((H, D, m), 0.5, floor=1e-4, **made)
        if kernel != "rbf":
            self.lengthscale, self.variance = kernel_parameters(kernel, H, D, **made)

    @classmethod
    def kernel_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Kernel attention with one projection for queries and keys, whose rows have any sum."""
        return {"kernel": options.get("kernel", "rbf"), "symmetric": True, "normalize": "none"}

    def _from_kernel(self, source: Any, latent_from: str) -> dict[str, Tensor]:
        if not source.symmetric:
            raise ValueError("sgpa has one projection for queries and keys, expected a symmetric source")
        if source.normalize != "none":
            raise ValueError("sgpa does not normalise rows, expected normalize='none'")
        self._check_like(source, "causal")
        if source.kernel == self.kernel:
            parts = ("query",) if self.kernel == "rbf" else ("query", "lengthscale", "variance")
            return {f"{p}.{n}": x for p in parts for n, x in getattr(source, p).state_dict().items()}
        unit = source.kernel == "ard_rbf" and bool((source.variance() - 1).abs().max() < 1e-6)
        if self.kernel == "rbf" and unit:
            return {f"query.{name}": x for name, x in source.folded("query").items()}
        raise ValueError(f"expected a source with kernel {self.kernel!r}, got {source.kernel!r}")

    def inducing_tokens(self) -> Tensor:
        """The raw inducing inputs.  [H, m, E]"""
        return self.inducing

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
            shapes = (tuple(x.shape) for x in (self.inducing, inducing))
            raise ValueError("expected inducing of shape {}, got {}".format(*shapes))
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
        q = self._arguments(heads)[0]
        if self.kernel != "rbf":
            q = q.to(compute_dtype(q.dtype)) / self.lengthscale()[:, None]  # [H, 1, D]
        return q, q

    def _compared(self, heads: Heads) -> tuple[Tensor, Tensor, bool]:
        return *self._kernel_inputs(heads), self.kernel == "exp_dot"

    def _options(self, heads: Heads) -> dict[str, Any]:
        return {"kernel": self._kernel(), "jitter": self.jitter, "mask": heads.one_mask("'sgpa'")}

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        return sgpa_posterior(
            *self._arguments(heads), **self._options(heads), with_variance=with_variance,
            with_draw=heads.one_draw,
        )  # fmt: skip

    def _regularizer(self, heads: Heads, posterior: Posterior, generator: Source) -> Tensor:
        kl = posterior.kl()  # [B, H]
        if heads.mask is None:
            return kl
        # a sequence of only padding is not an example, but has the terms of eq. 20 without tokens
        return torch.where(heads.mask.any(-1), kl, 0.0)

    def _weights(self, heads: Heads) -> Tensor:
        posterior = self._posterior(heads)
        assert isinstance(posterior, SGPAPosterior)
        f = posterior.factors
        return (f.K_qq - f.Phi @ f.Phi.mT).to(heads.v.dtype)
