"""Predictions from draws: closed forms, noise that belongs to items, bounded batches, an untouched model."""

import copy
import io
import math
import pickle
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from gpattention.gp import ItemNoise
from gpattention.models.predict import predict
from gpattention.models.prediction import Prediction
from tests.models.stub_models import StubModel, StubOutput, normal
from tests.refusals import refusals

X = normal(11, 5, seed=1)
NO_DRAWS = "mutual_information is 0 because there are not two draws, which is not certainty"


def same(a: Prediction, b: Prediction, tolerance: float = 1e-6) -> None:
    assert a.logits.shape == b.logits.shape
    torch.testing.assert_close(a.logits, b.logits, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.probs, b.probs, rtol=tolerance, atol=tolerance)


class TestUncertainty:
    def test_against_numpy(self) -> None:
        logits = 4 * normal(6, 9, 5, seed=2, dtype=torch.float64)
        p = Prediction.from_logits(logits)
        each = np.exp(logits.numpy())
        each /= each.sum(-1, keepdims=True)
        mean = each.mean(0)
        total, own = -(mean * np.log(mean)).sum(-1), -(each * np.log(each)).sum(-1).mean(0)
        for found, expected in [
            (p.probs, mean), (p.log_probs, np.log(mean)), (p.entropy, total), (p.expected_entropy, own),
            (p.mutual_information, total - own), (p.confidence, mean.max(-1)),
        ]:  # fmt: skip
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)
        assert p.label.tolist() == mean.argmax(-1).tolist()
        assert (p.samples, len(p), p.classes) == (6, 9, 5)

    def test_mutual_information_is_never_negative_and_huge_logits_stay_finite(self) -> None:
        alike = normal(1, 500, 4, seed=3).expand(5, 500, 4)
        alike = alike + 1e-7 * normal(5, 500, 4, seed=4)
        assert bool((Prediction.from_logits(alike).mutual_information >= 0).all())
        p = Prediction.from_logits(torch.tensor([[[0.0, 3e4]]]))
        assert p.entropy.item() == 0
        assert p.log_probs[0, 0].item() == -3e4  # its probability is 0 in floating point


class TestDrawn:
    """A disagreement of 0 without draws differs from that of draws which agree."""

    def every_form(self, p: Prediction) -> list[Prediction]:
        """The prediction after everything that makes another of it."""
        stored = io.BytesIO()
        torch.save(p, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        return [
            p, p[2:5], p[3], p.to("cpu"), Prediction.cat([p[:4], p[4:]]), copy.deepcopy(p),
            pickle.loads(pickle.dumps(p)), loaded, Prediction.from_logits(p.logits / 2, drawn=p.drawn),
        ]  # fmt: skip

    @pytest.mark.parametrize(("samples", "drawn"), [(0, False), (1, True), (4, True)])
    def test_it_goes_with_the_prediction(self, samples: int, drawn: bool) -> None:
        assert predict(StubModel(), X, samples=samples)[[]].drawn is drawn
        for form in self.every_form(predict(StubModel(), X, samples=samples)):
            assert form.drawn is drawn
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                disagreement = form.mutual_information
            assert bool((disagreement == 0).all()) == (samples < 2)
            assert len(heard) == (samples < 2)
            assert all(str(warning.message).startswith(NO_DRAWS) for warning in heard)
            assert all(warning.filename == __file__ for warning in heard)

    def test_logits_of_others_are_looked_at(self) -> None:
        draws = normal(4, 6, 3)
        assert Prediction.from_logits(draws).drawn
        assert not Prediction.from_logits(draws[:1]).drawn
        copies = Prediction.from_logits(draws[:1].expand(4, 6, 3))  # as a fit that chose no draws makes
        assert not copies.drawn
        assert not Prediction.cat([Prediction.from_logits(draws), copies]).drawn


class TestParts:
    WHOLE = predict(StubModel(), X, samples=4, variances=True)

    @pytest.mark.parametrize(
        "index", [slice(2, 7), X[:, 0] > 0, [5, 0], [], 3, -1, -2, np.int64(7), range(2, 8, 5)]
    )
    @pytest.mark.parametrize("make", [None, np.array, torch.tensor])
    def test_indexing(self, index: Any, make: Any) -> None:
        whole, given = self.WHOLE, index
        if make is not None and isinstance(index, list):
            given = make(index, dtype=(make.__module__ == "numpy" and np.uint8) or torch.long)
        part = whole[given]
        rows = torch.arange(11)[[index] if isinstance(index, int | np.integer) else index]
        assert len(part) == len(rows)
        assert torch.equal(part.logits, whole.logits[:, rows])
        for name in ("probs", "label", "confidence", "entropy", "expected_entropy", "mutual_information"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows])
        assert torch.equal(part.variances[1], whole.variances[1][rows])
        mask = [place in (2, 7) for place in range(11)]
        same(whole[mask if make is None else make(mask)], whole[[2, 7]])
        same(whole[torch.tensor(-4)], whole[7])

    def test_cat_and_iteration(self) -> None:
        for again in (Prediction.cat([self.WHOLE[:4], self.WHOLE[4:]]), Prediction.cat(list(self.WHOLE))):
            same(again, self.WHOLE, 0)
            assert again.variances[0] is None
            assert torch.equal(again.variances[1], self.WHOLE.variances[1])


