"""The handle: every family, tasks, settings, precision, and what it refuses."""

import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gpattention
from gpattention.hosts import Handle, TokenPrediction, Values
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.sites import find_sites, hooked
from gpattention.hosts.variance import Frame
from gpattention.models import Prediction
from tests.hosts.hosts import CLASSES, HOSTS, ITEMS, TOKENS, Encoder, Host, bert, logits, make, pass_on
from tests.refusals import refusals
from tests.threads import state_of


def texts() -> dict[str, Tensor]:
    return dict(make("bert").inputs)


def settings(handle: Handle, **changes: Any) -> Handle:
    handle.settings = replace(handle.settings, **changes)
    return handle


def undrawn(handle: Handle) -> Handle:
    """With the settings of a fit that chose no draws."""
    return settings(handle, scale=torch.zeros_like(handle.settings.scale))


def test_variances_without_samples_keep_the_mean() -> None:
    host = make("bert")
    handle, sparse = (gpattention.attach(host.model, max_keys=m) for m in (TOKENS, 3))
    result = handle.predict(host.inputs, samples=0, variances=True)
    torch.testing.assert_close(result.logits, handle.predict(host.inputs, samples=0).logits)
    first, _ = result.variances
    torch.testing.assert_close(result.variances, handle.variances(host.inputs, batch_size=2))
    assert float(sparse.variances(host.inputs)[0].mean()) > float(first.mean())  # of fewer keys


def test_classes_of_tokens() -> None:
    inputs, model = texts(), bert("ForTokenClassification").eval()
    handle = gpattention.attach(model)
    result = handle.predict(inputs, samples=3)
    assert isinstance(result, TokenPrediction)
    assert handle.task == "tokens"
    assert result.probs.shape == (ITEMS, TOKENS, CLASSES)
    assert len(result) == ITEMS
    assert torch.equal(result.real, inputs["attention_mask"].bool())
    assert len(result.of_real_tokens) == int(inputs["attention_mask"].sum())
    for name in ("label", "confidence", "entropy", "mutual_information"):
        assert getattr(result, name).shape == (ITEMS, TOKENS)
    torch.testing.assert_close(result.confidence, result.probs.amax(-1))
    with torch.no_grad():
        assert torch.equal(handle.predict(inputs, samples=0).probs, model(**inputs).logits.softmax(-1))


REGRESSION = {"num_labels": 1, "problem_type": "regression"}
UNDRAWN: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "classes": (bert, {"mutual_information": "not two draws, which is not certainty.*chose no draws"}),
    "tokens": (lambda: bert("ForTokenClassification"), {"mutual_information": "mutual_information is 0"}),
    "values": (
        lambda: bert(**REGRESSION),
        dict.fromkeys(("variance", "stddev", "total_variance"), "variance is 0"),
    ),
}


@pytest.mark.parametrize("task", UNDRAWN)
def test_predictions_say_whether_anything_was_drawn(task: str) -> None:
    build, read = UNDRAWN[task]
    handle = gpattention.attach(build())
    assert handle.predict(texts(), samples=3).drawn
    assert not handle.predict(texts(), samples=0).drawn
    result = undrawn(handle).predict(texts(), samples=3)
    assert not result.drawn
    for name, message in read.items():
        with pytest.warns(UserWarning, match=message) as heard:
            assert bool((getattr(result, name) == 0).all())
        assert heard[0].filename == __file__
    if task == "classes":
        assert result.samples == 3
        assert not Prediction.from_logits(result.logits / 2).drawn  # a temperature of one's own
    if task == "tokens":
        assert not result.of_real_tokens.drawn
    if task == "values":  # a fitted residual is a variance of its own
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fitted = settings(handle, residual=0.5).predict(texts(), samples=5)
            assert bool((fitted.variance == 0.5).all())


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
    with pytest.warns(UserWarning, match="chose no draws are no score"):
        replace(fitted, scale=torch.zeros_like(fitted.scale)).warn_unfitted(stacklevel=2)


@pytest.mark.parametrize("labels", [1, 2])
def test_regression(labels: int) -> None:
    handle = gpattention.attach(bert(num_labels=labels, problem_type="regression"))
    result = handle.predict(texts(), samples=6)
    assert isinstance(result, Values)
    assert handle.task == "regression"
    assert result.mean.shape == result.variance.shape == (ITEMS, labels)
    torch.testing.assert_close(result.variance, result.draws.var(0))
    torch.testing.assert_close(result.stddev.square(), result.variance)
    settings(handle, residual=0.5)
    torch.testing.assert_close(handle.predict(texts(), samples=6).variance, result.variance + 0.5)
    assert Values.from_draws(torch.zeros(2, 3, 1).half()).mean.dtype == torch.float32


