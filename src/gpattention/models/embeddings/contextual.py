"""The one interface of frozen embeddings, words in and one vector per word out, and their cache on disk.

A *learned* embedding is the model's own token table, trained with the rest of it from the indices of a
`Vocabulary`: it needs nothing here, and its frozen part is `NoEmbedding`.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpattention.checks import check_count
from gpattention.files import digest, make_folder, write_atomically
from gpattention.models.config import check_finite
from gpattention.numerics import NonFiniteError

Sentences = Sequence[Sequence[str]]


def check_sentences(sentences: Sentences) -> None:
    """Raise `ValueError` unless these are lists of non-empty words, none of them empty.

    A sentence that was not split is refused, as a string is a sequence of its letters, and a sentence without
    words, as a row of padding has no softmax.
    """
    if isinstance(sentences, str):
        raise ValueError(f"expected sentences to be lists of words, got the string {sentences!r}")
    for i, sentence in enumerate(sentences):
        if isinstance(sentence, str):
            got = f"the string {sentence!r}: split it with words(text)"
            raise ValueError(f"expected sentences[{i}] to be a list of words, got {got}")
        if len(sentence) == 0:
            raise ValueError(f"expected sentences[{i}] to hold at least one word, got none")
        for j, word in enumerate(sentence):
            if not isinstance(word, str) or not word:
                raise ValueError(f"expected sentences[{i}][{j}] to be a non-empty string, got {word!r}")


@runtime_checkable
class ContextualEmbedding(Protocol):
    """Frozen vectors of words, which may depend on the whole sentence.

    They depend on nothing else: not on other sentences of the call (up to rounding), nor on earlier calls, so
    that `CachedEmbedding` can store one file per sentence.

    Attributes:
        width: numbers per word.
        name: a fingerprint: embeddings with the same name give the same vectors.
    """

    width: int
    name: str

    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, width] tensor per sentence: float32, on the CPU, without gradient."""


class NoEmbedding:
    """No frozen embedding: vectors of width 0.

    Attributes:
        width: 0
        name: "none"
    """

    width = 0
    name = "none"

    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, 0] tensor per sentence."""
        check_sentences(sentences)
        return [torch.zeros(len(sentence), 0) for sentence in sentences]


def pad(vectors: Sequence[Tensor]) -> Tensor:
    """Stack sentences of [n_words, width], with zeros behind short ones.  [B, N, width]

    The padding mask of the same sentences comes from `Vocabulary.encode`.

    Args:
        vectors: of each sentence.

    Returns:
        One tensor of all.

    Raises:
        ValueError: there is no sentence, or their widths differ.
    """
    if len(vectors) == 0:
        raise ValueError("expected vectors of at least one sentence, got none")
    for i, x in enumerate(vectors):
        if x.ndim != 2 or x.shape[-1] != vectors[0].shape[-1]:
            wanted = f"shape [n_words, {vectors[0].shape[-1]}] like the first"
            raise ValueError(f"expected vectors[{i}] of {wanted}, got {tuple(x.shape)}")
    return torch.nn.utils.rnn.pad_sequence(list(vectors), batch_first=True)


def embed_in_batches(
    sentences: Sentences, size: int, embed: Callable[[Sentences], list[Tensor]]
) -> list[Tensor]:
    """`embed` in batches of similar length, which need little padding; the order is kept."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    found: dict[int, Tensor] = {}
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        found |= zip(batch, embed([sentences[i] for i in batch]), strict=True)
    return [found[i] for i in range(len(sentences))]


_FORMAT = "gpattention.embedding"
_VERSION = "1"
_TENSOR = "vectors"  # [n_words, width]


