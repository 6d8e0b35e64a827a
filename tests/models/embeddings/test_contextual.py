"""The interface of embeddings, and their cache on disk."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gpattention.checks import require
from gpattention.gp import NonFiniteError
from gpattention.models.embeddings import CachedEmbedding, ContextualEmbedding, NoEmbedding, pad
from tests.refusals import refusals


def test_no_embedding() -> None:
    nothing = NoEmbedding()
    assert (nothing.width, nothing.name) == (0, "none")
    assert [x.shape for x in nothing.embed([["a", "b"], ["c"]])] == [(2, 0), (1, 0)]
    assert pad(nothing.embed([["a", "b"], ["c"]])).shape == (2, 2, 0)
    assert isinstance(nothing, ContextualEmbedding)
    padded = pad([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])])
    assert padded.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_an_extra_that_is_broken_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import its_missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="its_missing_dependency"):
        require("half_installed", extra="none", user="test")


SENTENCES = [["a", "b"], ["c"], ["a b"], ["a", "b"], ["d", "e", "f"]]


class Counting:
    """Vectors [letters of the word, its position, scale], counting what it is asked for."""

    width = 3

    def __init__(self, scale: float = 1.0, given: Tensor | None = None) -> None:
        self.scale, self.given = scale, given
        self.name = f"counting/{scale}"
        self.asked: list[list[Sequence[str]]] = []

    def embed(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        self.asked.append(list(sentences))
        if self.given is not None:
            return [self.given] * len(sentences)
        return [torch.tensor([[len(w), i, self.scale] for i, w in enumerate(s)]) * 1.0 for s in sentences]


def test_computes_once(tmp_path: Path) -> None:
    embedding = Counting()
    cached = CachedEmbedding(embedding, tmp_path / "cache")
    assert (cached.width, cached.name) == (3, "counting/1.0")
    assert isinstance(cached, ContextualEmbedding)
    plain = Counting().embed(SENTENCES)
    for _ in range(2):
        found = cached.embed(SENTENCES)
        assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
        found[0].zero_()  # results are the caller's own
    assert found[3].count_nonzero() > 0
    assert embedding.asked == [[["a", "b"], ["c"], ["a b"], ["d", "e", "f"]]]
    other_process = Counting()
    CachedEmbedding(other_process, tmp_path / "cache").embed([["c"], ["new"]])
    assert other_process.asked == [[["new"]]]
    assert cached.embed([]) == []


def test_progress_and_interruption(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []

    class Stopping(Counting):
        def embed(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
            if len(self.asked) == 1:
                raise KeyboardInterrupt
            return super().embed(sentences)

    with pytest.raises(KeyboardInterrupt):
        CachedEmbedding(Stopping(), tmp_path, batch_size=2).embed(SENTENCES)
    resumed = Counting()
    cached = CachedEmbedding(resumed, tmp_path, batch_size=1, progress=lambda *step: steps.append(step))
    for _ in range(2):
        cached.embed(SENTENCES)
    assert resumed.asked == [[["a b"]], [["d", "e", "f"]]]
    assert steps == [(0, 2), (1, 2), (2, 2)]


@pytest.fixture
def cached(tmp_path: Path) -> CachedEmbedding:
    made = CachedEmbedding(Counting(), tmp_path)
    made.embed([["a", "b"], ["c"]])
    return made


def test_files_that_are_damaged_anywhere(cached: CachedEmbedding) -> None:
    file = cached.file(["a", "b"])
    whole = file.read_bytes()
    flipped = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for content in (*flipped, *(whole[:kept] for kept in range(len(whole)))):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"(?s){re.escape(str(file))}.*delete the file to compute"):
            cached.embed([["c"], ["a", "b"]])
        assert file.read_bytes() == content  # nothing was repaired


def test_foreign_files(cached: CachedEmbedding, tmp_path: Path) -> None:
    file, other = cached.file(["a", "b"]), CachedEmbedding(Counting(2.0), tmp_path)
    other.file(["a", "b"]).parent.mkdir(parents=True, exist_ok=True)
    other.file(["a", "b"]).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"expected embedding 'counting/2.0', got 'counting/1.0'"):
        other.embed([["a", "b"]])
    vectors, format_ = {"vectors": torch.zeros(2, 3)}, {"format": "gpattention.embedding", "version": "2"}
    for write, message in (
        (lambda: file.write_bytes(cached.file(["c"]).read_bytes()), r"expected sentence '\w+', got '\w+'"),
        (lambda: save_file(vectors, file), r"expected format 'gpattention\.embedding', got None"),
        (lambda: save_file({"other": torch.zeros(2, 3)}, file), "is damaged"),
        (lambda: save_file(vectors, file, format_), "expected version '1', got '2'"),
    ):
        write()
        with pytest.raises(ValueError, match=message):
            cached.embed([["a", "b"]])


def kept(folder: Path, given: Tensor) -> Any:
    """What the cache of an unsound embedding gives, which must be nothing, and keep nothing."""
    try:
        return CachedEmbedding(Counting(given=given), folder).embed([["a"]])
    finally:
        assert not list(folder.rglob("*.safetensors"))


test_refusals = refusals([
    (lambda: NoEmbedding().embed(["the cat"]), r"sentences\[0\]", "a list of words"),
    (lambda folder: CachedEmbedding(Counting(), folder).embed(["ab"]), r"sentences\[0\]", "a list of words"),
    (lambda folder: CachedEmbedding(Counting(), folder, batch_size=0), "batch_size", "got 0"),
    (lambda: pad([]), "vectors", "got none"),
    (lambda: pad([torch.zeros(2, 2), torch.zeros(1, 3)]), r"vectors\[1\]", r"got \(1, 3\)"),
    (lambda: pad([torch.zeros(2)]), r"vectors\[0\]", r"got \(2,\)"),
    (lambda folder: kept(folder, torch.zeros(1, 4)), r"\(1, 3\) vectors .*\['a'\]", r"got \(1, 4\)"),
    (lambda folder: kept(folder, torch.zeros(1, 3).double()), r"vectors of float32", "got .*float64"),
])  # fmt: skip
test_numbers_must_be_finite = refusals(
    [(lambda folder: kept(folder, torch.full((1, 3), torch.nan)), "counting/1.0", r"non-finite .*\['a'\]")],
    NonFiniteError,
)
