"""How strange an item is, from densities of its signals: one score with a p-value.

Parts (`PARTS`) are detectors of `detectors`: two-sided densities of features and of profiles over heads, and
one-sided scores of logits.  Held-out items are split at random in three disjoint sets:

    40 %  densities     mean and covariance of every part, effect of length on the profiles
    20 %  weights       remaining effect of length on scores a_k, their mean m_k, spread u_k and weights w_k
    40 %  calibration   only scores, which nothing else depends on

    score  s = sum_k w_k (a_k - m_k) / u_k                          w_k >= 0, sum_k w_k = 1
    p      p = (1 + #{calibration >= s}) / (n + 1)

A new usual item is exchangeable with the n calibration items, so that P(p <= a) <= a for every a (conformal
p-values; Vovk et al., "Algorithmic Learning in a Random World", 2005).

If lengths differ, their effect is removed first: a text is not strange because it is short.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.functional import normalize, relu

from gpattention.checks import check_choice, check_labels, check_whole
from gpattention.files import StrPath, make_folder, read_object, write_atomically
from gpattention.models import Signals
from gpattention.numerics import NonFiniteError
from gpattention.strangeness import detectors
from gpattention.strangeness.detectors import Gaussians, Residual

Head = tuple[Tensor, Tensor]  # weight [C, E] and bias [C] of a linear one
State = Mapping[str, Tensor]  # fitted numbers of a part
SPLIT = (0.4, 0.2)  # shares for densities and for weights; the rest is for calibration
BANK = 2000  # most items that KNN keeps, evenly spaced
COMPARED = 2000  # most clean items, and items of every shift, to choose parts by
ROUNDS = 10  # of adding a part
FOLDS = 5  # for the choice between one slope and several
HINGES = (0.25, 0.5, 0.75)  # quantiles of log lengths where slopes may change
FORMAT = "gpattention-strangeness-1"
PROFILES = {"variance_density": "variance", "attention_density": "attention_entropy"}  # part to signal


# Parts


@dataclass(frozen=True)
class Part:
    """A detector: `fit` to usual items, with classes and head if they are known, and `score` others."""

    label: str  # in tables
    reads: str  # the signal that it uses
    score: Callable[[Signals, State], Tensor]  # [B]
    fit: Callable[[Signals, Tensor | None, Head | None], State] = lambda *_: {}


def _features(signals: Signals, normed: bool) -> Tensor:
    return normalize(signals.features, dim=-1) if normed else signals.features


def _mahalanobis(normed: bool, relative: bool, label: str) -> Part:
    def fit(signals: Signals, classes: Tensor | None, _: object) -> State:
        x = _features(signals, normed)
        found = vars(detectors.fit_gaussians(x, classes))
        every = vars(detectors.fit_gaussians(x)) if relative else {}
        return {**found, **{f"background_{name}": value for name, value in every.items()}}

    def score(signals: Signals, state: State) -> Tensor:
        x, usual = _features(signals, normed), Gaussians(state["means"], state["root"])
        if not relative:
            return detectors.log_distance(x, usual)
        background = Gaussians(state["background_means"], state["background_root"])
        return detectors.relative_mahalanobis(x, usual, background)

    return Part(label, "features", score, fit)


def _standardised(profile: Tensor, state: State) -> Tensor:
    return (profile - state["centre"]) / state["unit"]


def _profile(field: str, label: str) -> Part:
    def fit(signals: Signals, *_: object) -> State:
        profile = getattr(signals, field)  # [n, P]
        state = {"centre": profile.mean(0), "unit": _spread(profile)}
        return {**state, **vars(detectors.fit_gaussians(_standardised(profile, state)))}

    def score(signals: Signals, state: State) -> Tensor:
        usual = Gaussians(state["means"], state["root"])
        return detectors.log_distance(_standardised(getattr(signals, field), state), usual)

    return Part(label, field, score, fit)


def _fit_vim(signals: Signals, _: object, head: Head | None) -> State:
    assert head is not None
    return vars(detectors.fit_residual(signals.features, signals.logits, *(x.double().cpu() for x in head)))


def _of_logits(label: str, function: Callable[[Tensor], Tensor]) -> Part:
    return Part(label, "logits", lambda signals, _: function(signals.logits))


PARTS = {  # in the order of tables
    "entropy": _of_logits("predictive entropy", detectors.prediction_entropy),
    "max_softmax": _of_logits("maximum softmax", detectors.max_softmax),
    "energy": _of_logits("energy", detectors.energy),
    "gen": _of_logits("generalised entropy", detectors.generalised_entropy),
    "mahalanobis": _mahalanobis(False, False, "Mahalanobis"),
    "mahalanobis_normed": _mahalanobis(True, False, "Mahalanobis++"),
    "relative_mahalanobis": _mahalanobis(False, True, "relative Mahalanobis"),
    "relative_mahalanobis_normed": _mahalanobis(True, True, "relative Mahalanobis++"),
    "knn": Part(
        "nearest neighbours", "features", lambda s, state: detectors.knn_distance(s.features, state["bank"]),
        lambda s, *_: {"bank": s.features[torch.arange(min(BANK, len(s))) * len(s) // min(BANK, len(s))]},
    ),
    "vim": Part(
        "ViM", "features", lambda s, state: detectors.vim(s.features, s.logits, Residual(**state)), _fit_vim
    ),
    "variance_density": _profile("variance", "density of the variance profile"),
    "attention_density": _profile("attention_entropy", "density of the attention profile"),
}  # fmt: skip
USUAL = ("entropy", "mahalanobis", "variance_density", "attention_density")  # of equal weight


def available_parts(signals: Signals, classes: int = 1, head: Head | None = None) -> tuple[str, ...]:
    """The parts that can be computed from signals.

    Args:
        signals: of any items of the model.
        classes: number of classes of the items.
        head: weight and bias of the linear head, if they are known.

    Returns:
        Names of `PARTS`: scores of logits need logits of two classes, relative distances items of two, ViM
        the head, densities of profiles the profile.
    """

    def there(name: str, part: Part) -> bool:
        if part.reads == "logits":
            return signals.logits.shape[1] > 1
        if name.startswith("relative"):
            return classes > 1
        if name == "vim":
            return head is not None and signals.logits.shape[1] > 0
        found = getattr(signals, part.reads)
        return found is not None and found.shape[1] > 0

    return tuple(name for name, part in PARTS.items() if there(name, part))


def fit_parts(signals: Signals, labels: Tensor | None, head: Head | None = None) -> dict[str, State]:
    """Fit all available parts to all items.

    Args:
        signals: of usual items.
        labels: [B] their classes; predicted classes if not given.
        head: weight and bias of the linear head, if they are known.

    Returns:
        The fitted numbers of each part by name, for `score_part`.
    """
    exact, classes = _exact(signals), _classes(signals, labels)
    names = available_parts(signals, 1 if classes is None else len(classes.unique()), head)
    return {name: PARTS[name].fit(exact, classes, head) for name in names}


def score_part(name: str, signals: Signals, state: State) -> Tensor:
    """The score of one part, in its own units and without regard to length.

    Args:
        name: of the part.
        signals: of items.
        state: its fitted numbers from `fit_parts`.

    Returns:
        Larger for stranger items.  [B]
    """
    return PARTS[name].score(_exact(signals), state)


def _spread(x: Tensor) -> Tensor:
    """Standard deviations; 1 for columns that are constant up to rounding.  [n, P] to [P]"""
    spread = x.std(0, correction=0)
    return torch.where(spread > 1e-6 * x.abs().mean(0).clamp_min(1e-30), spread, 1.0)


def _exact(signals: Signals) -> Signals:
    """The signals in float64 on the CPU; they must be finite."""
    found: dict[str, Any] = dict.fromkeys(("token_mask", "token_variance", "token_attention_entropy"))
    for name in ("logits", "features", "variance", "attention_entropy"):
        value = getattr(signals, name)
        found[name] = None if value is None else value.detach().cpu().double()
        if value is not None and not bool(value.isfinite().all()):
            wrong = int((~value.isfinite()).sum())
            raise NonFiniteError(f"expected finite signals, got {wrong} non-finite numbers in {name}")
    return replace(signals, tokens=signals.tokens.cpu(), **found)


def _classes(signals: Signals, labels: Tensor | None) -> Tensor | None:
    """Labels, or else predicted classes [B]; None if items have no classes."""
    count = signals.logits.shape[1]
    if count < 2:
        return None
    if labels is None:
        return signals.logits.argmax(-1).cpu()
    check_labels(labels, len(signals), count)
    return labels.cpu()


# Length


@dataclass(frozen=True, eq=False)
class LengthEffect:
    """The effect of t, the log number of real tokens, on P numbers: piecewise linear, 0 at the mean t.

    Beyond the lengths that it was fitted to it is constant.
    """

    typical: Tensor  # [] mean t
    reach: Tensor  # [2] least and largest t
    hinges: Tensor  # [K] where slopes change; none: one slope
    slopes: Tensor  # [1 + K, P]

    @classmethod
    def fit(cls, t: Tensor, y: Tensor) -> "LengthEffect":
        """Least squares of y [n, P] on t [n]; several slopes if they predict left-out items better."""
        reach = torch.stack([t.min(), t.max()])
        # not at the ends, where one side would have no items
        several = t.quantile(torch.tensor(HINGES, dtype=t.dtype)).unique()
        several = several[(several > reach[0]) & (several < reach[1])]
        scaled = y / _spread(y)  # so that all columns have the same weight
        hinges = min((several[:0], several), key=lambda each: _error_left_out(_design(t, each), scaled))
        return cls(t.mean(), reach, hinges, _least_squares(_design(t, hinges), y)[1:].contiguous())

    def __call__(self, t: Tensor) -> Tensor:
        """The effect at log lengths [B].  [B, P]"""
        there, here = _design(t.clamp(*self.reach), self.hinges), _design(self.typical[None], self.hinges)
        return (there - here)[:, 1:] @ self.slopes


def _design(t: Tensor, hinges: Tensor) -> Tensor:
    """1, t, and t beyond every hinge.  [B, 2 + K]"""
    return torch.cat([torch.ones_like(t)[:, None], t[:, None], relu(t[:, None] - hinges)], 1)


def _least_squares(design: Tensor, y: Tensor) -> Tensor:
    """The solution of least norm, if lengths do not determine the slopes.  [2 + K, P]"""
    return torch.linalg.pinv(design) @ y


def _error_left_out(design: Tensor, y: Tensor) -> float:
    """Cross-validated mean squared error, by fifths of the items, which are in random order."""
    fold, lost = torch.arange(len(y)) % FOLDS, []
    for out in (fold == f for f in range(FOLDS)):
        lost.append(y[out] - design[out] @ _least_squares(design[~out], y[~out]))
    return float(torch.cat(lost).square().mean())


# Scores of the parts, in common units


@dataclass(frozen=True, eq=False)
class PartScores:
    """Scores of all parts without the effect of length, in standard deviations of held-out items."""

    parts: tuple[str, ...]
    states: Mapping[str, State]  # by part
    effects: Mapping[str, LengthEffect]  # on profiles and on "scores"; none if all lengths are equal
    mean: Tensor  # [K]
    unit: Tensor  # [K]
    reads: Mapping[str, Any]  # sizes and sites that signals must have, by name

    @classmethod
    def fit(
        cls, signals: Signals, labels: Tensor | None, parts: Sequence[str] | None, densities: Tensor,
        scaling: Tensor, *, head: Head | None = None, regress_length: bool = True,
    ) -> "PartScores":  # fmt: skip
        """Fit densities to some items and units to others; all available parts if `parts` is None."""
        signals, classes = _exact(signals), _classes(signals, labels)
        usual, others = signals[densities], signals[scaling]
        own = None if classes is None else classes[densities]
        offered = available_parts(signals, 1 if own is None else len(own.unique()), head)
        if parts is None:
            parts = offered
        for name in parts:
            check_choice("parts", name, offered)
        if not parts:
            raise ValueError(f"expected at least one of parts, got {parts!r}")
        effects: dict[str, LengthEffect] = {}
        if regress_length and _differ(usual):
            for name in ("variance", "attention_entropy"):
                if getattr(signals, name) is not None:
                    effects[name] = LengthEffect.fit(_log_tokens(usual), getattr(usual, name))
        found = cls(tuple(parts), {}, effects, torch.zeros(()), torch.ones(()), _form(signals))
        # densities are fitted after the effect of length was removed
        usual = found._without_length(usual)
        fits = {name: PARTS[name].fit(usual, own, head) for name in parts}
        # results depend on the memory layout by rounding, and files keep no other layout
        states = {name: {key: x.contiguous() for key, x in state.items()} for name, state in fits.items()}
        found = replace(found, states=states)
        if regress_length and _differ(others) and len(others) > FOLDS:
            effect = LengthEffect.fit(_log_tokens(others), found._raw(others))
            one_sided = torch.tensor([PARTS[name].reads == "logits" for name in parts])
            effect = replace(effect, slopes=effect.slopes.masked_fill(one_sided, 0))
            found = replace(found, effects={**effects, "scores": effect})
        raw = found._raw(others)  # [n, K]
        return replace(found, mean=raw.mean(0), unit=_spread(raw))

    def __call__(self, signals: Signals, *, length: bool = True) -> Tensor:
        """Scores in units of held-out items; if not `length`, without removing its effect.  [B, K]"""
        form = _form(signals)
        for name in {PARTS[part].reads for part in self.parts}:
            if form[name] != self.reads[name]:
                raise ValueError(f"expected signals with {name} of {self.reads[name]}, got {form[name]}")
        return (self._raw(_exact(signals), length=length) - self.mean) / self.unit

    def only(self, kept: Sequence[int]) -> "PartScores":
        """The scores of some parts."""
        effects, some = dict(self.effects), list(kept)
        if (effect := effects.get("scores")) is not None:
            effects["scores"] = replace(effect, slopes=effect.slopes[:, some].contiguous())
        states = {self.parts[i]: self.states[self.parts[i]] for i in some}
        mean, unit = self.mean[some], self.unit[some]
        return replace(self, parts=tuple(states), states=states, effects=effects, mean=mean, unit=unit)

    def _without_length(self, signals: Signals) -> Signals:
        t = _log_tokens(signals)
        own = {name: effect(t) for name, effect in self.effects.items() if name != "scores"}
        return replace(signals, **{name: getattr(signals, name) - effect for name, effect in own.items()})

    def _raw(self, signals: Signals, *, length: bool = True) -> Tensor:
        seen = self._without_length(signals) if length else signals
        if not self.parts:
            return signals.features.new_zeros(len(signals), 0)
        each = torch.stack([PARTS[name].score(seen, self.states[name]) for name in self.parts], -1)  # [B, K]
        if "scores" not in self.effects or not length:
            return each
        return each - self.effects["scores"](_log_tokens(signals))

    def profile_shares(self, signals: Signals) -> dict[str, Tensor]:
        """The contribution of every column to the squared distance d^2 of a profile.  [B, P] each

        It is delta_j (Sigma^-1 delta)_j with delta = x - mu, negative if other columns compensate for it.
        """
        seen, found = self._without_length(_exact(signals)), {}
        for name in (name for name in self.parts if name in PROFILES):
            state = self.states[name]
            delta = _standardised(getattr(seen, PROFILES[name]), state) - state["means"]  # [B, P]
            found[name] = delta * (delta @ state["root"] @ state["root"].mT)
        return found

    def to_tensors(self) -> dict[str, Tensor]:
        """All numbers by name, for `from_tensors`."""
        found = {"mean": self.mean, "unit": self.unit}
        for name, effect in self.effects.items():
            found |= {f"length/{name}/{key}": value for key, value in vars(effect).items()}
        for name, state in self.states.items():
            found |= {f"part/{name}/{key}": value for key, value in state.items()}
        return found

    @classmethod
    def from_tensors(cls, parts: Sequence[str], reads: Mapping[str, Any], tensors: State) -> "PartScores":
        """The inverse of `to_tensors`."""
        groups: dict[str, dict[str, dict[str, Tensor]]] = {"length": {}, "part": {}}
        for name, value in tensors.items():
            if name.count("/") == 2:
                kind, of, key = name.split("/")
                groups[kind].setdefault(of, {})[key] = value
        effects = {name: LengthEffect(**fields) for name, fields in groups["length"].items()}
        states = {name: groups["part"].get(name, {}) for name in parts}
        return cls(tuple(parts), states, effects, tensors["mean"], tensors["unit"], dict(reads))


def _differ(signals: Signals) -> bool:
    """Whether items are of different lengths."""
    return bool((signals.tokens != signals.tokens[0]).any())


def _log_tokens(signals: Signals) -> Tensor:
    """t of every item.  [B]"""
    return signals.tokens.clamp_min(1).double().log()


def _form(signals: Signals) -> dict[str, Any]:
    """Sizes and sites of signals, for JSON."""
    return {
        "logits": signals.logits.shape[1],
        "features": signals.features.shape[1],
        "variance": None if signals.variance is None else list(signals.sites),
        "attention_entropy": None if signals.attention_entropy is None else list(signals.entropy_sites),
    }


# Weights


def choose_weights(
    clean: Tensor, shifted: Mapping[str, Tensor], start: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Choose weights of the parts that separate clean from shifted items.

    Parts are added one by one, possibly several times, to maximise the mean AUROC over the shifts (Caruana et
    al., "Ensemble Selection from Libraries of Models", 2004).  Their number is chosen by cross-validation:
    every shift is judged by weights that were chosen without it.  The weights `start` are kept if no number
    is better.

    Args:
        clean: [n, K] in units of held-out items.
        shifted: by name, [m, K] each.
        start: [K] initial weights.

    Returns:
        Weights [K] that sum to 1, and the AUROC of every shift by the weights chosen without it.

    Raises:
        ValueError: there are fewer than two shifts, or one has no items.
    """
    if len(shifted) < 2 or any(len(z) == 0 for z in shifted.values()):
        sizes = {name: len(z) for name, z in shifted.items()}
        raise ValueError(f"expected shifted to be at least two shifts with items, got {sizes}")
    # AUROCs cost items times shifts times parts times rounds
    clean, others = clean[:COMPARED], {name: z[:COMPARED] for name, z in shifted.items()}
    rounds = {name: weights_without(name, clean, others) for name in others}  # [R, K] each
    judged = torch.stack([_aurocs(clean @ rounds[s].mT, others[s] @ rounds[s].mT) for s in others])  # [S, R]
    untouched = torch.cat([_aurocs((clean @ start)[:, None], (z @ start)[:, None]) for z in others.values()])
    table = torch.cat([untouched[:, None], judged], 1)  # [S, 1 + R]
    best = int(table.mean(0).argmax())
    weights = start if best == 0 else _add_parts(clean, list(others.values()))[best - 1]
    return weights, dict(zip(others, table[:, best].tolist(), strict=True))


