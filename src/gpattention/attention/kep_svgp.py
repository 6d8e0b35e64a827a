"""KEP-SVGP: two sparse variational GPs on the singular features of an asymmetric kernel (eq. 26-29)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpattention.attention.base import (
    Attention,
    Heads,
    Source,
    mean_over_processes,
    processes,
    register_attention,
)
from gpattention.attention.parameters import refuse_unused
from gpattention.checks import check_choice, check_count, plain
from gpattention.gp import KEPPosterior, Posterior, kep_svgp_posterior
from gpattention.numerics import compute_dtype

Merge = Literal["sum", "cat"]
MERGES: tuple[Merge, ...] = ("sum", "cat")
ROWS_PER_RANK = 10  # of tokens in the directions of features, as in the authors' code


class HeadMap(nn.Linear):
    """One map of every head's channels to its part of the output: [..., H s] -> [..., H D]."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the channels of all heads side by side."""
        return super().forward(x.unflatten(-1, (-1, self.in_features))).flatten(-2)


@register_attention("kep-svgp")
class KEPSVGPAttention(Attention):
    """KEP-SVGP attention (Chen, Tonin, Tao and Suykens, ICML 2024), from its published equations.

    Queries and keys are divided by their norms; values have no projection, and after the heads there is only
    the map from s channels to the width of a head.  In a config for a whole model, only the last layer has
    this kind and all others have softmax attention, as in the authors' code.  It has no warm start: the first
    phase of a recipe is this model itself without draws and regulariser.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        merge: "sum" adds the features of queries and keys; "cat" maps both to as many tokens, which needs
            sequences of equal length.
        rank: number s of singular features.
        tokens: number of tokens of a sequence with "cat"; the largest number with "sum", where None is any.
            Models set it themselves.
        eta_ksvd: weight of the KSVD loss; by default that of the authors for CIFAR, 1 with "sum" and 10 with
            "cat".
        eta_kl: weight of the KL divergence.
        **options: those of `Attention`; the maps to queries and keys never have a bias.

    Raises:
        ValueError: an option is unknown, or has no effect in the mode that is chosen.
    """

    draws = True
    crosses = False
    weighs = False
    sized = True
    below = "softmax"
    projections = ("query", "key")
    regularizers = ("ksvd+kl", "ksvd", "kl", "none")
    default_regularizer = "ksvd+kl"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        merge: Merge = "sum",
        rank: int = 10,
        tokens: int | None = None,
        eta_ksvd: float | None = None,
        eta_kl: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        check_choice("merge", merge, MERGES)
        rank = check_count("rank", rank)
        tokens = None if tokens is None else check_count("tokens", tokens)
        if merge == "cat" and tokens is None:
            raise ValueError(
                "expected tokens to be the number of tokens of every sequence with merge='cat', got None"
            )
        eta_ksvd, eta_kl = plain(eta_ksvd), plain(eta_kl)
        for name, eta in (("eta_ksvd", eta_ksvd), ("eta_kl", eta_kl)):
            if eta is not None and not 0 <= eta < float("inf"):
                raise ValueError(f"expected {name} >= 0 and finite, got {eta}")
            if name[4:] not in self.regularizer:
                refuse_unused(KEPSVGPAttention, f"where regularizer is {self.regularizer!r}", **{name: eta})
        self.merge: Merge = merge
        self.one_length = merge == "cat"
        self.rank, self.tokens, self.eta_kl = rank, tokens, eta_kl
        self.eta_ksvd = (10.0 if merge == "cat" else 1.0) if eta_ksvd is None else eta_ksvd
        made, H, s = self._made_with, num_heads, rank
        self.query, self.key = (nn.Linear(embed_dim, embed_dim, bias=False, **made) for _ in range(2))
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=embed_dim**-0.5)
        self.value = nn.Identity()  # type: ignore[assignment]  # X_h: each head reads its slice of the tokens
        self.output = HeadMap(s, self.head_dim, bias=self._bias, **made)
        nn.init.normal_(self.output.weight, std=s**-0.5)
        if self.output.bias is not None:
            nn.init.zeros_(self.output.bias)
        rows = ROWS_PER_RANK * s if tokens is None else min(tokens, ROWS_PER_RANK * s)
        start = _orthogonal(H, rows, s).to(**made)  # the same for both: the KSVD loss then starts near 0
        self.query_rows, self.key_rows = nn.Parameter(start), nn.Parameter(start.clone())
        self.log_scale = nn.Parameter(torch.zeros(H, s, **made))
        # features are about standard normal at first, so that their sum has variance 2 and the mean 1
        self.inducing_mean = nn.Parameter((torch.randn(H, s, s) * (2 * s) ** -0.5).to(**made))
        self.scale_lower = nn.Parameter(torch.zeros(H, s, s, s, **made))  # [H, channels, s, s], strict part
        self.log_diagonal = nn.Parameter(torch.zeros(H, s, s, **made))  # S is the prior's Lambda^2 at first
        if merge == "cat":
            assert tokens is not None
            both = torch.eye(tokens).repeat(1, 2)  # starts as "sum"
            self.combine = nn.Parameter(both.to(**made))  # [N, 2 N]

    def scale_tril(self) -> Tensor:
        """Factors of the covariances of the inducing variables.  [H, channels, s, s]"""
        diagonal = self.log_diagonal.to(compute_dtype(self.log_diagonal.dtype)).exp()
        return self.scale_lower.tril(-1).to(diagonal.dtype) + torch.diag_embed(diagonal)

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        N = heads.queries.shape[-2]
        if self.merge == "cat" and self.tokens != N:
            why = "whose map from queries and keys to tokens is of one length"
            raise ValueError(f"expected sequences of tokens={self.tokens} with merge='cat', {why}, got {N}")
        q, k = self._projected(heads)
        dtype = torch.promote_types(q.dtype, heads.v.dtype)  # under autocast the tokens are not projected
        return kep_svgp_posterior(
            q.to(dtype), k.to(dtype), heads.v.to(dtype), self.query_rows, self.key_rows, self.log_scale,
            self.inducing_mean, self.scale_tril(), mask=heads.one_mask("'kep-svgp'"),
            combine=self.combine if self.merge == "cat" else None,
        )  # fmt: skip

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q, k = (nn.functional.normalize(x, dim=-1) for x in self._projected(heads))
        return q, k

    def _regularizer(self, heads: Heads, posterior: Posterior, generator: Source) -> Tensor:
        """A sequence's share: their sum over heads and mean over sequences is eta_ksvd KSVD + eta_kl KL."""
        assert isinstance(posterior, KEPPosterior)
        total = posterior.e.new_zeros(heads.queries.shape[0], self.num_heads)  # [B, H]
        if "ksvd" in self.regularizer:  # of the batch: every head of every sequence bears a part
            total = total + self.eta_ksvd * self._ksvd(posterior, heads) / self.num_heads
        if "kl" in self.regularizer:
            total = total + self.eta_kl * posterior.kl()
        if heads.mask is None:
            return total
        return torch.where(heads.mask.any(-1), total, 0.0)  # padding alone is no example

    def _ksvd(self, posterior: KEPPosterior, heads: Heads) -> Tensor:
        """Of the whole batch, however many processes share it in training.  []"""
        if not (self.training and processes() > 1):
            return posterior.ksvd()
        gap = posterior.ksvd_gap(mean_over_processes(posterior.ksvd_terms()))
        whole = mean_over_processes(gap.detach())
        count = heads.v.new_full((), len(heads.queries)) if heads.mask is None else heads.mask.any(-1).sum()
        share = mean_over_processes(count.to(gap.dtype)) / count.clamp_min(1)  # each of so many bears it
        # averaged over processes this is the square of the whole batch's gap, and so is its gradient
        return share * whole * (2 * gap - whole)


def _orthogonal(heads: int, rows: int, columns: int) -> Tensor:
    """Matrices with orthonormal columns, or rows where these are fewer.  [H, rows, columns]"""
    made = torch.empty(heads, rows, columns)
    for each in made:
        nn.init.orthogonal_(each)
    return made
