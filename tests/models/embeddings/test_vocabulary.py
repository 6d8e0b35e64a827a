"""Vocabularies and word vectors from files."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpattention.models.embeddings import (
    PADDING,
    UNKNOWN,
    ContextualEmbedding,
    GloveEmbedding,
    Vocabulary,
    words,
)

TRAINING = [["b", "a", "The"], ["b", "c", "the", "a", "b"], ["d", "<pad>"]]


@pytest.mark.parametrize(("text", "expected"), [
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
])  # fmt: skip
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
    assert Vocabulary.from_sentences(TRAINING, min_count=2).words == ("b", "a")
    assert Vocabulary.from_sentences(TRAINING, max_size=5).words == ("b", "a", "<pad>")
    lower = Vocabulary.from_sentences(TRAINING, min_count=2, lowercase=True)
    assert lower.words == ("b", "a", "the")
    assert (lower.index("THE"), lower.index("B"), vocabulary.index("B")) == (4, 2, UNKNOWN)


def test_encode() -> None:
    vocabulary = Vocabulary.from_sentences(TRAINING)
    tokens, padding = vocabulary.encode([["a", "zebra", "b"], ["<pad>"]])
    assert (tokens.dtype, padding.dtype) == (torch.int64, torch.bool)
    assert tokens.tolist() == [[3, 1, 2], [4, PADDING, PADDING]]
    assert padding.tolist() == [[False, False, False], [False, True, True]]
    tokens, padding = vocabulary.encode([])
    assert (tokens.shape, padding.shape) == ((0, 0), (0, 0))


def of(*words: str, **options: Any) -> Callable[[], Vocabulary]:
    return lambda: Vocabulary(words, **options)


def built(sentences: Any = TRAINING, **options: Any) -> Callable[[], Vocabulary]:
    return lambda: Vocabulary.from_sentences(sentences, **options)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    *(
        (call, message)
        for sentences, message in (
            ("the cat", "sentences to be lists of words, got the string 'the cat'"),
            ([["a"], "the cat"], "sentences[1] to be a list of words, got the string 'the cat'"),
            ([["a"], []], "sentences[1] to hold at least one word, got none"),
            ([["a", ""]], "sentences[0][1] to be a non-empty string, got ''"),
            ([["a", 3]], "sentences[0][1] to be a non-empty string, got 3"),
        )
        for call in (built(sentences), partial(Vocabulary(("a",)).encode, sentences))
    ),
    (built(min_count=0), "min_count to be a whole number >= 1, got 0"),
    (built(max_size=9.5), "max_size to be a whole number, got 9.5"),
    (built(max_size=2), "max_size > 2, padding and unknown being two of them, got 2"),
    (built(lowercase="False"), "lowercase to be true or false, got 'False'"),
    (built(min_count=4), "a word that occurs 4 times (min_count), got 3 sentences with 7 different words"),
    (of("a", "b", "a"), "words to differ from each other, got 'a' more than once"),
    (of("a", "B", lowercase=True), "words[1] in lower case, got 'B'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


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


def test_files_that_are_no_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    Vocabulary.from_sentences(TRAINING).save(file)
    whole = file.read_bytes()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"format": "other"}, "is not a vocabulary: expected .* format 'gpattention.vocabulary'"),
        ({"version": 2}, "expected a vocabulary of version 1, got 2"),
        ({"words": "ab"}, "a list 'words' and a bool 'lowercase', got str and bool"),
        ({"lowercase": None}, "a list 'words' and a bool 'lowercase', got list and NoneType"),
        ({"words": ["a", 3]}, r"v.json: expected words\[1\] to be a non-empty string, got 3"),
        ({"words": [["a"]]}, r"v.json: expected words\[0\] to be a non-empty string, got \['a'\]"),
        ({"words": ["a", "a"]}, "v.json: expected words to differ from each other, got 'a' more than once"),
    ]
    for content, message in (
        *((json.dumps(json.loads(whole) | change).encode(), message) for change, message in changes),
        # the last two bytes are the closing brace and the end of line
        *((whole[:kept], r"v\.json is not JSON") for kept in range(len(whole) - 2)),
        (b"[1, 2]", "is not a vocabulary: expected a JSON object"),
        (b"\x89HDF\xff", "not JSON"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Vocabulary.load(file)
    with pytest.raises(FileNotFoundError, match=r"expected path to be a file, got .*nowhere"):
        Vocabulary.load(tmp_path / "nowhere")


LINES = ["the 0.5 -1 2e-1", "cat 1 2 3", ". . . 4 5 6", "x\u00a0y 7 8 9"]


def write(folder: Path, *lines: str | bytes, name: str = "glove.txt") -> Path:
    data = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    (folder / name).write_bytes(data)
    return folder / name


def test_reads_glove(tmp_path: Path) -> None:
    embedding = GloveEmbedding(write(tmp_path, *LINES))
    assert (embedding.width, len(embedding)) == (3, 4)
    first, second = embedding.embed([["cat", "dog", "the"], [". . .", "x\u00a0y", "The"]])
    assert torch.equal(first, torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [0.5, -1.0, 0.2]]))
    assert torch.equal(second, torch.tensor([[4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [0.0, 0.0, 0.0]]))
    assert (first.dtype, first.requires_grad) == (torch.float32, False)
    assert ("cat" in embedding, "dog" in embedding, 3 in embedding) == (True, False, False)
    assert isinstance(embedding, ContextualEmbedding)


@pytest.mark.parametrize("end", ["", " ", "\r", " \r"])
def test_reads_word2vec_text_and_its_line_ends(end: str, tmp_path: Path) -> None:
    plain = GloveEmbedding(write(tmp_path, *LINES, name="plain"))
    headed = GloveEmbedding(
        write(tmp_path, *(line + end for line in ["4 3", *LINES]), name="headed"), width=3
    )
    assert headed.name == plain.name
    assert torch.equal(headed.embed([["the"]])[0], torch.tensor([[0.5, -1.0, 0.2]]))


def test_words_with_spaces_narrow_files_and_repeated_words(tmp_path: Path) -> None:
    spaced = GloveEmbedding(write(tmp_path, LINES[2], LINES[1]), width=3)  # a first word needs the width
    assert spaced.embed([[". . .", "cat"]])[0].tolist() == [[4, 5, 6], [1, 2, 3]]
    narrow = GloveEmbedding(write(tmp_path, "7 3", "8 4"), width=1)  # no header
    assert narrow.embed([["7", "8"]])[0].tolist() == [[3], [4]]
    repeated = GloveEmbedding(write(tmp_path, "a 1 2", "b 3 4", "a 5 6", "c 7 8"))
    assert repeated.embed([["a", "b", "c"]])[0].tolist() == [[1, 2], [3, 4], [7, 8]]


def test_only_the_vocabulary_is_kept(tmp_path: Path) -> None:
    file = write(tmp_path, *LINES, "unread not a number")
    embedding = GloveEmbedding(file, vocabulary=Vocabulary(("cat", "dog", "The")))
    assert len(embedding) == 1
    assert embedding.embed([["the", "cat"]])[0].tolist() == [[0, 0, 0], [1, 2, 3]]
    lower = GloveEmbedding(file, vocabulary=Vocabulary(("the",), lowercase=True))
    torch.testing.assert_close(lower.embed([["THE"]])[0], torch.tensor([[0.5, -1.0, 0.2]]))
    mixed = GloveEmbedding(file, vocabulary=Vocabulary(("The", "CAT")), lowercase=True)
    assert len(mixed) == 2


def test_name_tells_what_is_embedded(tmp_path: Path) -> None:
    file = write(tmp_path, *LINES)
    name = GloveEmbedding(file).name
    assert name.startswith("glove-")
    assert GloveEmbedding(write(tmp_path, *LINES, name="moved")).name == name
    others = {
        GloveEmbedding(file, vocabulary=Vocabulary(("cat",))).name,
        GloveEmbedding(file, lowercase=True).name,
        GloveEmbedding(write(tmp_path, *LINES[:3], "x\u00a0y 7 8 9.5", name="number")).name,
        GloveEmbedding(write(tmp_path, *LINES[:3], "xy 7 8 9", name="word")).name,
    }
    assert len(others | {name}) == 5


MALFORMED: list[tuple[tuple[str | bytes, ...], dict[str, Any], str]] = [
    ((*LINES, "short 1 2"), {}, "line 5: expected a word and 3 numbers, got 'short 1 2'"),
    ((*LINES, "bad 1 two 3"), {}, "line 5: expected 3 numbers after the word, got could not convert"),
    ((*LINES, "bad 1 nan 3"), {}, "line 5: expected finite numbers, got nan"),
    ((*LINES, "bad 1 1e39 3"), {}, "line 5: expected finite numbers, got 1e39"),
    ((*LINES, b"\xff 1 2 3"), {}, "line 5: expected a word in UTF-8, got '\ufffd 1 2 3'"),
    (("word" * 20,), {}, "line 1: expected a word and its numbers, got '" + "word" * 15 + "...'"),
    (("5 3", *LINES), {}, "expected 5 words as its first line says, got 4: truncated?"),
    (("4 0", *LINES), {}, "line 1: expected a width >= 1 in the header, got 0"),
    (("9" * 5000 + " 3", *LINES), {}, "line 1: expected a count and a width in the header, got '999"),
    ((), {}, "expected words and their numbers, got an empty file"),
    (("4 3", *LINES), {"width": 5}, "line 1: expected width 5 in the header, got 3"),
    ((*LINES,), {"width": 5}, "line 1: expected a word and 5 numbers"),
]


@pytest.mark.parametrize(("lines", "options", "message"), MALFORMED)
def test_malformed_files(lines: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        GloveEmbedding(file, **options)
    assert str(file) in str(caught.value)


def test_arguments_of_glove(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected width to be a whole number >= 1, got 0"):
        GloveEmbedding(write(tmp_path, *LINES), width=0)
    with pytest.raises(FileNotFoundError, match=r"expected file to be a file, got .*nowhere"):
        GloveEmbedding(tmp_path / "nowhere")
