"""What an attached model predicts where the answer is not one class per item."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.models.prediction import Prediction, differ, warn_undrawn


@dataclass(frozen=True, eq=False)
class Values:
    """Numbers with a variance: regression outputs, or the entries of an embedding.

    `drawn` says whether the draws are any: where it is False they are copies of one another.
    """

    draws: Tensor  # [S, B, D]
    mean: Tensor  # [B, D] over the draws; of the model itself where there were none
    spread: Tensor  # [B, D] variance of the draws
    residual: float = 0.0  # variance of regression targets that the draws do not explain, fitted
    drawn: bool = True

    @classmethod
    def from_draws(cls, draws: Tensor, residual: float = 0.0, *, drawn: bool | None = None) -> "Values":
        """From [S, B, D]; S = 1 has no spread of its own.  `drawn` as in `Prediction.from_logits`."""
        if draws.ndim != 3 or not len(draws):
            raise ValueError(f"expected draws [samples, items, numbers], got shape {tuple(draws.shape)}")
        draws = draws.float() if draws.dtype in (torch.float16, torch.bfloat16) else draws
        drawn = differ(draws) if drawn is None else drawn
        spread = draws.var(0) if drawn and len(draws) > 1 else torch.zeros_like(draws[0])
        return cls(draws, draws.mean(0), spread, residual, drawn)

    @property
    def variance(self) -> Tensor:
        """Of the draws, plus `residual`; 0 without both, which reading it then warns of.  [B, D]"""
        return self._variance(stacklevel=3)

    @property
    def stddev(self) -> Tensor:
        """[B, D]"""
        return self._variance(stacklevel=3).sqrt()

    @property
    def total_variance(self) -> Tensor:
        """Sum over the numbers of an item: one figure for the uncertainty of an embedding.  [B]"""
        return self._variance(stacklevel=3).sum(-1)

    def _variance(self, stacklevel: int) -> Tensor:
        if self.residual == 0:
            warn_undrawn("variance", len(self.draws), self.drawn, stacklevel)
        return self.spread + self.residual

    def __len__(self) -> int:
        return self.draws.shape[1]


@dataclass(frozen=True, eq=False)
class TokenPrediction:
    """A class for every token."""

    tokens: Prediction  # of B * N tokens, item by item
    real: Tensor  # [B, N] False = padding

    @property
    def probs(self) -> Tensor:
        """[B, N, C]"""
        return self.tokens.probs.unflatten(0, tuple(self.real.shape))

    @property
    def label(self) -> Tensor:
        """[B, N]"""
        return self.tokens.label.view(self.real.shape)

    @property
    def confidence(self) -> Tensor:
        """[B, N]"""
        return self.tokens.confidence.view(self.real.shape)

    @property
    def entropy(self) -> Tensor:
        """[B, N]"""
        return self.tokens.entropy.view(self.real.shape)

    @property
    def mutual_information(self) -> Tensor:
        """[B, N]; as of `Prediction`, it warns where nothing was drawn."""
        return self.tokens.disagreement(stacklevel=3).view(self.real.shape)

    @property
    def drawn(self) -> bool:
        """Whether the logits are draws."""
        return self.tokens.drawn

    @property
    def of_real_tokens(self) -> Prediction:
        """The prediction of all tokens that are not padding, one after the other."""
        return self.tokens[self.real.flatten()]

    def __len__(self) -> int:
        return len(self.real)
