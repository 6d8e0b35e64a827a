"""Sentences as an encoder reads them, sorted by length so that batches carry little padding."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpattention.data import TextData, Texts
from gpattention.data.keyed import BATCHES, permutation

POOL = 32  # batches whose sentences are sorted together in training


@dataclass(frozen=True, eq=False)
class Sentences:
    """Token numbers of sentences, shortest first, and their labels."""

    name: str  # validation, test, ood/NAME
    tokens: tuple[tuple[int, ...], ...]
    labels: Tensor  # [n]
    padding: int = 0  # number of the padding token

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that a model sees of them, and of the labels."""
        plain = json.dumps([self.tokens, self.labels.tolist(), self.padding])
        return hashlib.sha256(plain.encode()).hexdigest()

    def inputs(self, items: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Padded to the longest of them, each [B, N]."""
        rows = [torch.tensor(self.tokens[i]) for i in items]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    def blocks(self, size: int, device: torch.device) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Number of the first sentence, and inputs, of at most `size` sentences in a row."""
        for start in range(0, len(self), size):
            yield start, self.inputs(range(start, min(start + size, len(self))), device)

    def shuffled(
        self, size: int, *, seed: int, epoch: int = 0, device: torch.device
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Inputs and labels of an epoch: random batches of sentences of about one length, in random order."""
        order = permutation(len(self), BATCHES, seed, epoch)
        batches: list[Tensor] = []
        for pool in order.split(POOL * size):
            batches += pool.sort().values.split(size)  # sentences are numbered by their length
        for place in permutation(len(batches), BATCHES, seed, epoch, 1).tolist():
            items = batches[place]
            yield self.inputs(items.tolist(), device), self.labels[items].to(device)


def encode_sentences(name: str, texts: Texts, tokenizer: Any) -> Sentences:
    """With the tokenizer of transformers that an encoder was trained with."""
    found: list[list[int]] = tokenizer(list(texts.sentences))["input_ids"]
    order = sorted(range(len(found)), key=lambda i: len(found[i]))
    return Sentences(
        name,
        tuple(tuple(found[i]) for i in order),
        texts.labels[torch.tensor(order)],
        int(tokenizer.pad_token_id),
    )


def encode_data(data: TextData, tokenizer: Any) -> dict[str, Sentences]:
    """All parts by name: train, validation, test, ood/NAME."""
    return {name: encode_sentences(name, part, tokenizer) for name, part in data.parts.items()}
