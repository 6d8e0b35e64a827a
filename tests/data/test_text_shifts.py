"""Shifts of texts: what each changes, by how much, and that a text's shift is its own."""

from difflib import SequenceMatcher

import pytest

from gpattention.data import TEXT_SHIFTS, shift_texts
from gpattention.data.shifts import SEVERITIES
from tests.refusals import refusals

TEXTS = [
    "The book that the committee praised was written by nobody whom we know .",
    "Did you ever see a river run uphill after a long and rainy night in spring ?",
    "She said yes",
    "Ouch",
    "x y",
]
every_shift = pytest.mark.parametrize("name", TEXT_SHIFTS)


@every_shift
@pytest.mark.parametrize("severity", SEVERITIES)
def test_lists_may_be_cut_at_will(name: str, severity: int) -> None:
    whole = shift_texts(TEXTS, name, severity, seed=3, first_item=5)
    parts = [shift_texts([t], name, severity, seed=3, first_item=5 + i)[0] for i, t in enumerate(TEXTS)]
    assert whole == parts
    assert shift_texts(TEXTS, name, severity, seed=3, first_item=5) == whole


@every_shift
def test_items_and_seeds_have_their_own(name: str) -> None:
    alike = [TEXTS[1]] * 12
    severity = 2
    assert len(set(shift_texts(alike, name, severity))) > 1
    assert shift_texts(alike, name, severity) != shift_texts(alike, name, severity, seed=1)


@every_shift
def test_severer_is_further_away(name: str) -> None:
    def kept(severity: int) -> float:  # share of the letters that stay
        pairs = zip(TEXTS[:2] * 20, shift_texts(TEXTS[:2] * 20, name, severity), strict=True)
        return sum(SequenceMatcher(None, a, b, autojunk=False).ratio() for a, b in pairs) / 40

    assert 1 > kept(1) > kept(2) > kept(3)


@every_shift
@pytest.mark.parametrize("severity", SEVERITIES)
def test_texts_of_no_words_and_of_one(name: str, severity: int) -> None:
    assert shift_texts([], name, severity) == []
    assert shift_texts(["", "  "], name, severity) == ["", ""]
    assert all(text for text in shift_texts(["a", "Ouch", "x y"] * 30, name, severity))


def test_what_each_does() -> None:
    words = TEXTS[1].split()
    for severity in SEVERITIES:
        changed = {n: shift_texts([TEXTS[1]] * 30, n, severity) for n in TEXT_SHIFTS}
        for text in changed["dropped"]:
            rest = iter(words)
            assert all(word in rest for word in text.split())  # in the same order
            assert len(text.split()) < len(words)
        assert all(sorted(text.split()) == sorted(words) for text in changed["swapped"])
        assert all(set(text.split()) == set(words) for text in changed["doubled"])
        assert all(TEXTS[1].startswith(text) or TEXTS[1].endswith(text) for text in changed["cut"])
        assert all(text.lower() == TEXTS[1].lower() for text in changed["recased"])
        for text in changed["typos"]:
            pairs = list(zip(text.split(), words, strict=True))
            wrong = sum(a != b for a, b in pairs)
            assert 0 < wrong <= round(TEXT_SHIFTS["typos"].strengths[severity - 1] * len(words))
            assert all(abs(len(a) - len(b)) <= 1 for a, b in pairs)


test_refusals = refusals(
    [
        (lambda: shift_texts(TEXTS, "shuffled", 1), "name", "'shuffled'"),
        (lambda: shift_texts(TEXTS, "cut", 4), "severity", "4"),
        (lambda: shift_texts(TEXTS, "cut", 1, seed=0.5), "seed", "0.5"),  # type: ignore[arg-type]
        (lambda: shift_texts(TEXTS, "cut", 1, first_item=-1), "first_item", "-1"),
        (lambda: shift_texts("a text", "cut", 1), "texts", "'a text'"),
        (lambda: shift_texts(["a", 7], "cut", 1), "texts", "7"),  # type: ignore[list-item]
    ]
)
