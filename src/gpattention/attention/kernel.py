"""Kernel attention: the mean the GP kinds start from, without a posterior."""

from typing import Any, Literal

from torch import Tensor

from gpattention.attention.base import Attention, Heads
from gpattention.attention.initialisation import spread_
from gpattention.attention.parameters import Positive
from gpattention.attention.registry import register_attention
from gpattention.gp.kernel_attention import kernel_attention, kernel_weights, without_padding
from gpattention.gp.precision import compute_dtype

KernelName = Literal["rbf", "ard_rbf", "exp_dot"]
KERNELS: tuple[KernelName, ...] = ("rbf", "ard_rbf", "exp_dot")
Normalize = Literal["none", "rows"]


def check_normalize(normalize: str) -> Normalize:
    """One of the two ways to weigh values."""
    if normalize == "none" or normalize == "rows":
        return normalize  # type: ignore[return-value]
    raise ValueError(f"expected normalize to be 'none' or 'rows', got {normalize!r}")


def kernel_parameters(
    kernel: KernelName, num_heads: int, head_dim: int, *, learn_variance: bool = True, **made_with: Any
) -> tuple[Positive, Positive]:
    """Length scales [H, D] and variances [H] of ard_rbf and exp_dot.

    exp(q . k) has no mean at all when the tokens spread as rbf wants them (SPREAD = 1): longer scales
    and a small variance keep its rows in proportion.
    """
    lengthscale, variance = (1.0, 1.0) if kernel == "ard_rbf" else (1.6, 0.1)
    return (
        Positive((num_heads, head_dim), lengthscale, **made_with),
        Positive((num_heads,), variance, learned=learn_variance, **made_with),
    )


@register_attention("kernel")
class KernelAttention(Attention):
    """kappa(q, k) V, or its rows divided by their sums (eq. 25's mean).

    Options beside those of `Attention`: `kernel` ("rbf", "ard_rbf" with a length scale per head and
    dimension and a variance per head, "exp_dot" likewise), `symmetric` (queries and keys share their
    projection), `normalize` ("rows" or "none"), `causal`.  Rows divided by their sums do not depend on the
    variance: it is then held fixed, a tensor of the state dict all the same but no parameter to train.
    """

    normalizes = True
    causal_form = True
    projections = ("query", "key", "value")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kernel: KernelName = "rbf",
        symmetric: bool = False,
        normalize: Normalize = "rows",
        causal: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        if kernel not in KERNELS:
            raise ValueError(f"expected kernel to be one of {', '.join(KERNELS)}, got {kernel!r}")
        self.kernel: KernelName = kernel
        self.symmetric, self.causal = symmetric, causal
        self.normalize = check_normalize(normalize)
        self.query = self._linear()
        self.key = None if symmetric else self._linear()
        for linear in (self.query, self.key):
            if linear is not None:
                spread_(linear, num_heads)
        if kernel != "rbf":
            # without a gradient it would be a parameter that DDP waits for in vain
            self.lengthscale, self.variance = kernel_parameters(
                kernel, num_heads, self.head_dim, learn_variance=normalize == "none", **self._made_with
            )

    def _scaled(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Queries and keys divided by the length scales.  [B, H, N, D]"""
        q = self._projection("query", heads)
        k = self._projection("key", heads) if self.key is not None else self._split(self.query(heads.keys))
        q, k = q.to(compute_dtype(q.dtype)), k.to(compute_dtype(k.dtype))
        if self.kernel != "rbf":
            scale = self.lengthscale()[:, None]  # [H, 1, D]
            q, k = q / scale, k / scale
        return q, k

    def _projected(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """The same with padding overwritten.  [B, H, N, D]"""
        return without_padding(
            *self._scaled(heads), dot=self.kernel == "exp_dot", mask=heads.mask, query_mask=heads.query_mask
        )

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        return self._projected(heads)

    def _mean(self, heads: Heads) -> Tensor:
        return kernel_attention(*self._scaled(heads), heads.v, **self._options(heads))

    def _weights(self, heads: Heads) -> Tensor:
        return kernel_weights(*self._scaled(heads), **self._options(heads)).to(heads.v.dtype)

    def _options(self, heads: Heads) -> dict[str, Any]:
        normalised = self.normalize == "rows"
        return {
            "normalised": normalised,
            "dot": self.kernel == "exp_dot",
            "variance": None if normalised or self.kernel == "rbf" else self.variance(),  # [H]
            "causal": self.causal,
            "mask": heads.mask,
            "query_mask": heads.query_mask,
        }