def test_embeddings_have_a_variance() -> None:
    inputs, model = texts(), bert("Model").eval()
    handle = gpattention.attach(model)
    result = handle.predict(inputs, samples=20)
    assert isinstance(result, Values)
    assert handle.task == "embedding"
    assert result.variance.shape == (ITEMS, 16)
    assert len(result) == ITEMS
    torch.testing.assert_close(result.total_variance, result.variance.sum(-1))
    assert bool((result.total_variance > 0).all())
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None]
    pooled = (states * real).sum(1) / real.sum(1)
    torch.testing.assert_close(handle.predict(inputs, samples=0).mean, pooled)


def test_calls_of_ones_own() -> None:
    host = make("encoder, batch second")
    handle = gpattention.attach(
        host.model.encoder, task="embedding", call=lambda model, x: model(x.transpose(0, 1)).mean(0)
    )
    assert handle.predict(host.inputs["x"], samples=4).mean.shape == (ITEMS, 16)
    named = gpattention.attach(host.model, call=lambda model, x: {"logits": model(**x)})
    plain = gpattention.attach(host.model).predict(host.inputs, samples=2)
    assert torch.equal(named.predict(host.inputs, samples=2).logits, plain.logits)


def encoding(**options: Any) -> Callable[[], Any]:
    """A call of the encoder alone, whose masks are as given."""
    call = lambda model, x: model.encoder(x["x"], **options)[:, 0]  # noqa: E731
    return lambda: gpattention.attach(Encoder(), call=call).predict(make("encoder").inputs)


def predicting(model: Callable[[], Any] = bert, inputs: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: gpattention.attach(model(), **options).predict({**texts(), **(inputs or {})})


def flash() -> Any:
    handle = gpattention.attach(bert())
    handle.model.config._attn_implementation = "flash_attention_2"
    return handle.predict(texts())


def set_to(**changes: Any) -> Callable[[], Any]:
    """Settings of two sites of two heads, wrongly changed."""
    return lambda: settings(gpattention.attach(bert()), **changes)


test_refusals = refusals([
    (set_to(scale=torch.ones(1, 2)), r"settings\.scale of shape \(2, 2\)"),
    (set_to(draws=(True,)), "settings.draws for 2 sites, got 1"),
    (set_to(noise=torch.zeros(2, 2)), "noise > 0"),
    (set_to(scale=-torch.ones(2, 2)), "scale >= 0"),
    (predicting(task="embedding"), "last_hidden_state"),
    (predicting(task="tokens"), "3 axes"),
    (predicting(lambda: bert("Model"), task="classification"), "with logits"),
    (predicting(lambda: bert(problem_type="multi_label_classification")), "multi_label"),
    (predicting(call=lambda model, x: torch.zeros(len(x["input_ids"]), 3)), "called none"),
    (predicting(call=lambda model, x: model(**x).logits[:2]), "one answer for each"),
    (predicting(inputs={"attention_mask": torch.ones(ITEMS, 1, 7, 7).bool().tril()}), "causal or windowed"),
    (encoding(mask=torch.ones(7, 7).triu(1).bool()), "differs"),
    (encoding(mask=torch.randn(7, 7)), "adds numbers"),
    (flash, "sdpa or eager, got 'flash_attention_2'"),
    (lambda: gpattention.attach(bert(), task="nothing"), "task.*'nothing'"),  # type: ignore[arg-type]
    (lambda: gpattention.attach(bert(), call="forward"), "call.*'forward'"),  # type: ignore[arg-type]
    (lambda: gpattention.attach(bert(), max_keys=0), "max_keys.*0"),
    (lambda: gpattention.attach(bert(), max_log_amplitude=-1.0), r"max_log_amplitude.*-1\.0"),
    (lambda: gpattention.attach(bert(), max_log_amplitude=float("nan")), "max_log_amplitude.*nan"),
    (lambda: gpattention.attach(bert()).predict(texts(), samples=-1), "samples.*-1"),
    (lambda: gpattention.attach(bert()).predict(texts(), batch_size=0), "batch_size.*0"),
    (lambda: gpattention.attach(bert()).predict(texts(), first_item=-1), "first_item.*-1"),
    (lambda: gpattention.attach(bert("Model")).fit(texts(), torch.zeros(ITEMS)), "got embeddings"),
    (lambda: Values.from_draws(torch.zeros(2, 3)), r"draws.*\(2, 3\)"),
])  # fmt: skip


def test_sites_can_be_switched_off() -> None:
    host = make("bert")
    handle = settings(gpattention.attach(host.model), draws=(False, True))
    result = handle.predict(host.inputs, samples=2, variances=True)
    assert result.variances[0] is None
    assert float(result.variances[1].min()) > 0
    assert "off" in repr(handle)
    settings(handle, draws=(False, False), temperature=2.0)  # then the model runs once and by itself
    assert handle.predict(host.inputs, samples=2, variances=True).variances == (None, None)
    counts: list[tuple[int, int]] = []
    with torch.no_grad():
        own = host.model.eval()(**host.inputs).logits
    result = handle.predict(host.inputs, samples=4, progress=lambda *count: counts.append(count))
    assert counts == [(ITEMS, ITEMS)]
    assert torch.equal(result.logits, (own / 2).expand(4, -1, -1))


def test_noise_of_a_site_and_temperature() -> None:
    """The first depends on no other site; the second divides draws only."""
    host = make("bert")
    handle = gpattention.attach(host.model)
    tiny = handle.settings.scale.clone()
    tiny[0] = 1e-7
    alone = settings(handle, draws=(False, True)).predict(host.inputs, samples=2).logits
    both = settings(handle, draws=(True, True), scale=tiny).predict(host.inputs, samples=2).logits
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-5)
    mean = handle.predict(host.inputs, samples=0).logits
    settings(handle, temperature=2.0)
    torch.testing.assert_close(handle.predict(host.inputs, samples=2).logits * 2, both)
    assert torch.equal(handle.predict(host.inputs, samples=0).logits, mean)


