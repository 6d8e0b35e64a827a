"""Suite `clean`: metrics, reliability, gallery and health."""

import math
from base64 import b64decode

import numpy as np
import pytest
import torch

from gpattention.attention import Attention
from gpattention.evaluation.predictions import ItemSet, Predicted
from gpattention.evaluation.suites import Findings, clean, clean_findings, gallery, health_table
from gpattention.evaluation.suites.examples import token_maps
from gpattention.models import predict
from tests.evaluation.cases import draws, mean_probs, predicted, softmax, some_labels
from tests.models.small_models import seeded, sentences, text, vision
from tests.oracles import metrics as oracles


def by_metric(found: Findings, name: str) -> dict[str, float]:
    return {record.metric: record.value for record in found.records if record.set == name}


@pytest.mark.parametrize("samples", [1, 5])
def test_every_metric_against_loops(samples: int) -> None:
    one = predicted(70, samples=samples)
    found = by_metric(clean_findings("model", {"test": one}, batch=25), "test")
    probs, labels = mean_probs(one), one.known_labels.numpy()
    confidence, right = oracles.confidences(probs, labels)
    parts = [slice(start, start + 25) for start in range(0, 70, 25)]
    expected = {
        "accuracy": oracles.accuracy(probs, labels),
        "mcc": oracles.mcc(probs, labels),
        "nll": oracles.nll(probs, labels, least=0.0),
        "brier": oracles.brier(probs, labels),
        "ece": oracles.ece(probs, labels, 15),
        "mce": oracles.mce(probs, labels, 15),
        "adaptive_ece": oracles.adaptive_ece(probs, labels, 15),
        "classwise_ece": oracles.classwise_ece(probs, labels, 15),
        "aurc": oracles.aurc(confidence, 1 - right),
        "batch_ece": np.mean([oracles.ece(probs[part], labels[part], 10) for part in parts]),
        "batch_mce": np.mean([oracles.mce(probs[part], labels[part], 10) for part in parts]),
    }
    assert found == pytest.approx(expected, abs=1e-9)


def test_a_certain_mistake_costs_what_its_logits_say() -> None:
    """In float32 the probability of e^-200 is 0, and its logarithm would be cut off."""
    one = Predicted.from_logits(torch.tensor([[[200.0, 0.0], [1.0, 0.0]]]), torch.tensor([1, 0]))
    found = by_metric(clean_findings("model", {"test": one}, batch=10), "test")
    assert found["nll"] == pytest.approx((200 + math.log1p(math.exp(-1))) / 2)


def test_only_sets_with_labels_are_evaluated() -> None:
    unlabelled = Predicted.from_logits(draws())
    sets = {"validation": predicted(), "test": predicted(seed=8), "ood/far": unlabelled}
    found = clean_findings("mean", sets, batch=20)
    assert {(r.set, r.predictor) for r in found.records} == {("validation", "mean"), ("test", "mean")}
    assert set(found.curves["reliability"]) == {"mean"}
    assert clean_findings("mean", {"ood/far": unlabelled}, batch=20) == Findings()
    with pytest.raises(ValueError, match="items with labels"):
        unlabelled.known_labels  # noqa: B018
    with pytest.raises(ValueError, match="labels from 0 to 3, got 4"):
        Predicted.from_logits(draws(items=1), torch.tensor([4]))


def test_reliability_adds_up_to_the_calibration_error() -> None:
    found = clean_findings("model", {"test": predicted(90)}, batch=30)
    bins = found.curves["reliability"]["model"]
    assert (len(bins["edges"]), sum(bins["count"])) == (16, 90)
    assert [c is None for c in bins["confidence"]] == [n == 0 for n in bins["count"]]
    each = zip(bins["count"], bins["confidence"], bins["accuracy"], strict=True)
    gap = sum(n * abs(c - a) for n, c, a in each if n)
    assert gap / 90 == pytest.approx(by_metric(found, "test")["ece"])


