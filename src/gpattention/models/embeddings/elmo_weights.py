"""The files of an ELMo: `options.json` and `weights.hdf5` as bilm and AllenNLP publish them.

Shapes: D numbers per character, F filters in all, P numbers per direction, C numbers per memory cell.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gpattention.models.embeddings.extras import require
from gpattention.reading import read_json

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
        get = _Getter(file, read_json(file))
        filters = get("char_cnn", "filters")
        if not isinstance(filters, list) or not filters or not all(_is_filter(pair) for pair in filters):
            raise get.wrong("char_cnn", "filters", "a list of [width, count] of positive integers", filters)
        activation = get("char_cnn", "activation")
        if activation not in ACTIVATIONS:
            raise get.wrong("char_cnn", "activation", "'relu' or 'tanh'", activation)
        characters = get("char_cnn", "n_characters", default=CHARACTERS)
        if characters not in (CHARACTERS, CHARACTERS + 1):  # bilm counts padding words in at inference
            raise get.wrong("char_cnn", "n_characters", f"{CHARACTERS} or {CHARACTERS + 1}", characters)
        skip = get("lstm", "use_skip_connections", default=False)
        if not isinstance(skip, bool):
            raise get.wrong("lstm", "use_skip_connections", "true or false", skip)
        longest = max(width for width, _ in filters)
        return cls(
            character_width=get.integer("char_cnn", "embedding", "dim"),
            filters=tuple((width, count) for width, count in filters),
            activation=activation,
            highways=get.integer("char_cnn", "n_highway", least=0, default=0),
            # Three for a word of one byte with its begin and end.
            max_characters=get.integer("char_cnn", "max_characters_per_token", least=max(3, longest)),
            cell_width=get.integer("lstm", "dim"),
            projection_width=get.integer("lstm", "projection_dim"),
            layers=get.integer("lstm", "n_layers"),
            cell_clip=get.clip("lstm", "cell_clip"),
            projection_clip=get.clip("lstm", "proj_clip"),
            skip_connections=skip,
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
class Convolution:
    """Filters of one width over the characters of a word."""

    weight: Tensor  # [filters, D, width]
    bias: Tensor  # [filters]


@dataclass(frozen=True, slots=True)
class Highway:
    """A gate between an affine map with relu, and no change."""

    transform: Affine  # F to F
    carry: Affine  # F to F


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
    convolutions: tuple[Convolution, ...]
    highways: tuple[Highway, ...]
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
                    raise ValueError(
                        f"{file}: expected dataset {name} of floating-point numbers of shape {shape} as the "
                        f"options say, got {dataset.dtype} and {dataset.shape}"
                    )
                if math.prod(shape) > LARGEST:
                    raise ValueError(
                        f"{file}: expected at most {LARGEST} numbers in dataset {name}, got shape {shape}"
                    )
                values = torch.from_numpy(dataset[...].astype("float32"))
                if not bool(values.isfinite().all()):
                    raise ValueError(f"{file}: expected finite numbers in dataset {name}")
                return values.to(device)

            return cls._gather(read, options, has_projection="CNN_proj" in archive)

    @classmethod
    def _gather(cls, read: Read, options: ElmoOptions, has_projection: bool) -> Self:
        width, total, out = options.character_width, options.filter_count, options.projection_width
        characters = read("char_embed", CHARACTERS, width)  # [261, D]
        project = None
        if has_projection or total != out:  # bilm writes none where the widths agree
            project = Affine(read("CNN_proj/W_proj", total, out), read("CNN_proj/b_proj", out))
        return cls(
            characters=torch.cat([characters.new_zeros(1, width), characters]),
            convolutions=tuple(
                Convolution(
                    read(f"CNN/W_cnn_{i}", 1, size, width, count)[0].permute(2, 1, 0).contiguous(),
                    read(f"CNN/b_cnn_{i}", count),
                )
                for i, (size, count) in enumerate(options.filters)
            ),
            highways=tuple(
                Highway(
                    *(
                        Affine(
                            read(f"CNN_high_{i}/W_{gate}", total, total),
                            read(f"CNN_high_{i}/b_{gate}", total),
                        )
                        for gate in ("transform", "carry")
                    )
                )
                for i in range(options.highways)
            ),
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


def _is_filter(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n > 0 for n in pair)


@dataclass(frozen=True, slots=True)
class _Getter:
    """Fields of nested JSON objects by their keys."""

    file: Path
    content: Any

    def __call__(self, *keys: str, default: Any = None) -> Any:
        found = self.content
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if found is not None:
            return found
        if default is None:
            raise ValueError(f"{self.file}: option {'.'.join(keys)} is missing")
        return default

    def integer(self, *keys: str, least: int = 1, default: int | None = None) -> int:
        found = self(*keys, default=default)
        if type(found) is not int or found < least:
            raise self.wrong(*keys, f"an integer >= {least}", found)
        return found

    def clip(self, *keys: str) -> float | None:
        """Where to clip; 0, null or nothing there mean nowhere."""
        found = self(*keys, default=0)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            raise self.wrong(*keys, "a number >= 0", found)
        return float(found) or None

    def wrong(self, *keys_expected_value: Any) -> ValueError:
        *keys, expected, value = keys_expected_value
        return ValueError(f"{self.file}: expected option {'.'.join(keys)} to be {expected}, got {value!r}")