def weights_without(name: str, clean: Tensor, shifted: Mapping[str, Tensor]) -> Tensor:
    """Weights after every round of adding a part, by all shifts but one.

    Args:
        name: of the shift that is left out.
        clean: [n, K].
        shifted: by name, [m, K] each.

    Returns:
        [R, K], each of sum 1.
    """
    return _add_parts(clean, [z for other, z in shifted.items() if other != name])


def _add_parts(clean: Tensor, shifted: Sequence[Tensor]) -> Tensor:
    counts, found = clean.new_zeros(clean.shape[1]), []
    for _ in range(ROUNDS):
        pairs = [((clean @ counts)[:, None] + clean, (z @ counts)[:, None] + z) for z in shifted]
        gains = torch.stack([_aurocs(*pair) for pair in pairs]).mean(0)  # [K]
        counts = counts.clone()
        counts[int(gains.argmax())] += 1
        found.append(counts / counts.sum())
    return torch.stack(found)


def _aurocs(inside: Tensor, outside: Tensor) -> Tensor:
    """AUROC of every column; ties count half.  [n, K], [m, K] to [K]"""
    ranked, others = inside.mT.contiguous().sort(-1).values, outside.mT.contiguous()
    below = [torch.searchsorted(ranked, others, right=right).double().mean(-1) for right in (False, True)]
    return (below[0] + below[1]) / (2 * len(inside))