def test_temperature_divides_every_draw() -> None:
    logits = draws()
    hot = Predicted.from_logits(logits, some_labels(logits)).tempered(3.0)
    hotter = hot.tempered(0.5)  # counts from the logits as they were
    for found, temperature in ((hot, 3.0), (hotter, 0.5)):
        expected = softmax(logits.double().numpy() / temperature).mean(0)
        assert found.prediction.probs.numpy() == pytest.approx(expected)
        records = clean_findings("model+temperature", {"test": found}, batch=20).records
        assert {record.detail["temperature"] for record in records} == {temperature}


def test_findings_merge() -> None:
    first = Findings(curves={"a": {"x": {"p": 1}}, "b": [1]}, notes=("one", "two"))
    second = Findings(curves={"a": {"x": {"q": 2}, "y": 3}, "b": [2]}, notes=("two", "three"))
    both = Findings.merge([first, second])
    assert both.curves == {"a": {"x": {"p": 1, "q": 2}, "y": 3}, "b": [2]}
    assert both.notes == ("one", "two", "three")
    assert first.curves == {"a": {"x": {"p": 1}}, "b": [1]}  # as it was


# Items worth looking at, with the variance at their tokens; health by layer

CPU = torch.device("cpu")
CLASSES = ("red", "green", "blue")


def pixels(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 3, 8, 8), generator=seeded(0), dtype=torch.uint8)


@pytest.fixture(scope="module")
def made() -> tuple:
    model = vision("softmax", "cgp")
    items = ItemSet(
        "test", pixels(30), torch.randint(3, (30,), generator=seeded(1)), lambda x: x.double() / 255
    )
    raw = predict(model, items.inputs(0, 30, CPU), samples=4)
    found = Predicted.from_logits(raw.logits, items.labels)
    return model, items, found, gallery(model, items, found, CLASSES, CPU)


def picture(entry: dict) -> np.ndarray:
    return np.frombuffer(b64decode(entry["image"]["pixels"]), np.uint8).reshape(entry["image"]["shape"])


@pytest.mark.parametrize("kind", ["softmax", "kernel", "sgpa", "direct", "cgp", "scgp"])
def test_attention_that_a_token_gets_is_its_share_of_the_weights(kind: str) -> None:
    model, x = vision(kind), pixels(3).double() / 255
    variances, shares = token_maps(model, x)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    total, calls = np.zeros((3, 4)), list[torch.Tensor]()
    hooks = [
        layer.register_forward_pre_hook(
            lambda own, given, named: calls.append((own, given, dict(named))), with_kwargs=True
        )
        for layer in layers
    ]
    with torch.no_grad():
        model.eval()(x)
        for hook in hooks:
            hook.remove()
        for layer, given, named in list(calls):
            weights = layer(*given, **{**named, "need": ("weights",)}).weights
            for item, head in np.ndindex(*weights.shape[:2]):
                total[item] += np.abs(weights[item, head].numpy()).sum(0)
    assert len(calls) == len(layers)
    assert shares == pytest.approx(total / total.sum(1, keepdims=True), rel=1e-4)
    assert (variances[0] is None) == (not model.draws)


def test_a_layer_without_weights_gives_none() -> None:
    """The last layer of KEP-SVGP weighs no values; those below are softmax."""
    x = pixels(3).double() / 255
    for model, known in ((vision("softmax", "kep-svgp"), True), (vision("kep-svgp"), False)):
        variances, shares = token_maps(model, x)
        assert [len(row) for row in variances] == [4] * 3
        if known:
            assert [sum(row) for row in shares] == pytest.approx([1.0] * 3, abs=1e-3)
        else:
            assert shares == [None] * 3