class CachedEmbedding:
    """An embedding that stores its vectors in a folder, and computes only missing ones.

    There is one file per sentence, named by the embedding's `name` and the words, so that several embeddings,
    data sets and processes can share a folder.  Files that are damaged or of something else are refused, and
    never overwritten.

    Args:
        embedding: computes missing vectors.
        folder: of the files; created if it does not exist.
        batch_size: sentences that are computed between two writes, and lost by an interruption.
        progress: called with (done, total) of the sentences to compute, at the start and after every batch;
            not called if none is missing.
    """

    def __init__(
        self, embedding: ContextualEmbedding, folder: str | os.PathLike[str], *, batch_size: int = 256,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:  # fmt: skip
        self._embedding = embedding
        self._folder = Path(folder) / digest(embedding.name)[:32]  # a name may hold any character
        self._batch_size = check_count("batch_size", batch_size)
        self._progress = progress or (lambda done, total: None)
        self.width, self.name = embedding.width, embedding.name  # the vectors are the same

    def file(self, sentence: Sequence[str]) -> Path:
        """The file of a sentence."""
        key = _key(sentence)
        return self._folder / key[:2] / f"{key}.safetensors"

    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, width] tensor per sentence."""
        check_sentences(sentences)
        files = [self.file(sentence) for sentence in sentences]
        # by file: a sentence that comes twice is computed once
        missing = {file: s for file, s in zip(files, sentences, strict=True) if not file.exists()}
        self._compute(list(missing.items()))
        return [self._load(file, sentence) for file, sentence in zip(files, sentences, strict=True)]

    def _compute(self, missing: list[tuple[Path, Sequence[str]]]) -> None:
        total = len(missing)
        for start in range(0, total, self._batch_size):
            self._progress(start, total)
            batch = missing[start : start + self._batch_size]
            vectors = self._embedding.embed([sentence for _, sentence in batch])
            for (file, sentence), x in zip(batch, vectors, strict=True):
                self._keep(file, sentence, x.detach().cpu().contiguous())
        if total:
            self._progress(total, total)

    def _keep(self, file: Path, sentence: Sequence[str], x: Tensor) -> None:
        """Write vectors, which must be of the right form and finite."""
        expected = (len(sentence), self.width)
        if x.shape != expected or x.dtype != torch.float32:
            wanted = f"{expected} vectors of float32 for {list(sentence)}"
            raise ValueError(f"expected {self.name} to give {wanted}, got {tuple(x.shape)} and {x.dtype}")
        if not bool(x.isfinite().all()):
            raise NonFiniteError(f"{self.name} gives non-finite numbers for {list(sentence)}")
        make_folder(file.parent)
        label = self._label(sentence) | {"sha256": _sum(x)}
        write_atomically(file, save({_TENSOR: x}, metadata=label))

    def _label(self, sentence: Sequence[str]) -> dict[str, str]:
        named = {"embedding": self.name, "sentence": _key(sentence)}
        return {"format": _FORMAT, "version": _VERSION, **named}

    def _load(self, file: Path, sentence: Sequence[str]) -> Tensor:
        remedy = "delete the file to compute it again"
        try:
            with safe_open(file, framework="pt") as archive:
                label = archive.metadata() or {}
                # a copy, as the tensor itself would keep its file mapped, and maps are limited
                x: Tensor = archive.get_tensor(_TENSOR).clone()  # [n_words, width]
        except SafetensorError as error:
            raise ValueError(f"cached embedding {file} is damaged ({error}): {remedy}") from None
        for field, expected in self._label(sentence).items():
            if label.get(field) != expected:
                got = f"got {label.get(field)!r}: {remedy}"
                raise ValueError(f"cached embedding {file}: expected {field} {expected!r}, {got}")
        if label.get("sha256") != _sum(x):
            raise ValueError(f"cached embedding {file} is damaged (its checksum differs): {remedy}")
        check_finite(file, {_TENSOR: x})
        return x


def _key(sentence: Sequence[str]) -> str:
    return digest(json.dumps(list(sentence)))  # JSON writes ["a b"] and ["a", "b"] differently


def _sum(x: Tensor) -> str:
    """Checksum of shape, type and numbers."""
    return digest(str((tuple(x.shape), x.dtype)), x.numpy().tobytes())
