"""Frozen hidden states of an encoder in a local Hugging Face folder."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpattention.checks import check_count, require
from gpattention.files import digest, file_digest, read_object
from gpattention.models.config import check_finite
from gpattention.models.embeddings.contextual import Sentences, check_sentences, embed_in_batches

_READ = {".json", ".txt", ".model", ".safetensors", ".bin"}  # what models and tokenizers are made of


class HuggingFaceEmbedding:
    """The hidden state at the first subword of each word; needs the extra `hf`, and never the network.

    Sentences too long for the encoder are refused: a truncated one would lack words.

    Args:
        folder: what `save_pretrained` writes: config, weights and a fast tokenizer.
        layer: which hidden state, 0 being the token embeddings; negative ones count from the last.
        max_length: most subwords of a sentence, special ones included; the folder's own limit if not given.
        batch_size: sentences at a time.
        device: where to compute; results are on the CPU.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, layer: int = -1, max_length: int | None = None,
        batch_size: int = 32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        max_length = None if max_length is None else check_count("max_length", max_length)
        self._batch_size = check_count("batch_size", batch_size)
        path = Path(folder)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"expected folder to be a local one with a config.json, got {path}")
        read_object(path / "config.json", nonfinite=True)  # what is wrong with it is reported with its name
        transformers: Any = require("transformers", extra="hf", user="HuggingFaceEmbedding")
        self._tokenizer: Any = _load_tokenizer(transformers, path)
        self._model: Any = _load_model(transformers, path).to(device)
        self._device = torch.device(device)
        config = self._model.config
        depth = int(config.num_hidden_layers)
        if not -depth - 1 <= layer <= depth:
            raise ValueError(f"expected layer in [{-depth - 1}, {depth}], got {layer}")
        self._layer = layer % (depth + 1)
        own = [self._tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
        self._max_length = min(int(n) for n in [max_length or own[0], own[1]] if n is not None)
        self.width = int(config.hidden_size)
        read = sorted(file for file in path.iterdir() if file.is_file() and file.suffix in _READ)
        parts = [part for file in read for part in (file.name, file_digest(file))]
        self.name = f"huggingface-{digest(*parts, str(self._layer))}"

    @torch.no_grad()
    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, width] tensor per sentence."""
        check_sentences(sentences)
        return embed_in_batches(sentences, self._batch_size, self._embed_batch)

    def _embed_batch(self, sentences: Sentences) -> list[Tensor]:
        split: dict[str, Any] = {"is_split_into_words": True, "padding": True, "return_tensors": "pt"}
        inputs = self._tokenizer([list(words) for words in sentences], **split)
        firsts = [self._firsts(inputs, row, words) for row, words in enumerate(sentences)]
        result = self._model(**inputs.to(self._device), output_hidden_states=True)
        states = result.hidden_states[self._layer].cpu()  # [B, subwords, width]
        return [x[first] for x, first in zip(states, firsts, strict=True)]

    def _firsts(self, inputs: Any, row: int, words: Sequence[str]) -> list[int]:
        """The position of the first subword of each word of a sentence."""
        length = int(inputs["attention_mask"][row].sum())
        if length > self._max_length:
            got = f"{length} of {len(words)} words in {' '.join(words)[:60]!r}: split it"
            raise ValueError(f"expected sentences of at most {self._max_length} subwords, got {got}")
        found = {word: at for at, word in reversed([*enumerate(inputs.word_ids(row))])}
        for place, word in enumerate(words):
            if place not in found:
                raise ValueError(f"expected words that the tokenizer can split, got {word!r}, which it drops")
        return [found[place] for place in range(len(words))]


def _load_tokenizer(transformers: Any, folder: Path) -> Any:
    # Without the prefix space a byte-level tokenizer would glue the words of a list together.
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, use_fast=True, add_prefix_space=True
    )
    if not tokenizer.is_fast or tokenizer.pad_token is None:
        has = f"is_fast = {tokenizer.is_fast} and pad_token = {tokenizer.pad_token}"
        got = f"{type(tokenizer).__name__} with {has}"
        raise ValueError(f"{folder}: expected a fast tokenizer with a padding token, got {got}")
    tokenizer.padding_side = "right"
    return tokenizer


def _load_model(transformers: Any, folder: Path) -> Any:
    model, report = transformers.AutoModel.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{folder}: expected an encoder, got the encoder-decoder {type(model).__name__}")
    # A pooler stands above the hidden states; any other gap would be filled with random numbers.
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing or report["mismatched_keys"]:
        got = f"none of the right shape for {missing or sorted(report['mismatched_keys'])}"
        raise ValueError(f"{folder}: expected every weight of {type(model).__name__}, got {got}")
    buffers = dict(model.named_buffers())
    check_finite(folder, {**dict(model.named_parameters()), **buffers}, infinite=buffers)
    return model.float().eval().requires_grad_(False)
