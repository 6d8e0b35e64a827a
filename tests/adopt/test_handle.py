"""The handle: tasks, settings, and what it refuses."""

import warnings
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gpattention
from gpattention.adopt.frames import Frame
from gpattention.adopt.handle import Handle
from gpattention.adopt.results import TokenPrediction, Values
from gpattention.models import Prediction
from tests.adopt.hosts import CLASSES, ITEMS, TOKENS, make

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": 40,
}  # fmt: skip


def bert(head: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, **options)
    return getattr(transformers, f"Bert{head}")(config)


def texts() -> dict[str, torch.Tensor]:
    host = make("bert")
    return dict(host.inputs)


def test_classes_of_items() -> None:
    host = make("bert")
    prediction = gpattention.attach(host.model).predict(host.inputs, samples=3, variances=True)
    assert isinstance(prediction, Prediction)
    assert prediction.logits.shape == (3, ITEMS, CLASSES)
    assert [v.shape for v in prediction.variances] == [(ITEMS, 2, TOKENS)] * 2
    assert float(prediction.logits.std(0).min()) > 0


def test_variances_without_samples_keep_the_mean() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    told = handle.predict(host.inputs, samples=0, variances=True)
    plain = handle.predict(host.inputs, samples=0)
    torch.testing.assert_close(told.logits, plain.logits)
    for mine, theirs in zip(told.variances, handle.variances(host.inputs, batch_size=2), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_classes_of_tokens() -> None:
    inputs = texts()
    handle = gpattention.attach(bert("ForTokenClassification", num_labels=CLASSES))
    told = handle.predict(inputs, samples=3)
    assert isinstance(told, TokenPrediction)
    assert handle.task == "tokens"
    assert told.probs.shape == (ITEMS, TOKENS, CLASSES)
    assert len(told) == ITEMS
    assert torch.equal(told.real, inputs["attention_mask"].bool())
    assert len(told.of_real_tokens) == int(inputs["attention_mask"].sum())
    for name in ("label", "confidence", "entropy", "mutual_information"):
        assert getattr(told, name).shape == (ITEMS, TOKENS)
    torch.testing.assert_close(told.confidence, told.probs.amax(-1))
    model = handle.detach().eval()
    with torch.no_grad():
        logits = model(**inputs).logits
    told = gpattention.attach(model).predict(inputs, samples=0)
    assert torch.equal(told.probs, logits.softmax(-1))


def undrawn(handle: Handle) -> Handle:
    """With the settings of a fit that chose no draws."""
    handle.settings = replace(handle.settings, scale=torch.zeros_like(handle.settings.scale))
    return handle


@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_predictions_say_whether_anything_was_drawn(name: str) -> None:
    host = make(name)
    handle = gpattention.attach(host.model)
    assert handle.predict(host.inputs, samples=3).drawn
    assert not handle.predict(host.inputs, samples=0).drawn
    told = undrawn(handle).predict(host.inputs, samples=3)
    assert not told.drawn
    assert told.samples == 3
    with pytest.warns(UserWarning, match="not two draws, which is not certainty.*chose no draws") as heard:
        assert bool((told.mutual_information == 0).all())
    assert heard[0].filename == __file__
    again = Prediction.from_logits(told.logits / 2)  # a temperature of one's own
    assert not again.drawn


def test_tokens_and_values_say_it_too() -> None:
    inputs = texts()
    tokens = gpattention.attach(bert("ForTokenClassification", num_labels=CLASSES))
    assert tokens.predict(inputs, samples=2).drawn
    told = undrawn(tokens).predict(inputs, samples=2)
    assert not told.drawn
    assert not told.of_real_tokens.drawn
    with pytest.warns(UserWarning, match="mutual_information is 0") as heard:
        assert bool((told.mutual_information == 0).all())
    assert heard[0].filename == __file__
    values = gpattention.attach(bert("ForSequenceClassification", num_labels=1, problem_type="regression"))
    assert values.predict(inputs, samples=2).drawn
    still = undrawn(values).predict(inputs, samples=5)
    assert not still.drawn
    for read in ("variance", "stddev", "total_variance"):
        with pytest.warns(UserWarning, match="variance is 0") as heard:
            assert bool((getattr(still, read) == 0).all())
        assert heard[0].filename == __file__
    values.settings = replace(values.settings, residual=0.5)  # a fitted residual is a variance of its own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool((values.predict(inputs, samples=5).variance == 0.5).all())


def test_variances_are_no_score_before_a_fit() -> None:
    host = make("encoder")
    handle = gpattention.attach(host.model)
    for read in (lambda: handle.variances(host.inputs), lambda: handle.predict(host.inputs, variances=True)):
        with pytest.warns(UserWarning, match=r"not fitted are no score.*handle\.fit") as heard:
            read()
        assert heard[0].filename == __file__
    frame = Frame(*(torch.zeros(()) for _ in fields(Frame)))
    fitted = replace(handle.settings, frames=(frame,) * len(handle.sites))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.warn_unfitted(stacklevel=2)
    with pytest.warns(UserWarning, match="chose no draws, so that variances are no score"):
        replace(fitted, scale=torch.zeros_like(fitted.scale)).warn_unfitted(stacklevel=2)


@pytest.mark.parametrize("labels", [1, 2])
def test_regression(labels: int) -> None:
    model = bert("ForSequenceClassification", num_labels=labels, problem_type="regression")
    handle = gpattention.attach(model)
    told = handle.predict(texts(), samples=6)
    assert isinstance(told, Values)
    assert handle.task == "regression"
    assert told.mean.shape == told.variance.shape == (ITEMS, labels)
    torch.testing.assert_close(told.variance, told.draws.var(0))
    torch.testing.assert_close(told.stddev.square(), told.variance)
    handle.settings = replace(handle.settings, residual=0.5)
    torch.testing.assert_close(handle.predict(texts(), samples=6).variance, told.variance + 0.5)
    with pytest.warns(UserWarning, match="variance is 0 because there are not two draws"):
        assert bool((handle.predict(texts(), samples=0).variance == 0).all())


def test_embeddings_have_a_variance() -> None:
    inputs = texts()
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    handle = gpattention.attach(model)
    told = handle.predict(inputs, samples=20)
    assert isinstance(told, Values)
    assert handle.task == "embedding"
    assert told.variance.shape == (ITEMS, 16)
    assert len(told) == ITEMS
    torch.testing.assert_close(told.total_variance, told.variance.sum(-1))
    assert bool((told.total_variance > 0).all())
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None]
    pooled = (states * real).sum(1) / real.sum(1)
    torch.testing.assert_close(handle.predict(inputs, samples=0).mean, pooled)
    with pytest.raises(ValueError, match="got embeddings"):
        handle.fit(inputs, torch.zeros(ITEMS))


