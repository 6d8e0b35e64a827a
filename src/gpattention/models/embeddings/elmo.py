"""ELMo: words by their letters, in the context of their sentence (Peters et al. 2018, arXiv:1802.05365).

The files are `options.json` and `weights.hdf5` as bilm and AllenNLP publish them; options and tensors keep
their names.  Shapes: B sentences of T words (begin and end included), L characters a word; D numbers per
character, F filters in all, P numbers per direction, C numbers per memory cell.
"""

import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpattention.checks import check_count, require
from gpattention.files import digest, existing_file, file_digest, read_json
from gpattention.models.embeddings.contextual import Sentences, check_sentences, embed_in_batches

CHARACTERS = 261  # the 256 bytes, begin and end of sentence and of word, and padding within a word
BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PAD_WORD = range(256, 261)
CELL = "RNN_{}/RNN/MultiRNNCell/Cell{}/LSTMCell/"  # of a direction and a layer
LARGEST = 10**9  # numbers of a dataset; a compressed file of zeros can promise any

Options = dict[str, Any]
Weights = dict[str, Tensor]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _are_filters(found: object) -> bool:
    pairs = found if isinstance(found, list) else []
    return bool(pairs) and all(isinstance(p, list) and len(p) == 2 and all(map(_is_count, p)) for p in pairs)


