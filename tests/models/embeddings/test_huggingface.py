"""Hidden states of a tiny local BERT and RoBERTa against the models called by hand."""

import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpattention.models.embeddings import ContextualEmbedding, HuggingFaceEmbedding

transformers = pytest.importorskip("transformers")

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "."]
SENTENCES = [["The", "cats", "sat", "."], ["cat"], ["cats", "cats", "dog"]]
IDS = [[2, 5, 6, 7, 8, 9, 3], [2, 6, 3], [2, 6, 7, 6, 7, 1, 3]]  # [CLS] pieces [SEP]
FIRSTS = [[1, 2, 4, 5], [1], [1, 3, 5]]  # the first piece of each word
SMALL = {
    "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 12,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.ERROR)
    yield
    transformers.utils.logging.set_verbosity(before)


def make_bert(folder: Path, seed: int = 0, **tokens: Any) -> Path:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    inner = Tokenizer(models.WordPiece({w: i for i, w in enumerate(PIECES)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **(special | tokens)).save_pretrained(folder)
    torch.manual_seed(seed)
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


def by_hand(folder: Path, layer: int) -> list[torch.Tensor]:
    model = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return [
            model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0, first]
            for ids, first in zip(IDS, FIRSTS, strict=True)
        ]


@pytest.mark.parametrize(("layer", "same"), [(-1, 2), (0, -3), (1, -2), (2, -1)])
@pytest.mark.parametrize("batch_size", [1, 32])
def test_first_pieces_of_the_layer(bert: Path, layer: int, same: int, batch_size: int) -> None:
    embedding = HuggingFaceEmbedding(bert, layer=layer, batch_size=batch_size)
    assert embedding.width == 8
    found = embedding.embed(SENTENCES)
    for x, expected in zip(found, by_hand(bert, layer), strict=True):
        assert (x.dtype, x.requires_grad) == (torch.float32, False)
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    assert HuggingFaceEmbedding(bert, layer=same).name == embedding.name
    assert embedding.embed([]) == []


def test_name_tells_contents_and_layer(bert: Path, tmp_path: Path) -> None:
    name = HuggingFaceEmbedding(bert).name
    assert name.startswith("huggingface-")
    shutil.copytree(bert, tmp_path / "moved")
    (tmp_path / "moved" / "README.md").write_text("does not count")
    assert HuggingFaceEmbedding(tmp_path / "moved", batch_size=2).name == name
    others = {
        HuggingFaceEmbedding(bert, layer=1).name,
        HuggingFaceEmbedding(make_bert(tmp_path / "b", 1)).name,
    }
    assert len(others | {name}) == 3
    assert isinstance(HuggingFaceEmbedding(bert), ContextualEmbedding)


def copied(bert: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The model with its weights changed."""
    folder = shutil.copytree(bert, folder / "bert")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_pooler_is_not_needed(bert: Path, tmp_path: Path) -> None:
    folder = copied(bert, tmp_path, lambda x: [x.pop(name) for name in list(x) if "pooler" in name])
    for x, y in zip(HuggingFaceEmbedding(folder).embed(SENTENCES), by_hand(bert, -1), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_refusals(bert: Path, tmp_path: Path) -> None:
    embedding = HuggingFaceEmbedding(bert)
    assert embedding.embed([["cat"] * 10])[0].shape == (10, 8)  # 12 with [CLS] and [SEP]
    gone, words = "encoder.layer.1.output.dense.bias", "embeddings.word_embeddings.weight"
    (broken := shutil.copytree(bert, tmp_path / "broken")).joinpath("config.json").write_text("[" * 5000)
    for call, message in (
        (lambda: embedding.embed([["cat"], ["cats"] * 6]), "at most 12 subwords, got 14 of 6 words"),
        (lambda: HuggingFaceEmbedding(bert, max_length=3).embed([["cat"], ["cats"]]), "3 subwords, got 4"),
        (lambda: embedding.embed([["cat"], ["\u200b", "cat"]]), r"got '\\u200b', which it drops"),
        (lambda: HuggingFaceEmbedding(bert, layer=3), r"layer in \[-3, 2\], got 3"),
        (lambda: HuggingFaceEmbedding(bert, layer=-4), r"layer in \[-3, 2\], got -4"),
        (lambda: HuggingFaceEmbedding(bert, max_length=0), "max_length .* got 0"),
        (lambda: HuggingFaceEmbedding(bert, batch_size=0), "batch_size .* got 0"),
        (lambda: HuggingFaceEmbedding(copied(bert, tmp_path / "gone", lambda x: x.pop(gone))), gone),
        (
            lambda: HuggingFaceEmbedding(copied(bert, tmp_path / "nan", lambda x: x[words].fill_(torch.nan))),
            "nan/bert: expected finite numbers, got nan in .*embeddings",
        ),
        (lambda: HuggingFaceEmbedding(broken), r"broken/config\.json is not JSON"),
        (lambda: HuggingFaceEmbedding(make_bert(tmp_path / "unpadded", pad_token=None)), "a padding token"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(FileNotFoundError, match=r"folder .* got bert"):
        HuggingFaceEmbedding("bert-base-uncased")  # never looked for on the network


def test_byte_level_tokenizers_see_the_spaces(tmp_path: Path) -> None:
    pieces = {"<s>": 0, "<pad>": 1, "</s>": 2, "Ġ": 3, "a": 4, "b": 5, "Ġa": 6, "<unk>": 7, "<mask>": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.RobertaTokenizerFast(vocab=pieces, merges=[("Ġ", "a")]).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**SMALL, type_vocab_size=1, pad_token_id=1)
    model = transformers.RobertaModel(config).eval()
    model.save_pretrained(tmp_path)
    found = HuggingFaceEmbedding(tmp_path).embed([["a", "ab", "a"]])[0]
    with torch.no_grad():
        states = model(torch.tensor([[0, 6, 6, 5, 6, 2]])).last_hidden_state[0]  # [6, 8]
    torch.testing.assert_close(found, states[[1, 2, 4]], rtol=1e-5, atol=1e-6)


def test_encoder_decoders_are_refused(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 10, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    both = transformers.T5Model(transformers.T5Config(**sizes))
    report: dict[str, list[str]] = {"missing_keys": [], "mismatched_keys": []}
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda path, **how: (both, report))
    with pytest.raises(ValueError, match="expected an encoder, got the encoder-decoder T5Model"):
        HuggingFaceEmbedding(bert)


def test_without_transformers(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'gpattention\[hf\]'"):
        HuggingFaceEmbedding(bert)