def test_the_gallery_shows_the_items_worth_looking_at(made: tuple) -> None:
    model, items, found, shown = made
    shown, answers = {k: v for k, v in shown.items() if k != "answers"}, shown["answers"]
    assert (answers["items"], answers["set"]) == (items.digest, "test")
    assert answers["predicted"] == found.prediction.label.tolist()
    assert answers["labels"] == items.labels.tolist()
    assert answers["confidence"] == pytest.approx(found.prediction.confidence.tolist(), rel=1e-5)
    confidence, right = found.prediction.confidence, found.prediction.probs[torch.arange(30), items.labels]
    wrong = [i for i in range(30) if found.prediction.label[i] != items.labels[i]]
    places = {kind: [entry["index"] for entry in entries] for kind, entries in shown.items()}
    assert places["most_certain"] == sorted(range(30), key=lambda i: -confidence[i])[:8]
    assert places["least_certain"] == sorted(range(30), key=lambda i: confidence[i])[:8]
    assert places["most_wrong"] == sorted(wrong, key=lambda i: right[i])[:8]
    sure = sorted(wrong, key=lambda i: -confidence[i])[:8]
    assert places["sure_and_wrong"] == sure
    for entry in (each for kind in shown.values() for each in kind):
        place = entry["index"]
        assert entry["label"] == CLASSES[items.labels[place]]
        assert entry["predicted"] == CLASSES[found.prediction.label[place]]
        assert entry["confidence"] == float(confidence[place])
        assert entry["uncertainty"] == float(found.prediction.entropy[place])
        assert (picture(entry) == items.stored[place].permute(1, 2, 0).numpy()).all()
        assert (entry["grid"], entry["words"]) == ([2, 2], None)
        one = predict(model, items.inputs(place, place + 1, CPU), samples=0, variances=True)
        assert entry["token_variance"] == pytest.approx(one.variances[1].mean(1)[0].tolist(), rel=1e-5)


def test_words_and_padding() -> None:
    model, x = text("cgp"), sentences(2, 5, 3)
    words = tuple(tuple(f"w{i}" for i in range(n)) for n in (2, 5, 3))
    items = ItemSet("test", {"tokens": x}, torch.tensor([0, 1, 2]), words=words)
    found = Predicted.from_logits(predict(model, {"tokens": x}, samples=2).logits, items.labels)
    shown = gallery(model, items, found, CLASSES, CPU)
    assert len(shown["most_certain"]) == 3
    for entry in shown["most_certain"]:
        assert entry["words"] == list(words[entry["index"]])
        assert len(entry["token_variance"]) == len(entry["words"])
        assert (entry["image"], entry["grid"]) == (None, None)


def test_a_model_without_variance_and_without_mistakes() -> None:
    model = vision("softmax")
    x = pixels(4).float() / 255  # decimals are pixels too
    raw = predict(model, x.double(), samples=0)
    items = ItemSet("test", x.double(), raw.label)
    shown = gallery(model, items, Predicted.from_logits(raw.logits, raw.label), CLASSES, CPU)
    assert shown["most_wrong"] == []
    assert {entry["token_variance"] for entry in shown["most_certain"]} == {None}
    first = shown["most_certain"][0]
    assert (picture(first) == pixels(4)[first["index"]].permute(1, 2, 0).numpy()).all()
    assert sum(first["token_attention"]) == pytest.approx(1, abs=1e-4)


def test_health_has_a_row_for_every_layer(made: tuple) -> None:
    model, items, _, _ = made
    rows = health_table(model, items, CPU)
    report = model.health(items.inputs(0, 30, CPU), items.labels)
    assert [row["kind"] for row in rows] == ["softmax", "cgp"]
    assert [row["variance_correlation"] for row in rows] == list(report.variance_correlation)
    assert rows[1]["stddev_ratio"] == report.layers[1].stddev_ratio


def test_health_of_long_sequences_looks_at_fewer_items(made: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    model, items, _, _ = made
    monkeypatch.setattr(clean, "HEALTH_PAIRS", 7 * model.config.longest**2 + 1)
    report = model.health(items.inputs(0, 7, CPU), items.labels[:7])
    assert health_table(model, items, CPU)[1]["stddev_ratio"] == report.layers[1].stddev_ratio