# The score


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why items are strange; created by `Strangeness.explain`.

    Attributes:
        score: [B].
        p_value: [B].
        parts: K names.
        contributions: [B, K] of every part to the score, which is their sum.
        length: [B] how much stranger the item would be without removing the effect of its length.
        sites: by profile part, [B, P] contributions of every head to the squared distance of the profile.
        names: by profile part, P names of its columns.
    """

    score: Tensor
    p_value: Tensor
    parts: tuple[str, ...]
    contributions: Tensor
    length: Tensor
    sites: Mapping[str, Tensor]
    names: Mapping[str, tuple[str, ...]]

    @property
    def part(self) -> tuple[str, ...]:
        """The part that contributes most to each item."""
        return tuple(self.parts[k] for k in self.contributions.argmax(-1).tolist())

    @property
    def site(self) -> tuple[str | None, ...]:
        """The site and head that contribute most to the stranger profile; None without profiles."""
        if not self.sites:
            return (None,) * len(self.score)
        profiles = list(self.sites)
        which = self.contributions[:, [self.parts.index(name) for name in profiles]].argmax(-1).tolist()
        columns = {name: shares.argmax(-1).tolist() for name, shares in self.sites.items()}
        return tuple(self.names[profiles[k]][columns[profiles[k]][i]] for i, k in enumerate(which))

    def __str__(self) -> str:
        rows = zip(self.score, self.p_value, self.part, self.site, self.length, strict=True)
        return "\n".join(
            f"score {s:.2f}, p {p:.4f}: {PARTS[part].label}{f', {site}' if site else ''}, length {t:+.2f}"
            for s, p, part, site, t in rows
        )


@dataclass(frozen=True, eq=False)
class Strangeness:
    """How strange items are, as a score, a p-value and a flag; created by `fit`, and immutable.

    >>> strangeness = Strangeness.fit(model.signals(held_out), labels)
    >>> strangeness.flag(model.signals(inputs), rate=0.01)  # [B]

    Attributes:
        scores: of the parts that have a weight.
        weights: [K], of sum 1.
        calibration: [n] scores of usual items, in ascending order.
        judged: by shift, the AUROC of weights that were chosen without it; empty without shifts.
    """

    fewest: ClassVar[int] = 10  # items to fit to

    scores: PartScores
    weights: Tensor
    calibration: Tensor
    judged: Mapping[str, float]

    @classmethod
    def fit(
        cls, signals: Signals, labels: Tensor | None = None, parts: Sequence[str] | None = None,
        shifted: Mapping[str, Signals] | None = None, *, origins: Tensor | None = None,
        head: Head | None = None, regress_length: bool = True, seed: int = 0,
    ) -> "Strangeness":  # fmt: skip
        """Fit densities, weights and calibration to held-out items, a few hundred or more.

        Args:
            signals: of items of the usual kind that the model was not trained on.
            labels: [B] classes of the items; predicted classes where not given.  Of no use in regression.
            parts: names of `PARTS`.  If not given: entropy, Mahalanobis distance and both profiles, where
                they can be had; with `shifted`, all that can be had.
            shifted: signals of synthetically shifted items by the names of at least two shifts.  With them
                parts and weights are those that separate clean from shifted items, each shift judged by a fit
                to the others; without them weights are equal.
            origins: [m] the item of `signals` that each item of every shift was made of.  Those made of items
                of the weights' share are used alone, since p-values hold only if nothing has seen calibration
                items.  If not given, shifted items are taken to be made of other items than `signals`, or of
                those that `split` gives for the weights.
            head: weight [C, E] and bias [C] of the linear head, for ViM.
            regress_length: whether what varies with the number of tokens is taken out, where lengths differ.
            seed: of the split.

        Returns:
            The fitted strangeness.

        Raises:
            ValueError: too few items, parts that cannot be had, or shifts that cannot be judged.
            NonFiniteError: signals that are not finite.
        """
        densities, weighing, calibrating = cls.split(len(signals), seed)
        usual = [name for name in available_parts(signals) if name in USUAL] if parts is None else list(parts)
        scores = PartScores.fit(
            signals, labels, usual if shifted is None else parts, densities, weighing, head=head,
            regress_length=regress_length,
        )  # fmt: skip
        start = torch.tensor([float(name in usual) for name in scores.parts], dtype=torch.float64)  # [K]
        weights, judged = start / start.sum(), dict[str, float]()
        if shifted is not None:
            own = {name: _made_of(name, found, origins, weighing) for name, found in shifted.items()}
            others = {name: scores(found) for name, found in own.items()}  # [m, K] each
            weights, judged = choose_weights(scores(signals[weighing]), others, weights)
        kept = weights.nonzero()[:, 0].tolist()
        found = cls(scores.only(kept), weights[kept], weights[:0], judged)
        return found.recalibrate(signals[calibrating])

    @staticmethod
    def split(items: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers of the items that `fit` takes for densities, for weights and for calibration."""
        if items < Strangeness.fewest:
            raise ValueError(f"expected signals of at least {Strangeness.fewest} items, got {items}")
        order = torch.randperm(items, generator=torch.Generator().manual_seed(check_whole("seed", seed)))
        first, second = (int(share * items) for share in SPLIT)
        return order[:first], order[first : first + second], order[first + second :]

    def score(self, signals: Signals) -> Tensor:
        """How strange items are, in about standard deviations.  [B]"""
        return (self.scores(signals) @ self.weights).to(signals.tokens.device)

    def p_value(self, signals: Signals) -> Tensor:
        """The share of usual items that are at least as strange; new usual items have p <= a with
        probability at most a, for every a.  [B]
        """
        n, scores = len(self.calibration), self.score(signals).cpu()
        below = torch.searchsorted(self.calibration, scores)  # [B] calibration < score
        return ((1 + n - below).double() / (n + 1)).to(signals.tokens.device)

    def flag(self, signals: Signals, rate: float = 0.01) -> Tensor:
        """Which items are so strange that at most this share of usual ones is.  [B] bool

        Args:
            signals: of the items.
            rate: of false alarms; at least 1 / (n + 1), or nothing could ever be flagged.

        Returns:
            p <= rate.

        Raises:
            ValueError: a rate that n calibration items cannot show.
        """
        least = 1 / (len(self.calibration) + 1)
        if not least <= rate < 1:
            allowed = f"from {least:.3g}, which {len(self.calibration)} calibration items allow, to below 1"
            raise ValueError(f"expected rate {allowed}, got {rate}")
        return self.p_value(signals) <= rate

    def explain(self, signals: Signals) -> Explanation:
        """Which part makes items strange, which site and head, and what their length has to do with it."""
        score, weights = self.score(signals), self.weights
        contributions = self.scores(signals) * weights  # [B, K]
        length = self.scores(signals, length=False) @ weights - score.cpu()  # [B]
        sites = self.scores.profile_shares(signals)
        columns = {"variance_density": signals.sites, "attention_density": signals.entropy_sites}
        return Explanation(
            score, self.p_value(signals), self.scores.parts, contributions, length, sites,
            {name: columns[name] for name in sites},
        )  # fmt: skip

    def recalibrate(self, signals: Signals) -> "Strangeness":
        """The same score with p-values among these items, all of them usual and none fitted to; no labels.

        Args:
            signals: of at least one item.

        Returns:
            Another one.

        Raises:
            ValueError: no items.
        """
        if len(signals) == 0:
            raise ValueError("expected signals of at least one item to calibrate with, got 0")
        return replace(self, calibration=self.score(signals).cpu().sort().values)

    def save(self, folder: StrPath) -> None:
        """Write `strangeness.json` and `strangeness.safetensors`, each in one piece."""
        tensors = {**self.scores.to_tensors(), "weights": self.weights, "calibration": self.calibration}
        record = {"parts": self.scores.parts, "reads": self.scores.reads, "judged": self.judged}
        save_fitted(Path(folder), "strangeness", FORMAT, record, tensors)

    @classmethod
    def load(cls, folder: StrPath) -> "Strangeness":
        """What `save` wrote.

        Raises:
            ValueError: files that are damaged, or of something else.
        """
        record, tensors = load_fitted(Path(folder), "strangeness", FORMAT, ("parts", "reads", "judged"))
        scores = PartScores.from_tensors(record["parts"], record["reads"], tensors)
        return cls(scores, tensors["weights"], tensors["calibration"], record["judged"])


