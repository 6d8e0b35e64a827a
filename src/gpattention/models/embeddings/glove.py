"""Word vectors from a text file: GloVe, word2vec and fastText write one word and its numbers a line."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpattention.models.embeddings.files import digest, existing_file
from gpattention.models.embeddings.sentences import Sentences, check_sentences
from gpattention.models.embeddings.vocabulary import Vocabulary


class GloveEmbedding:
    """One vector per word, whatever its sentence; zeros for a word that the file does not hold.

    Ask `word in embedding` which words it holds.

    Args:
        file: text; each line a word, then its numbers.  A first line "count width" is understood.
        width: numbers per word; the header's, or as many as the first line holds, if not given.  Give it if
            the first word of the file has spaces in it.
        vocabulary: keep the vectors of these words only; all others become zeros.  Saves memory, and the
            numbers of words that are not kept are not even parsed.
        lowercase: look words up in lower case, as an uncased file needs; a lowercase vocabulary implies it.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        width: int | None = None,
        vocabulary: Vocabulary | None = None,
        lowercase: bool = False,
    ) -> None:
        if width is not None and width < 1:
            raise ValueError(f"expected width >= 1, got {width}")
        self._lowercase = lowercase or (vocabulary is not None and vocabulary.lowercase)
        wanted = None if vocabulary is None else {self._spelling(word).encode() for word in vocabulary.words}
        self._rows, self._vectors = _read(existing_file("file", file), width, wanted)
        parts = ["lower" if self._lowercase else "cased", *self._rows]
        self._name = f"glove-{digest(*parts, self._vectors.numpy().tobytes())}"

    @property
    def width(self) -> int:
        """Numbers per word."""
        return self._vectors.shape[-1]

    @property
    def name(self) -> str:
        """Fingerprint of the kept words and their vectors."""
        return self._name

    def __len__(self) -> int:
        """How many words have a vector."""
        return len(self._rows)

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and self._spelling(word) in self._rows

    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, width] tensor per sentence."""
        check_sentences(sentences)
        zeros = len(self._rows)  # the row after the last word's
        return [
            self._vectors[[self._rows.get(self._spelling(word), zeros) for word in sentence]]
            for sentence in sentences
        ]

    def _spelling(self, word: str) -> str:
        return word.lower() if self._lowercase else word


def _read(file: Path, width: int | None, wanted: set[bytes] | None) -> tuple[dict[str, int], Tensor]:
    """Rows of the words, and [words + 1, width] vectors whose last row is zero.

    A word written twice keeps its first vector: these files are sorted by frequency.
    """
    rows: dict[str, int] = {}
    vectors: list[np.ndarray] = []
    promised, count = None, 0
    # Bytes, because some words of the published files contain what Unicode calls white space.
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{file}, line {number}"
            if number == 1:
                promised, width = _header(line, width, where)
                if promised is not None:
                    continue
            if width is None:
                raise ValueError(f"{where}: expected a word and its numbers, got {_shown(line)}")
            fields = line.rsplit(maxsplit=width)
            if len(fields) != width + 1:
                raise ValueError(f"{where}: expected a word and {width} numbers, got {_shown(line)}")
            count += 1
            if wanted is not None and fields[0] not in wanted:
                continue
            vector = _numbers(fields[1:], where)  # [width]
            try:
                word = fields[0].decode()
            except UnicodeDecodeError:
                raise ValueError(f"{where}: expected a word in UTF-8, got {_shown(line)}") from None
            if rows.setdefault(word, len(vectors)) == len(vectors):
                vectors.append(vector)
    if count == 0 or width is None:
        raise ValueError(f"{file}: expected words and their numbers, got an empty file")
    if promised is not None and promised != count:
        raise ValueError(f"{file}: expected {promised} words as its first line says, got {count}: truncated?")
    vectors.append(np.zeros(width, dtype=np.float32))
    return rows, torch.from_numpy(np.stack(vectors))


def _header(line: bytes, width: int | None, where: str) -> tuple[int | None, int | None]:
    """Number of words and width that a first line "count width" tells; else what is known without it."""
    fields = line.split()
    # A word and one number look the same, but only if vectors have one number.
    if len(fields) != 2 or width == 1 or not all(field.isdigit() for field in fields):
        return None, width if width is not None else (max(len(fields) - 1, 0) or None)
    if max(map(len, fields)) > 15:
        raise ValueError(f"{where}: expected a count and a width in the header, got {_shown(line)}")
    count, told = int(fields[0]), int(fields[1])
    if told < 1 or (width is not None and told != width):
        expected = "a width >= 1" if width is None else f"width {width}"
        raise ValueError(f"{where}: expected {expected} in the header, got {told}")
    return count, told


def _numbers(fields: list[bytes], where: str) -> np.ndarray:
    """The numbers of one line.  [width]"""
    try:
        with np.errstate(over="ignore"):
            vector = np.array([float(field) for field in fields], dtype=np.float32)
    except ValueError as error:
        raise ValueError(f"{where}: expected {len(fields)} numbers after the word, got {error}") from None
    if not np.isfinite(vector).all():
        bad = fields[int(np.flatnonzero(~np.isfinite(vector))[0])].decode(errors="replace")
        raise ValueError(f"{where}: expected finite numbers, got {bad}")
    return vector


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r\n")
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