def test_a_call_of_ones_own() -> None:
    host = make("encoder, batch second")
    encoder = host.model.encoder
    handle = gpattention.attach(
        encoder, task="embedding", call=lambda model, x: model(x.transpose(0, 1)).mean(0)
    )
    assert handle.predict(host.inputs["x"], samples=4).mean.shape == (ITEMS, 16)
    wrong = gpattention.attach(encoder, call=lambda model, x: model(x.transpose(0, 1))[:, 0])
    with pytest.raises(ValueError, match="one answer for each"):
        wrong.predict(host.inputs["x"])


def test_mappings_of_logits_are_read() -> None:
    host = make("encoder")
    handle = gpattention.attach(host.model, call=lambda model, x: {"logits": model(**x)})
    plain = gpattention.attach(host.model).predict(host.inputs, samples=2)
    assert torch.equal(handle.predict(host.inputs, samples=2).logits, plain.logits)


def test_outputs_that_do_not_fit_are_refused() -> None:
    host = make("bert")
    with pytest.raises(ValueError, match="last_hidden_state"):
        gpattention.attach(host.model, task="embedding").predict(host.inputs)
    with pytest.raises(ValueError, match="3 axes"):
        gpattention.attach(host.model, task="tokens").predict(host.inputs)
    plain = transformers.BertModel(transformers.BertConfig(**SIZES))
    with pytest.raises(ValueError, match="with logits"):
        gpattention.attach(plain, task="classification").predict(host.inputs)
    many = bert("ForSequenceClassification", num_labels=3, problem_type="multi_label_classification")
    with pytest.raises(ValueError, match="multi_label"):
        gpattention.attach(many).predict(host.inputs)
    with pytest.raises(ValueError, match="expected task"):
        gpattention.attach(host.model, task="nothing")  # type: ignore[arg-type]


def test_settings_are_checked() -> None:
    handle = gpattention.attach(make("bert").model)
    before = handle.settings
    for wrong in (
        replace(before, scale=before.scale[:1]),
        replace(before, draws=(True,)),
        replace(before, noise=before.noise * 0),
        replace(before, scale=-before.scale),
    ):
        with pytest.raises(ValueError, match="expected settings"):
            handle.settings = wrong
    assert handle.settings is before


