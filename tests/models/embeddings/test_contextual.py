"""The interface itself: nothing embedded, padding, batches, and what importing it costs."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from gpattention.models import embeddings
from gpattention.models.embeddings import ContextualEmbedding, NoEmbedding, pad
from gpattention.models.embeddings.contextual import in_batches
from gpattention.models.embeddings.extras import require


def test_public_names() -> None:
    assert [name for name in embeddings.__all__ if not hasattr(embeddings, name)] == []
    assert list(embeddings.__all__) == sorted(embeddings.__all__, key=lambda name: (not name.isupper(), name))


def test_no_embedding() -> None:
    nothing = NoEmbedding()
    assert (nothing.width, nothing.name) == (0, "none")
    assert [x.shape for x in nothing.embed([["a", "b"], ["c"]])] == [(2, 0), (1, 0)]
    assert pad(nothing.embed([["a", "b"], ["c"]])).shape == (2, 2, 0)
    assert isinstance(nothing, ContextualEmbedding)
    with pytest.raises(ValueError, match=re.escape("expected sentences[0] to be a list of words")):
        nothing.embed(["the cat"])


def test_pad() -> None:
    padded = pad([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])])
    assert padded.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]
    assert padded.dtype == torch.float32


def test_pad_checks() -> None:
    with pytest.raises(ValueError, match="expected vectors of at least one sentence, got none"):
        pad([])
    told = "expected vectors[1] of shape [n_words, 2] like the first, got (1, 3)"
    with pytest.raises(ValueError, match=re.escape(told)):
        pad([torch.zeros(2, 2), torch.zeros(1, 3)])
    with pytest.raises(ValueError, match=re.escape("expected vectors[0] of shape")):
        pad([torch.zeros(2)])


def test_batches_are_of_similar_length() -> None:
    sentences = [["a"] * n for n in (5, 1, 4, 2, 3)]
    assert in_batches(sentences, 2) == [[1, 3], [4, 2], [0]]
    assert in_batches([], 2) == []


def test_importing_needs_no_extra() -> None:
    allowed = {"gpattention", "numpy", "safetensors", "torch"} | set(sys.stdlib_module_names)
    for file in Path(embeddings.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed


def test_an_extra_that_is_broken_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import its_missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="its_missing_dependency"):
        require("half_installed", extra="none", user="test")
