"""Predictions from draws: closed forms, noise that belongs to items, bounded batches, an untouched model."""

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch

from gpattention.gp import ItemNoise, NonFiniteError
from gpattention.models.prediction import Prediction, predict
from tests.models.stub_models import StubModel, normal

X = normal(11, 5, seed=1)
NO_DRAWS = "mutual_information is 0 because there are not two draws, which is not certainty"


def of_probs(*draws: list[float]) -> Prediction:
    """One item, whose draws have these class probabilities."""
    return Prediction.from_logits(torch.tensor(draws, dtype=torch.float64).log()[:, None])


def same(a: Prediction, b: Prediction, tolerance: float = 1e-6) -> None:
    assert a.logits.shape == b.logits.shape
    torch.testing.assert_close(a.logits, b.logits, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.probs, b.probs, rtol=tolerance, atol=tolerance)


class TestUncertainty:
    def test_one_uniform_draw(self) -> None:
        p = Prediction.from_logits(torch.full((1, 2, 7), 3.0, dtype=torch.float64))
        torch.testing.assert_close(p.entropy, torch.full((2,), math.log(7), dtype=torch.float64))
        torch.testing.assert_close(p.expected_entropy, p.entropy)
        with pytest.warns(UserWarning, match=NO_DRAWS):
            assert p.mutual_information.tolist() == [0, 0]
        torch.testing.assert_close(p.confidence, torch.full((2,), 1 / 7, dtype=torch.float64))

    def test_sure_draws_that_disagree(self) -> None:
        p = Prediction.from_logits(torch.tensor([[[80.0, 0.0]], [[0.0, 80.0]]], dtype=torch.float64))
        assert p.entropy.item() == pytest.approx(math.log(2), abs=1e-12)
        assert p.expected_entropy.item() == pytest.approx(0, abs=1e-12)
        assert p.mutual_information.item() == pytest.approx(math.log(2), abs=1e-12)

    def test_two_draws_by_hand(self) -> None:
        p = of_probs([0.9, 0.1], [0.2, 0.8])

        def entropy(x: float) -> float:
            return -x * math.log(x) - (1 - x) * math.log(1 - x)

        assert p.probs[0].tolist() == pytest.approx([0.55, 0.45])
        assert (p.label.item(), p.confidence.item()) == (0, pytest.approx(0.55))
        assert p.entropy.item() == pytest.approx(entropy(0.55))
        assert p.expected_entropy.item() == pytest.approx((entropy(0.9) + entropy(0.2)) / 2)
        assert p.mutual_information.item() == pytest.approx(entropy(0.55) - (entropy(0.9) + entropy(0.2)) / 2)

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

    def test_half_precision_is_raised(self) -> None:
        p = Prediction.from_logits(normal(2, 3, 4).bfloat16())
        assert p.probs.dtype == p.logits.dtype == torch.float32


class TestDrawn:
    """A disagreement of 0 without draws is told apart from that of draws which agree."""

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
                told = form.mutual_information
            assert bool((told == 0).all()) == (samples < 2)
            assert len(heard) == (samples < 2)
            assert all(str(warning.message).startswith(NO_DRAWS) for warning in heard)
            assert all(warning.filename == __file__ for warning in heard)

    def test_logits_of_others_are_looked_at(self) -> None:
        draws = normal(4, 6, 3)
        assert Prediction.from_logits(draws).drawn
        assert not Prediction.from_logits(draws[:1]).drawn
        copies = Prediction.from_logits(
            draws[:1].expand(4, 6, 3)
        )  # as a handle makes whose fit chose no draws
        assert not copies.drawn
        assert not Prediction.cat([Prediction.from_logits(draws), copies]).drawn

    def test_it_warns_once_for_every_line(self) -> None:
        p = predict(StubModel(), X, samples=0)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("default")
            for _ in range(3):
                p.mutual_information.sum()
        assert len(heard) == 1


