"""Sentences of any loader as what training wants: indices of words, padding, frozen vectors beside them."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from gpattention.data import TextData
from gpattention.data.places import StrPath
from gpattention.experiments.inputs.contextual import Contextual, open_contextual
from gpattention.models.embeddings import ContextualEmbedding, Vocabulary, pad
from gpattention.training import TrainingData

# a space goes before the contractions of English, so that they begin a word: wo n't, i 'm, can not
_CONTRACTION = re.compile(r"(?<=[^\W\d_])(n't|'(?:s|m|d|ll|re|ve)|(?<=\bcan)not)\b")
_WORD = re.compile(
    r"n't|'(?:s|m|d|ll|re|ve)\b"  # contractions
    r"|\b(?:mr|mrs|ms|dr|st)\."  # abbreviations keep their full stop
    r"|\d+(?:[.,]\d+)+"  # 100,000
    r"|[^\W_]+(?:[-'][^\W_]+)*"  # letters and digits, with hyphens and apostrophes inside
    r"|``|''"  # quotation marks as in treebanks
    r"|\S"  # any other mark alone
)


@dataclass(frozen=True)
class TextEncoder:
    """Words to the inputs of a `TextTransformer`, every sentence filled up to one length.

    One length for all batches keeps shapes static, so that a captured graph serves every step.
    """

    vocabulary: Vocabulary
    embedding: ContextualEmbedding
    length: int

    def __call__(self, sentences: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """tokens [B, N] int64, padding_mask [B, N] bool, contextual [B, N, width] where there is one."""
        longest = max((len(sentence) for sentence in sentences), default=0)
        if longest > self.length:
            raise ValueError(f"expected sentences of at most {self.length} words, got one of {longest}")
        tokens, padding = self.vocabulary.encode(sentences)
        missing = self.length - longest
        inputs = {
            "tokens": pad_tensor(tokens, (0, missing)),
            "padding_mask": pad_tensor(padding, (0, missing), value=True),
        }
        if self.embedding.width:
            vectors = pad(self.embedding.embed(sentences))
            inputs["contextual"] = pad_tensor(vectors, (0, 0, 0, missing))
        return inputs


def sentence_words(text: str) -> list[str]:
    """Words of a sentence as CoLA's tokenized files have them, nearly.

    Lower case; a mark is a word of its own, but hyphens and apostrophes inside a word stay; contractions
    are cut before n't, 's, 'm, 'd, 'll, 're and 've ("won't" becomes wo n't); quotation marks become
    `` and '' as in treebanks.  See docs/recipes.md for how often this differs from CoLA's own files.
    """
    plain = unicodedata.normalize("NFC", text).lower().replace("\u2019", "'")
    plain = re.sub(r'(^|\s)["\u201c]', r"\1`` ", plain)
    plain = re.sub(r'["\u201c\u201d]', " '' ", plain)
    return _WORD.findall(_CONTRACTION.sub(r" \1", plain))


def encode_texts(
    data: TextData,
    contextual: Contextual,
    vocabulary_options: Mapping[str, Any],
    root: StrPath | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[TextData, TextEncoder]:
    """All parts encoded: the vocabulary is the training part's, the length the longest sentence's of all.

    A sentence without words (there is none in CoLA) is refused by the vocabulary.
    """
    vocabulary = Vocabulary.from_sentences(data.train.words, **_vocabulary_options(vocabulary_options))
    length = max(len(sentence) for part in data.parts.values() for sentence in part.words)
    encoder = TextEncoder(vocabulary, open_contextual(contextual, root, progress=progress), length)
    return data.encoded(encoder), encoder


def with_words(data: TextData) -> TextData:
    """Sentences as written, cut into words by `sentence_words`."""

    def change(sentences: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(" ".join(sentence_words(sentence)) for sentence in sentences)

    parts = {name: replace(part, sentences=change(part.sentences)) for name, part in data.parts.items()}
    outside = {name: parts[f"ood/{name}"] for name in data.ood}
    return replace(
        data, train=parts["train"], validation=parts["validation"], test=parts["test"], ood=outside
    )


def text_training_data(data: TextData, encoder: TextEncoder) -> TrainingData:
    """Encoded sentences, and the facts that the data decides about a text transformer."""
    facts = {
        "classes": len(data.classes),
        "vocabulary": len(encoder.vocabulary),
        "contextual_width": encoder.embedding.width,
        "max_length": encoder.length,
    }
    return TrainingData(
        train=dict(data.train.inputs),
        train_labels=data.train.labels,
        validation=dict(data.validation.inputs),
        validation_labels=data.validation.labels,
        facts=facts,
    )


def _vocabulary_options(options: Mapping[str, Any]) -> dict[str, Any]:
    known = ("min_count", "max_size", "lowercase")
    if not isinstance(options, Mapping):
        raise ValueError(f"expected vocabulary to be a table of {', '.join(known)}, got {options!r}")
    for name in options:
        if name not in known:
            raise ValueError(f"expected options of the vocabulary among {', '.join(known)}, got {name!r}")
    return dict(options)
