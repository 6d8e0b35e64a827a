"""Six shifts of texts at three severities, for fitting detectors and temperatures to changed texts.

>>> from gpattention.data import TEXT_SHIFTS, shift_texts
>>> shift_texts(["The cat sat on the mat."], "typos", severity=2)

White space separates words.  The random numbers of a text depend only on the seed, its number, the shift and
the severity, so that a list may be split in any way.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpattention.checks import check_choice, check_count, check_whole
from gpattention.data.shifts import check_severity

Words = list[str]


@dataclass(frozen=True)
class TextShift:
    """One kind of shift.

    Attributes:
        name: for `shift_texts`.
        strengths: of severities 1 to 3, shares of the words.
        apply: a function of words, a strength and the random number generator of the text.
    """

    name: str
    strengths: tuple[float, ...]
    apply: Callable[[Words, float, random.Random], Words]


TEXT_SHIFTS: dict[str, TextShift] = {}


def _register(*strengths: float) -> Callable[[Any], Any]:
    """Decorator that registers a function as the shift with its name."""

    def register(apply: Callable[[Words, float, random.Random], Words]) -> Any:
        TEXT_SHIFTS[apply.__name__] = TextShift(apply.__name__, strengths, apply)
        return apply

    return register


def _chosen(words: Words, share: float, generator: random.Random) -> set[int]:
    """Places of a share of the words, at least one, so that short sentences change too."""
    return set(generator.sample(range(len(words)), max(1, round(share * len(words)))))


@_register(0.1, 0.25, 0.5)
def dropped(words: Words, share: float, generator: random.Random) -> Words:
    """A share of the words left out, but not the last remaining word."""
    lost = _chosen(words, share, generator)
    return [word for place, word in enumerate(words) if place not in lost] or words[:1]


@_register(0.1, 0.25, 0.5)
def doubled(words: Words, share: float, generator: random.Random) -> Words:
    """A share of the words doubled."""
    twice = _chosen(words, share, generator)
    return [word for place, word in enumerate(words) for _ in range(1 + (place in twice))]


@_register(0.1, 0.25, 0.5)
def swapped(words: Words, share: float, generator: random.Random) -> Words:
    """A share of the words changes places with the next one."""
    changed = list(words)
    for place in sorted(_chosen(words, share, generator)):
        other = (place + 1) % len(words)
        changed[place], changed[other] = changed[other], changed[place]
    return changed


@_register(0.15, 0.35, 0.7)
def typos(words: Words, share: float, generator: random.Random) -> Words:
    """A share of the words with two neighbouring letters swapped, one lost, doubled or replaced."""
    wrong = _chosen(words, share, generator)
    return [_mistyped(word, generator) if place in wrong else word for place, word in enumerate(words)]


def _mistyped(word: str, generator: random.Random) -> str:
    place, kind = generator.randrange(len(word)), generator.randrange(4)
    before, letter, after = word[:place], word[place], word[place + 1 :]
    if len(word) == 1:  # nothing to swap with, and nothing would be left
        kind = 2 + kind % 2
    if kind == 0:
        return before + after[:1] + letter + after[1:] if after else before[:-1] + letter + before[-1:]
    if kind == 1:
        return before + after
    return before + letter * 2 + after if kind == 2 else before + generator.choice(_LETTERS) + after


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@_register(0.25, 0.5, 0.75)
def cut(words: Words, share: float, generator: random.Random) -> Words:
    """A share of the words cut off at the beginning or at the end."""
    kept = max(1, len(words) - max(1, round(share * len(words))))
    return words[:kept] if generator.random() < 0.5 else words[len(words) - kept :]


@_register(0.25, 0.5, 1.0)
def recased(words: Words, share: float, generator: random.Random) -> Words:
    """A share of the words in the other case."""
    other = _chosen(words, share, generator)
    return [word.swapcase() if place in other else word for place, word in enumerate(words)]


def shift_texts(
    texts: Sequence[str], name: str, severity: int, *, seed: int = 0, first_item: int = 0
) -> list[str]:
    """Texts under the shift `name` of `TEXT_SHIFTS` at severity 1 to 3.

    Text b is item `first_item + b`.  Texts without words become empty.

    Args:
        texts: of any length.
        name: such as "typos".
        severity: 1, 2 or 3.
        seed: of all random numbers.
        first_item: the number of the first text in its set.

    Returns:
        As many texts, words separated by single spaces.

    Raises:
        ValueError: the shift or severity is unknown, or an element is not a text.

    >>> shift_texts(["we went home"], "recased", 3)
    ['WE WENT HOME']
    """
    check_choice("name", name, tuple(TEXT_SHIFTS))
    severity = check_severity(severity)
    seed, first_item = check_whole("seed", seed), check_count("first_item", first_item, least=0)
    wrong = [text for text in texts if not isinstance(text, str)] if not isinstance(texts, str) else [texts]
    if wrong:
        raise ValueError(f"texts: expected a list of strings, got {wrong[0]!r}")
    chosen = TEXT_SHIFTS[name]
    changed = []
    for item, text in enumerate(texts, first_item):
        words = text.split()
        generator = random.Random(f"{seed}/{name}/{severity}/{item}")  # the same on every machine
        found = chosen.apply(words, chosen.strengths[severity - 1], generator) if words else words
        changed.append(" ".join(found))
    return changed
