"""ELMo files that are not what they should be are refused by file, field or dataset."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpattention.models.embeddings import ElmoEmbedding
from tests.models.embeddings.elmo_files import OPTIONS, options, random_weights, shapes, write

CELL = "RNN_1/RNN/MultiRNNCell/Cell1/LSTMCell"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path, OPTIONS, random_weights(OPTIONS))


@pytest.mark.parametrize("name", shapes(OPTIONS))
def test_every_dataset_is_needed_in_its_shape(name: str, tmp_path: Path) -> None:
    weights = random_weights(OPTIONS)
    values = weights.pop(name)
    with pytest.raises(ValueError, match=re.escape(f"weights.hdf5: dataset {name} is missing")):
        ElmoEmbedding(*write(tmp_path / "missing", OPTIONS, weights))
    weights[name] = values[..., :-1]
    told = (
        f"expected dataset {name} of floating-point numbers of shape {values.shape} as the options say, got "
    )
    with pytest.raises(ValueError, match=re.escape(f"{told}float32 and {weights[name].shape}")):
        ElmoEmbedding(*write(tmp_path / "narrow", OPTIONS, weights))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("char_embed", lambda x: x.astype("int32"), "of floating-point numbers of shape (261, 3)"),
        (
            f"{CELL}/B",
            lambda x: np.where(x == x[3], np.nan, x),
            f"expected finite numbers in dataset {CELL}/B",
        ),
    ],
)
def test_numbers(name: str, change: Any, told: str, tmp_path: Path) -> None:
    weights = random_weights(OPTIONS)
    weights[name] = change(weights[name])
    with pytest.raises(ValueError, match=re.escape(told)):
        ElmoEmbedding(*write(tmp_path, OPTIONS, weights))


def test_a_group_is_not_a_dataset(tmp_path: Path) -> None:
    weights = random_weights(OPTIONS)
    weights["char_embed/inner"] = weights.pop("char_embed")
    with pytest.raises(ValueError, match="dataset char_embed is missing"):
        ElmoEmbedding(*write(tmp_path, OPTIONS, weights))


WRONG = [
    ("char_cnn__filters", [], "char_cnn.filters to be a list of [width, count] of positive integers, got []"),
    ("char_cnn__filters", [[1, 0]], "of positive integers, got [[1, 0]]"),
    ("char_cnn__filters", [[1, 2, 3]], "of positive integers, got [[1, 2, 3]]"),
    ("char_cnn__filters", None, "option char_cnn.filters is missing"),
    ("char_cnn__activation", "gelu", "option char_cnn.activation to be 'relu' or 'tanh', got 'gelu'"),
    ("char_cnn__n_characters", 300, "option char_cnn.n_characters to be 261 or 262, got 300"),
    ("char_cnn__embedding", 3, "option char_cnn.embedding.dim is missing"),
    ("char_cnn__n_highway", -1, "option char_cnn.n_highway to be an integer >= 0, got -1"),
    ("char_cnn__max_characters_per_token", 3, "max_characters_per_token to be an integer >= 4, got 3"),
    ("lstm__dim", 6.0, "option lstm.dim to be an integer >= 1, got 6.0"),
    ("lstm__n_layers", 0, "option lstm.n_layers to be an integer >= 1, got 0"),
    ("lstm__projection_dim", None, "option lstm.projection_dim is missing"),
    ("lstm__cell_clip", -1, "option lstm.cell_clip to be a number >= 0, got -1"),
    ("lstm__proj_clip", True, "option lstm.proj_clip to be a number >= 0, got True"),
    ("lstm__use_skip_connections", 1, "option lstm.use_skip_connections to be true or false, got 1"),
]


@pytest.mark.parametrize(("field", "value", "told"), WRONG)
def test_options(field: str, value: Any, told: str, tmp_path: Path) -> None:
    changed = options(**{field: value})
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        ElmoEmbedding(*write(tmp_path, changed, random_weights(OPTIONS)))
    assert str(tmp_path / "options.json") in str(caught.value)


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"lstm": {"dim'])
def test_options_of_another_kind(content: str, files: tuple[Path, Path]) -> None:
    files[0].write_text(content)
    with pytest.raises(ValueError, match=r"options\.json( is not JSON|: option .* missing)"):
        ElmoEmbedding(*files)


@pytest.mark.parametrize("kept", [0, 100, 3000])
def test_weights_truncated(kept: int, files: tuple[Path, Path]) -> None:
    whole = files[1].read_bytes()
    assert len(whole) > 3000
    files[1].write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=r"weights\.hdf5 is not an HDF5 file, or is truncated"):
        ElmoEmbedding(*files)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"layer_weights": [0.0, 1.0]}, "expected layer_weights to be 3 finite numbers, got [0.0, 1.0]"),
        ({"layer_weights": [0.0, 1.0, float("nan")]}, "expected layer_weights to be 3 finite numbers"),
        ({"gamma": float("inf")}, "expected gamma to be finite, got inf"),
        ({"batch_size": 0}, "expected batch_size >= 1, got 0"),
    ],
)
def test_arguments(arguments: dict, told: str, files: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        ElmoEmbedding(*files, **arguments)


def test_files_must_be_there(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"expected options_file to be a file, got {tmp_path}")
    ):
        ElmoEmbedding(tmp_path, files[1])
    with pytest.raises(FileNotFoundError, match=r"expected weights_file to be a file, got .*nowhere"):
        ElmoEmbedding(files[0], tmp_path / "nowhere")


def test_without_h5py(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"ElmoEmbedding needs h5py: pip install 'gpattention\[elmo\]'"):
        ElmoEmbedding(*files)