def test_sites_can_be_switched_off() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    handle.settings = replace(handle.settings, draws=(False, True))
    told = handle.predict(host.inputs, samples=2, variances=True)
    assert told.variances[0] is None
    assert float(told.variances[1].min()) > 0
    assert "off" in repr(handle)
    handle.settings = replace(handle.settings, draws=(False, False))
    told = handle.predict(host.inputs, samples=2)
    assert told.logits.shape == (2, ITEMS, CLASSES)
    assert torch.equal(told.logits, handle.predict(host.inputs, samples=0).logits.expand(2, -1, -1))
    assert handle.predict(host.inputs, samples=2, variances=True).variances == (None, None)


def test_without_draws_the_model_runs_once_and_by_itself() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    handle.settings = replace(handle.settings, scale=handle.settings.scale * 0, temperature=2.0)
    counts: list[tuple[int, int]] = []
    with torch.no_grad():
        own = host.model.eval()(**host.inputs).logits
    told = handle.predict(host.inputs, samples=4, progress=lambda *count: counts.append(count))
    assert counts == [(ITEMS, ITEMS)]
    assert torch.equal(told.logits, (own / 2).expand(4, -1, -1))


def test_the_noise_of_a_site_does_not_depend_on_the_others() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    before = handle.settings
    handle.settings = replace(before, draws=(False, True))
    alone = handle.predict(host.inputs, samples=2).logits
    tiny = before.scale.clone()
    tiny[0] = 1e-7
    handle.settings = replace(before, scale=tiny)
    torch.testing.assert_close(handle.predict(host.inputs, samples=2).logits, alone, rtol=1e-4, atol=1e-5)


def test_the_temperature_divides_draws_only() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    before = handle.predict(host.inputs, samples=2), handle.predict(host.inputs, samples=0)
    handle.settings = replace(handle.settings, temperature=2.0)
    torch.testing.assert_close(handle.predict(host.inputs, samples=2).logits * 2, before[0].logits)
    assert torch.equal(handle.predict(host.inputs, samples=0).logits, before[1].logits)


def test_settings_travel() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    handle.settings = replace(handle.settings, temperature=2.0, scale=handle.settings.scale * 2)
    other = gpattention.attach(host.model)
    other.load_state_dict(handle.state_dict())
    assert torch.equal(
        other.predict(host.inputs, samples=2).logits, handle.predict(host.inputs, samples=2).logits
    )
    with pytest.raises(ValueError, match="state: expected the settings of sites"):
        gpattention.attach(make("encoder").model).load_state_dict(handle.state_dict())
    with pytest.raises(ValueError, match="differs in power"):
        handle.load_state_dict({name: x for name, x in handle.state_dict().items() if name != "power"})


def test_numbers_are_checked() -> None:
    host = make("bert")
    handle = gpattention.attach(host.model)
    for options in ({"samples": -1}, {"batch_size": 0}, {"first_item": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            handle.predict(host.inputs, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_keys"):
        gpattention.attach(host.model, max_keys=0)


def test_long_sequences_take_the_sparse_form() -> None:
    host = make("bert")
    exact, sparse = (gpattention.attach(host.model, max_keys=m) for m in (TOKENS, 3))
    first, thinner = (handle.variances(host.inputs)[0] for handle in (exact, sparse))
    assert bool((thinner >= first * (1 - 1e-4)).all())
    assert float(thinner.mean()) > float(first.mean())
    plain = exact.predict(host.inputs, samples=0)
    assert torch.equal(sparse.predict(host.inputs, samples=0).logits, plain.logits)


def test_values_are_checked() -> None:
    with pytest.raises(ValueError, match="expected draws"):
        Values.from_draws(torch.zeros(2, 3))
    assert Values.from_draws(torch.zeros(2, 3, 1).half()).mean.dtype == torch.float32


def test_importing_is_lazy() -> None:
    assert "attach" in dir(gpattention)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gpattention.nothing  # noqa: B018


def test_weights_that_are_fetched_when_used() -> None:
    """The parameters of an offloaded model lie nowhere between its calls."""
    accelerate = pytest.importorskip("accelerate")
    host = make("bert")
    before = gpattention.attach(host.model).predict(host.inputs, samples=3).logits
    accelerate.cpu_offload(host.model, execution_device="cpu")
    handle = gpattention.attach(host.model)
    assert torch.equal(handle.predict(host.inputs, samples=3).logits, before)
