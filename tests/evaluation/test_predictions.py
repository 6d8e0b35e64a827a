"""Sets of items, predictions of them in chunks, and the files that keep predictions."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gpattention.evaluation import predictions
from gpattention.evaluation.predictions import (
    CacheKey,
    DamagedPredictionError,
    ItemSet,
    Predicted,
    PredictionCache,
    RawPrediction,
    layer_means,
    padding_of,
    predict_items,
)
from gpattention.evaluation.predictors import UnavailablePredictorError, build_predictor, predictor_order
from gpattention.evaluation.suites.efficiency import peak_memory
from gpattention.gp import ItemNoise, deferred_checks
from gpattention.models import predict
from tests.evaluation.cases import draws
from tests.models.small_models import images, sentences, text, vision

CPU = torch.device("cpu")


def halved(stored: torch.Tensor) -> torch.Tensor:
    return stored.float() / 2


def some(**changes: object) -> ItemSet:
    stored = torch.arange(7 * 12, dtype=torch.uint8).view(7, 3, 2, 2)
    return replace(ItemSet("test", stored, torch.arange(7), halved), **changes)


def some_sentences() -> ItemSet:
    tokens = torch.arange(1, 9).view(4, 2)
    words = tuple((f"a{i}", f"b{i}") for i in range(4))
    return ItemSet("test", {"tokens": tokens, "padding_mask": tokens > 7}, torch.arange(4), words=words)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_chunks_make_up_the_whole(size: int) -> None:
    items = some()
    parts = list(items.chunks(size, CPU))
    assert [start for start, _ in parts] == list(range(0, 7, size))
    assert torch.cat([inputs for _, inputs in parts]).equal(halved(items.stored))
    joined = torch.cat([inputs["tokens"] for _, inputs in some_sentences().chunks(size, CPU)])
    assert joined.equal(some_sentences().stored["tokens"])


def test_selection() -> None:
    chosen, whole = some().select(torch.tensor([5, 0])), some()
    assert chosen.stored.equal(whole.stored[[5, 0]])
    assert chosen.labels.tolist() == [5, 0]
    third = some_sentences().select(torch.tensor([2]))
    assert (third.words, third.stored["tokens"].tolist()) == ((("a2", "b2"),), [[5, 6]])
    assert len(whole.first(3)) == 3
    assert whole.first(None) is whole.first(7) is whole.spread(None) is whole.spread(7) is whole
    with pytest.raises(ValueError, match="labels of 7 items in test, got 3"):
        some(labels=torch.arange(3))
    with pytest.raises(ValueError, match="words of 7 items in test, got 1"):
        some(words=(("a",),))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 100])
def test_a_limit_is_spread_over_everything(count: int) -> None:
    """Of any number of classes one after the other, of any sizes, each gives its share, to one item."""
    sizes = [1, 40, 3, 17, 39]
    labels = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes))
    chosen = ItemSet("ordered", torch.zeros(100, 1), labels).spread(count)
    assert chosen.labels.equal(labels[[i * 100 // count for i in range(count)]])
    for place, size in enumerate(sizes):
        assert abs(int((chosen.labels == place).sum()) - size * count / 100) <= 1


def test_digests_notice_everything() -> None:
    changed = some().stored.clone()
    changed[6, 0, 0, 0] += 1
    kinds = [
        some(), some(stored=changed), some(stored=some().stored.flip(0)),
        some(stored=some().stored.view(7, 12, 1, 1)), some(labels=torch.arange(7).flip(0)), some(labels=None),
        some(prepare=lambda x: x.float() / 3), some_sentences(), some_sentences().first(3),
    ]  # fmt: skip
    digests = [items.digest for items in kinds]
    assert len(set(digests)) == len(digests)
    assert digests[0] == some(name="other").digest  # a name is not an item
    turned = some().stored.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not turned.is_contiguous()
    assert digests[0] == some(stored=turned).digest  # nor is how it lies in memory


# Whole sets in chunks give what one call gives; predictors by name; one variance per layer


@pytest.mark.parametrize(("chunk", "rows"), [(2, 3), (3, 100), (2000, None)])
@pytest.mark.parametrize("name", ["model", "mean", "mc_dropout", "dropout_draws"])
def test_chunks_change_nothing(
    name: str, chunk: int, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "CHUNK", chunk)
    model, x = vision("cgp", dropout=0.2), images(7)
    built = build_predictor(name, model, 4)
    items, done = ItemSet("test", x, torch.arange(7) % 3), []
    found = predict_items(
        built.predictor, items, samples=built.samples, seed=3, device=CPU, batch_size=rows,
        progress=lambda *x: done.append(x),
    )  # fmt: skip
    assert done == sorted(done)
    assert done[-1] == (7000, 7000)
    whole = built.predictor.predict(x, samples=built.samples, seed=3)
    assert found.logits.dtype == torch.float32
    assert found.logits.numpy() == pytest.approx(whole.logits.numpy(), abs=1e-6)
    assert found.labels.equal(items.labels)
    assert (found.layer_variance is None) == ("dropout" in name)


def test_padding_does_not_lower_a_variance() -> None:
    model = text("cgp")
    short, long = ({"tokens": sentences(3, 2, to=to)} for to in (3, 8))
    means = [
        layer_means(predict(model, inputs, samples=0, variances=True).variances, padding_of(inputs))
        for inputs in (short, long)
    ]
    assert means[1].numpy() == pytest.approx(means[0].numpy())
    mask = {"tokens": short["tokens"], "padding_mask": torch.tensor([[False] * 3] * 2)}
    assert padding_of(mask) is mask["padding_mask"]
    assert padding_of(images(2)) is None


@pytest.mark.parametrize(("kind", "samples"), [("softmax", 10), ("cgp", 0)])
def test_nothing_to_draw_from_is_the_mean(kind: str, samples: int) -> None:
    built = build_predictor("model", vision(kind), samples)
    assert (built.samples, built.draw) == (0, "none")


@pytest.mark.parametrize(("name", "kind", "dropout", "samples", "reason"), [
    ("mean", "softmax", 0.1, 10, "the model does not draw"),
    ("dropout_draws", "softmax", 0.3, 4, "the model does not draw"),
    ("mc_dropout", "cgp", 0.1, 0, "it draws, and 0"),
    ("mc_dropout", "cgp", 0.0, 5, "expected a model with"),
    ("laplace", "softmax", 0.1, 3, "it needs the training"),
    ("gp_layer", "softmax", 0.1, 3, "it needs the training"),
])  # fmt: skip
def test_predictors_that_a_model_cannot_have(
    name: str, kind: str, dropout: float, samples: int, reason: str
) -> None:
    with pytest.raises(UnavailablePredictorError, match=f"{name} is left out: {reason}"):
        build_predictor(name, vision(kind, dropout=dropout), samples)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def device(self) -> torch.device:
        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")
        return torch.device("cuda")

    @pytest.mark.parametrize("name", ["model", "mean", "mc_dropout", "dropout_draws"])
    def test_as_on_a_cpu(self, name: str, device: torch.device) -> None:
        model, items = vision("cgp", dropout=0.2), ItemSet("test", images(9), torch.arange(9) % 3)
        found = []
        for place in (CPU, device):
            built = build_predictor(name, model.to(place), 4)
            found.append(predict_items(built.predictor, items, samples=built.samples, seed=1, device=place))
        assert found[1].logits.is_cuda
        assert found[1].logits.cpu().numpy() == pytest.approx(found[0].logits.numpy(), abs=1e-5)
        if found[0].layer_variance is not None:
            assert found[1].layer_variance.cpu().numpy() == pytest.approx(
                found[0].layer_variance.numpy(), abs=1e-6
            )

    def test_nothing_is_read_back_inside_a_chunk(self, device: torch.device) -> None:
        """Of the model's passes; the checks at the end of a chunk may wait."""
        model = vision("cgp").to(device)
        built = build_predictor("model", model, 4)
        x = images(6).to(device)
        predict_items(built.predictor, ItemSet("test", x), samples=4, seed=0, device=device)  # warm
        torch.cuda.set_sync_debug_mode("error")
        try:
            with deferred_checks():
                collected = model(
                    x, draw="independent", generator=ItemNoise(0, *[torch.arange(6, device=device)] * 2)
                )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert collected.logits.isfinite().all()

    def test_memory_is_the_allocators(self, device: torch.device) -> None:
        found = peak_memory(lambda: torch.zeros(1 << 20, device=device), device)
        assert 4 << 20 <= found < 6 << 20