class TestNoiseBelongsToItems:
    @pytest.mark.parametrize("batch_size", [1, 3, 10, 1000])
    def test_batch_size_changes_nothing(self, batch_size: int) -> None:
        model = StubModel()
        whole = predict(model, X, samples=7, variances=True, batch_size=77)
        steps: list[tuple[int, int]] = []
        asked: Any = {"batch_size": batch_size, "progress": lambda *step: steps.append(step)}
        part = predict(model, X, samples=7, variances=True, **asked)
        same(part, whole)
        assert steps == [(min(done + batch_size, 77), 77) for done in range(0, 77, batch_size)]
        same(predict(StubModel(), X, samples=3), Prediction.from_logits(whole.logits[:3]))  # the first ones
        torch.testing.assert_close(part.variances[1], whole.variances[1], rtol=1e-5, atol=1e-6)
        assert max(call["rows"] for call in model.calls[1:]) == min(batch_size, 77)

    def test_seeds_items_and_samples_differ(self) -> None:
        alike = X[:1].expand(4, 5)
        a, b = (predict(StubModel(), alike, samples=3, seed=seed).logits for seed in (0, 1))
        rows = torch.cat([a.flatten(0, 1), b.flatten(0, 1)])  # [24, 3]
        assert torch.pdist(rows).min() > 1e-3


class TestModelAndInputs:
    def test_variances_are_means_over_samples(self) -> None:
        model = StubModel()
        p = predict(model, X, samples=6, variances=True, batch_size=5)
        each = []
        for s in range(6):
            noise = ItemNoise(0, torch.arange(11), torch.full((11,), s))
            each.append(model(X, draw="independent", generator=noise, need=("variance",)).layers[1].variance)
        assert p.variances[0] is None
        assert p.variances[1].shape == (11, 2, 3)
        torch.testing.assert_close(p.variances[1], torch.stack(each).mean(0), rtol=1e-5, atol=1e-6)
        mean = predict(model, X, samples=0, variances=True).variances[1]
        expected = model.features(X).square()[:, None, :3].expand(-1, 2, 3)
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)

    def test_mappings(self) -> None:
        scale = normal(11, seed=4)
        mapped = predict(StubModel(), {"x": X, "scale": scale}, samples=3, batch_size=4)
        same(mapped, predict(StubModel(), X * scale[:, None], samples=3))


class Pooled(StubModel):
    """Its logits have lost the axis of items."""

    def forward(self, inputs, **options) -> StubOutput:
        output = super().forward(inputs, **options)
        return StubOutput(output.logits[0], output.layers)


def of(inputs: Any = X, **options: Any) -> Prediction:
    return predict(StubModel(), inputs, **options)


def test_printed_it_is_a_short_table() -> None:
    lines = repr(of(samples=4)).splitlines()
    assert lines[0] == "Prediction of 11 items, 3 classes, 4 draws (entropies in nats)"
    assert "item  label  confidence  entropy  expected entropy  mutual information" in lines[1]
    assert (len(lines), lines[-1]) == (2 + 8 + 1, "... and 3 more")
    found = of(samples=4)
    assert lines[2].split()[:3] == ["0", str(int(found.label[0])), f"{float(found.confidence[0]):.3f}"]
    with warnings.catch_warnings():  # nothing is said of draws that are none
        warnings.simplefilter("error")
        undrawn = repr(of(samples=0)[:2])
    assert "no draws" in undrawn
    assert "mutual" not in undrawn
    assert undrawn.count("\n") == 3
    assert "of 0 items" in repr(found[[]])


def test_as_a_table_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    found = of(samples=4)
    frame = found.to_frame(probs=True)
    assert list(frame["item"]) == list(range(11))
    for name in ("label", "confidence", "entropy", "expected_entropy", "mutual_information"):
        assert list(frame[name]) == getattr(found, name).tolist()
    assert list(frame["probs_2"]) == found.probs[:, 2].tolist()
    assert "mutual_information" not in of(samples=0).to_frame()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"gpattention\[train\]"):
        found.to_frame()


test_refusals = refusals([
    (lambda: of(samples=-1), "samples", "got -1"),
    (lambda: of(batch_size=0), "batch_size", "got 0"),
    (lambda: of(first_item=-3), "first_item", "got -3"),
    (lambda: of(draw="both"), "draw", "got 'both'"),
    (lambda: of(X[:0]), "at least one item", "got 0"),
    (lambda: of({}), "inputs", "empty mapping"),
    (lambda: of({"x": X, "scale": X[:3, 0]}), "number of items", "{'x': 11, 'scale': 3}"),
    (lambda: of({"scale": 1.0, "x": X}), "scale", "got float"),
    (lambda: predict(Pooled(), X, samples=0), r"\[11, ...\]", r"got shape \(3,\)"),
    (lambda: predict(StubModel(variances=False), X, variances=True), "variances", "2 layers"),
    (lambda: Prediction.cat([]), "Prediction", "got none"),
    (lambda: Prediction.cat([of(samples=4), of(samples=0)]), "logits", r"\(1, 3\), \(4, 3\)"),
    (lambda: Prediction.cat([of(variances=True), of()]), "variances", "None"),
    (lambda: Prediction.from_logits(normal(3, 4)), "logits", r"got shape \(3, 4\)"),
    (lambda: Prediction.from_logits(normal(1, 3, 4).numpy()), "logits", "got ndarray"),
    (lambda: Prediction.from_logits(torch.tensor([[[0.0, math.nan]]])), "logits", "1 non-finite"),
])  # fmt: skip
test_places_that_are_none = refusals([
    (lambda: of()[11], "below 11", "got 11"),
    (lambda: of()[[True, False]], "11 items", r"\(2,\) and torch.bool"),
    (lambda: of()[[0.5]], "item numbers", "float32"),
], IndexError)  # fmt: skip