def test_weights_that_are_fetched_when_used() -> None:
    """The parameters of an offloaded model lie nowhere between its calls."""
    accelerate = pytest.importorskip("accelerate")
    host = make("bert")
    before = gpattention.attach(host.model).predict(host.inputs, samples=3).logits
    accelerate.cpu_offload(host.model, execution_device="cpu")
    assert torch.equal(gpattention.attach(host.model).predict(host.inputs, samples=3).logits, before)


@pytest.fixture(params=list(HOSTS))
def host(request: pytest.FixtureRequest) -> Host:
    return make(request.param)


@pytest.mark.parametrize("training", [False, True])
def test_the_host_means_pass_unchanged(host: Host, training: bool) -> None:
    handle = gpattention.attach(host.model.train(training))

    def run() -> Tensor:
        torch.manual_seed(1)  # of dropout
        return logits(host)

    plain = run()
    with hooked(host.model, handle.sites, pass_on):
        met = run()
    torch.testing.assert_close(met, plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(run(), plain)


def test_without_samples_it_is_the_model_itself(host: Host) -> None:
    handle = gpattention.attach(host.model.train())
    prediction = handle.predict(host.inputs, samples=0)
    assert host.model.training
    host.model.eval()
    with torch.no_grad():
        assert torch.equal(prediction.logits[0], logits(host))
        torch.testing.assert_close(handle.process_mean(host.inputs), logits(host), rtol=1e-5, atol=1e-5)
        if not isinstance(host.inputs, Tensor) and "input_ids" in host.inputs:  # in bfloat16 too
            result = gpattention.attach(host.model.bfloat16()).predict(host.inputs, samples=2)
            assert bool(result.probs.isfinite().all())


def test_draws_spread_and_do_not_depend_on_batches(host: Host) -> None:
    handle = gpattention.attach(host.model)
    together = handle.predict(host.inputs, samples=4, seed=3)
    apart = handle.predict(host.inputs, samples=4, seed=3, batch_size=3)
    torch.testing.assert_close(together.logits, apart.logits, rtol=1e-4, atol=1e-5)
    assert float(together.logits.std(0).min()) > 0
    other = handle.predict(host.inputs, samples=4, seed=4)
    assert float((other.logits - together.logits).abs().min()) > 0
    more = handle.predict(host.inputs, samples=6, seed=3)
    torch.testing.assert_close(more.logits[:4], together.logits, rtol=1e-4, atol=1e-5)


def test_the_model_stays_as_it_was(host: Host) -> None:
    def broken(site: Site, call: AttentionCall) -> Tensor:
        raise RuntimeError("broken")

    kept = state_of(host.model.eval())
    with torch.no_grad():
        before = logits(host)
    with gpattention.attach(host.model) as handle:
        handle.predict(host.inputs, samples=2)
        handle.variances(host.inputs)
    with pytest.raises(ValueError, match="detached"):
        handle.predict(host.inputs)
    with (
        pytest.raises(RuntimeError, match="broken"),
        hooked(host.model, find_sites(host.model).sites, broken),
    ):
        logits(host)
    assert state_of(host.model) == kept
    with torch.no_grad():
        assert torch.equal(logits(host), before)


@pytest.mark.parametrize("name", ["bert", "bert eager", "roberta", "distilbert"])
def test_padding_changes_nothing(name: str) -> None:
    host = make(name)
    handle = gpattention.attach(host.model)
    real = host.inputs["attention_mask"].bool()
    other = {**host.inputs, "input_ids": torch.where(real, host.inputs["input_ids"], 9)}
    first, second = (handle.variances(x)[1] for x in (host.inputs, other))  # [B, H, N]
    where = real[:, None].expand_as(first)
    torch.testing.assert_close(first[where], second[where])
    torch.testing.assert_close(handle.predict(host.inputs, 3).logits, handle.predict(other, 3).logits)
    without = handle.variances({"input_ids": host.inputs["input_ids"]})[1]
    assert not torch.allclose(without[where], first[where])
