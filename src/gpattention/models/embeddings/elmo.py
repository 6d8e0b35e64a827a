"""ELMo: words by their letters, in the context of their sentence (Peters et al. 2018, arXiv:1802.05365).

The files are `options.json` and `weights.hdf5` as bilm and AllenNLP publish them.  Shapes: B sentences of T
words (begin and end included), L characters a word; D numbers per character, F filters in all, P numbers per
direction, C numbers per memory cell.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from gpattention.checks import check_count
from gpattention.files import digest, existing_file, file_digest, read_json
from gpattention.models.embeddings.contextual import Sentences, check_sentences, in_batches, require

CHARACTERS = 261  # the 256 bytes, begin and end of sentence and of word, and padding within a word
LARGEST = 10**9  # numbers of a dataset; a compressed file of zeros can promise any
ACTIVATIONS = ("relu", "tanh")

Read = Callable[..., Tensor]  # read("CNN/W_cnn_0", 1, 3, 4, 8): a dataset that must have this shape


@dataclass(frozen=True, slots=True)
class ElmoOptions:
    """Sizes and choices of the network."""

    character_width: int  # D
    filters: tuple[tuple[int, int], ...]  # (characters a filter sees, number of such filters)
    activation: str
    highways: int
    max_characters: int  # per word, its begin and end included
    cell_width: int  # C
    projection_width: int  # P
    layers: int
    cell_clip: float | None
    projection_clip: float | None
    skip_connections: bool

    @property
    def filter_count(self) -> int:
        """F"""
        return sum(count for _, count in self.filters)

    @classmethod
    def read(cls, file: Path) -> Self:
        """From `options.json`; `ValueError` names what is missing or wrong."""
        content = read_json(file)

        def get(path: str, expected: str, fits: Callable[[Any], bool], default: Any = None) -> Any:
            found = content
            for key in path.split("."):
                found = found.get(key) if isinstance(found, dict) else None
            found = default if found is None else found
            if found is None:
                raise ValueError(f"{file}: option {path} is missing")
            if not fits(found):
                raise ValueError(f"{file}: expected option {path} to be {expected}, got {found!r}")
            return found

        def count(path: str, least: int = 1, default: int | None = None) -> int:
            whole = partial(_is_whole, least=least)
            return int(get(path, f"an integer >= {least}", whole, default))

        filters = get("char_cnn.filters", "a list of [width, count] of positive integers", _are_filters)
        both = (CHARACTERS, CHARACTERS + 1)  # bilm counts padding words in at inference
        get("char_cnn.n_characters", f"{both[0]} or {both[1]}", both.__contains__, CHARACTERS)
        clips = [get(f"lstm.{name}", "a number >= 0", _is_clip, 0) for name in ("cell_clip", "proj_clip")]
        return cls(
            character_width=count("char_cnn.embedding.dim"),
            filters=tuple((width, number) for width, number in filters),
            activation=get("char_cnn.activation", "'relu' or 'tanh'", ACTIVATIONS.__contains__),
            highways=count("char_cnn.n_highway", 0, 0),
            # Three for a word of one byte with its begin and end.
            max_characters=count(
                "char_cnn.max_characters_per_token", max(3, *(width for width, _ in filters))
            ),
            cell_width=count("lstm.dim"),
            projection_width=count("lstm.projection_dim"),
            layers=count("lstm.n_layers"),
            cell_clip=float(clips[0]) or None,  # 0, null or nothing there mean nowhere
            projection_clip=float(clips[1]) or None,
            skip_connections=get(
                "lstm.use_skip_connections", "true or false", lambda skip: isinstance(skip, bool), False
            ),
        )


@dataclass(frozen=True, slots=True)
class Affine:
    """x W + b"""

    weight: Tensor  # [in, out]
    bias: Tensor  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]"""
        return x @ self.weight + self.bias


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer of one direction; gates in the order input, candidate, forget, output."""

    drive: Affine  # P to 4 C, from below; its bias has the forget gate's + 1
    recur: Tensor  # [P, 4 C], from the step before
    project: Tensor  # [C, P]


@dataclass(frozen=True, slots=True)
class ElmoWeights:
    """Every number of the network, float32 on one device."""

    characters: Tensor  # [262, D], row 0 zero: characters of a padding word
    convolutions: tuple[tuple[Tensor, Tensor], ...]  # [filters, D, width] and [filters] of one width each
    highways: tuple[tuple[Affine, Affine], ...]  # F to F each: transform, and the gate that carries
    project: Affine | None  # F to P
    forward: tuple[Cell, ...]
    backward: tuple[Cell, ...]

    @classmethod
    def read(cls, file: Path, options: ElmoOptions, device: torch.device) -> Self:
        """From `weights.hdf5`; `ValueError` names a dataset that is missing or of another shape."""
        h5py: Any = require("h5py", extra="elmo", user="ElmoEmbedding")
        try:
            archive = h5py.File(file, "r")
        except OSError as error:
            raise ValueError(f"{file} is not an HDF5 file, or is truncated ({error})") from None
        with archive:

            def read(name: str, *shape: int) -> Tensor:
                dataset = archive.get(name)
                if not isinstance(dataset, h5py.Dataset):
                    raise ValueError(f"{file}: dataset {name} is missing")
                if dataset.shape != shape or dataset.dtype.kind != "f":
                    wanted = f"floating-point numbers of shape {shape} as the options say"
                    got = f"{dataset.dtype} and {dataset.shape}"
                    raise ValueError(f"{file}: expected dataset {name} of {wanted}, got {got}")
                if math.prod(shape) > LARGEST:
                    most = f"at most {LARGEST} numbers in dataset {name}"
                    raise ValueError(f"{file}: expected {most}, got shape {shape}")
                values = torch.from_numpy(dataset[...].astype("float32"))
                if not bool(values.isfinite().all()):
                    raise ValueError(f"{file}: expected finite numbers in dataset {name}")
                return values.to(device)

            return cls._gather(read, options, has_projection="CNN_proj" in archive)

    @classmethod
    def _gather(cls, read: Read, options: ElmoOptions, has_projection: bool) -> Self:
        width, total, out = options.character_width, options.filter_count, options.projection_width
        characters = read("char_embed", CHARACTERS, width)  # [261, D]

        def gate(i: int, name: str) -> Affine:
            place = f"CNN_high_{i}/"
            return Affine(read(f"{place}W_{name}", total, total), read(f"{place}b_{name}", total))

        project = None
        if has_projection or total != out:  # bilm writes none where the widths agree
            project = Affine(read("CNN_proj/W_proj", total, out), read("CNN_proj/b_proj", out))
        return cls(
            characters=torch.cat([characters.new_zeros(1, width), characters]),
            convolutions=tuple(
                (read(f"CNN/W_cnn_{i}", 1, size, width, n)[0].permute(2, 1, 0), read(f"CNN/b_cnn_{i}", n))
                for i, (size, n) in enumerate(options.filters)
            ),
            highways=tuple((gate(i, "transform"), gate(i, "carry")) for i in range(options.highways)),
            project=project,
            forward=tuple(_cell(read, 0, i, options) for i in range(options.layers)),
            backward=tuple(_cell(read, 1, i, options) for i in range(options.layers)),
        )


def _cell(read: Read, direction: int, layer: int, options: ElmoOptions) -> Cell:
    place = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
    c, p = options.cell_width, options.projection_width
    both = read(f"{place}/W_0", 2 * p, 4 * c)  # [P + P, 4 C]: from below, then from the step before
    bias = read(f"{place}/B", 4 * c)
    bias[2 * c : 3 * c] += 1.0  # TensorFlow adds the forget bias when it runs, not in the file
    return Cell(Affine(both[:p], bias), both[p:], read(f"{place}/W_P_0", c, p))


def _is_whole(value: object, least: int = 1) -> bool:
    return type(value) is int and value >= least


def _are_filters(found: object) -> bool:
    pairs = found if isinstance(found, list) else []
    return bool(pairs) and all(isinstance(p, list) and len(p) == 2 and all(map(_is_whole, p)) for p in pairs)


def _is_clip(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def word_vectors(characters: Tensor, weights: ElmoWeights, options: ElmoOptions) -> Tensor:
    """Words by their spelling: characters [W, L] to [W, P]."""
    activate = torch.relu if options.activation == "relu" else torch.tanh
    letters = functional.embedding(characters, weights.characters).mT  # [W, D, L]
    found = [functional.conv1d(letters, *filters).amax(-1) for filters in weights.convolutions]
    x = activate(torch.cat(found, -1))  # [W, F]
    for transform, carry in weights.highways:
        gate = torch.sigmoid(carry(x))  # [W, F], of the change and not, as its name says, of x
        x = gate * torch.relu(transform(x)) + (1.0 - gate) * x
    return x if weights.project is None else weights.project(x)


def layers(x: Tensor, lengths: Tensor, weights: ElmoWeights, options: ElmoOptions) -> Tensor:
    """Every layer's vectors, the words' own first: x [B, T, P], lengths [B] to [1 + layers, B, T, 2 P].

    Each direction has its own stack and starts from zero state; what stands behind a sentence's length
    reaches neither.
    """
    steps = torch.arange(x.shape[1], device=x.device)  # [T]
    back = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)  # [B, T]
    back = back[..., None].expand(x.shape)  # [B, T, P], its own inverse
    ahead, behind = x, x.gather(1, back)  # [B, T, P] each, `behind` last word first
    found = [torch.cat([x, x], -1)]
    for i, (forward, backward) in enumerate(zip(weights.forward, weights.backward, strict=True)):
        skip = options.skip_connections and i > 0
        ahead = lstm(ahead, forward, options) + (ahead if skip else 0.0)
        behind = lstm(behind, backward, options) + (behind if skip else 0.0)
        found.append(torch.cat([ahead, behind.gather(1, back)], -1))
    return torch.stack(found)


def lstm(x: Tensor, cell: Cell, options: ElmoOptions) -> Tensor:
    """Projected LSTM from the first step to the last: [B, T, P] to [B, T, P]."""
    driven = cell.drive(x)  # [B, T, 4 C]
    state = x.new_zeros(x.shape[0], cell.project.shape[1])  # [B, P]
    memory = x.new_zeros(x.shape[0], cell.project.shape[0])  # [B, C]
    states = []
    for step in driven.unbind(1):  # [B, 4 C]
        take, candidate, keep, show = (step + state @ cell.recur).chunk(4, -1)  # [B, C] each
        memory = torch.sigmoid(keep) * memory + torch.sigmoid(take) * torch.tanh(candidate)
        memory = clip(memory, options.cell_clip)
        state = (torch.sigmoid(show) * torch.tanh(memory)) @ cell.project
        state = clip(state, options.projection_clip)
        states.append(state)
    return torch.stack(states, 1)


def clip(x: Tensor, most: float | None) -> Tensor:
    """x within [-most, most]."""
    return x if most is None else x.clamp(-most, most)


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
        self, options_file: str | os.PathLike[str], weights_file: str | os.PathLike[str], *,
        layer_weights: Sequence[float] | None = None, gamma: float = 1.0, batch_size: int = 32,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        files = existing_file("options_file", options_file), existing_file("weights_file", weights_file)
        self._options = ElmoOptions.read(files[0])
        depth = 1 + self._options.layers
        scalars = [0.0] * depth if layer_weights is None else [float(s) for s in layer_weights]
        if len(scalars) != depth or not all(math.isfinite(s) for s in scalars):
            raise ValueError(f"expected layer_weights to be {depth} finite numbers, got {layer_weights}")
        if not math.isfinite(gamma):
            raise ValueError(f"expected gamma to be finite, got {gamma}")
        self._batch_size = check_count("batch_size", batch_size)
        self._device = torch.device(device)
        self._weights = ElmoWeights.read(files[1], self._options, self._device)
        mix = float(gamma) * torch.tensor(scalars, dtype=torch.float64).softmax(0)  # [1 + layers]
        self._mix = mix.to(self._device, torch.float32)
        self.width = 2 * self._options.projection_width
        self.name = f"elmo-{digest(*map(file_digest, files), repr(scalars), repr(float(gamma)))}"

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
        ends = (BEGIN_SENTENCE,), (END_SENTENCE,)
        spelled = [[ends[0], *(tuple(w.encode()) for w in sentence), ends[1]] for sentence in sentences]
        rows = {word: i for i, word in enumerate(dict.fromkeys(w for s in spelled for w in s))}
        letters = [character_ids(word, self._options.max_characters) for word in rows]
        vectors = word_vectors(torch.tensor(letters, device=self._device), self._weights, self._options)
        padded = [[rows[w] for w in s] + [0] * (max(lengths) - len(s)) for s in spelled]
        x = vectors[torch.tensor(padded, device=self._device)]  # [B, T, P]
        every = layers(x, torch.tensor(lengths, device=self._device), self._weights, self._options)
        mixed = torch.einsum("l,lbtw->btw", self._mix, every).cpu()  # [B, T, 2 P]
        return [mixed[i, 1 : length - 1].clone() for i, length in enumerate(lengths)]


def character_ids(letters: Sequence[int], max_characters: int) -> list[int]:
    """Begin of word, letters, end of word and padding, each raised by 1.  [max_characters]"""
    inner = [BEGIN_WORD, *letters[: max_characters - 2], END_WORD]
    return [letter + 1 for letter in inner + [PAD_WORD] * (max_characters - len(inner))]
