"""ELMo against an independent NumPy forward, and against what it must not depend on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpattention.models.embeddings import ContextualEmbedding, ElmoEmbedding
from gpattention.models.embeddings.elmo import character_ids
from tests.models.embeddings.elmo_files import OPTIONS, options, random_weights, write
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
    told = options(**changes)
    weights = random_weights(told)
    scalars = [0.3, -0.7, 1.1, 0.2][: 1 + told["lstm"]["n_layers"]]
    embedding = ElmoEmbedding(*write(tmp_path, told, weights), layer_weights=scalars, gamma=1.7)
    assert embedding.width == 2 * told["lstm"]["projection_dim"]
    for sentence, x in zip(SENTENCES, embedding.embed(SENTENCES), strict=True):
        expected = elmo(sentence, weights, told, scalars, gamma=1.7)
        assert (x.shape, x.dtype, x.requires_grad) == (expected.shape, torch.float32, False)
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=2e-6)
        assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("absent", [0, None, "not mentioned"])
@pytest.mark.parametrize("clip", ["cell_clip", "proj_clip"])
def test_clips_bind_and_may_be_absent(clip: str, absent: Any, tmp_path: Path) -> None:
    weights = random_weights(OPTIONS)
    clipped = ElmoEmbedding(*write(tmp_path / "clipped", OPTIONS, weights)).embed(SENTENCES)
    told = options(**{f"lstm__{clip}": absent})
    if absent == "not mentioned":
        del told["lstm"][clip]
    free = ElmoEmbedding(*write(tmp_path / "free", told, weights)).embed(SENTENCES)
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


def test_context_matters_from_the_first_layer_up(files: tuple[Path, Path]) -> None:
    words = ElmoEmbedding(*files, layer_weights=[0.0, -1e4, -1e4]).embed(SENTENCES)[3]  # cat cat cat sat sat
    top = ElmoEmbedding(*files, layer_weights=[-1e4, -1e4, 0.0]).embed(SENTENCES)[3]
    assert torch.equal(words[0], words[2])
    assert (top[0] - top[2]).abs().max() > 1e-3


def test_bytes_past_the_limit_are_not_read(files: tuple[Path, Path]) -> None:
    embedding = ElmoEmbedding(*files)
    same, other = embedding.embed([["b" * 48 + "tail"]])[0], embedding.embed([["b" * 47 + "tail"]])[0]
    assert torch.equal(same, embedding.embed([["b" * 48]])[0])
    assert (same - other).abs().max() > 1e-3


def test_character_ids() -> None:
    assert character_ids(tuple("é!".encode()), 7) == [259, 0xC3 + 1, 0xA9 + 1, ord("!") + 1, 260, 261, 261]
    assert character_ids((256,), 4) == [259, 257, 260, 261]
    assert character_ids(tuple(b"abcdef"), 5) == [259, 98, 99, 100, 260]


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
