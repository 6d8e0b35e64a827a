"""ELMo: words by their letters, in the context of their sentence, from the published weight files."""

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from gpattention.models.embeddings.contextual import check_batch_size, in_batches
from gpattention.models.embeddings.elmo_network import layers, word_vectors
from gpattention.models.embeddings.elmo_weights import ElmoOptions, ElmoWeights
from gpattention.models.embeddings.files import digest, existing_file, file_digest
from gpattention.models.embeddings.sentences import Sentences, check_sentences

# Characters behind the 256 bytes; every number is raised by 1, because 0 fills up short sentences.
BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PAD_WORD = 256, 257, 258, 259, 260


class ElmoEmbedding:
    """Frozen ELMo of width 2 P: gamma times a weighted mean of the word layer and the biLSTM layers.

    Sentences start from zero state, so a sentence has one embedding.  (bilm and AllenNLP carry state from
    one batch to the next, and their vectors depend on what was embedded before.)  A word's bytes beyond
    `max_characters_per_token` less its begin and end (48 of 50) are not read, as in theirs.

    Args:
        options_file: the published `options.json`.
        weights_file: the published `weights.hdf5`; reading it needs the extra `elmo`.
        layer_weights: one number per layer, the word layer first, that a softmax turns into the weights of
            the mean; equal weights if not given.
        gamma: scale of the result.
        batch_size: sentences at a time.
        device: where to compute; results are on the CPU.
    """

    def __init__(
        self,
        options_file: str | os.PathLike[str],
        weights_file: str | os.PathLike[str],
        *,
        layer_weights: Sequence[float] | None = None,
        gamma: float = 1.0,
        batch_size: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_batch_size(batch_size)
        files = existing_file("options_file", options_file), existing_file("weights_file", weights_file)
        self._options = ElmoOptions.read(files[0])
        depth = 1 + self._options.layers
        scalars = [0.0] * depth if layer_weights is None else [float(s) for s in layer_weights]
        if len(scalars) != depth or not all(math.isfinite(s) for s in scalars):
            raise ValueError(f"expected layer_weights to be {depth} finite numbers, got {layer_weights}")
        if not math.isfinite(gamma):
            raise ValueError(f"expected gamma to be finite, got {gamma}")
        self._batch_size = batch_size
        self._device = torch.device(device)
        self._weights = ElmoWeights.read(files[1], self._options, self._device)
        mix = float(gamma) * torch.tensor(scalars, dtype=torch.float64).softmax(0)  # [1 + layers]
        self._mix = mix.to(self._device, torch.float32)
        self._name = f"elmo-{digest(*map(file_digest, files), repr(scalars), repr(float(gamma)))}"

    @property
    def width(self) -> int:
        """Numbers per word: both directions."""
        return 2 * self._options.projection_width

    @property
    def name(self) -> str:
        """Fingerprint of both files, the layers' weights and gamma."""
        return self._name

    @torch.no_grad()
    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, width] tensor per sentence."""
        check_sentences(sentences)
        found: dict[int, Tensor] = {}
        for batch in in_batches(sentences, self._batch_size):
            vectors = self._embed_batch([sentences[i] for i in batch])
            found |= zip(batch, vectors, strict=True)
        return [found[i] for i in range(len(sentences))]

    def _embed_batch(self, sentences: Sentences) -> list[Tensor]:
        lengths = [2 + len(sentence) for sentence in sentences]  # with begin and end of sentence
        spelled = [[_BEGIN, *map(_bytes, sentence), _END] for sentence in sentences]
        rows = {word: i for i, word in enumerate(dict.fromkeys(w for s in spelled for w in s))}
        letters = [character_ids(word, self._options.max_characters) for word in rows]
        vectors = word_vectors(torch.tensor(letters, device=self._device), self._weights, self._options)
        padded = [[rows[w] for w in s] + [0] * (max(lengths) - len(s)) for s in spelled]
        x = vectors[torch.tensor(padded, device=self._device)]  # [B, T, P]
        every = layers(x, torch.tensor(lengths, device=self._device), self._weights, self._options)
        mixed = torch.einsum("l,lbtw->btw", self._mix, every).cpu()  # [B, T, 2 P]
        return [mixed[i, 1 : length - 1].clone() for i, length in enumerate(lengths)]


def _bytes(word: str) -> tuple[int, ...]:
    return tuple(word.encode())


_BEGIN, _END = (BEGIN_SENTENCE,), (END_SENTENCE,)


def character_ids(letters: Sequence[int], max_characters: int) -> list[int]:
    """Begin of word, letters, end of word and padding, each raised by 1.  [max_characters]"""
    inner = [BEGIN_WORD, *letters[: max_characters - 2], END_WORD]
    return [letter + 1 for letter in inner + [PAD_WORD] * (max_characters - len(inner))]
