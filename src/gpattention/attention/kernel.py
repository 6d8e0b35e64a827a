"""Kernel attention: the mean the GP kinds start from, without a posterior."""

from typing import Any, Literal

from torch import Tensor

from gpattention.attention.base import Attention, Form, Heads, MeanProcess, register_attention
from gpattention.attention.parameters import Positive, spread_
from gpattention.checks import check_choice
from gpattention.gp import kernel_attention, kernel_weights, without_padding
from gpattention.numerics import compute_dtype

KernelName = Literal["rbf", "ard_rbf", "exp_dot"]
KERNELS: tuple[KernelName, ...] = ("rbf", "ard_rbf", "exp_dot")
Normalize = Literal["none", "rows"]
NORMALIZE: tuple[Normalize, ...] = ("none", "rows")


def kernel_parameters(
    kernel: KernelName, num_heads: int, head_dim: int, *, learn_variance: bool = True, **made_with: Any
) -> tuple[Positive, Positive]:
    """Length scales [H, D] and variances [H] of ard_rbf and exp_dot.

    exp(q . k) has no mean at all when the tokens spread as rbf wants them (SPREAD = 1): longer scales
    and a small variance keep its rows in proportion.
    """
    lengthscale, variance = (1.0, 1.0) if kernel == "ard_rbf" else (1.6, 0.1)
    scales = Positive((num_heads, head_dim), lengthscale, **made_with)
    return scales, Positive((num_heads,), variance, learned=learn_variance, **made_with)


@register_attention("kernel")
class KernelAttention(Attention):
    """kappa(q, k) V, or its rows divided by their sums (eq. 25's mean).

    Rows divided by their sums do not depend on the variance, which is then fixed: a tensor in the state dict,
    but not a parameter.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        kernel: "rbf", "ard_rbf" with a length scale per head and dimension and a variance per head, or
            "exp_dot" likewise.
        symmetric: queries and keys share their projection.
        normalize: "rows" or "none".
        causal: whether token i sees only tokens up to i.
        **options: those of `Attention`.

    Raises:
        ValueError: an option is unknown.
    """

    normalizes = True
    causal_form = True
    projections = ("query", "key", "value")
    converts_from = ("softmax",)
    exportable = True
    attachable = True

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
        check_choice("kernel", kernel, KERNELS)
        check_choice("normalize", normalize, NORMALIZE)
        self.kernel: KernelName = kernel
        self.normalize: Normalize = normalize
        self.symmetric, self.causal = symmetric, causal
        self.query = self._linear()
        self.key = None if symmetric else self._linear()
        for linear in (self.query, self.key):
            if linear is not None:
                spread_(linear, num_heads)
        if kernel != "rbf":
            # DDP would wait for ever for a parameter without a gradient
            self.lengthscale, self.variance = kernel_parameters(
                kernel, num_heads, self.head_dim, learn_variance=normalize == "none", **self._made_with
            )

    def folded(self, part: str) -> dict[str, Tensor]:
        """State of the projection to "query" or "key", with rows divided by the length scales."""
        linear = self.key if part == "key" and self.key is not None else self.query
        state = {name: x.double() for name, x in linear.state_dict().items()}
        if self.kernel == "rbf":
            return state
        scale = self.lengthscale().double().flatten()  # [E]
        return {name: x / (scale[:, None] if x.ndim == 2 else scale) for name, x in state.items()}

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
        masks: dict[str, Any] = {"mask": heads.mask, "query_mask": heads.query_mask}
        return without_padding(*self._scaled(heads), dot=self.kernel == "exp_dot", **masks)

    def _compared(self, heads: Heads) -> tuple[Tensor, Tensor, bool]:
        return *self._projected(heads), self.kernel == "exp_dot"

    def _mean(self, heads: Heads) -> Tensor:
        return kernel_attention(*self._scaled(heads), heads.v, **self._options(heads))

    def _weights(self, heads: Heads) -> Tensor:
        return kernel_weights(*self._scaled(heads), **self._options(heads)).to(heads.v.dtype)

    def _mean_process(self, heads: Heads) -> MeanProcess:
        rows, dot = self.normalize == "rows", self.kernel == "exp_dot"
        form: Form = ("softmax" if dot else "rows") if rows else ("exp_dot" if dot else "rbf")
        return MeanProcess(*self._projected(heads), form, self._amplitude())

    def _amplitude(self) -> Tensor | None:
        """The variance [H] of the kernel, if it is not 1 and does not cancel."""
        return None if self.normalize == "rows" or self.kernel == "rbf" else self.variance()

    def _options(self, heads: Heads) -> dict[str, Any]:
        kernel = {"dot": self.kernel == "exp_dot", "variance": self._amplitude()}
        masks = {"causal": self.causal, "mask": heads.mask, "query_mask": heads.query_mask}
        return {"normalised": self.normalize == "rows", **kernel, **masks}
