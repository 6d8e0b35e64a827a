"""What one attention layer looks like from inside: is it switched off, collapsed, or speaking?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.attention.base import Attention, Heads
from gpattention.attention.parameters import Positive
from gpattention.gp import Posterior, noise_floor, rbf
from gpattention.gp.inputs import keep_rows


@dataclass(frozen=True)
class AttentionHealth:
    """Means over batch, heads and real tokens; None where the kind has no such thing.

    `floor_share` is exp(floor - U), U the negative log density of the layer's own outputs per token and
    dimension and `floor` the least it can be: 1 means collapsed to the noise.
    """

    kind: str
    kappa_qk: float  # near 0: attention is off; near 1: every token is the same
    kappa_qq: float  # near 1: the queries have merged
    mean_ratio: float  # ||mean|| / ||v||
    amplitude: float | None  # prior standard deviation, the process' own scale
    noise: float | None  # sigma^2
    prior_stddev: float | None
    posterior_stddev: float | None
    stddev_ratio: float | None  # posterior / prior; near 1: the keys tell the variance nothing
    floor_share: float | None

    def problems(self) -> list[str]:
        """What a person should look at, in words."""
        found = []
        if self.kappa_qk < 0.02:
            found.append(f"attention is nearly off: mean kappa(q, k) is {self.kappa_qk:.3f}")
        if self.kappa_qq > 0.95:
            found.append(f"queries have merged: mean kappa(q, q) is {self.kappa_qq:.3f}")
        if self.stddev_ratio is not None and self.stddev_ratio > 0.98:
            found.append(f"the variance is the prior's: posterior/prior is {self.stddev_ratio:.3f}")
        if self.floor_share is not None and self.floor_share > 0.9:
            found.append(f"the density sits at its noise floor: share {self.floor_share:.2f}")
        return found


@torch.no_grad()
def diagnose(
    attention: Attention,
    query: Tensor,  # [B, N, E]
    *,
    key_padding_mask: Tensor | None = None,  # [B, N] True = ignore
    inducing: Tensor | None = None,  # [H, m, E], sgpa's
) -> AttentionHealth:
    """Measure a layer in self-attention on these tokens."""
    heads, _ = attention._heads(query, None, None, key_padding_mask, None, inducing)
    q, k = attention._kernel_inputs(heads)
    posterior = attention._posterior(heads) if attention.draws else None
    mean = attention._mean(heads) if posterior is None else posterior.mean  # [B, H, N, D]
    values = keep_rows(heads.v, heads.mask)
    prior = stddev = ratio = None
    if posterior is not None:
        prior, stddev = posterior.prior_stddev, posterior.stddev
        stddev = stddev.square().mean(-1).sqrt() if stddev.ndim == mean.ndim else stddev
        ratio = _mean(stddev / torch.where(prior > 0, prior, 1.0), heads)
    noise = getattr(attention, "noise", None)
    return AttentionHealth(
        kind=attention.kind,
        kappa_qk=_pair_mean(rbf(q, k), heads),
        kappa_qq=_pair_mean(rbf(q, q), heads),
        mean_ratio=float(mean.norm() / values.norm().clamp_min(1e-12)),
        amplitude=_amplitude(attention),
        noise=float(noise().mean()) if isinstance(noise, Positive) else None,
        prior_stddev=None if prior is None else _mean(prior, heads),
        posterior_stddev=None if stddev is None else _mean(stddev, heads),
        stddev_ratio=ratio,
        floor_share=_floor_share(attention, heads, posterior),
    )


def _amplitude(attention: Attention) -> float | None:
    # in rows divided by their sums a kernel's variance cancels: it is no scale of anything
    by_sums = getattr(attention, "normalize", "none") == "rows"
    for name in ("prior_scale", "scale_q", *(() if by_sums else ("variance",))):
        parameter = getattr(attention, name, None)
        if isinstance(parameter, Positive):
            found = parameter()  # [H]
            return float((found.sqrt() if name == "variance" else found).mean())
    return None


def _floor_share(attention: Attention, heads: Heads, posterior: Posterior | None) -> float | None:
    density = None if posterior is None else attention._log_density(heads, posterior)
    noise = getattr(attention, "noise", None)
    if density is None or not isinstance(noise, Positive):
        return None
    above = -density.per_token().query - noise_floor(noise())  # [B, H] nats above the floor
    return float((-above.clamp_min(0)).exp().mean())


def _mean(x: Tensor, heads: Heads) -> float:
    """Mean over real queries of [B, H, N]."""
    if heads.query_mask is None:
        return float(x.mean())
    kept = heads.query_mask.expand_as(x)
    return float(torch.where(kept, x, 0.0).sum() / kept.sum().clamp_min(1))


def _pair_mean(kappa: Tensor, heads: Heads) -> float:
    """Mean over pairs of different real tokens of [B, H, N, N]."""
    n = kappa.shape[-1]
    pairs = ~torch.eye(n, dtype=torch.bool, device=kappa.device).expand_as(kappa)
    if heads.mask is not None:
        pairs = pairs & heads.mask[..., None, :] & heads.mask[..., None]
    return float(torch.where(pairs, kappa, 0.0).sum() / pairs.sum().clamp_min(1))
