"""Words, their order, their numbers, and the file they are kept in."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gpattention.models.embeddings import PADDING, UNKNOWN, Vocabulary, words

TRAINING = [["b", "a", "The"], ["b", "c", "the", "a", "b"], ["d", "<pad>"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat sat.", ["The", "cat", "sat", "."]),
        ("  don't\tpanic!?\n", ["don", "'", "t", "panic", "!", "?"]),
        ("well-known (3.5%) a_b", ["well", "-", "known", "(", "3", ".", "5", "%", ")", "a", "_", "b"]),
        ("“Größe” €5", ["“", "Größe", "”", "€", "5"]),
        ("cafe\u0301", ["caf\u00e9"]),  # NFC
        ("हिन्दी ok", ["हिन्दी", "ok"]),  # vowel signs stay in their word
        ("a\u00a0b\u2003c", ["a", "b", "c"]),
        ("...", [".", ".", "."]),
        (" \n", []),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_order_is_by_count_then_alphabet() -> None:
    vocabulary = Vocabulary.from_sentences(TRAINING)
    assert vocabulary.words == ("b", "a", "<pad>", "The", "c", "d", "the")
    assert Vocabulary.from_sentences(TRAINING[::-1]) == vocabulary
    assert [vocabulary.index(word) for word in ("b", "a", "the", "nowhere")] == [2, 3, 8, UNKNOWN]
    assert len(vocabulary) == 9
    assert ("d" in vocabulary, "e" in vocabulary, 3 in vocabulary) == (True, False, False)
    assert hash(vocabulary) == hash(Vocabulary(vocabulary.words))


def test_limits_and_case() -> None:
    assert Vocabulary.from_sentences(TRAINING, min_count=2).words == ("b", "a")
    assert Vocabulary.from_sentences(TRAINING, max_size=5).words == ("b", "a", "<pad>")
    lower = Vocabulary.from_sentences(TRAINING, min_count=2, lowercase=True)
    assert lower.words == ("b", "a", "the")
    assert (lower.index("THE"), lower.index("B")) == (4, 2)
    assert Vocabulary.from_sentences(TRAINING).index("B") == UNKNOWN


def test_encode() -> None:
    vocabulary = Vocabulary.from_sentences(TRAINING)
    tokens, padding = vocabulary.encode([["a", "zebra", "b"], ["<pad>"]])
    assert (tokens.dtype, padding.dtype) == (torch.int64, torch.bool)
    assert tokens.tolist() == [[3, 1, 2], [4, PADDING, PADDING]]
    assert padding.tolist() == [[False, False, False], [False, True, True]]
    tokens, padding = vocabulary.encode([])
    assert (tokens.shape, padding.shape) == ((0, 0), (0, 0))


def test_mask_is_what_torch_attention_expects() -> None:
    vocabulary = Vocabulary.from_sentences(TRAINING)
    torch.manual_seed(0)
    table, attention = (
        torch.nn.Embedding(len(vocabulary), 4),
        torch.nn.MultiheadAttention(4, 2, batch_first=True),
    )

    def attend(sentences: list[list[str]]) -> torch.Tensor:
        tokens, padding = vocabulary.encode(sentences)
        x = table(tokens)  # [B, N, 4]
        return attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    torch.testing.assert_close(attend([["a", "b"], ["c", "d", "a"]])[0, :2], attend([["a", "b"]])[0])


@pytest.mark.parametrize(
    ("sentences", "told"),
    [
        ("the cat", "expected sentences to be lists of words, got the string 'the cat'"),
        (
            [["a"], "the cat"],
            "expected sentences[1] to be a list of words, got the string 'the cat': split it",
        ),
        ([["a"], []], "expected sentences[1] to hold at least one word, got none"),
        ([["a", ""]], "expected sentences[0][1] to be a non-empty string, got ''"),
        ([["a", 3]], "expected sentences[0][1] to be a non-empty string, got 3"),
    ],
)
def test_sentences_are_checked(sentences: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Vocabulary.from_sentences(sentences)
    with pytest.raises(ValueError, match=re.escape(told)):
        Vocabulary(("a",)).encode(sentences)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"min_count": 0}, "expected min_count >= 1, got 0"),
        ({"min_count": "2"}, "expected min_count to be a whole number, got '2'"),
        ({"max_size": 9.5}, "expected max_size to be a whole number, got 9.5"),
        ({"lowercase": "False"}, "expected lowercase to be true or false, got 'False'"),
        ({"max_size": 2}, "expected max_size > 2, padding and unknown being two of them, got 2"),
        ({"min_count": 4}, "a word that occurs 4 times (min_count), got 3 sentences with 7 different words"),
    ],
)
def test_arguments(arguments: dict, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Vocabulary.from_sentences(TRAINING, **arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((("a", "b", "a"),), "expected words to differ from each other, got 'a' more than once"),
        ((("a", ""),), "expected words[1] to be a non-empty string, got ''"),
        ((("a", "B"), True), "expected words[1] in lower case, got 'B'"),
    ],
)
def test_words_are_checked(arguments: tuple, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Vocabulary(*arguments)


@pytest.mark.parametrize("lowercase", [False, True])
def test_save_and_load(lowercase: bool, tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_sentences(
        [*TRAINING, ["straße", "猫", "\ud800", '"\n']], lowercase=lowercase
    )
    vocabulary.save(tmp_path / "made" / "vocabulary.json")
    (tmp_path / "fresh").touch()  # readable by whom other new files are
    assert (tmp_path / "made/vocabulary.json").stat().st_mode == (tmp_path / "fresh").stat().st_mode
    assert Vocabulary.load(tmp_path / "made" / "vocabulary.json") == vocabulary
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["vocabulary.json"]
    assert json.loads((tmp_path / "made" / "vocabulary.json").read_text())["version"] == 1


def test_truncated_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    Vocabulary.from_sentences(TRAINING).save(file)
    whole = file.read_bytes()
    for kept in range(len(whole) - 2):  # the last two are the closing brace and the end of line
        file.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"v\.json is not JSON"):
            Vocabulary.load(file)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"format": "other"},
            "is not a vocabulary: expected a JSON object with format 'gpattention.vocabulary'",
        ),
        ({"version": 2}, "expected a vocabulary of version 1, got 2"),
        ({"words": "ab"}, "expected a list 'words' and a bool 'lowercase', got str and bool"),
        ({"lowercase": None}, "expected a list 'words' and a bool 'lowercase', got list and NoneType"),
        ({"words": ["a", 3]}, "v.json: expected words[1] to be a non-empty string, got 3"),
        ({"words": [["a"]]}, "v.json: expected words[0] to be a non-empty string, got ['a']"),
        ({"words": ["a", "a"]}, "v.json: expected words to differ from each other, got 'a' more than once"),
    ],
)
def test_foreign_files(change: dict, told: str, tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    Vocabulary.from_sentences(TRAINING).save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(told)):
        Vocabulary.load(file)


def test_files_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match="is not a vocabulary: expected a JSON object"):
        Vocabulary.load(file)
    file.write_bytes(b"\x89HDF\xff")
    with pytest.raises(ValueError, match="not JSON"):
        Vocabulary.load(file)
    with pytest.raises(FileNotFoundError, match=r"expected path to be a file, got .*nowhere"):
        Vocabulary.load(tmp_path / "nowhere")
