"""Text datasets in memory: sentences, labels, and the tensors that an encoder makes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gpattention.data.batch import Batch, check_labels, total_bytes

Encoder = Callable[[list[list[str]]], Mapping[str, Tensor]]  # words of the sentences to tensors, one row each


@dataclass(frozen=True, eq=False, repr=False)
class Texts:
    """Sentences with one label each and, once encoded, the tensors that stand for them."""

    sentences: tuple[str, ...]
    labels: Tensor  # [n] int64
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # each [n, ...]

    def __post_init__(self) -> None:
        check_labels(self.labels, len(self.sentences))
        for name, tensor in self.inputs.items():
            if tensor.ndim == 0 or len(tensor) != len(self):
                raise ValueError(
                    f"expected inputs[{name!r}] to have {len(self)} rows, one per sentence, "
                    f"got shape {tuple(tensor.shape)}"
                )

    def __len__(self) -> int:
        return len(self.sentences)

    def __repr__(self) -> str:
        inputs = {name: tuple(tensor.shape) for name, tensor in self.inputs.items()}
        return f"Texts({len(self)} sentences, inputs {inputs}, {self.labels.device})"

    @property
    def words(self) -> list[list[str]]:
        """The sentences cut at white space: their words, if they are tokenized."""
        return [sentence.split() for sentence in self.sentences]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take."""
        return total_bytes({"labels": self.labels} | {f"inputs/{k}": x for k, x in self.inputs.items()})

    def encoded(self, encoder: Encoder) -> "Texts":
        """The same with the encoder's tensors as inputs."""
        inputs = {name: tensor.to(self.labels.device) for name, tensor in encoder(self.words).items()}
        return replace(self, inputs=inputs)

    def select(self, items: Tensor) -> "Texts":
        """A part of these sentences, in that order."""
        items = items.to(self.labels.device)
        sentences = tuple(self.sentences[i] for i in items.tolist())
        return Texts(sentences, self.labels[items], {name: x[items] for name, x in self.inputs.items()})

    def batch(self, items: Tensor) -> Batch:
        """Those items, on the device where the tensors lie."""
        if not self.inputs:
            raise ValueError("expected encoded texts, got no inputs: call encoded(encoder) first")
        items = items.to(self.labels.device)
        return Batch(items, {name: x[items] for name, x in self.inputs.items()}, self.labels[items])

    def to(self, device: torch.device | str) -> "Texts":
        """The same with all tensors on another device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Texts(self.sentences, self.labels.to(device), inputs)


@dataclass(frozen=True, eq=False)
class TextData:
    """A text classification dataset.  Out-of-distribution sentences have labels too.

    >>> vocabulary = Vocabulary.from_sentences(data.train.words)
    >>> data = data.encoded(lambda s: dict(zip(("tokens", "padding_mask"), vocabulary.encode(s))))
    """

    name: str
    train: Texts
    validation: Texts
    test: Texts
    classes: tuple[str, ...]
    seed: int  # of the split
    ood: Mapping[str, Texts] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Texts]:
        """All parts by name; out-of-distribution ones as "ood/name"."""
        known = {"train": self.train, "validation": self.validation, "test": self.test}
        return known | {f"ood/{name}": part for name, part in self.ood.items()}

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors of all parts take."""
        return sum(part.nbytes for part in self.parts.values())

    def encoded(self, encoder: Encoder) -> "TextData":
        """The same with the encoder's tensors as inputs of every part."""
        return self._each(lambda part: part.encoded(encoder))

    def to(self, device: torch.device | str) -> "TextData":
        """The same with all tensors on another device."""
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Texts], Texts]) -> "TextData":
        return replace(
            self,
            train=change(self.train),
            validation=change(self.validation),
            test=change(self.test),
            ood={name: change(part) for name, part in self.ood.items()},
        )
