"""Scores of how far an item is from the data, larger for items further away; fitted to validation items.

KL matching (Hendrycks et al., "Scaling Out-of-Distribution Detection for Real-World Settings", 2022) compares
the probabilities p of an item with the mean probabilities d_k of validation items of class k.  Two variants
are published under this name:

- `kl_matching`, of the article: validation items belong to the class that the model predicts, and the score
  is the least KL(p || d_k) over the classes;
- `kl_matching_predicted`, of the library pytorch-ood in 2024, when the paper was written: validation items
  belong to the class of their label, and the score is KL(p || d_k) for the class k that the model predicts.

The others are `max_softmax`, 1 - max p; `entropy` of p; `energy`, -log sum exp of the logits, which are first
averaged over the draws; `mutual_information` between prediction and draw, if there are several draws; and
`gp_variance`, the variance of the attention outputs, averaged over heads and tokens, standardised for each
layer by its mean and standard deviation on validation items, and averaged over the layers.  It is kept for
comparison: rising and falling variances of layers cancel in it, while `variance_density` sees both.

If predictions have signals, the single detectors of `PARTS` are fitted to those of all validation items, and
`strangeness` combines them (`gpattention.evaluation.Strangeness`).

To add a score, write a function and one line in `SCORES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gpattention.evaluation.predictions import Predicted
from gpattention.strangeness import PARTS, Head, State, Strangeness, fit_parts, score_part
from gpattention.strangeness.detectors import generalised_entropy


@dataclass(frozen=True, eq=False)
class OodScores:
    """Scores for out-of-distribution detection; made by `fit`.

    >>> OodScores.fit(validation)(test)["kl_matching"]  # [B]

    Args:
        validation: predictions of labelled items of the kind that was trained on, but not trained on; None
            for only the scores that need none.
        head: weight [C, E] and bias [C] of the linear head of the model, for ViM; None leaves out ViM.
    """

    validation: Predicted | None
    head: Head | None = None

    @classmethod
    def fit(cls, validation: Predicted | None, head: Head | None = None) -> "OodScores":
        """Fit to items of the kind that was trained on, but not trained on; without any, to nothing."""
        if validation is not None:
            _ = validation.known_labels  # raises now rather than at the first score
        return cls(validation, head)

    def __call__(self, predicted: Predicted) -> dict[str, Tensor]:
        """Every score that this prediction allows, in float64.  [B] each"""
        found: dict[str, Tensor] = {}
        for name, kind in sorted(SCORES.items(), key=lambda item: item[1].place):
            score = None if kind.fitted and self.validation is None else kind.function(predicted, self)
            found |= {} if score is None else {name: score}
        return found

    @cached_property
    def densities(self) -> Mapping[str, State]:
        """The state of every detector that the signals of the validation items allow."""
        if self.validation is None or self.validation.signals is None:
            return {}
        return fit_parts(self.validation.signals, self.validation.known_labels, self.head)

    @cached_property
    def strangeness(self) -> Strangeness | None:
        """Fitted to the validation items; None if there are too few."""
        known = self.validation
        if known is None or known.signals is None or len(known) < Strangeness.fewest:
            return None
        return Strangeness.fit(known.signals, known.known_labels)


def _divergences(probs: Tensor, templates: Tensor) -> Tensor:
    """KL(p || d_k) of every item and template.  [B, K]"""
    # a probability of 0 may have underflowed
    cross = probs @ templates.clamp(min=torch.finfo(templates.dtype).tiny).log().mT  # [B, K]
    return (-torch.special.entr(probs).sum(-1, keepdim=True) - cross).clamp(min=0)


def _class_means(probs: Tensor, classes: Tensor) -> Tensor:
    """Mean probabilities of the items of each class; NaN for a class without items.  [C, C]"""
    count = probs.shape[1]
    sums = probs.new_zeros(count, count).index_add_(0, classes, probs)
    return sums / torch.bincount(classes, minlength=count)[:, None]


def _kl_matching(predicted: Predicted, fitted: Any) -> Tensor:
    """The least KL(p || d_k) over the classes k that are predicted for some validation item.  [B]"""
    validation = fitted.validation
    templates = _class_means(validation.prediction.probs, validation.prediction.label)  # [C, C]
    return _divergences(predicted.prediction.probs, templates[~templates.isnan().any(-1)]).amin(-1)


def _kl_matching_predicted(predicted: Predicted, fitted: Any) -> Tensor:
    """KL(p || d_k) for the predicted class k; infinite if no validation item was of that class.  [B]"""
    probs, validation = predicted.prediction.probs, fitted.validation
    each = _divergences(probs, _class_means(validation.prediction.probs, validation.known_labels))  # [B, C]
    return each.gather(-1, probs.argmax(-1, keepdim=True))[:, 0].nan_to_num(nan=torch.inf)


def _mutual_information(predicted: Predicted, _: object) -> Tensor | None:
    found = predicted.prediction
    return found.mutual_information if found.drawn and found.samples > 1 else None


def _gp_variance(predicted: Predicted, fitted: Any) -> Tensor | None:
    validation = fitted.validation
    if validation.layer_variance is None or predicted.layer_variance is None:
        return None
    usual = validation.layer_variance.double()  # [n, L]
    spread = usual.std(0, correction=0)  # [L]
    unit = torch.where(spread > 0, spread, 1.0)  # a constant variance ranks nothing
    return ((predicted.layer_variance.double() - usual.mean(0)) / unit).mean(-1)


def _density(predicted: Predicted, fitted: Any, name: str) -> Tensor | None:
    if predicted.signals is None or name not in fitted.densities:
        return None
    return score_part(name, predicted.signals, fitted.densities[name]).to(predicted.prediction.probs.device)


def _strangeness(predicted: Predicted, fitted: Any) -> Tensor | None:
    if predicted.signals is None or fitted.strangeness is None:
        return None
    found: Tensor = fitted.strangeness.score(predicted.signals)
    return found.to(predicted.prediction.probs.device)


@dataclass(frozen=True)
class OodScore:
    """One score."""

    label: str  # its name for readers
    function: Callable[[Predicted, Any], Tensor | None]  # of a prediction and `OodScores`; None if impossible
    place: int = 9  # in records; tables take the first score by default
    fitted: bool = False  # whether it needs validation items
    unit: str = ""


SCORES = {  # in the order of tables
    "entropy": OodScore(
        "predictive entropy", lambda predicted, _: predicted.prediction.entropy, 3, unit="nats"
    ),
    "max_softmax": OodScore(
        "maximum softmax", lambda predicted, _: 1 - predicted.prediction.confidence, 2,
        unit="0 to 1",
    ),
    "energy": OodScore(
        "energy", lambda predicted, _: -predicted.prediction.logits.mean(0).logsumexp(-1), 4, unit="nats",
    ),
    "kl_matching": OodScore("KL matching", _kl_matching, 0, fitted=True, unit="nats"),
    "kl_matching_predicted": OodScore(
        "KL matching, by predicted class", _kl_matching_predicted, 1, fitted=True, unit="nats"
    ),
    "mutual_information": OodScore("mutual information", _mutual_information, 5, unit="nats"),
    "gp_variance": OodScore("GP variance", _gp_variance, 6, fitted=True),
    "gen": OodScore(
        "generalised entropy", lambda predicted, _: generalised_entropy(predicted.prediction.log_probs), 7
    ),
    **{
        name: OodScore(part.label, partial(_density, name=name), 8, fitted=True)
        for name, part in PARTS.items() if part.reads != "logits"
    },
    "strangeness": OodScore("strangeness", _strangeness, 9, fitted=True),
}  # fmt: skip


def score_name(score: str, *, unit: bool = False) -> str:
    """The name of a score for readers.

    Args:
        score: its name in records.
        unit: whether to add its unit, if it has one.

    Returns:
        Its label; for an unknown score its name with spaces.
    """
    known = SCORES.get(score)
    if known is None:
        return score.replace("_", " ")
    return f"{known.label}, {known.unit}" if unit and known.unit else known.label
