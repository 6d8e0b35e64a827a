"""Words to numbers: the vocabulary of a training set, and a plain way to split text into words."""

import json
import os
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from gpattention.checks import check_whole
from gpattention.models.embeddings.files import existing_file
from gpattention.models.embeddings.sentences import Sentences, check_sentences
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import read_json

PADDING = 0  # index of the token that fills short sentences up
UNKNOWN = 1  # index of every word that is not in the vocabulary
SPECIAL = 2  # how many indices are not words

_FORMAT = "gpattention.vocabulary"
_VERSION = 1


def words(text: str) -> list[str]:
    """Split text on white space, each punctuation mark and symbol a word of its own.

    The text is brought to Unicode's composed form (NFC) first, so that an accented letter is the same word
    however it was typed; case is kept.  There are no rules of any language: "don't" becomes don ' t.
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
    """

    words: tuple[str, ...]
    lowercase: bool = False  # whether words are lowercased before they are looked up
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
        min_count = check_whole("min_count", min_count)
        max_size = None if max_size is None else check_whole("max_size", max_size)
        if not isinstance(lowercase, bool):  # a recipe's text 'False' would be true
            raise ValueError(f"expected lowercase to be true or false, got {lowercase!r}")
        if min_count < 1:
            raise ValueError(f"expected min_count >= 1, got {min_count}")
        if max_size is not None and max_size <= SPECIAL:
            raise ValueError(
                f"expected max_size > {SPECIAL}, padding and unknown being two of them, got {max_size}"
            )
        check_sentences(sentences)
        counts = Counter(word.lower() if lowercase else word for sentence in sentences for word in sentence)
        kept = sorted((word for word, n in counts.items() if n >= min_count), key=lambda w: (-counts[w], w))
        if not kept:
            raise ValueError(
                f"expected sentences with a word that occurs {min_count} times (min_count), got "
                f"{len(sentences)} sentences with {len(counts)} different words"
            )
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
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "lowercase": self.lowercase,
            "words": list(self.words),
        }
        file = Path(path)
        make_folder(file.parent)
        write_atomically(file, (json.dumps(content, indent=0) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote; `ValueError` for anything else."""
        file = existing_file("path", path)
        content = read_json(file)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{file} is not a vocabulary: expected a JSON object with format {_FORMAT!r}")
        if content.get("version") != _VERSION:
            raise ValueError(
                f"{file}: expected a vocabulary of version {_VERSION}, got {content.get('version')!r}"
            )
        kept, lowercase = content.get("words"), content.get("lowercase")
        if not isinstance(kept, list) or not isinstance(lowercase, bool):
            raise ValueError(
                f"{file}: expected a list 'words' and a bool 'lowercase', got {type(kept).__name__} and "
                f"{type(lowercase).__name__}"
            )
        try:
            return cls(tuple(kept), lowercase)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
