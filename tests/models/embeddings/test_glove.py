"""Word vectors out of text files, good and bad."""

import re
from pathlib import Path

import pytest
import torch

from gpattention.models.embeddings import ContextualEmbedding, GloveEmbedding, Vocabulary

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


def test_first_word_with_spaces_needs_the_width(tmp_path: Path) -> None:
    embedding = GloveEmbedding(write(tmp_path, LINES[2], LINES[1]), width=3)
    assert embedding.embed([[". . .", "cat"]])[0].tolist() == [[4, 5, 6], [1, 2, 3]]


def test_width_one_has_no_header(tmp_path: Path) -> None:
    embedding = GloveEmbedding(write(tmp_path, "7 3", "8 4"), width=1)
    assert embedding.embed([["7", "8"]])[0].tolist() == [[3], [4]]


def test_only_the_vocabulary_is_kept(tmp_path: Path) -> None:
    file = write(tmp_path, *LINES, "unread not a number")
    embedding = GloveEmbedding(file, vocabulary=Vocabulary(("cat", "dog", "The")))
    assert len(embedding) == 1
    assert embedding.embed([["the", "cat"]])[0].tolist() == [[0, 0, 0], [1, 2, 3]]
    lower = GloveEmbedding(file, vocabulary=Vocabulary(("the",), lowercase=True))
    torch.testing.assert_close(lower.embed([["THE"]])[0], torch.tensor([[0.5, -1.0, 0.2]]))
    mixed = GloveEmbedding(file, vocabulary=Vocabulary(("The", "CAT")), lowercase=True)
    assert len(mixed) == 2


def test_a_repeated_word_keeps_its_first_vector(tmp_path: Path) -> None:
    embedding = GloveEmbedding(write(tmp_path, "a 1 2", "b 3 4", "a 5 6", "c 7 8"))
    assert embedding.embed([["a", "b", "c"]])[0].tolist() == [[1, 2], [3, 4], [7, 8]]


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


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((*LINES, "short 1 2"), "line 5: expected a word and 3 numbers, got 'short 1 2'"),
        ((*LINES, ""), "line 5: expected a word and 3 numbers, got ''"),
        ((*LINES, "bad 1 two 3"), "line 5: expected 3 numbers after the word, got could not convert"),
        ((*LINES, "bad 1 nan 3"), "line 5: expected finite numbers, got nan"),
        ((*LINES, "bad 1 1e39 3"), "line 5: expected finite numbers, got 1e39"),
        ((*LINES, b"\xff 1 2 3"), "line 5: expected a word in UTF-8, got '\ufffd 1 2 3'"),
        (("word" * 20,), "line 1: expected a word and its numbers, got '" + "word" * 15 + "...'"),
        (("", "a 1 2"), "line 1: expected a word and its numbers, got ''"),
        (("5 3", *LINES), "expected 5 words as its first line says, got 4: truncated?"),
        (("4 0", *LINES), "line 1: expected a width >= 1 in the header, got 0"),
        (("0 3",), "expected words and their numbers, got an empty file"),
        ((), "expected words and their numbers, got an empty file"),
    ],
)
def test_malformed_files(lines: tuple, told: str, tmp_path: Path) -> None:
    file = write(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        GloveEmbedding(file)
    assert str(file) in str(caught.value)


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected width >= 1, got 0"):
        GloveEmbedding(write(tmp_path, *LINES), width=0)
    with pytest.raises(ValueError, match="line 1: expected width 5 in the header, got 3"):
        GloveEmbedding(write(tmp_path, "4 3", *LINES), width=5)
    with pytest.raises(ValueError, match="line 1: expected a word and 5 numbers"):
        GloveEmbedding(write(tmp_path, *LINES), width=5)
    with pytest.raises(FileNotFoundError, match=r"expected file to be a file, got .*nowhere"):
        GloveEmbedding(tmp_path / "nowhere")


def test_hostile_headers_and_bytes_tell_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "vectors.txt"
    for content, told in (
        (b"9" * 5000 + b" 3\na 1 2 3\n", "line 1: expected a count and a width in the header, got '999"),
        (
            b"3 " + b"9" * 5000 + b"\na 1 2 3\n",
            "line 1: expected a count and a width in the header, got '3 999",
        ),
        (b"a 1 2\n\xff 1 2\n", "line 2: expected a word in UTF-8"),
        (b"a 1 2\nb 1 \xff\n", "line 2: expected 2 numbers after the word"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"vectors\.txt, {told}"):
            GloveEmbedding(file)
