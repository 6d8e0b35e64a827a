"""What direct, cgp and scgp share: noise and amplitudes per head, rows normalised or not."""

import math
from typing import Any, ClassVar

from torch import Tensor, nn

from gpattention.attention.base import Attention, Heads
from gpattention.attention.initialisation import spread_
from gpattention.attention.kernel import Normalize, check_normalize
from gpattention.attention.parameters import NOISE_FLOOR, Positive
from gpattention.attention.unused import refuse_unused
from gpattention.gp import LogDensity, row_log_amplitude


class GaussianAttention(Attention):
    """Queries and keys as evaluations of one Gaussian process.

    `normalize="rows"` gives the query process the amplitude t / sum_j kappa(q_i, k_j) (eq. 25): the
    mean is a weighted average of the values and the standard deviation grows where a query has no near
    key.  The prior scale t is per head; the values are divided by it, so that it changes the standard
    deviation alone.  `normalize="none"` is the paper's: amplitudes scale_q and scale_k per head.

    `prior_scale`, `learn_prior_scale` and `max_stddev` (a cap on the amplitude) are options of normalised
    rows, `scale` and `learn_scale` of `normalize="none"`; in the other mode they are refused.
    """

    draws: ClassVar[bool] = True
    normalizes: ClassVar[bool] = True
    projections: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        normalize: Normalize = "rows",
        noise: float = 0.01,
        learn_noise: bool = True,
        scale: float = 1.0,
        learn_scale: bool = True,
        prior_scale: float = 0.2,
        learn_prior_scale: bool = True,
        max_stddev: float = 2.0,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.normalize = check_normalize(normalize)
        if self.normalize == "none":
            refuse_unused(
                GaussianAttention, "where normalize is 'none'",
                prior_scale=prior_scale, learn_prior_scale=learn_prior_scale, max_stddev=max_stddev,
            )  # fmt: skip
        else:
            refuse_unused(
                GaussianAttention, "unless normalize is 'none'", scale=scale, learn_scale=learn_scale
            )
        self.query, self.key = self._linear(), self._linear()
        for linear in (self.query, self.key):
            spread_(linear, num_heads)
        made, H = self._made_with, num_heads
        self.noise = Positive((H,), noise, floor=NOISE_FLOOR, learned=learn_noise, name="noise", **made)
        if not max_stddev > 0:
            raise ValueError(f"expected max_stddev > 0, got {max_stddev}")
        self.max_stddev = max_stddev
        if self.normalize == "rows":
            self.prior_scale = Positive(
                (H,), prior_scale, learned=learn_prior_scale, name="prior_scale", **made
            )
        else:
            self.scale_q = Positive((H,), scale, learned=learn_scale, name="scale", **made)
            self.scale_k = Positive((H,), scale, learned=learn_scale, name="scale", **made)

    def _projected(self, heads: Heads) -> tuple[Tensor, Tensor]:
        return self._projection("query", heads), self._projection("key", heads)

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        return self._projected(heads)

    def _amplitudes(
        self, q: Tensor, k: Tensor, heads: Heads, *, causal: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Values [B, H, K, D] and the keyword arguments every function of the process takes."""
        if self.normalize == "none":
            return heads.v, {**self._common(heads), "scale_q": self.scale_q(), "scale_k": self.scale_k()}
        t = self.prior_scale()  # [H]
        log_amplitude = row_log_amplitude(q, k, causal=causal, **self._row_options(heads, t))
        return self._normalised(heads, t, log_amplitude)

    def _normalised(self, heads: Heads, t: Tensor, log_amplitude: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The same for rows of log a_i [B, H, Q] at the prior scale t [H], which the values undo."""
        values = (heads.v / t[:, None, None]).to(heads.v.dtype)
        return values, {**self._common(heads), "log_amplitude": log_amplitude}

    def _common(self, heads: Heads) -> dict[str, Any]:
        return {"noise": self.noise(), "mask": heads.mask, "query_mask": heads.query_mask}

    def _row_options(self, heads: Heads, t: Tensor) -> dict[str, Any]:
        """How rows are normalised: a_i is capped at the largest standard deviation wanted."""
        return {
            "scale": t,
            "mask": heads.mask,
            "query_mask": heads.query_mask,
            "max_log_amplitude": math.log(self.max_stddev),
        }

    def _density(self, density: LogDensity) -> Tensor:
        """The sign that is added to a loss.  [B, H]"""
        return -density.total

    def _latent(self) -> nn.Linear:
        """A projection to latent inputs that starts as the keys': the exact model then starts as direct."""
        linear = self._linear()
        linear.load_state_dict(self.key.state_dict())
        return linear


def causal_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of causal attention, which defines no density of all tokens and so has no regulariser."""
    given = options.get("regularizer")
    if given not in (None, "none"):
        raise ValueError(
            f"causal attention defines no density of all tokens: expected regularizer 'none', got {given!r}"
        )
    return {**options, "regularizer": "none"}