# Predictions on disk: taken only where everything agrees, refused where they are damaged

KEY = CacheKey("model", 10, 0, "independent", "m" * 64, "{}", "i" * 64, "0.2.0", fitted="")


def raw(**changes: object) -> RawPrediction:
    g = torch.Generator().manual_seed(0)
    logits, variance = torch.randn(10, 6, 3, generator=g), torch.rand(6, 2, generator=g)
    return replace(RawPrediction(logits, torch.arange(6), variance), **changes)


@pytest.mark.parametrize("changes", [{}, {"labels": None}, {"layer_variance": None}])
def test_there_and_back(changes: dict, tmp_path: Path) -> None:
    written = raw(**changes)
    path = PredictionCache(tmp_path).write("corrupted/fog/3", KEY, written)
    assert path == tmp_path / "model" / "corrupted" / "fog" / "3.safetensors"
    found = PredictionCache(tmp_path).read("corrupted/fog/3", KEY)
    assert found.logits.equal(written.logits)
    for name in ("labels", "layer_variance"):
        before, after = getattr(written, name), getattr(found, name)
        assert (before is None) == (after is None)
        assert before is None or after.equal(before)


CHANGES = {
    "samples": 5, "seed": 1, "draw": "joint", "model": "n" * 64, "config": '{"heads": 2}', "items": "j" * 64,
    "fitted": '{"seed": 1}', "version": "0.0.1", "noise": 0, "predictor": "mean",
}  # fmt: skip