class TestParts:
    def whole(self) -> Prediction:
        return predict(StubModel(), X, samples=4, variances=True)

    @pytest.mark.parametrize("index", [slice(2, 7), X[:, 0] > 0, torch.tensor([5, 0]), [5, 0], 3, -1, -2])
    def test_indexing(self, index) -> None:
        whole = self.whole()
        part = whole[index]
        rows = torch.arange(11)[[index] if isinstance(index, int) else index]
        assert len(part) == len(rows)
        same(part, Prediction.from_logits(whole.logits[:, rows]))
        for name in ("label", "confidence", "entropy", "expected_entropy", "mutual_information"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows])
        assert torch.equal(part.variances[1], whole.variances[1][rows])

    @pytest.mark.parametrize("make", [list, np.array, torch.tensor])
    def test_masks_and_numbers_of_any_type(self, make) -> None:
        whole = self.whole()
        mask = make([place in (2, 7) for place in range(11)])
        for index in (mask, make([2, 7]), np.array([2, 7], dtype=np.uint8), range(2, 8, 5)):
            same(whole[index], Prediction.from_logits(whole.logits[:, [2, 7]]))
        for index in (np.int64(7), torch.tensor(7), torch.tensor(-4)):
            same(whole[index], Prediction.from_logits(whole.logits[:, [7]]))

    def test_empty_selection(self) -> None:
        assert len(self.whole()[torch.zeros(11, dtype=torch.bool)]) == 0
        assert len(self.whole()[[]]) == 0

    def test_cat_and_iteration(self) -> None:
        whole = self.whole()
        for again in (Prediction.cat([whole[:4], whole[4:]]), Prediction.cat(list(whole))):
            same(again, whole, 0)
            assert again.variances[0] is None
            assert torch.equal(again.variances[1], whole.variances[1])
        moved = whole.to("cpu")
        assert torch.equal(moved.entropy, whole.entropy)

    def test_errors(self) -> None:
        whole = self.whole()
        with pytest.raises(IndexError, match="below 11, got 11"):
            whole[11]
        with pytest.raises(IndexError, match=r"mask of 11 items, got shape \(2,\) and torch.bool"):
            whole[[True, False]]
        with pytest.raises(IndexError, match=r"got shape \(1,\) and torch.float32"):
            whole[[0.5]]
        with pytest.raises(ValueError, match="at least one prediction"):
            Prediction.cat([])
        with pytest.raises(ValueError, match=r"one \(samples, classes\), got \[\(1, 3\), \(4, 3\)\]"):
            Prediction.cat([whole, predict(StubModel(), X, samples=0)])
        with pytest.raises(ValueError, match="variances of the same layers"):
            Prediction.cat([whole, predict(StubModel(), X, samples=4)])
        with pytest.raises(ValueError, match=r"\[samples, items, classes\].*got shape \(3, 4\)"):
            Prediction.from_logits(normal(3, 4))
        with pytest.raises(ValueError, match="logits to be a tensor, got ndarray: torch"):
            Prediction.from_logits(normal(1, 3, 4).numpy())  # type: ignore[arg-type]
        with pytest.raises(NonFiniteError, match="logits hold 1 non-finite"):
            Prediction.from_logits(torch.tensor([[[0.0, math.nan]]]))


class TestNoiseBelongsToItems:
    @pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 10, 64, 1000])
    def test_batch_size_changes_nothing(self, batch_size: int) -> None:
        model = StubModel()
        whole = predict(model, X, samples=7, variances=True, batch_size=77)
        part = predict(model, X, samples=7, variances=True, batch_size=batch_size)
        same(part, whole)
        torch.testing.assert_close(part.variances[1], whole.variances[1], rtol=1e-5, atol=1e-6)
        assert max(call["rows"] for call in model.calls[1:]) == min(batch_size, 77)

    def test_other_items_change_nothing(self) -> None:
        whole = predict(StubModel(), X, samples=5)
        same(predict(StubModel(), X[4:9], samples=5, first_item=4), whole[4:9])
        changed = X.clone()
        changed[0] = 0
        same(predict(StubModel(), changed, samples=5)[1:], whole[1:])

    def test_fewer_samples_are_the_first(self) -> None:
        few, many = (predict(StubModel(), X, samples=n) for n in (3, 8))
        torch.testing.assert_close(few.logits, many.logits[:3], rtol=1e-6, atol=1e-6)

    def test_seeds_items_and_samples_differ(self) -> None:
        alike = X[:1].expand(4, 5)
        a, b = (predict(StubModel(), alike, samples=3, seed=seed).logits for seed in (0, 1))
        rows = torch.cat([a.flatten(0, 1), b.flatten(0, 1)])  # [24, 3]
        assert torch.pdist(rows).min() > 1e-3

    def test_draws_have_the_moments_of_the_model(self) -> None:
        model = StubModel(spread=0.3)
        model.first.weight.data.zero_()  # then only the second draw reaches the logits linearly
        model.second.weight.data.zero_()
        logits = predict(model, X[:1], samples=20_000, batch_size=20_000).logits[:, 0].double()  # [S, C]
        weight, mean = model.head.weight.detach().double(), model.head(model.second.bias).detach().double()
        cov = 0.09 * weight @ weight.mT
        assert torch.allclose(logits.mean(0), mean, atol=5 * float((cov.diagonal() / 20_000).sqrt().max()))
        torch.testing.assert_close(logits.T.cov(), cov, rtol=0.05, atol=0.05 * float(cov.diagonal().max()))


