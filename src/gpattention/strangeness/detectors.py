"""Detectors of strange items: pure functions of features, profiles and logits, larger for stranger items.

    x [B, E]   items                             mu_k [K, E]  mean of the usual items of class k
    z [B, C]   logits, p = softmax(z)            Sigma [E, E] one covariance of all classes, shrunk
    d_k^2 = (x - mu_k)^T Sigma^-1 (x - mu_k)     W [E, E]     W W^T = Sigma^-1, so that d_k = |(x - mu_k) W|

Densities are two-sided: an item can be strange on either side of the usual ones.  Scores of logits are
one-sided: an item is strange if its prediction is uncertain.  "++" (Mueller and Hein, "Mahalanobis++", 2025)
divides features by their norm first.  All is computed in the type of the arguments, which should be float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gpattention.numerics import cholesky

__all__ = [
    "Gaussians", "Residual", "energy", "fit_gaussians", "fit_residual", "generalised_entropy", "knn_distance",
    "ledoit_wolf", "log_distance", "mahalanobis", "max_softmax", "prediction_entropy", "relative_mahalanobis",
    "vim",
]  # fmt: skip

LEAST_SHRINKAGE = 1e-6  # so that every covariance has an inverse
NEIGHBOUR = 10  # KNN uses the distance to the usual item of this rank
ROWS = 1000  # items whose distances to all usual ones are in memory at once
GEN_POWER, GEN_CLASSES = 0.1, 100  # as in the article


def ledoit_wolf(x: Tensor) -> tuple[Tensor, float]:
    """The shrunk covariance of centred items, (1 - s) S + s m I with S = x^T x / n and m = tr S / E.

    s = min(b, d) / d with d = |S - m I|^2 and b = sum_i |x_i x_i^T - S|^2 / n^2 minimises the expected
    squared error (Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices",
    2004).  Items without any spread have the covariance I.

    Args:
        x: [n, E] of mean zero.

    Returns:
        The covariance [E, E], and s, which is at least 1e-6.
    """
    items, width = x.shape
    covariance = x.mT @ x / items  # [E, E] S
    mean = float(covariance.diagonal().mean())
    eye = torch.eye(width, dtype=x.dtype, device=x.device)  # [E, E]
    if not mean > 0:
        return eye, 1.0
    apart = float((covariance - mean * eye).square().sum())
    # sum_i |x_i x_i^T - S|^2 = sum_i |x_i|^4 - n |S|^2
    error = float(x.square().sum(-1).square().mean() - covariance.square().sum()) / items
    shrinkage = max(min(error / apart, 1.0), LEAST_SHRINKAGE) if apart > 0 else LEAST_SHRINKAGE
    return (1 - shrinkage) * covariance + shrinkage * mean * eye, shrinkage


@dataclass(frozen=True, eq=False)
class Gaussians:
    """Gaussians of K classes with one covariance; created by `fit_gaussians`."""

    means: Tensor  # [K, E]
    root: Tensor  # [E, E] W

    def distances(self, x: Tensor) -> Tensor:
        """d_k^2 to every class.  [B, K]"""
        seen, means = (x - self.means[0]) @ self.root, (self.means - self.means[0]) @ self.root
        # by differences, as products would cancel for items near a mean
        return torch.cdist(seen, means, compute_mode="donot_use_mm_for_euclid_dist").square()


def fit_gaussians(x: Tensor, classes: Tensor | None = None) -> Gaussians:
    """Fit the means of classes and their common covariance, by Ledoit and Wolf.

    Args:
        x: [n, E].
        classes: [n]; one class for all items if not given.

    Returns:
        The Gaussians of K >= 1 classes.

    Raises:
        ValueError: there are no items.
    """
    if len(x) == 0:
        raise ValueError(f"expected at least one item to fit a density to, got shape {tuple(x.shape)}")
    members = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    if classes is not None:
        members = classes.to(x.device).unique(return_inverse=True)[1]  # [n]
    count = int(members.max()) + 1
    sums = x.new_zeros(count, x.shape[1]).index_add_(0, members, x)  # [K, E]
    means = sums / members.bincount(minlength=count)[:, None]
    covariance, shrinkage = ledoit_wolf(x - means[members])
    lower = cholesky(covariance, name="covariance of the items", noise=shrinkage)  # [E, E]
    eye = torch.eye(len(lower), dtype=x.dtype, device=x.device)  # [E, E]
    return Gaussians(means, torch.linalg.solve_triangular(lower, eye, upper=False).mT)


def mahalanobis(x: Tensor, usual: Gaussians) -> Tensor:
    """min_k d_k^2 (Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples", 2018).

    Args:
        x: [B, E]; MDS++ if both these and the fitted ones are divided by their norms.
        usual: the classes.

    Returns:
        The squared distance to the nearest class.  [B]
    """
    return usual.distances(x).amin(-1)


def relative_mahalanobis(x: Tensor, usual: Gaussians, background: Gaussians) -> Tensor:
    """min_k d_k^2 - d_0^2 (Ren et al., "A Simple Fix to Mahalanobis Distance", 2021).

    d_0 is the distance to one Gaussian of all classes with its own covariance, so that distances cancel in
    directions that do not separate classes.

    Args:
        x: [B, E]; RMDS++ if divided by their norms.
        usual: the classes.
        background: one Gaussian of all items.

    Returns:
        The difference; it may be negative.  [B]
    """
    return usual.distances(x).amin(-1) - background.distances(x)[:, 0]


def log_distance(x: Tensor, usual: Gaussians) -> Tensor:
    """log sqrt(1 + min_k d_k^2): the log Mahalanobis distance, finite also at the mean.

    It ranks items as the density of a Gaussian does; because of the logarithm a few far items do not
    determine the spread of the scores.

    Args:
        x: [B, E].
        usual: one class, or several.

    Returns:
        A number >= 0.  [B]
    """
    return 0.5 * usual.distances(x).amin(-1).log1p()


def knn_distance(x: Tensor, bank: Tensor, neighbour: int = NEIGHBOUR) -> Tensor:
    """|x / |x| - b_(k)|, the distance to the k-th nearest usual item, all on the unit sphere.

    (Sun et al., "Out-of-Distribution Detection with Deep Nearest Neighbors", 2022.)

    Args:
        x: [B, E].
        bank: [n, E] usual items.
        neighbour: k, at most n.

    Returns:
        A distance in [0, 2].  [B]
    """
    usual, k = normalize(bank, dim=-1), min(neighbour, len(bank))
    parts = normalize(x, dim=-1).split(ROWS)
    nearest = torch.cat([(part @ usual.mT).topk(k, -1).values[:, -1] for part in parts])  # [B] cosines
    return (2 - 2 * nearest).clamp_min(0).sqrt()


@dataclass(frozen=True, eq=False)
class Residual:
    """The directions in which usual features hardly vary, from where all logits are 0; see `vim`."""

    origin: Tensor  # [E] o
    null: Tensor  # [E, E - D] R
    alpha: Tensor  # []


def fit_residual(x: Tensor, logits: Tensor, weight: Tensor, bias: Tensor) -> Residual:
    """What `vim` needs, from usual items and the linear head.

    Args:
        x: [n, E] features.
        logits: [n, C] = x weight^T + bias.
        weight: [C, E] of the head.
        bias: [C].

    Returns:
        o = -weight^+ bias, the E - E // 2 directions R of least E[(x - o)(x - o)^T], and
        alpha = mean of max_c z_c / mean of |(x - o) R|.
    """
    # by least squares, as there is no such point with more classes than features
    origin = -torch.linalg.pinv(weight) @ bias  # [E]
    seen = x - origin
    null = torch.linalg.eigh(seen.mT @ seen / len(x)).eigenvectors[:, : x.shape[1] - x.shape[1] // 2]
    length = (seen @ null).norm(dim=-1).mean()
    return Residual(origin, null, logits.amax(-1).mean() / length.clamp_min(torch.finfo(x.dtype).tiny))


def vim(x: Tensor, logits: Tensor, usual: Residual) -> Tensor:
    """alpha |(x - o) R| - log sum_c exp z_c (Wang et al., "ViM: Out-Of-Distribution with Virtual-logit
    Matching", 2022): a logit for "none of them", from directions that do not change the logits of classes.

    Args:
        x: [B, E] features.
        logits: [B, C].
        usual: of usual items.

    Returns:
        The virtual logit against the others.  [B]
    """
    return usual.alpha * ((x - usual.origin) @ usual.null).norm(dim=-1) - logits.logsumexp(-1)


def prediction_entropy(logits: Tensor) -> Tensor:
    """-sum_c p_c log p_c, in nats.

    Args:
        logits: [B, C].

    Returns:
        The entropy.  [B]
    """
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def max_softmax(logits: Tensor) -> Tensor:
    """1 - max_c p_c (Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution
    Examples", 2017).

    Args:
        logits: [B, C].

    Returns:
        The probability of all other classes.  [B]
    """
    return 1 - logits.softmax(-1).amax(-1)


def energy(logits: Tensor) -> Tensor:
    """-log sum_c exp z_c (Liu et al., "Energy-based Out-of-distribution Detection", 2020).

    Args:
        logits: [B, C].

    Returns:
        The free energy.  [B]
    """
    return -logits.logsumexp(-1)


def generalised_entropy(logits: Tensor, power: float = GEN_POWER, classes: int = GEN_CLASSES) -> Tensor:
    """GEN, sum over the M most probable classes of p_c^g (1 - p_c)^g (Liu et al., "GEN: Pushing the Limits of
    Softmax-Based Out-of-Distribution Detection", 2023): sensitive to small departures from certainty.

    Args:
        logits: [B, C].
        power: g.
        classes: M, at most.

    Returns:
        The generalised entropy.  [B]
    """
    probs = logits.softmax(-1).topk(min(classes, logits.shape[-1]), -1).values  # [B, M]
    return (probs * (1 - probs)).clamp_min(0).pow(power).sum(-1)
