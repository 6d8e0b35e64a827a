"""Whole sets in chunks give what one call gives; predictors by name; one variance per layer."""

import pytest
import torch

from gpattention.evaluation import named_predictors, predicting
from gpattention.evaluation.cost import peak_memory
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.layer_variance import layer_means, padding_of
from gpattention.evaluation.named_predictors import UnavailablePredictorError, build_predictor
from gpattention.evaluation.predicting import predict_items
from gpattention.gp import ItemNoise, deferred_checks
from gpattention.models import predict
from tests.models.small_models import images, sentences, text, vision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("chunk", "rows"), [(2, 3), (3, 100), (2000, None)])
@pytest.mark.parametrize("name", ["model", "mean", "mc_dropout", "dropout_draws"])
def test_chunks_change_nothing(
    name: str, chunk: int, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicting, "CHUNK", chunk)
    model, x = vision("cgp", dropout=0.2), images(7)
    built = build_predictor(name, model, 4)
    items = ItemSet("test", x, torch.arange(7) % 3)
    found = predict_items(built.predictor, items, samples=built.samples, seed=3, device=CPU, batch_size=rows)
    whole = built.predictor.predict(x, samples=built.samples, seed=3)
    assert found.logits.dtype == torch.float32
    assert found.logits.numpy() == pytest.approx(whole.logits.numpy(), abs=1e-6)
    assert found.labels.equal(items.labels)
    assert (found.layer_variance is None) == ("dropout" in name)


def test_progress_goes_from_nothing_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "CHUNK", 3)
    told = []
    built = build_predictor("model", vision("cgp"), 2)
    items = ItemSet("test", images(7))
    predict_items(
        built.predictor, items, samples=2, seed=0, device=CPU, batch_size=2,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    done = [d for d, _ in told]
    assert done == sorted(done)
    assert told[-1] == (7000, 7000)


def test_one_variance_per_layer() -> None:
    model, x = vision("cgp", "softmax", "sgpa"), images(5)
    told = predict(model, x, samples=3, variances=True)
    found = layer_means(told.variances, None)
    assert found.shape == (5, 2)  # softmax has none
    assert found[:, 0].numpy() == pytest.approx(told.variances[0].flatten(1).mean(1).numpy())
    assert found[:, 1].numpy() == pytest.approx(told.variances[2].flatten(1).mean(1).numpy())
    assert layer_means([None, None], None) is None


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


class TestByName:
    def test_models_that_do_not_draw_have_no_mean_of_their_own(self) -> None:
        built = build_predictor("model", vision("softmax"), 10)
        assert (built.samples, built.draw) == (0, "none")
        with pytest.raises(UnavailablePredictorError, match="mean is left out: the model does not draw"):
            build_predictor("mean", vision("softmax"), 10)

    def test_no_samples_are_no_draws(self) -> None:
        assert build_predictor("model", vision("cgp"), 0).draw == "none"
        with pytest.raises(UnavailablePredictorError, match="mc_dropout is left out: it draws, and 0"):
            build_predictor("mc_dropout", vision("cgp"), 0)

    def test_no_dropout(self) -> None:
        with pytest.raises(UnavailablePredictorError, match="mc_dropout is left out: expected a model with"):
            build_predictor("mc_dropout", vision("cgp", dropout=0.0), 5)

    def test_masks_with_and_without_draws(self) -> None:
        x = images(6)
        drawn, masked = (
            build_predictor(name, vision("cgp", dropout=0.3), 4) for name in ("model", "mc_dropout")
        )
        both = build_predictor("dropout_draws", vision("cgp", dropout=0.3), 4)
        assert (masked.draw, both.draw) == ("dropout", "dropout+independent")
        logits = [built.predictor.predict(x, samples=200, seed=1).logits for built in (drawn, masked, both)]
        spread = [float(each.var(0).mean()) for each in logits]
        assert spread[2] > max(spread[:2]) > 0
        with pytest.raises(UnavailablePredictorError, match="dropout_draws is left out: the model does not"):
            build_predictor("dropout_draws", vision("softmax", dropout=0.3), 4)

    @pytest.mark.parametrize("name", ["laplace", "gp_layer"])
    def test_last_layers_are_fitted_on_training_items(self, name: str) -> None:
        model = vision("softmax", dtype=torch.float32)
        x, y = images(40, dtype=torch.float32), torch.arange(40) % 3
        built = build_predictor(name, model, 3, lambda: (x, y))
        assert built.draw == "weights"
        assert built.predictor.predict(x[:5], samples=3).logits.shape == (3, 5, 3)
        with pytest.raises(UnavailablePredictorError, match=f"{name} is left out: it needs the training"):
            build_predictor(name, model, 3)

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match="predictor to be one of model, mean"):
            build_predictor("oracle", vision("cgp"), 3)
        assert set(named_predictors.DEFAULT_PREDICTORS) <= set(named_predictors.PREDICTORS)


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
