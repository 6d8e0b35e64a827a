"""Words to numbers: the vocabulary of a training set, vectors from a file, a plain way to split text."""

import json
import os
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from gpattention.checks import check_count, check_whole
from gpattention.files import digest, existing_file, make_folder, read_object, write_atomically
from gpattention.models.embeddings.contextual import Sentences, check_sentences

PADDING = 0  # index of the token that fills short sentences up
UNKNOWN = 1  # index of every word that is not in the vocabulary
SPECIAL = 2  # how many indices are not words

_FORMAT = "gpattention.vocabulary"
_VERSION = 1


def words(text: str) -> list[str]:
    """Split text on white space, each punctuation mark and symbol a word of its own.

    The text is brought to Unicode's composed form (NFC) first, so that an accented letter is the same word
    however it was typed; case is kept.  There are no rules of any language: "don't" becomes don ' t.

    Args:
        text: any.

    Returns:
        Its words in order.
    """
    found = []
    for chunk in unicodedata.normalize("NFC", text).split():
        start = 0
        for i, letter in enumerate(chunk):
            if unicodedata.category(letter)[0] in "PS":
                found += [chunk[start:i], letter]
                start = i + 1
        found.append(chunk[start:])
    return [word for word in found if word]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words a model knows, in order: `words[i]` has index i + 2.

    Index 0 is padding and index 1 stands for every other word.  Neither has a spelling, so a text that
    holds "<pad>" or "<unk>" holds an ordinary word.

    Attributes:
        words: all different.
        lowercase: whether words are lowercased before they are looked up.
    """

    words: tuple[str, ...]
    lowercase: bool = False
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for i, word in enumerate(self.words):
            if not isinstance(word, str) or not word:
                raise ValueError(f"expected words[{i}] to be a non-empty string, got {word!r}")
            if self.lowercase and word != word.lower():
                raise ValueError(f"expected words[{i}] in lower case, got {word!r}")
        index = {word: i + SPECIAL for i, word in enumerate(self.words)}
        if len(index) != len(self.words):
            twice = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ValueError(f"expected words to differ from each other, got {twice!r} more than once")
        object.__setattr__(self, "_index", index)

    @classmethod
    def from_sentences(
        cls, sentences: Sentences, *, min_count: int = 1, max_size: int | None = None, lowercase: bool = False
    ) -> Self:
        """The words of training sentences, the most frequent first, equally frequent ones alphabetically.

        Args:
            sentences: lists of words, of the training set only.
            min_count: rarer words become unknown.
            max_size: at most this many indices, padding and unknown included: rows of the token table.
            lowercase: "The" and "the" are one word.
        """
        min_count = check_count("min_count", min_count)
        max_size = None if max_size is None else check_whole("max_size", max_size)
        if not isinstance(lowercase, bool):  # a recipe's text 'False' would be true
            raise ValueError(f"expected lowercase to be true or false, got {lowercase!r}")
        if max_size is not None and max_size <= SPECIAL:
            least = f"max_size > {SPECIAL}, padding and unknown being two of them"
            raise ValueError(f"expected {least}, got {max_size}")
        check_sentences(sentences)
        counts = Counter(word.lower() if lowercase else word for sentence in sentences for word in sentence)
        kept = sorted((word for word, n in counts.items() if n >= min_count), key=lambda w: (-counts[w], w))
        if not kept:
            wanted = f"sentences with a word that occurs {min_count} times (min_count)"
            got = f"{len(sentences)} sentences with {len(counts)} different words"
            raise ValueError(f"expected {wanted}, got {got}")
        return cls(tuple(kept if max_size is None else kept[: max_size - SPECIAL]), lowercase)

    def __len__(self) -> int:
        """Number of indices, padding and unknown included."""
        return SPECIAL + len(self.words)

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and self.index(word) != UNKNOWN

    def index(self, word: str) -> int:
        """Index of the word, 1 if it is unknown."""
        return self._index.get(word.lower() if self.lowercase else word, UNKNOWN)

    def encode(self, sentences: Sentences) -> tuple[Tensor, Tensor]:
        """Indices and padding mask of a batch.  [B, N] int64 and [B, N] bool

        The mask is True at padding, as `key_padding_mask` of `torch.nn.MultiheadAttention`; the functions
        of `gpattention.gp` take its opposite.  Both tensors are on the CPU.
        """
        check_sentences(sentences)
        longest = max((len(sentence) for sentence in sentences), default=0)
        tokens = torch.full((len(sentences), longest), PADDING, dtype=torch.int64)  # [B, N]
        padding = torch.ones((len(sentences), longest), dtype=torch.bool)  # [B, N]
        for i, sentence in enumerate(sentences):
            tokens[i, : len(sentence)] = torch.tensor([self.index(word) for word in sentence])
            padding[i, : len(sentence)] = False
        return tokens, padding

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary as JSON."""
        content = {"format": _FORMAT, "version": _VERSION, "lowercase": self.lowercase, "words": self.words}
        file = Path(path)
        make_folder(file.parent)
        write_atomically(file, (json.dumps(content, indent=0) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote; `ValueError` for anything else."""
        file = existing_file("path", path)
        content = read_object(file)
        for key, expected in (("format", _FORMAT), ("version", _VERSION)):
            if content.get(key) != expected:
                raise ValueError(f"{file}: expected {key} {expected!r}, got {content.get(key)!r}")
        kept, lowercase = content.get("words"), content.get("lowercase")
        if not isinstance(kept, list) or not isinstance(lowercase, bool):
            got = f"{type(kept).__name__} and {type(lowercase).__name__}"
            raise ValueError(f"{file}: expected a list 'words' and a bool 'lowercase', got {got}")
        try:
            return cls(tuple(kept), lowercase)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None


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
        self, file: str | os.PathLike[str], *, width: int | None = None, vocabulary: Vocabulary | None = None,
        lowercase: bool = False,
    ) -> None:  # fmt: skip
        width = None if width is None else check_count("width", width)
        self._lowercase = lowercase or (vocabulary is not None and vocabulary.lowercase)
        wanted = None if vocabulary is None else {self._spelling(word).encode() for word in vocabulary.words}
        self._rows, self._vectors = _read(existing_file("file", file), width, wanted)
        self.width = int(self._vectors.shape[-1])
        parts = ["lower" if self._lowercase else "cased", *self._rows]
        self.name = f"glove-{digest(*parts, self._vectors.numpy().tobytes())}"

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
    """Rows of the words, and [words + 1, width] vectors whose last row is zero."""
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
            if not width:
                raise ValueError(f"{where}: expected a word and its numbers, got {_shown(line)}")
            word, *numbers = line.rsplit(maxsplit=width) or [b""]
            if len(numbers) != width:
                raise ValueError(f"{where}: expected a word and {width} numbers, got {_shown(line)}")
            count += 1
            if wanted is not None and word not in wanted:
                continue
            try:
                with np.errstate(over="ignore"):
                    vector = np.array([float(x) for x in numbers], dtype=np.float32)  # [width]
                spelled = word.decode()
            except ValueError as error:  # of a word in another encoding, too
                raise ValueError(f"{where}: expected a word in UTF-8 and {width} numbers: {error}") from None
            if not np.isfinite(vector).all():
                raise ValueError(f"{where}: expected finite numbers, got {_shown(line)}")
            # A word written twice keeps its first vector: these files are sorted by frequency.
            if rows.setdefault(spelled, len(vectors)) == len(vectors):
                vectors.append(vector)
    if not count or not width:
        raise ValueError(f"{file}: expected words and their numbers, got an empty file")
    if promised not in (None, count):
        raise ValueError(f"{file}: expected {promised} words as its first line says, got {count}: truncated?")
    return rows, torch.from_numpy(np.stack([*vectors, np.zeros(width, dtype=np.float32)]))


def _header(line: bytes, width: int | None, where: str) -> tuple[int | None, int]:
    """Number of words and width of a first line "count width"; else what is known without it."""
    fields = line.split()
    # A word and one number look the same, but only if vectors have one number.
    if len(fields) != 2 or width == 1 or not all(field.isdigit() for field in fields):
        return None, width or max(len(fields) - 1, 0)
    # Python refuses to read numbers of thousands of digits, with a message of its own
    count, found = (int(field[:16]) for field in fields)
    if found < 1 or width not in (None, found) or count >= 10**15:
        wanted = "a width" if width is None else f"the width {width}"
        raise ValueError(f"{where}: expected a count and {wanted} in the header, got {_shown(line)}")
    return count, found


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r\n")
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
