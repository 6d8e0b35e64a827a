"""ELMo against an oracle, and what is refused of its files."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpattention.models.embeddings import ContextualEmbedding, ElmoEmbedding
from tests.models.embeddings.elmo_files import OPTIONS, options, random_weights, shapes, write
from tests.oracles.elmo import elmo

LONG = "x" * 47 + "yz" + "é" * 20  # 48 bytes are read, the y being the last
SENTENCES = [["The", "cat", "sat", "."], ["Straße", LONG, "猫"], ["a"], ["cat", "cat", "cat", "sat", "sat"]]
VARIANTS = {
    "as published": {},
    "tanh": {"char_cnn__activation": "tanh"},
    "no skips": {"lstm__use_skip_connections": False},
    "no projection of words": {"lstm__projection_dim": 9},
    "one layer": {"lstm__n_layers": 1},
    "three layers": {"lstm__n_layers": 3},
    "no highway": {"char_cnn__n_highway": 0},
    "short words": {"char_cnn__max_characters_per_token": 5},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_against_the_oracle(changes: dict, tmp_path: Path) -> None:
    chosen = options(**changes)
    weights = random_weights(chosen)
    scalars = [0.3, -0.7, 1.1, 0.2][: 1 + chosen["lstm"]["n_layers"]]
    embedding = ElmoEmbedding(*write(tmp_path, chosen, weights), layer_weights=scalars, gamma=1.7)
    assert embedding.width == 2 * chosen["lstm"]["projection_dim"]
    for sentence, x in zip(SENTENCES, embedding.embed(SENTENCES), strict=True):
        expected = elmo(sentence, weights, chosen, scalars, gamma=1.7)
        assert (x.shape, x.dtype, x.requires_grad) == (expected.shape, torch.float32, False)
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=2e-6)
        assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("absent", [0, None, "not mentioned"])
@pytest.mark.parametrize("clip", ["cell_clip", "proj_clip"])
def test_clips_bind_and_may_be_absent(clip: str, absent: Any, tmp_path: Path) -> None:
    weights = random_weights(OPTIONS)
    clipped = ElmoEmbedding(*write(tmp_path / "clipped", OPTIONS, weights)).embed(SENTENCES)
    chosen = options(**{f"lstm__{clip}": absent})
    if absent == "not mentioned":
        del chosen["lstm"][clip]
    free = ElmoEmbedding(*write(tmp_path / "free", chosen, weights)).embed(SENTENCES)
    never_binds = options(**{f"lstm__{clip}": 1e9})
    for sentence, x, y in zip(SENTENCES, free, clipped, strict=True):
        expected = elmo(sentence, weights, never_binds, [0.0, 0.0, 0.0])
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=2e-6)
        assert (x - y).abs().max() > 1e-3


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path, OPTIONS, random_weights(OPTIONS))


def test_default_is_the_plain_mean_of_the_layers(files: tuple[Path, Path]) -> None:
    only = [[0.0 if i == k else -1e4 for i in range(3)] for k in range(3)]
    alone = [ElmoEmbedding(*files, layer_weights=scalars).embed(SENTENCES[:1])[0] for scalars in only]
    torch.testing.assert_close(ElmoEmbedding(*files).embed(SENTENCES[:1])[0], sum(alone) / 3)
    words = alone[0]  # the word layer is the same for both directions
    assert torch.equal(words[:, :4], words[:, 4:])
    assert (alone[1][:, :4] - alone[1][:, 4:]).abs().amax(-1).min() > 0.1


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_a_sentence_is_embedded_alone(files: tuple[Path, Path], batch_size: int) -> None:
    embedding = ElmoEmbedding(*files, batch_size=batch_size)
    together = embedding.embed(SENTENCES)
    for sentence, x in zip(SENTENCES, together, strict=True):
        torch.testing.assert_close(x, embedding.embed([sentence])[0], rtol=0, atol=1e-6)
    again = embedding.embed(SENTENCES)  # no state is carried over
    assert [torch.equal(x, y) for x, y in zip(together, again, strict=True)] == [True] * 4
    assert embedding.embed([]) == []


def test_name_tells_contents_and_mixture_but_not_place(files: tuple[Path, Path], tmp_path: Path) -> None:
    name = ElmoEmbedding(*files).name
    assert name.startswith("elmo-")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = [elsewhere / file.name for file in files]
    for file, copy in zip(files, moved, strict=True):
        copy.write_bytes(file.read_bytes())
    assert ElmoEmbedding(*moved, layer_weights=[0, 0, 0], batch_size=3).name == name
    others = {
        ElmoEmbedding(*files, gamma=2.0).name,
        ElmoEmbedding(*files, layer_weights=[0.0, 0.0, 0.1]).name,
        ElmoEmbedding(*write(tmp_path / "seed", OPTIONS, random_weights(OPTIONS, seed=1))).name,
        ElmoEmbedding(*write(tmp_path / "clip", options(lstm__cell_clip=3), random_weights(OPTIONS))).name,
    }
    assert len(others | {name}) == 5
    assert isinstance(ElmoEmbedding(*files), ContextualEmbedding)


@pytest.mark.parametrize("name", shapes(OPTIONS))
def test_every_dataset_is_needed_in_its_shape(name: str, tmp_path: Path) -> None:
    weights = random_weights(OPTIONS)
    values = weights.pop(name)
    with pytest.raises(ValueError, match=re.escape(f"weights.hdf5: dataset {name} is missing")):
        ElmoEmbedding(*write(tmp_path / "missing", OPTIONS, weights))
    weights[name] = values[..., :-1]
    found = f"{values.shape} as the options say, got float32 and {weights[name].shape}"
    with pytest.raises(ValueError, match=f"dataset {name} of .*{re.escape(found)}"):
        ElmoEmbedding(*write(tmp_path / "narrow", OPTIONS, weights))


def test_numbers_and_groups(tmp_path: Path) -> None:
    cell = "RNN_1/RNN/MultiRNNCell/Cell1/LSTMCell/B"
    good = random_weights(OPTIONS)
    inner = {f"{name}/inner" if name == "char_embed" else name: x for name, x in good.items()}
    nan = np.where(good[cell] == good[cell][3], np.nan, good[cell])
    for weights, message in (
        (
            good | {"char_embed": good["char_embed"].astype("int32")},
            "floating-point numbers of shape (261, 3)",
        ),
        (good | {cell: nan}, f"expected finite numbers in dataset {cell}"),
        (inner, "dataset char_embed is missing"),  # a group is no dataset
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
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


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_options(field: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ElmoEmbedding(*write(tmp_path, options(**{field: value}), random_weights(OPTIONS)))
    assert str(tmp_path / "options.json") in str(caught.value)


def test_damaged_files_and_arguments(files: tuple[Path, Path]) -> None:
    for arguments, message in (
        ({"layer_weights": [0.0, 1.0]}, r"layer_weights to be 3 finite numbers, got \[0.0, 1.0\]"),
        ({"layer_weights": [0.0, 1.0, float("nan")]}, "layer_weights to be 3 finite numbers"),
        ({"gamma": float("inf")}, "gamma to be finite, got inf"),
        ({"batch_size": 0}, "batch_size to be a whole number >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ElmoEmbedding(*files, **arguments)  # type: ignore[arg-type]
    whole = files[1].read_bytes()
    assert len(whole) > 3000
    for kept in (0, 100, 3000):
        files[1].write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"weights\.hdf5 is not an HDF5 file, or is truncated"):
            ElmoEmbedding(*files)
    for content in ("", "[1, 2]", '{"lstm": {"dim'):
        files[0].write_text(content)
        with pytest.raises(ValueError, match=r"options\.json( is not JSON|: option .* missing)"):
            ElmoEmbedding(*files)


def test_files_must_be_there(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"expected options_file to be a file, got {tmp_path}"):
        ElmoEmbedding(tmp_path, files[1])
    with pytest.raises(FileNotFoundError, match=r"expected weights_file to be a file, got .*nowhere"):
        ElmoEmbedding(files[0], tmp_path / "nowhere")


def test_without_h5py(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"ElmoEmbedding needs h5py: pip install 'gpattention\[elmo\]'"):
        ElmoEmbedding(*files)