def _is_clip(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


COUNT = ("an integer >= 1", _is_count, None)
CLIP = ("a number >= 0", _is_clip, 0)  # 0, null or nothing there mean nowhere
# what an option must be, whether it is, and what it is where the file does not say
OPTIONS: dict[str, tuple[str, Any, Any]] = {
    "char_cnn.embedding.dim": COUNT,  # D
    # characters that a filter sees, and how many such filters there are
    "char_cnn.filters": ("a list of [width, count] of positive integers", _are_filters, None),
    "char_cnn.n_characters": ("261 or 262", lambda n: n in (261, 262), 261),  # bilm counts padding words in
    "char_cnn.activation": ("'relu' or 'tanh'", lambda name: name in ("relu", "tanh"), None),
    "char_cnn.n_highway": ("an integer >= 0", lambda n: type(n) is int and n >= 0, 0),
    "char_cnn.max_characters_per_token": COUNT,  # begin and end of the word included
    "lstm.dim": COUNT,  # C
    "lstm.projection_dim": COUNT,  # P
    "lstm.n_layers": COUNT,
    "lstm.cell_clip": CLIP,
    "lstm.proj_clip": CLIP,
    "lstm.use_skip_connections": ("true or false", lambda value: isinstance(value, bool), False),
}


def read_options(file: Path) -> Options:
    """Every one of `OPTIONS`; `ValueError` names what is missing or wrong."""
    content, options = read_json(file), {}
    for path, (expected, fits, default) in OPTIONS.items():
        found = content
        for key in path.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        options[path] = found = default if found is None else found
        if found is None:
            raise ValueError(f"{file}: option {path} is missing")
        if not fits(found):
            raise ValueError(f"{file}: expected option {path} to be {expected}, got {found!r}")
    most = "char_cnn.max_characters_per_token"
    # a word of one byte with its begin and end, and as many as the widest filter sees
    least = max(3, *(width for width, _ in options["char_cnn.filters"]))
    if options[most] < least:
        raise ValueError(f"{file}: expected option {most} to be an integer >= {least}, got {options[most]}")
    return options


def datasets(options: Options, *, projected: bool) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in the file."""
    D, filters = options["char_cnn.embedding.dim"], options["char_cnn.filters"]  # noqa: N806
    P, C = options["lstm.projection_dim"], options["lstm.dim"]  # noqa: N806
    F = sum(count for _, count in filters)  # noqa: N806
    shapes: dict[str, tuple[int, ...]] = {"char_embed": (CHARACTERS, D)}
    for i, (width, count) in enumerate(filters):
        shapes |= {f"CNN/W_cnn_{i}": (1, width, D, count), f"CNN/b_cnn_{i}": (count,)}
    for i, gate in product(range(options["char_cnn.n_highway"]), ("transform", "carry")):
        shapes |= {f"CNN_high_{i}/W_{gate}": (F, F), f"CNN_high_{i}/b_{gate}": (F,)}
    if projected or F != P:  # bilm writes none where the widths agree
        shapes |= {"CNN_proj/W_proj": (F, P), "CNN_proj/b_proj": (P,)}
    for direction, layer in product((0, 1), range(options["lstm.n_layers"])):
        cell = CELL.format(direction, layer)
        # rows: from below, then from the step before; columns: input, candidate, forget and output gate
        shapes |= {cell + "W_0": (2 * P, 4 * C), cell + "B": (4 * C,), cell + "W_P_0": (C, P)}
    return shapes


def read_weights(file: Path, options: Options, device: torch.device) -> Weights:
    """All tensors, float32; `ValueError` names a dataset that is missing or of another shape."""
    h5py: Any = require("h5py", extra="elmo", user="ElmoEmbedding")
    try:
        archive = h5py.File(file, "r")
    except OSError as error:
        raise ValueError(f"{file} is not an HDF5 file, or is truncated ({error})") from None
    weights = {}
    with archive:
        for name, shape in datasets(options, projected="CNN_proj" in archive).items():
            dataset = archive.get(name)
            if not isinstance(dataset, h5py.Dataset):
                raise ValueError(f"{file}: dataset {name} is missing")
            if dataset.shape != shape or dataset.dtype.kind != "f" or math.prod(shape) > LARGEST:
                wanted = f"at most {LARGEST} floating-point numbers of shape {shape} as the options say"
                got = f"{dataset.dtype} and {dataset.shape}"
                raise ValueError(f"{file}: expected dataset {name} of {wanted}, got {got}")
            x = torch.from_numpy(dataset[...].astype("float32")).to(device)
            if not bool(x.isfinite().all()):
                raise ValueError(f"{file}: expected finite numbers in dataset {name}")
            if name.endswith("/B"):
                x[len(x) // 2 : 3 * len(x) // 4] += 1.0  # TensorFlow adds the forget bias when it runs
            weights[name] = x
    # characters of a padding word are row 0
    weights["char_embed"] = functional.pad(weights["char_embed"], (0, 0, 1, 0))  # [262, D]
    return weights


def word_vectors(characters: Tensor, weights: Weights, options: Options) -> Tensor:
    """Words by their spelling: characters [W, L] to [W, P]."""

    def affine(place: str, name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{place}/W_{name}"] + weights[f"{place}/b_{name}"]

    letters = functional.embedding(characters, weights["char_embed"]).mT  # [W, D, L]
    found = []
    for i in range(len(options["char_cnn.filters"])):
        kernel = weights[f"CNN/W_cnn_{i}"][0].permute(2, 1, 0)  # [filters, D, width]
        found.append(functional.conv1d(letters, kernel, weights[f"CNN/b_cnn_{i}"]).amax(-1))
    x = getattr(torch, options["char_cnn.activation"])(torch.cat(found, -1))  # [W, F]
    for i in range(options["char_cnn.n_highway"]):
        change = torch.relu(affine(f"CNN_high_{i}", "transform", x))  # [W, F]
        # the gate is of the change and not, as its name says, of x
        gate = torch.sigmoid(affine(f"CNN_high_{i}", "carry", x))  # [W, F]
        x = gate * change + (1.0 - gate) * x
    return affine("CNN_proj", "proj", x) if "CNN_proj/W_proj" in weights else x


def layers(x: Tensor, lengths: Tensor, weights: Weights, options: Options) -> Tensor:
    """Every layer's vectors, the words' own first: x [B, T, P], lengths [B] to [1 + layers, B, T, 2 P].

    Each direction has its own stack and starts from zero state; what stands behind a sentence's length
    reaches neither.
    """
    steps = torch.arange(x.shape[1], device=x.device)  # [T]
    back = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)  # [B, T]
    back = back[..., None].expand(x.shape)  # [B, T, P], its own inverse
    ahead, behind = x, x.gather(1, back)  # [B, T, P] each, `behind` last word first
    found = [torch.cat([x, x], -1)]
    for layer in range(options["lstm.n_layers"]):
        skip = options["lstm.use_skip_connections"] and layer > 0
        ahead = lstm(ahead, CELL.format(0, layer), weights, options) + (ahead if skip else 0.0)
        behind = lstm(behind, CELL.format(1, layer), weights, options) + (behind if skip else 0.0)
        found.append(torch.cat([ahead, behind.gather(1, back)], -1))
    return torch.stack(found)


def lstm(x: Tensor, cell: str, weights: Weights, options: Options) -> Tensor:
    """Projected LSTM from the first step to the last: [B, T, P] to [B, T, P]."""
    drive, recur = weights[cell + "W_0"].chunk(2)  # [P, 4 C] each
    project = weights[cell + "W_P_0"]  # [C, P]
    most_memory, most_state = options["lstm.cell_clip"] or math.inf, options["lstm.proj_clip"] or math.inf
    memory, state = (x.new_zeros(len(x), count) for count in project.shape)  # [B, C], [B, P]
    states = []
    for step in (x @ drive + weights[cell + "B"]).unbind(1):  # [B, 4 C]
        take, candidate, keep, show = (step + state @ recur).chunk(4, -1)  # [B, C] each
        memory = torch.sigmoid(keep) * memory + torch.sigmoid(take) * torch.tanh(candidate)
        memory = memory.clamp(-most_memory, most_memory)
        state = (torch.sigmoid(show) * torch.tanh(memory)) @ project
        state = state.clamp(-most_state, most_state)
        states.append(state)
    return torch.stack(states, 1)


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
        self._options = read_options(files[0])
        depth = 1 + self._options["lstm.n_layers"]
        scalars = [0.0] * depth if layer_weights is None else [float(s) for s in layer_weights]
        if len(scalars) != depth or not all(math.isfinite(s) for s in scalars):
            raise ValueError(f"expected layer_weights to be {depth} finite numbers, got {layer_weights}")
        if not math.isfinite(gamma):
            raise ValueError(f"expected gamma to be finite, got {gamma}")
        self._batch_size = check_count("batch_size", batch_size)
        self._device = torch.device(device)
        self._weights = read_weights(files[1], self._options, self._device)
        mix = float(gamma) * torch.tensor(scalars, dtype=torch.float64).softmax(0)  # [1 + layers]
        self._mix = mix.to(self._device, torch.float32)
        self.width = 2 * self._options["lstm.projection_dim"]
        self.name = f"elmo-{digest(*map(file_digest, files), repr(scalars), repr(float(gamma)))}"

    @torch.no_grad()
    def embed(self, sentences: Sentences) -> list[Tensor]:
        """One [n_words, width] tensor per sentence."""
        check_sentences(sentences)
        return embed_in_batches(sentences, self._batch_size, self._embed_batch)

    def _embed_batch(self, sentences: Sentences) -> list[Tensor]:
        lengths = [2 + len(sentence) for sentence in sentences]  # with begin and end of sentence
        ends = (BEGIN_SENTENCE,), (END_SENTENCE,)
        spelled = [[ends[0], *(tuple(w.encode()) for w in sentence), ends[1]] for sentence in sentences]
        rows = {word: i for i, word in enumerate(dict.fromkeys(w for s in spelled for w in s))}
        letters = [character_ids(word, self._options["char_cnn.max_characters_per_token"]) for word in rows]
        vectors = word_vectors(torch.tensor(letters, device=self._device), self._weights, self._options)
        padded = [[rows[w] for w in s] + [0] * (max(lengths) - len(s)) for s in spelled]
        x = vectors[torch.tensor(padded, device=self._device)]  # [B, T, P]
        every = layers(x, torch.tensor(lengths, device=self._device), self._weights, self._options)
        mixed = torch.einsum("l,lbtw->btw", self._mix, every).cpu()  # [B, T, 2 P]
        return [mixed[i, 1 : length - 1].clone() for i, length in enumerate(lengths)]


def character_ids(letters: Sequence[int], most: int) -> list[int]:
    """Begin of word, letters, end of word and padding, each raised by 1, as 0 is a padding word.  [most]"""
    inner = [BEGIN_WORD, *letters[: most - 2], END_WORD]
    return [letter + 1 for letter in inner + [PAD_WORD] * (most - len(inner))]
