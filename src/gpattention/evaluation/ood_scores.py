"""Scores of how far an item lies outside the data, larger for further out; fitted on validation items.

KL matching (Hendrycks et al., "Scaling Out-of-Distribution Detection for Real-World Settings", 2022) compares
an item's probabilities p with the mean probabilities d_k of validation items of class k.  Two variants are
published under that name:

- `kl_matching`, the article's: validation items go to the class that the model predicts, and the score is
  the least KL(p || d_k) over the classes;
- `kl_matching_predicted`, that of the library pytorch-ood in 2024, the paper's time: validation items go to
  the class of their label, and the score is KL(p || d_k) for the class k that the model predicts.

The others: `max_softmax`, 1 - max p; `entropy` of p; `energy`, -log sum exp of the logits, which are first
averaged over the draws; `mutual_information` between prediction and draw, where there are several draws;
`gp_variance`, the variance of the attention outputs, averaged over heads and tokens, made comparable between
layers by its mean and standard deviation on validation items, then averaged over the layers.  It stays for
comparison: layers whose variances rise and fall cancel in it, where `variance_density` sees both.

Where a prediction has signals, the single detectors of `PARTS` are fitted to those of all validation items,
and `strangeness` is their combination (`gpattention.evaluation.Strangeness`).

A new score is one function and one line of `SCORES`.
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
    """Scores of out-of-distribution items; made by `fit`.

    >>> OodScores.fit(validation)(test)["kl_matching"]  # [B]

    Args:
        validation: predictions of items of the kind that was trained on, but not trained on, with labels;
            None for those scores alone that need none.
        head: weight [C, E] and bias [C] of the model's linear head, for ViM; without ViM if None.
    """

    validation: Predicted | None
    head: Head | None = None

    @classmethod
    def fit(cls, validation: Predicted | None, head: Head | None = None) -> "OodScores":
        """On items of the kind that was trained on, but not trained on; fewer scores without any."""
        if validation is not None:
            _ = validation.known_labels  # refused here rather than at the first score
        return cls(validation, head)

    def __call__(self, predicted: Predicted) -> dict[str, Tensor]:
        """Every score that can be had of this prediction, in float64.  [B] each"""
        found: dict[str, Tensor] = {}
        for name, kind in sorted(SCORES.items(), key=lambda item: item[1].place):
            score = None if kind.fitted and self.validation is None else kind.function(predicted, self)
            found |= {} if score is None else {name: score}
        return found

    @cached_property
    def densities(self) -> Mapping[str, State]:
        """Of every detector that the validation items' signals allow."""
        if self.validation is None or self.validation.signals is None:
            return {}
        return fit_parts(self.validation.signals, self.validation.known_labels, self.head)

    @cached_property
    def strangeness(self) -> Strangeness | None:
        """Fitted to the validation items; None where there are too few."""
        known = self.validation
        if known is None or known.signals is None or len(known) < Strangeness.fewest:
            return None
        return Strangeness.fit(known.signals, known.known_labels)


def _divergences(probs: Tensor, templates: Tensor) -> Tensor:
    """KL(p || d_k) of every item and template.  [B, K]"""
    # a probability that underflowed is not a proof of impossibility
    cross = probs @ templates.clamp(min=torch.finfo(templates.dtype).tiny).log().mT  # [B, K]
    return (-torch.special.entr(probs).sum(-1, keepdim=True) - cross).clamp(min=0)


def _class_means(probs: Tensor, classes: Tensor) -> Tensor:
    """Mean probabilities of the items of each class; NaN for a class without items.  [C, C]"""
    count = probs.shape[1]
    sums = probs.new_zeros(count, count).index_add_(0, classes, probs)
    return sums / torch.bincount(classes, minlength=count)[:, None]


def _kl_matching(predicted: Predicted, fitted: Any) -> Tensor:
    """The least KL(p || d_k) over the classes k that some validation item is predicted as.  [B]"""
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

    label: str  # as a reader knows it
    function: Callable[[Predicted, Any], Tensor | None]  # of fitted `OodScores` too; None: it cannot be had
    place: int = 9  # in records, where tables take the first score if nobody names one
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
    """What a reader calls a score.

    Args:
        score: as records name it.
        unit: whether to say what it is counted in, where it is counted in something.

    Returns:
        Its label; of an unknown one its name in words.
    """
    known = SCORES.get(score)
    if known is None:
        return score.replace("_", " ")
    return f"{known.label}, {known.unit}" if unit and known.unit else known.label
