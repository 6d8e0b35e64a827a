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
layers by its mean and standard deviation on validation items, then averaged over the layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.evaluation.predicted import Predicted

SCORES = {  # and what a reader calls them, in the order of tables
    "entropy": "predictive entropy",
    "max_softmax": "maximum softmax",
    "energy": "energy",
    "kl_matching": "KL matching",
    "kl_matching_predicted": "KL matching, by predicted class",
    "mutual_information": "mutual information",
    "gp_variance": "GP variance",
}


def score_name(score: str) -> str:
    """As a reader knows it."""
    return SCORES.get(score, score.replace("_", " "))


@dataclass(frozen=True, eq=False)
class OodScores:
    """What the scores need to know of the data; made by `fit`.

    >>> OodScores.fit(validation)(test)["kl_matching"]  # [B]
    """

    by_prediction: Tensor | None  # [C, C] mean probabilities of items predicted as class k; NaN where none is
    by_label: Tensor | None  # [C, C] mean probabilities of items of class k; NaN where there is none
    variance_mean: Tensor | None  # [L]
    variance_std: Tensor | None  # [L]

    @classmethod
    def fit(cls, validation: Predicted | None) -> "OodScores":
        """On items of the kind that was trained on, but not trained on; fewer scores without any."""
        if validation is None:
            return cls(None, None, None, None)
        probs, variance = validation.prediction.probs, validation.layer_variance
        mean = std = None
        if variance is not None:
            mean, std = variance.double().mean(0), variance.double().std(0, correction=0)
        return cls(
            _class_means(probs, validation.prediction.label),
            _class_means(probs, validation.known_labels),
            mean,
            std,
        )

    def __call__(self, predicted: Predicted) -> dict[str, Tensor]:
        """Every score that can be had of this prediction, in float64.  [B] each"""
        told = predicted.prediction
        scores = {}
        if self.by_prediction is not None and self.by_label is not None:
            scores["kl_matching"] = kl_matching(told.probs, self.by_prediction)
            scores["kl_matching_predicted"] = kl_matching_predicted(told.probs, self.by_label)
        scores["max_softmax"] = 1 - told.confidence
        scores["entropy"] = told.entropy
        scores["energy"] = -told.logits.mean(0).logsumexp(-1)
        if told.drawn and told.samples > 1:
            scores["mutual_information"] = told.mutual_information
        if predicted.layer_variance is not None and self.variance_mean is not None:
            scores["gp_variance"] = self._standard_variance(predicted.layer_variance)
        return scores

    def _standard_variance(self, variance: Tensor) -> Tensor:
        assert self.variance_mean is not None
        assert self.variance_std is not None
        unit = torch.where(self.variance_std > 0, self.variance_std, 1.0)  # a constant tells nothing
        return ((variance.double() - self.variance_mean) / unit).mean(-1)


def kl_matching(probs: Tensor, templates: Tensor) -> Tensor:
    """The least KL(p || d_k) over the classes k that have a template.  [B]"""
    return _divergences(probs, templates[~templates.isnan().any(-1)]).amin(-1)


def kl_matching_predicted(probs: Tensor, templates: Tensor) -> Tensor:
    """KL(p || d_k) for the predicted class k; infinite if no validation item was of that class.  [B]"""
    each = _divergences(probs, templates).gather(-1, probs.argmax(-1, keepdim=True))[:, 0]
    return each.nan_to_num(nan=torch.inf)


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
