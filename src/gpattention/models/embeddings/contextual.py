"""The one interface of frozen embeddings: words in, one vector per word out.

A *learned* embedding is the model's own token table, trained with the rest of it from the indices of a
`Vocabulary`: it needs nothing here, and its frozen part is `NoEmbedding`.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gpattention.models.embeddings.sentences import Sentences, check_sentences


@runtime_checkable
class ContextualEmbedding(Protocol):
    """Vectors of words that no training changes; a word's vector may depend on its whole sentence.

    It depends on nothing else: not on the other sentences of the call (beyond rounding), nor on earlier
    calls.  That is what lets `CachedEmbedding` keep one file per sentence.
    """

    @property
    def width(self) -> int:
        """Numbers per word."""

    @property
    def name(self) -> str:
        """Fingerprint: two embeddings of one name give the same vectors, wherever their files lie."""

    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, width] tensor per sentence: float32, on the CPU, without gradient."""


class NoEmbedding:
    """No frozen embedding: vectors of width 0."""

    width = 0
    name = "none"

    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, 0] tensor per sentence."""
        check_sentences(sentences)
        return [torch.zeros(len(sentence), 0) for sentence in sentences]


def pad(vectors: Sequence[Tensor]) -> Tensor:
    """Sentences of [n_words, width] side by side, short ones filled up with zeros.  [B, N, width]

    The padding mask of the same sentences comes from `Vocabulary.encode`.
    """
    if len(vectors) == 0:
        raise ValueError("expected vectors of at least one sentence, got none")
    for i, x in enumerate(vectors):
        if x.ndim != 2 or x.shape[-1] != vectors[0].shape[-1]:
            raise ValueError(
                f"expected vectors[{i}] of shape [n_words, {vectors[0].shape[-1]}] like the first, got "
                f"{tuple(x.shape)}"
            )
    return torch.nn.utils.rnn.pad_sequence(list(vectors), batch_first=True)


def in_batches(sentences: Sentences, size: int) -> list[list[int]]:
    """Positions of the sentences in batches of similar length, so that little of a batch is padding."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    return [order[i : i + size] for i in range(0, len(order), size)]


def check_batch_size(batch_size: int) -> None:
    """Raise `ValueError` unless a batch holds a sentence."""
    if batch_size < 1:
        raise ValueError(f"expected batch_size >= 1, got {batch_size}")
