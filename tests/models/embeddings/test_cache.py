"""Embeddings on disk: computed once, found again, refused when damaged."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gpattention.gp import NonFiniteError
from gpattention.models.embeddings import CachedEmbedding, ContextualEmbedding

MAPS = Path("/proc/self/maps")
SENTENCES = [["a", "b"], ["c"], ["a b"], ["a", "b"], ["d", "e", "f"]]


class Counting:
    """Vectors [letters of the word, its position, scale], counting what it is asked for."""

    width = 3

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.name = f"counting/{scale}"
        self.asked: list[list[Sequence[str]]] = []

    def embed(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        self.asked.append(list(sentences))
        return [torch.tensor([[len(w), i, self.scale] for i, w in enumerate(s)]) * 1.0 for s in sentences]


def test_computes_once(tmp_path: Path) -> None:
    embedding = Counting()
    cached = CachedEmbedding(embedding, tmp_path / "cache")
    assert (cached.width, cached.name) == (3, "counting/1.0")
    assert isinstance(cached, ContextualEmbedding)
    plain = Counting().embed(SENTENCES)
    for _ in range(2):
        found = cached.embed(SENTENCES)
        assert [torch.equal(x, y) for x, y in zip(found, plain, strict=True)] == [True] * 5
        assert {x.dtype for x in found} == {torch.float32}
    assert embedding.asked == [[["a", "b"], ["c"], ["a b"], ["d", "e", "f"]]]
    other_process = Counting()
    CachedEmbedding(other_process, tmp_path / "cache").embed([["c"], ["new"]])
    assert other_process.asked == [[["new"]]]
    assert cached.embed([]) == []


def test_embeddings_do_not_mix(tmp_path: Path) -> None:
    one, two = (CachedEmbedding(Counting(scale), tmp_path) for scale in (1.0, 2.0))
    assert one.embed([["a"]])[0].tolist() == [[1, 0, 1]]
    assert two.embed([["a"]])[0].tolist() == [[1, 0, 2]]
    assert one.file(["a"]) != two.file(["a"])
    assert len({one.file(s) for s in (["a", "b"], ["a b"], ["ab"], ["b", "a"])}) == 4


def test_results_are_the_callers_own(tmp_path: Path) -> None:
    cached = CachedEmbedding(Counting(), tmp_path)
    cached.embed([["a"]])[0].zero_()
    twice = cached.embed([["a"], ["a"]])
    twice[0].zero_()
    assert twice[1].tolist() == [[1, 0, 1]]
    assert cached.embed([["a"]])[0].tolist() == [[1, 0, 1]]


@pytest.mark.skipif(not MAPS.exists(), reason="tells open memory maps on Linux only")
def test_no_file_stays_mapped(tmp_path: Path) -> None:
    cached = CachedEmbedding(Counting(), tmp_path)
    found = cached.embed(SENTENCES)
    assert len(found) == 5
    assert str(tmp_path) not in MAPS.read_text()


def test_progress_and_interruption(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    class Stopping(Counting):
        def embed(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
            if len(self.asked) == 1:
                raise KeyboardInterrupt
            return super().embed(sentences)

    with pytest.raises(KeyboardInterrupt):
        CachedEmbedding(Stopping(), tmp_path, batch_size=2).embed(SENTENCES)
    resumed = Counting()
    cached = CachedEmbedding(resumed, tmp_path, batch_size=1, progress=lambda *step: told.append(step))
    cached.embed(SENTENCES)
    assert resumed.asked == [[["a b"]], [["d", "e", "f"]]]
    assert told == [(0, 2), (1, 2), (2, 2)]
    cached.embed(SENTENCES)
    assert len(told) == 3


@pytest.fixture
def cached(tmp_path: Path) -> CachedEmbedding:
    made = CachedEmbedding(Counting(), tmp_path)
    made.embed([["a", "b"], ["c"]])
    return made


def test_truncated_anywhere(cached: CachedEmbedding) -> None:
    file = cached.file(["a", "b"])
    whole = file.read_bytes()
    for kept in range(len(whole)):
        file.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=re.escape(f"cached embedding {file} is damaged")) as caught:
            cached.embed([["c"], ["a", "b"]])
        assert "delete the file to compute it again" in str(caught.value)
        assert len(file.read_bytes()) == kept  # nothing was repaired
    file.unlink()
    assert cached.embed([["a", "b"]])[0].tolist() == [[1, 0, 1], [1, 1, 1]]


def test_a_flipped_bit_anywhere_is_noticed(cached: CachedEmbedding) -> None:
    file = cached.file(["a", "b"])
    whole = file.read_bytes()
    for i in range(len(whole)):
        file.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(ValueError, match=re.escape(f"cached embedding {file}")):
            cached.embed([["a", "b"]])


def test_a_file_in_the_wrong_place(cached: CachedEmbedding, tmp_path: Path) -> None:
    file = cached.file(["a", "b"])
    whole = file.read_bytes()
    file.write_bytes(cached.file(["c"]).read_bytes())
    with pytest.raises(ValueError, match=r"expected sentence '\w+', got '\w+': delete the file"):
        cached.embed([["a", "b"]])
    other = CachedEmbedding(Counting(2.0), tmp_path)
    other.file(["a", "b"]).parent.mkdir(parents=True, exist_ok=True)
    other.file(["a", "b"]).write_bytes(whole)
    with pytest.raises(ValueError, match=r"expected embedding 'counting/2.0', got 'counting/1.0'"):
        other.embed([["a", "b"]])


def test_foreign_files(cached: CachedEmbedding) -> None:
    file = cached.file(["a", "b"])
    save_file({"vectors": torch.zeros(2, 3)}, file)
    with pytest.raises(ValueError, match=r"expected format 'gpattention\.embedding', got None"):
        cached.embed([["a", "b"]])
    save_file({"other": torch.zeros(2, 3)}, file)
    with pytest.raises(ValueError, match="is damaged"):
        cached.embed([["a", "b"]])
    save_file({"vectors": torch.zeros(2, 3)}, file, {"format": "gpattention.embedding", "version": "2"})
    with pytest.raises(ValueError, match="expected version '1', got '2'"):
        cached.embed([["a", "b"]])


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (
            torch.zeros(1, 4),
            ValueError,
            "to give (1, 3) vectors of float32 for ['a'], got (1, 4) and torch.float32",
        ),
        (torch.zeros(1, 3).double(), ValueError, "got (1, 3) and torch.float64"),
        (torch.full((1, 3), float("nan")), NonFiniteError, "counting/1.0 gives non-finite numbers for ['a']"),
    ],
)
def test_unsound_vectors_are_not_kept(given: Tensor, error: type, told: str, tmp_path: Path) -> None:
    class Unsound(Counting):
        def embed(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
            return [given] * len(sentences)

    cached = CachedEmbedding(Unsound(), tmp_path)
    with pytest.raises(error, match=re.escape(told)):
        cached.embed([["a"]])
    assert not cached.file(["a"]).exists()


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected batch_size >= 1, got 0"):
        CachedEmbedding(Counting(), tmp_path, batch_size=0)
    with pytest.raises(ValueError, match=re.escape("expected sentences[0] to be a list of words")):
        CachedEmbedding(Counting(), tmp_path).embed(["ab"])


def test_files_are_readable_by_whom_other_new_files_are(cached: CachedEmbedding, tmp_path: Path) -> None:
    (tmp_path / "fresh").touch()
    assert cached.file(["a", "b"]).stat().st_mode == (tmp_path / "fresh").stat().st_mode


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    cached = CachedEmbedding(Counting(), tmp_path)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        cached.embed([["a"]])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
