"""Vocabularies and word vectors from files."""

import json
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
from tests.refusals import refusals

TRAINING = [["b", "a", "The"], ["b", "c", "the", "a", "b"], ["d", "<pad>"]]


@pytest.mark.parametrize(("text", "expected"), [
    ("  don't\tpanic!?\n", ["don", "'", "t", "panic", "!", "?"]),
    ("well-known (3.5%) a_b", ["well", "-", "known", "(", "3", ".", "5", "%", ")", "a", "_", "b"]),
    ("“Größe” €5", ["“", "Größe", "”", "€", "5"]),
    ("cafe\u0301", ["caf\u00e9"]),  # NFC
    ("हिन्दी ok", ["हिन्दी", "ok"]),  # vowel signs stay in their word
    ("a\u00a0b\u2003c", ["a", "b", "c"]),
    (" \n", []),
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
    assert Vocabulary.from_sentences(TRAINING, max_size=5).words == ("b", "a", "<pad>")
    lower = Vocabulary.from_sentences(TRAINING, min_count=2, lowercase=True)
    assert lower.words == ("b", "a", "the")
    assert (lower.index("THE"), lower.index("B"), vocabulary.index("B")) == (4, 2, UNKNOWN)


def test_encode() -> None:
    tokens, padding = Vocabulary.from_sentences(TRAINING).encode([["a", "zebra", "b"], ["<pad>"]])
    assert (tokens.dtype, padding.dtype) == (torch.int64, torch.bool)
    assert tokens.tolist() == [[3, 1, 2], [4, PADDING, PADDING]]
    assert padding.tolist() == [[False, False, False], [False, True, True]]
    assert Vocabulary(("a",)).encode([])[0].shape == (0, 0)


@pytest.mark.parametrize("lowercase", [False, True])
def test_save_and_load(lowercase: bool, tmp_path: Path) -> None:
    strange = [*TRAINING, ["straße", "猫", "\ud800", '"\n']]
    vocabulary = Vocabulary.from_sentences(strange, lowercase=lowercase)
    vocabulary.save(tmp_path / "made" / "vocabulary.json")
    assert Vocabulary.load(tmp_path / "made" / "vocabulary.json") == vocabulary
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["vocabulary.json"]


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


@pytest.mark.parametrize("end", ["", " ", " \r"])
def test_reads_word2vec_text_and_its_line_ends(end: str, tmp_path: Path) -> None:
    plain = GloveEmbedding(write(tmp_path, *LINES, name="plain"))
    lines = (line + end for line in ["4 3", *LINES])
    headed = GloveEmbedding(write(tmp_path, *lines, name="headed"), width=3)
    assert headed.name == plain.name
    assert torch.equal(headed.embed([["the"]])[0], torch.tensor([[0.5, -1.0, 0.2]]))


@pytest.mark.parametrize(("lines", "width", "expected"), [
    ([LINES[2], LINES[1]], 3, {". . .": [4, 5, 6], "cat": [1, 2, 3]}),  # a first word needs the width
    (["7 3", "8 4"], 1, {"7": [3], "8": [4]}),  # no header
    (["a 1 2", "b 3 4", "a 5 6"], None, {"a": [1, 2], "b": [3, 4]}),
])  # fmt: skip
def test_words_with_spaces_narrow_files_and_repeated_words(
    lines: list[str], width: int | None, expected: dict[str, list[float]], tmp_path: Path
) -> None:
    embedding = GloveEmbedding(write(tmp_path, *lines), width=width)
    assert embedding.embed([list(expected)])[0].tolist() == list(expected.values())


def test_only_the_vocabulary_is_kept(tmp_path: Path) -> None:
    file = write(tmp_path, *LINES, "unread not a number")
    embedding = GloveEmbedding(file, vocabulary=Vocabulary(("cat", "dog", "The")))
    assert len(embedding) == 1
    assert embedding.embed([["the", "cat"]])[0].tolist() == [[0, 0, 0], [1, 2, 3]]
    lower = GloveEmbedding(file, vocabulary=Vocabulary(("the",), lowercase=True))
    torch.testing.assert_close(lower.embed([["THE"]])[0], torch.tensor([[0.5, -1.0, 0.2]]))
    assert len(GloveEmbedding(file, vocabulary=Vocabulary(("The", "CAT")), lowercase=True)) == 2


def test_name_tells_what_is_embedded(tmp_path: Path) -> None:
    file = write(tmp_path, *LINES)
    same = [file, write(tmp_path, *LINES, name="moved")]
    assert len({GloveEmbedding(each).name for each in same}) == 1
    others = [
        GloveEmbedding(file), GloveEmbedding(file, vocabulary=Vocabulary(("cat",))),
        GloveEmbedding(file, lowercase=True),
        GloveEmbedding(write(tmp_path, *LINES[:3], "x\u00a0y 7 8 9.5", name="number")),
        GloveEmbedding(write(tmp_path, *LINES[:3], "xy 7 8 9", name="word")),
    ]  # fmt: skip
    assert len({each.name for each in others}) == 5


def build(**options: Any) -> Vocabulary:
    return Vocabulary.from_sentences(**{"sentences": TRAINING} | options)


def loaded(folder: Path, content: bytes) -> Vocabulary:
    (folder / "v.json").write_bytes(content)
    return Vocabulary.load(folder / "v.json")


def changed(folder: Path, **change: Any) -> Vocabulary:
    build().save(folder / "v.json")
    return loaded(folder, json.dumps(json.loads((folder / "v.json").read_bytes()) | change).encode())


test_refusals = refusals([
    (lambda: build(sentences="the cat"), "sentences", "the string 'the cat'"),
    (lambda: build(sentences=[["a"], "the cat"]), r"sentences\[1\]", "the string 'the cat'"),
    (lambda: build(sentences=[["a"], []]), r"sentences\[1\]", "got none"),
    (lambda: build(sentences=[["a", ""]]), r"sentences\[0\]\[1\]", "got ''"),
    (lambda: Vocabulary(("a",)).encode([["a", 3]]), r"sentences\[0\]\[1\]", "got 3"),  # type: ignore[list-item]
    (lambda: build(min_count=0), "min_count", "got 0"),
    (lambda: build(min_count=4), "min_count", "7 different words"),
    (lambda: build(max_size=9.5), "max_size", "got 9.5"),
    (lambda: build(max_size=2), "max_size", "got 2"),
    (lambda: build(lowercase="False"), "lowercase", "got 'False'"),
    (lambda: Vocabulary(("a", "b", "a")), "words", "got 'a' more than once"),
    (lambda: Vocabulary(("a", "B"), lowercase=True), r"words\[1\]", "got 'B'"),
    (lambda folder: changed(folder, format="other"), "v.json.*format", "got 'other'"),
    (lambda folder: changed(folder, version=2), "version", "got 2"),
    (lambda folder: changed(folder, words="ab"), "words", "got str"),
    (lambda folder: changed(folder, lowercase=None), "lowercase", "NoneType"),
    (lambda folder: changed(folder, words=["a", 3]), r"v.json.*words\[1\]", "got 3"),
    (lambda folder: changed(folder, words=["a", "a"]), "v.json.*words", "'a' more than once"),
    (lambda folder: loaded(folder, b"[1, 2]"), "v.json", "list"),
    (lambda folder: loaded(folder, b"\x89HDF\xff"), "v.json", "not JSON"),
    (lambda folder: loaded(folder, b'{"format": "gpatt'), "v.json", "not JSON"),
    (lambda folder: GloveEmbedding(write(folder, *LINES), width=0), "width", "got 0"),
    *(
        (lambda folder, lines=lines, o=options: GloveEmbedding(write(folder, *lines), **o), "glove.txt", text)
        for lines, options, text in (
            ((*LINES, "short 1 2"), {}, "line 5: expected a word and 3 numbers, got 'short 1 2'"),
            ((*LINES, "bad 1 two 3"), {}, "line 5: .*'two'"),
            ((*LINES, "bad 1 nan 3"), {}, "line 5: .*got 'bad 1 nan 3'"),
            ((*LINES, "bad 1 1e39 3"), {}, "line 5: .*got 'bad 1 1e39 3'"),
            ((*LINES, b"\xff 1 2 3"), {}, "line 5: .*UTF-8"),
            (("word" * 20,), {}, "line 1: .*got '" + "word" * 15 + "...'"),
            (("5 3", *LINES), {}, "expected 5 words .* got 4: truncated"),
            (("4 0", *LINES), {}, "line 1: .*header, got '4 0'"),
            (("9" * 5000 + " 3", *LINES), {}, "line 1: .*header, got '999"),
            ((), {}, "an empty file"),
            (("", *LINES), {}, "line 1: expected a word and its numbers"),
            (("4 3", *LINES), {"width": 5}, "line 1: .*width 5 in the header, got '4 3'"),
            ((*LINES,), {"width": 5}, "line 1: expected a word and 5 numbers"),
        )
    ),
])  # fmt: skip
test_files_must_be_there = refusals([
    (lambda folder: Vocabulary.load(folder / "nowhere"), "path", "nowhere"),
    (lambda folder: GloveEmbedding(folder / "nowhere"), "file", "nowhere"),
], FileNotFoundError)  # fmt: skip
