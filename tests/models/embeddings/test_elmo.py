"""ELMo against an oracle, and what is refused of its files."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpattention.models.embeddings import ContextualEmbedding, ElmoEmbedding
from tests.models.embeddings.elmo_files import OPTIONS, options, random_weights, write
from tests.oracles.elmo import elmo
from tests.refusals import refusals

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


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_sentence_is_embedded_alone(files: tuple[Path, Path], batch_size: int) -> None:
    embedding = ElmoEmbedding(*files, batch_size=batch_size)
    together = embedding.embed(SENTENCES)
    for sentence, x in zip(SENTENCES, together, strict=True):
        torch.testing.assert_close(x, embedding.embed([sentence])[0], rtol=0, atol=1e-6)
    again = embedding.embed(SENTENCES)  # no state is carried over
    assert all(torch.equal(x, y) for x, y in zip(together, again, strict=True))
    assert embedding.embed([]) == []


def test_name_tells_contents_and_mixture_but_not_place(files: tuple[Path, Path], tmp_path: Path) -> None:
    same = [ElmoEmbedding(*files)]
    moved = write(tmp_path / "elsewhere", OPTIONS, random_weights(OPTIONS))
    same.append(ElmoEmbedding(*moved, layer_weights=[0, 0, 0], batch_size=3))
    assert same[0].name == same[1].name
    others = [
        same[0], ElmoEmbedding(*files, gamma=2.0), ElmoEmbedding(*files, layer_weights=[0.0, 0.0, 0.1]),
        ElmoEmbedding(*write(tmp_path / "seed", OPTIONS, random_weights(OPTIONS, seed=1))),
        ElmoEmbedding(*write(tmp_path / "clip", options(lstm__cell_clip=3), random_weights(OPTIONS))),
    ]  # fmt: skip
    assert len({each.name for each in others}) == 5
    assert isinstance(same[0], ContextualEmbedding)


CELL = "RNN_1/RNN/MultiRNNCell/Cell1/LSTMCell/B"
GOOD = random_weights(OPTIONS)


def of(folder: Path, weights: dict[str, np.ndarray] = GOOD, **changes: Any) -> ElmoEmbedding:
    return ElmoEmbedding(*write(folder, options(**changes), weights))


def damaged(folder: Path, place: int, content: bytes | int) -> ElmoEmbedding:
    files = write(folder, OPTIONS, GOOD)
    files[place].write_bytes(files[place].read_bytes()[:content] if isinstance(content, int) else content)
    return ElmoEmbedding(*files)


def given(folder: Path, **arguments: Any) -> ElmoEmbedding:
    return ElmoEmbedding(*write(folder, OPTIONS, GOOD), **arguments)


test_refusals = refusals([
    *((lambda f, n=n: of(f, {k: x for k, x in GOOD.items() if k != n}), n, "is missing") for n in GOOD),
    *((lambda f, n=n: of(f, GOOD | {n: GOOD[n][..., :-1]}), n, "options say, got float32") for n in GOOD),
    (lambda f: of(f, GOOD | {"char_embed": GOOD["char_embed"].astype("int32")}), "char_embed", "got int32"),
    (lambda f: of(f, GOOD | {CELL: np.full_like(GOOD[CELL], np.nan)}), "finite", CELL),
    # a group is no dataset
    (lambda f: of(f, {n.replace("char_embed", "char_embed/in"): x for n, x in GOOD.items()}),
     "char_embed", "missing"),
    *(
        (lambda f, n=name, x=value: of(f, **{n: x}), f"options.json.*{name.split('__')[1]}", got)
        for name, value, got in (
            ("char_cnn__filters", [], r"\[\]"),
            ("char_cnn__filters", [[1, 0]], r"\[\[1, 0\]\]"),
            ("char_cnn__filters", [[1, 2, 3]], r"\[\[1, 2, 3\]\]"),
            ("char_cnn__filters", None, "missing"),
            ("char_cnn__activation", "gelu", "'gelu'"),
            ("char_cnn__n_characters", 300, "261 or 262, got 300"),
            ("char_cnn__embedding", 3, "dim is missing"),
            ("char_cnn__n_highway", -1, ">= 0, got -1"),
            ("char_cnn__max_characters_per_token", 3, ">= 4, got 3"),
            ("lstm__dim", 6.0, "got 6.0"),
            ("lstm__n_layers", 0, ">= 1, got 0"),
            ("lstm__projection_dim", None, "missing"),
            ("lstm__cell_clip", -1, "got -1"),
            ("lstm__proj_clip", True, "got True"),
            ("lstm__use_skip_connections", 1, "got 1"),
        )
    ),
    (lambda f: given(f, layer_weights=[0.0, 1.0]), "layer_weights", r"\[0.0, 1.0\]"),
    (lambda f: given(f, layer_weights=[0.0, 1.0, np.nan]), "layer_weights", "3 finite"),
    (lambda f: given(f, gamma=np.inf), "gamma", "inf"),
    (lambda f: given(f, batch_size=0), "batch_size", "got 0"),
    *((lambda f, n=n: damaged(f, 1, n), "weights.hdf5", "truncated") for n in (0, 100, 3000)),
    *((lambda f, c=c: damaged(f, 0, c), "options.json", "not JSON") for c in (b"", b'{"lstm": {"dim')),
    (lambda f: damaged(f, 0, b"[1, 2]"), "options.json", "missing"),
])  # fmt: skip
test_files_must_be_there = refusals([
    (lambda f: ElmoEmbedding(f, write(f, OPTIONS, GOOD)[1]), "options_file", "got "),
    (lambda f: ElmoEmbedding(write(f, OPTIONS, GOOD)[0], f / "nowhere"), "weights_file", "nowhere"),
], FileNotFoundError)  # fmt: skip


def test_without_h5py(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"ElmoEmbedding needs h5py: pip install 'gpattention\[elmo\]'"):
        ElmoEmbedding(*files)
