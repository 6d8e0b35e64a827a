"""The same class where transformers is not installed: a stand-in whose hidden states tell where they were.

Words are split into pieces of two letters; the state of layer l at position p is [l, p, id of the piece].
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention.models.embeddings import HuggingFaceEmbedding

BEGIN, END = 1, 2


class Encoded(dict):
    rows: list[list[int | None]]

    def word_ids(self, row: int) -> list[int | None]:
        return self.rows[row]

    def to(self, _: Any) -> "Encoded":
        return self


class Tokenizer:
    is_fast, pad_token, model_max_length = True, "<pad>", 10**30

    def __call__(self, sentences: list[list[str]], **how: Any) -> Encoded:
        assert how == {"is_split_into_words": True, "padding": True, "return_tensors": "pt"}
        rows, ids = [], []
        for sentence in sentences:
            pieces = [
                (j, w[k : k + 2]) for j, w in enumerate(sentence) for k in range(0, len(w.strip("?")), 2)
            ]
            rows.append([None, *(j for j, _ in pieces), None])
            ids.append([BEGIN, *(ord(piece[0]) for _, piece in pieces), END])
        longest = max(map(len, ids))
        encoded = Encoded(
            input_ids=torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
            attention_mask=torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
        )
        encoded.rows = [row + [None] * (longest - len(row)) for row in rows]
        return encoded


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_hidden_layers=2, hidden_size=3, max_position_embeddings=6, is_encoder_decoder=False
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, output_hidden_states: bool) -> Any:
        assert (output_hidden_states, self.training, torch.is_grad_enabled()) == (True, False, False)
        at = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        states = [torch.stack([torch.full_like(at, layer), at, input_ids], -1).float() for layer in range(3)]
        return SimpleNamespace(hidden_states=states)


@pytest.fixture
def report() -> dict[str, list[str]]:
    return {"missing_keys": [], "mismatched_keys": []}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: dict[str, list[str]]) -> Path:
    def tokenizer(path: Path, **how: Any) -> Tokenizer:
        assert how == {"local_files_only": True, "use_fast": True, "add_prefix_space": True}
        return Tokenizer()

    def model(path: Path, **how: Any) -> tuple[Model, dict[str, list[str]]]:
        assert how == {"local_files_only": True, "output_loading_info": True}
        return Model(), report

    stand_in = SimpleNamespace(
        AutoTokenizer=SimpleNamespace(from_pretrained=tokenizer),
        AutoModel=SimpleNamespace(from_pretrained=model),
    )
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(("layer", "told"), [(-1, 2), (0, 0), (-2, 1)])
def test_first_pieces_of_the_layer(folder: Path, layer: int, told: int) -> None:
    a, b, c = map(ord, "abc")
    found = HuggingFaceEmbedding(folder, layer=layer).embed([["a", "bbbc", "cc"], ["c"]])
    assert found[0].tolist() == [[told, 1, a], [told, 2, b], [told, 4, c]]
    assert found[1].tolist() == [[told, 1, c]]


def test_names(folder: Path) -> None:
    name = HuggingFaceEmbedding(folder).name
    assert HuggingFaceEmbedding(folder, layer=2, batch_size=7).name == name
    assert HuggingFaceEmbedding(folder, layer=1).name != name
    (folder / "model.safetensors").write_bytes(b"other")
    assert HuggingFaceEmbedding(folder).name != name
    assert HuggingFaceEmbedding(folder).width == 3


def test_refusals(folder: Path, report: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = HuggingFaceEmbedding(folder)
    told = "expected sentences of at most 6 subwords, got 7 in sentences[1] of 2 words: split it"
    with pytest.raises(ValueError, match=re.escape(told)):
        embedding.embed([["a"], ["aaaaaa", "bbbb"]])
    with pytest.raises(ValueError, match=re.escape("got sentences[0][1] = '?', of which it leaves nothing")):
        embedding.embed([["a", "?"]])
    with pytest.raises(ValueError, match=re.escape("expected layer in [-3, 2], got 3")):
        HuggingFaceEmbedding(folder, layer=3)
    with pytest.raises(ValueError, match="expected max_length >= 1, got 0"):
        HuggingFaceEmbedding(folder, max_length=0)
    report["missing_keys"] = ["pooler.bias", "layer.0.bias"]
    with pytest.raises(ValueError, match=re.escape("got none of the right shape for ['layer.0.bias']")):
        HuggingFaceEmbedding(folder)
    monkeypatch.setattr(Tokenizer, "is_fast", False)
    with pytest.raises(ValueError, match="expected a fast tokenizer with a padding token, got Tokenizer"):
        HuggingFaceEmbedding(folder)


def test_encoder_decoders_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(Model):
        def __init__(self) -> None:
            super().__init__()
            self.config.is_encoder_decoder = True

    monkeypatch.setattr(
        sys.modules["transformers"].AutoModel,
        "from_pretrained",
        lambda path, **how: (Both(), {"missing_keys": [], "mismatched_keys": []}),
    )
    with pytest.raises(ValueError, match="expected an encoder, got the encoder-decoder Both"):
        HuggingFaceEmbedding(folder)


def test_without_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    told = r"HuggingFaceEmbedding needs transformers: pip install 'gpattention\[hf\]'"
    with pytest.raises(ImportError, match=told):
        HuggingFaceEmbedding(folder)
