"""Predictions on disk: taken only where everything agrees, refused where they are damaged."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gpattention.evaluation.prediction_cache import (
    CacheKey,
    DamagedPredictionError,
    PredictionCache,
    RawPrediction,
    file_digest,
)

KEY = CacheKey("model", 10, 0, "independent", "m" * 64, "{}", "i" * 64, "0.2.0", fitted="")


def some(**changes: object) -> RawPrediction:
    g = torch.Generator().manual_seed(0)
    logits, variance = torch.randn(10, 6, 3, generator=g), torch.rand(6, 2, generator=g)
    return replace(RawPrediction(logits, torch.arange(6), variance), **changes)


@pytest.mark.parametrize("changes", [{}, {"labels": None}, {"layer_variance": None}])
def test_there_and_back(changes: dict, tmp_path: Path) -> None:
    written = some(**changes)
    path = PredictionCache(tmp_path).write("corrupted/fog/3", KEY, written)
    assert path == tmp_path / "model" / "corrupted" / "fog" / "3.safetensors"
    found = PredictionCache(tmp_path).read("corrupted/fog/3", KEY)
    assert found.logits.equal(written.logits)
    for name in ("labels", "layer_variance"):
        before, after = getattr(written, name), getattr(found, name)
        assert (before is None) == (after is None)
        assert before is None or after.equal(before)


def test_nothing_there(tmp_path: Path) -> None:
    assert PredictionCache(tmp_path / "none").read("test", KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 5},
        {"seed": 1},
        {"draw": "joint"},
        {"model": "n" * 64},
        {"config": '{"heads": 2}'},
        {"items": "j" * 64},
        {"fitted": '{"seed": 1}'},
        {"version": "0.0.1"},
        {"noise": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_key_is_not_the_same(change: dict, tmp_path: Path) -> None:
    cache = PredictionCache(tmp_path)
    cache.write("test", KEY, some())
    other = replace(KEY, **change)
    assert cache.read("test", other) is None
    cache.write("test", other, some())  # takes the place of the old one
    assert cache.read("test", KEY) is None
    assert torch.equal(cache.read("test", other).logits, some().logits)


def test_every_part_of_the_key_was_tried_above() -> None:
    tried = {name for mark in test_another_key_is_not_the_same.pytestmark for name in _names(mark)}
    assert tried | {"predictor"} == set(asdict(KEY))  # a predictor has files of its own


def _names(mark: pytest.Mark) -> set[str]:
    return {name for change in mark.args[1] for name in change}


def test_a_file_that_does_not_say_which_version_wrote_it_is_passed_over(tmp_path: Path) -> None:
    """As 0.1.0 wrote them; it is no damage."""
    path = PredictionCache(tmp_path).write("test", KEY, some())
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    known = ("predictor", "samples", "seed", "draw", "model", "items")
    metadata["key"] = json.dumps({name: asdict(KEY)[name] for name in known})
    save_file(tensors, path, metadata)
    assert PredictionCache(tmp_path).read("test", KEY) is None


def test_predictors_do_not_share_files(tmp_path: Path) -> None:
    cache, other = PredictionCache(tmp_path), replace(KEY, predictor="mean")
    cache.write("test", KEY, some())
    cache.write("test", other, some(logits=torch.zeros(1, 6, 3)))
    assert len(cache.read("test", KEY).logits) == 10
    assert len(cache.read("test", other).logits) == 1


@pytest.mark.parametrize("damage", ["truncated", "altered", "empty", "other format", "no logits"])
def test_damage_is_refused_with_the_reason(damage: str, tmp_path: Path) -> None:
    path = PredictionCache(tmp_path).write("test", KEY, some())
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[:-20])
    elif damage == "altered":
        content[-3] ^= 1
        path.write_bytes(content)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other format":
        save_file({"logits": torch.zeros(1)}, path, {"format": "mine"})
    else:
        from gpattention.evaluation import prediction_cache

        tensors = {"labels": torch.arange(6)}
        metadata = {
            "format": prediction_cache.FORMAT,
            "key": "{}",
            "sha256": prediction_cache._digest(tensors),
        }
        metadata["key"] = json.dumps(asdict(KEY))
        save_file(tensors, path, metadata)
    with pytest.raises(DamagedPredictionError, match=r"test\.safetensors is damaged: .*--fresh"):
        PredictionCache(tmp_path).read("test", KEY)


def test_fresh_passes_over_what_was_there(tmp_path: Path) -> None:
    path = PredictionCache(tmp_path).write("test", KEY, some())
    path.write_bytes(b"damaged")
    fresh = PredictionCache(tmp_path, fresh=True)
    assert fresh.read("test", KEY) is None
    fresh.write("test", KEY, some())
    assert fresh.read("test", KEY).logits.equal(some().logits)  # its own is taken
    assert PredictionCache(tmp_path, fresh=True).read("test", KEY) is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PredictionCache(tmp_path)
    path = cache.write("test", KEY, some())

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("gpattention.models.storage.os.replace", full)
    with pytest.raises(OSError, match="no space"):
        cache.write("test", KEY, some(logits=torch.zeros(1, 6, 3)))
    monkeypatch.undo()
    assert cache.read("test", KEY).logits.equal(some().logits)
    assert list(path.parent.iterdir()) == [path]


def test_file_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a").startswith("ba7816bf8f01cfea414140de5dae2223")