@pytest.mark.parametrize("name", list(asdict(KEY)))
def test_another_key_is_not_the_same(name: str, tmp_path: Path) -> None:
    cache = PredictionCache(tmp_path)
    assert cache.read("test", KEY) is None
    cache.write("test", KEY, raw())
    other = replace(KEY, **{name: CHANGES[name]})
    assert cache.read("test", other) is None
    cache.write("test", other, raw(logits=torch.zeros(1, 6, 3)))
    assert len(cache.read("test", other).logits) == 1
    # it took the place of the old one; but a predictor has files of its own
    assert (cache.read("test", KEY) is None) == (name != "predictor")


def test_a_file_that_does_not_say_which_version_wrote_it_is_passed_over(tmp_path: Path) -> None:
    """As 0.1.0 wrote them; it is no damage."""
    path = PredictionCache(tmp_path).write("test", KEY, raw())
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    known = ("predictor", "samples", "seed", "draw", "model", "items")
    metadata["key"] = json.dumps({name: asdict(KEY)[name] for name in known})
    save_file(tensors, path, metadata)
    assert PredictionCache(tmp_path).read("test", KEY) is None


@pytest.mark.parametrize("damage", ["truncated", "altered", "empty", "other format", "no logits"])
def test_damage_is_refused_with_the_reason(damage: str, tmp_path: Path) -> None:
    path = PredictionCache(tmp_path).write("test", KEY, raw())
    content = bytearray(path.read_bytes())
    if damage in ("truncated", "empty"):
        path.write_bytes(content[:-20] if damage == "truncated" else b"")
    elif damage == "altered":
        content[-3] ^= 1
        path.write_bytes(content)
    elif damage == "other format":
        save_file({"logits": torch.zeros(1)}, path, {"format": "mine"})
    else:
        tensors = {"labels": torch.arange(6)}
        stated = {"key": json.dumps(asdict(KEY)), "sha256": predictions._digest(tensors)}
        save_file(tensors, path, {"format": predictions.FORMAT, **stated})
    with pytest.raises(DamagedPredictionError, match=r"test\.safetensors is damaged: .*--fresh"):
        PredictionCache(tmp_path).read("test", KEY)


def test_fresh_passes_over_what_was_there(tmp_path: Path) -> None:
    path = PredictionCache(tmp_path).write("test", KEY, raw())
    path.write_bytes(b"damaged")
    fresh = PredictionCache(tmp_path, fresh=True)
    assert fresh.read("test", KEY) is None
    fresh.write("test", KEY, raw())
    assert fresh.read("test", KEY).logits.equal(raw().logits)  # its own is taken
    assert PredictionCache(tmp_path, fresh=True).read("test", KEY) is None


def test_a_temperature_for_every_item() -> None:
    logits = draws(5)
    heats = torch.tensor([0.5, 1.0, 2.0, 3.0, 9.0], dtype=torch.float64)
    found = Predicted.from_logits(logits, temperature=heats)
    for i, heat in enumerate(heats.tolist()):
        alone = Predicted.from_logits(logits[:, i : i + 1], temperature=heat)
        assert found.prediction.probs[i].numpy() == pytest.approx(alone.prediction.probs[0].numpy())
    again = found.tempered(2.0)
    expected = Predicted.from_logits(logits, temperature=2.0).prediction.probs
    assert again.prediction.probs.numpy() == pytest.approx(expected.numpy())
    with pytest.raises(ValueError, match=r"temperature.*\[5\].*\(3,\)"):
        found.tempered(heats[:3])


def test_the_order_of_temperatures() -> None:
    suffixes = ("", "+temperature", "+shift_temperature", "+adaptive_temperature", "+odd")
    ordered = [*(f"model{suffix}" for suffix in suffixes), "mean"]
    assert sorted(sorted(ordered), key=predictor_order) == ordered
