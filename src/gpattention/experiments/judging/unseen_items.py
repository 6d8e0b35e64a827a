"""Items of one run that runs of other seeds, and so of other splits, do not know."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpattention.evaluation.items import ItemSet, row_digests
from gpattention.experiments.judging.run_sets import RunSets


@dataclass(frozen=True, eq=False)
class Unseen:
    """Places of the first run's items that no other member knows."""

    validation: Tensor  # [k] not trained on
    test: Tensor  # [k] neither trained on nor in the validation split, which chose the weights

    @staticmethod
    def by(first: RunSets, others: Sequence[RunSets]) -> "Unseen":
        """Compare every item of the first run with those of the others."""
        trained = {digest for other in others for digest in _fingerprints(other.train)}
        validated = {digest for other in others for digest in _fingerprints(other.chose_weights)}
        return Unseen(_places(first.validation, trained), _places(first.test, trained | validated))


def _fingerprints(items: ItemSet) -> list[bytes]:
    """Of what the items are, whatever the vocabulary that encodes them."""
    if items.words is not None:
        return [" ".join(words).encode() for words in items.words]
    return row_digests(items.stored)


def _places(items: ItemSet, seen: set[bytes]) -> Tensor:
    """Places of the items that are not among `seen`.  [k]"""
    new = [digest not in seen for digest in _fingerprints(items)]
    return torch.tensor(new).nonzero()[:, 0]