class TestMeanPrediction:
    def test_samples_0_is_the_mean(self) -> None:
        model = StubModel()
        p = predict(model, X, samples=0)
        assert p.logits.shape == (1, 11, 3)
        torch.testing.assert_close(p.logits[0], model(X).logits, rtol=1e-6, atol=1e-6)
        with pytest.warns(UserWarning, match=NO_DRAWS):
            assert bool((p.mutual_information == 0).all())
        assert (model.calls[0]["draw"], model.calls[0]["noise"]) == ("none", False)

    @pytest.mark.parametrize("options", [{"draw": "none"}, {}])
    def test_models_that_cannot_draw_give_it_too(self, options) -> None:
        model = StubModel(draws=bool(options))
        same(predict(model, X, samples=10, **options), predict(model, X, samples=0))
        assert [call["rows"] for call in model.calls] == [11, 11]


class TestModelAndInputs:
    @pytest.mark.parametrize("draw", ["independent", "joint"])
    def test_what_the_model_is_asked(self, draw) -> None:
        model = StubModel()
        predict(model, X, samples=2, draw=draw)
        predict(model, X, samples=2, draw=draw, variances=True)
        assert [call["need"] for call in model.calls] == [("logits",), ("logits", "variance")]
        assert {(call["draw"], call["noise"]) for call in model.calls} == {(draw, True)}

    def test_modes_and_gradients_are_restored(self) -> None:
        model = StubModel().train()
        model.second.eval()
        before = [module.training for module in model.modules()]
        p = predict(model, X, samples=2)
        assert not any(model.calls[0]["training"])
        assert not model.calls[0]["grad"]
        assert [module.training for module in model.modules()] == before
        assert torch.is_grad_enabled()
        assert not p.logits.requires_grad
        with pytest.raises(RuntimeError):
            predict(model, X[:, :2], samples=2)
        assert [module.training for module in model.modules()] == before
        (p.logits * torch.ones(3, requires_grad=True)).sum().backward()  # no inference tensors

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
        with pytest.raises(ValueError, match="none of the model's 2 layers has a variance"):
            predict(StubModel(variances=False), X, variances=True)

    def test_mappings(self) -> None:
        scale = normal(11, seed=4)
        mapped = predict(StubModel(), {"x": X, "scale": scale}, samples=3, batch_size=4)
        same(mapped, predict(StubModel(), X * scale[:, None], samples=3))

    def test_progress(self) -> None:
        told: list[tuple[int, int]] = []
        predict(
            StubModel(), X, samples=3, batch_size=15, progress=lambda done, total: told.append((done, total))
        )
        assert told == [(15, 33), (30, 33), (33, 33)]

    @pytest.mark.parametrize(
        ("inputs", "options", "message"),
        [
            (X, {"samples": -1}, "samples to be a whole number >= 0, got -1"),
            (X, {"samples": 2.5}, "samples to be a whole number >= 0, got 2.5"),
            (X, {"batch_size": 0}, "batch_size to be a whole number >= 1, got 0"),
            (X, {"first_item": -3}, "first_item to be a whole number >= 0, got -3"),
            (X, {"draw": "both"}, "draw to be one of none, independent, joint, got 'both'"),
            (X[:0], {}, "at least one item, got 0"),
            ({}, {}, "empty mapping"),
            ({"x": X, "scale": X[:3, 0]}, {}, "one number of items, got {'x': 11, 'scale': 3}"),
            ({"x": X, "scale": 1.0}, {}, "scale to be a tensor with the batch first, got float"),
            (torch.tensor(1.0), {}, "inputs to be a tensor with the batch first"),
        ],
    )
    def test_errors(self, inputs, options, message) -> None:
        with pytest.raises(ValueError) as raised:  # noqa: PT011 the message is looked at below
            predict(StubModel(), inputs, **options)
        assert message in str(raised.value)

    def test_logits_of_a_wrong_shape(self) -> None:
        class Pooled(StubModel):
            def forward(self, inputs, **options):
                told = super().forward(inputs, **options)
                return type(told)(told.logits[0], told.layers)

        with pytest.raises(ValueError, match=r"expected the model to give \[11, C\].*got shape \(3,\)"):
            predict(Pooled(), X, samples=0)