def _made_of(name: str, shifted: Signals, origins: Tensor | None, allowed: Tensor) -> Signals:
    if origins is None:
        return shifted
    if len(origins) != len(shifted):
        raise ValueError(f"expected origins of the {len(shifted)} items of {name!r}, got {len(origins)}")
    return shifted[torch.isin(origins.cpu(), allowed).to(shifted.tokens.device)]


# Files


def save_fitted(folder: Path, name: str, form: str, record: Mapping[str, Any], tensors: State) -> None:
    """Write NAME.safetensors, then NAME.json, which says which numbers are its own."""
    # clones, since safetensors refuses tensors that share memory
    numbers = save({key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()})
    described = {"format": form, **record, "sha256": hashlib.sha256(numbers).hexdigest()}
    make_folder(folder)
    write_atomically(folder / f"{name}.safetensors", numbers)
    write_atomically(folder / f"{name}.json", (json.dumps(described, indent=2) + "\n").encode())


def remove_fitted(folder: Path, name: str) -> None:
    """Remove what an earlier `save_fitted` may have left."""
    for ending in ("json", "safetensors"):
        (folder / f"{name}.{ending}").unlink(missing_ok=True)


def load_fitted(
    folder: Path, name: str, form: str, keys: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_fitted` wrote; errors name file and field."""
    path, numbers = folder / f"{name}.json", folder / f"{name}.safetensors"
    record = read_object(path)
    if record.get("format") != form:
        raise ValueError(f"{path}: expected format {form!r}, got {record.get('format')!r}")
    differ = sorted(set(record) ^ {"format", "sha256", *keys})
    if differ:
        raise ValueError(f"{path}: expected the keys {', '.join(keys)}, got a difference in {differ}")
    if not numbers.is_file():
        raise FileNotFoundError(f"no file {numbers}")
    content = numbers.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != record["sha256"]:
        expected = f"expected the numbers that {path.name} was written with, sha256 {record['sha256']}"
        raise ValueError(f"{numbers}: {expected}, got {found}: save them again")
    try:
        return record, load(content)
    except SafetensorError as error:
        raise ValueError(f"{numbers} is not a whole safetensors file: {error}") from error
