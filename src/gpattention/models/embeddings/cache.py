"""Frozen embeddings, computed once and kept on disk."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpattention.gp.errors import NonFiniteError
from gpattention.models.embeddings.contextual import ContextualEmbedding, check_batch_size
from gpattention.models.embeddings.files import digest
from gpattention.models.embeddings.sentences import Sentences, check_sentences
from gpattention.models.storage import check_finite, make_folder, write_atomically

_FORMAT = "gpattention.embedding"
_VERSION = "1"
_TENSOR = "vectors"  # [n_words, width]


class CachedEmbedding:
    """An embedding whose vectors are looked up in a folder, and computed only if they are not there.

    One file per sentence, found by the embedding's `name` and the sentence's words, so that several
    embeddings, datasets and processes can share a folder.  A file that is damaged or not ours is refused
    with its name, never overwritten.

    Args:
        embedding: what to compute missing vectors with.
        folder: where the files are; made if it is not there.
        batch_size: sentences computed between two writes: at most so many are lost if it is interrupted.
        progress: called with (done, total) of the sentences to compute, at the start and after every batch;
            not called if all are there.
    """

    def __init__(
        self,
        embedding: ContextualEmbedding,
        folder: str | os.PathLike[str],
        *,
        batch_size: int = 256,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_batch_size(batch_size)
        self._embedding = embedding
        self._folder = Path(folder) / digest(embedding.name)[:32]  # a name may hold any character
        self._batch_size = batch_size
        self._progress = progress

    @property
    def width(self) -> int:
        """Numbers per word."""
        return self._embedding.width

    @property
    def name(self) -> str:
        """That of the embedding: the vectors are the same."""
        return self._embedding.name

    def file(self, sentence: Sequence[str]) -> Path:
        """Where the vectors of a sentence are kept."""
        key = _key(sentence)
        return self._folder / key[:2] / f"{key}.safetensors"

    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, width] tensor per sentence."""
        check_sentences(sentences)
        files = [self.file(sentence) for sentence in sentences]
        missing = {file: s for file, s in zip(files, sentences, strict=True) if not file.exists()}
        self._compute(list(missing.items()))
        return [self._load(file, sentence) for file, sentence in zip(files, sentences, strict=True)]

    def _compute(self, missing: list[tuple[Path, Sequence[str]]]) -> None:
        total = len(missing)
        for start in range(0, total, self._batch_size):
            self._tell(start, total)
            batch = missing[start : start + self._batch_size]
            vectors = self._embedding.embed([sentence for _, sentence in batch])
            for (file, sentence), x in zip(batch, vectors, strict=True):
                self._check(x, sentence)
                make_folder(file.parent)
                write_atomically(file, self._packed(x, sentence))
        if total:
            self._tell(total, total)

    def _tell(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)

    def _check(self, x: Tensor, sentence: Sequence[str]) -> None:
        """What is not sound must not be kept."""
        expected = (len(sentence), self.width)
        if tuple(x.shape) != expected or x.dtype != torch.float32:
            raise ValueError(
                f"expected {self.name} to give {expected} vectors of float32 for {list(sentence)}, got "
                f"{tuple(x.shape)} and {x.dtype}"
            )
        if not bool(x.isfinite().all()):
            raise NonFiniteError(f"{self.name} gives non-finite numbers for {list(sentence)}")

    def _packed(self, x: Tensor, sentence: Sequence[str]) -> bytes:
        x = x.detach().cpu().contiguous()
        return save({_TENSOR: x}, metadata=self._label(sentence) | {"sha256": _sum(x)})

    def _label(self, sentence: Sequence[str]) -> dict[str, str]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "embedding": self.name,
            "sentence": _key(sentence),
        }

    def _load(self, file: Path, sentence: Sequence[str]) -> Tensor:
        remedy = "delete the file to compute it again"
        try:
            with safe_open(file, framework="pt") as archive:
                label = archive.metadata() or {}
                # A copy: the tensor itself would keep its file mapped, and a process has so many maps.
                x: Tensor = archive.get_tensor(_TENSOR).clone()  # [n_words, width]
        except SafetensorError as error:
            raise ValueError(f"cached embedding {file} is damaged ({error}): {remedy}") from None
        for field, expected in self._label(sentence).items():
            if label.get(field) != expected:
                raise ValueError(
                    f"cached embedding {file}: expected {field} {expected!r}, got {label.get(field)!r}: "
                    f"{remedy}"
                )
        if label.get("sha256") != _sum(x):
            raise ValueError(f"cached embedding {file} is damaged (its checksum differs): {remedy}")
        check_finite(file, {_TENSOR: x})
        return x


def _key(sentence: Sequence[str]) -> str:
    return digest(json.dumps(list(sentence)))  # JSON tells ["a b"] from ["a", "b"]


def _sum(x: Tensor) -> str:
    """Checksum of shape, type and numbers."""
    return digest(str((tuple(x.shape), x.dtype)), x.numpy().tobytes())
