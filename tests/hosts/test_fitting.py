"""Fitting to held-out data: what must be found, and that it never hurts; labels that are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention.evaluation import fit_temperature
from gpattention.hosts.fitting import (
    IGNORED,
    NOISES,
    Candidate,
    FitOptions,
    _chosen,
    _greedy_sites,
    bounds_reached,
    check_labels,
    collect_batches,
    log_likelihood,
)
from gpattention.metrics import nll
from tests.hosts.hosts import CLASSES, Encoder, bert
from tests.refusals import refusals

ZERO = torch.zeros(())
QUICK: dict[str, Any] = {"steps": 6, "samples": 4}
GLOBAL: dict[str, Any] = {**QUICK, "levels": ("global",), "select": False}
NO_LEVELS: dict[str, Any] = {**QUICK, "levels": ()}


class Loud(nn.Module):
    """An encoder whose logits are too large by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.factor = Encoder(), factor
        with torch.no_grad():
            self.inner.head.weight.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.inner(x)


def labelled(model: Loud, items: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs, and labels drawn from what the model would say at factor 1."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(items, 5, 16, generator=g)
    with torch.no_grad():
        probs = (model.eval()(x) / model.factor).softmax(-1)
    return x, torch.multinomial(probs, 1, generator=g)[:, 0]


def fitted_to(items: int) -> Tensor:
    """Which of them candidates are fitted to.  [items]"""
    return torch.arange(items) % 5 < 3


def test_without_levels_no_draws_are_tried() -> None:
    model = Loud(4.0)
    fit = gpattention.attach(model).fit(*labelled(model, 60, 0), **NO_LEVELS)
    assert [candidate.name for candidate in fit.candidates] == ["plain", "temperature"]
    assert not fit.settings.any_drawn


def test_an_overconfident_model_is_softened() -> None:
    model = Loud(6.0)
    handle = gpattention.attach(model)
    heard: list[tuple[str, int, int]] = []
    x, labels = labelled(model, 200, 1)
    fit = handle.fit(x, labels, **QUICK, progress=lambda *result: heard.append(result))
    assert [c.name for c in fit.candidates][:5] == ["plain", "temperature", "global", "sites", "heads"]
    assert fit.chosen != "plain"
    assert handle.settings is fit.settings
    tempered = fit.candidates[1].settings
    with torch.no_grad():
        logits = model.eval()(x[fitted_to(200)])[None]
    best = fit_temperature(logits, labels[fitted_to(200)])
    assert tempered.temperature == pytest.approx(best, rel=1e-4)
    x, labels = labelled(model, 200, 2)
    plain, fitted = handle.predict(x, samples=0), handle.predict(x, samples=8)
    assert nll(fitted.probs, labels) < nll(plain.probs, labels) - 0.3
    stages = [stage for stage, done, total in heard if done == total]
    assert stages[:6] == ["frames", "frames", "start", "global", "sites", "heads"]
    assert stages[-1] == "choice"
    assert str(fit) == repr(fit)  # also where a notebook shows it
    assert bool((handle.settings.noise >= NOISES[0]).all())


def test_a_calibrated_model_is_left_as_it_is() -> None:
    model = Loud(1.0).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    data = labelled(model, 200, 1)
    fit = gpattention.attach(model.train()).fit(data, **QUICK, temperature=False)
    assert [c.name for c in fit.candidates][:4] == ["plain", "global", "sites", "heads"]
    assert fit.chosen == "plain"
    assert all(c.settings.temperature == 1 and (c.name == "plain") == (c.draws == 0) for c in fit.candidates)
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_temperature_alone_is_that_of_all_items() -> None:
    """Whether gradients are off around the fit makes no difference."""
    model = Loud(6.0)
    x, labels = labelled(model, 60, 1)
    with torch.no_grad():
        expected = fit_temperature(model.eval()(x)[None], labels)
    texts = []
    for inferring in (False, True):
        with torch.inference_mode(inferring):
            fit = gpattention.attach(model).fit(x, labels, **NO_LEVELS)
            texts.append(str(gpattention.attach(model).fit(x, labels, **QUICK)))
        assert fit.chosen == "temperature"
        assert fit.settings.temperature == pytest.approx(expected, rel=1e-4)
        partly = fit.candidates[1].settings.temperature  # fitted to three fifths
        assert partly != pytest.approx(expected, rel=1e-3)
        assert f"all items ask for: {fit.settings.temperature:.3f}" in str(fit)
    assert texts[0] == texts[1]


def test_nothing_is_sharpened_where_every_item_is_right() -> None:
    """Not while scales are learnt either."""
    model = Loud(3.0).eval()
    x = torch.randn(1000, 5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        probs = model(x).softmax(-1)
    surest = probs.amax(-1).topk(100).indices
    fit = gpattention.attach(model).fit(x[surest], probs[surest].argmax(-1), **QUICK)
    assert all(c.settings.temperature == 1 for c in (*fit.candidates, fit))  # type: ignore[attr-defined]
    assert "The temperature is 1: all 100 items are right" in fit.reason
    assert fit.reason in repr(fit)


@pytest.mark.parametrize(("items", "factor", "shown"), [(40, 0.8, False), (400, 0.6, True)])
def test_sharpening_must_be_shown(items: int, factor: float, shown: bool) -> None:
    model = Loud(factor)  # too unsure
    fit = gpattention.attach(model).fit(labelled(model, items, 5), **GLOBAL)
    assert (fit.settings.temperature < 1) == shown
    assert ("excludes 1" if shown else "holds 1") in fit.reason
    assert fit.on_bounds == ()


def test_a_temperature_on_its_bound_is_named() -> None:
    """Labels that have nothing to do with a sure model: no temperature inside the bounds is best."""
    model = Loud(6.0)
    x, labels = labelled(model, 100, 1)
    with pytest.warns(UserWarning, match="temperature lies on its bound, 100; 100 is taken") as heard:
        fit = gpattention.attach(model).fit(x, (labels + 1) % CLASSES, **NO_LEVELS)
    assert heard[0].filename == __file__
    assert fit.settings.temperature == 100
    assert len(fit.on_bounds) == 1
    assert fit.on_bounds[0] in repr(fit)


def regression() -> tuple[Any, Tensor, Tensor]:
    """A handle of values, inputs and the model's own answers."""
    torch.manual_seed(0)
    model = Encoder().eval()
    model.head = nn.Linear(16, 1)
    x = torch.randn(100, 5, 16)
    handle = gpattention.attach(model, task="regression")
    return handle, x, handle.predict(x, samples=0).mean


def test_settings_on_their_bounds_are_named() -> None:
    settings = gpattention.attach(Encoder()).settings
    settings = replace(settings, power=torch.full_like(settings.power, 0.5))
    assert bounds_reached(settings) == ()
    for name, value in (("scale", 30.0), ("noise", NOISES[0]), ("noise", NOISES[1]), ("power", 1.0)):
        numbers = getattr(settings, name).clone()
        numbers[0, 1] = value
        (result,) = bounds_reached(replace(settings, **{name: numbers}))
        assert f"Fitted {name} lies on its bound, {value:.4g} at 1 of 4 heads" in result
        assert bounds_reached(replace(settings, **{name: numbers}, draws=(False, True))) == ()


def test_frames_are_those_of_the_data_and_means_still_the_hosts() -> None:
    model = Loud(2.0)
    handle = gpattention.attach(model)
    x, labels = labelled(model, 40, 1)
    handle.fit(x, labels, **GLOBAL)
    (frame, _) = handle.settings.frames
    site = handle.sites[0].module
    close = {"rtol": 1e-4, "atol": 1e-5}
    with torch.no_grad():
        q, k, v = nn.functional.linear(x[fitted_to(40)], site.in_proj_weight, site.in_proj_bias).chunk(3, -1)
        torch.testing.assert_close(handle.process_mean(x), model.eval()(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(frame.q0.flatten(), q.mean((0, 1)) * 8**-0.25, **close)
    torch.testing.assert_close(frame.k0.flatten(), k.mean((0, 1)) * 8**-0.25, **close)
    torch.testing.assert_close(frame.unit, v.unflatten(-1, (2, 8)).square().mean((0, 1, 3)).sqrt(), **close)


def test_regression_fits_the_residual() -> None:
    handle, x, own = regression()
    errors = 0.3 * torch.randn(100, 1)
    fit = handle.fit(x, own + errors, **GLOBAL)
    assert [c.name for c in fit.candidates] == ["plain", "global"]
    squares = errors.square()
    expected = float(squares[fitted_to(100)].mean())
    assert fit.candidates[0].settings.residual == pytest.approx(expected, rel=1e-4)
    assert fit.chosen == "plain"  # whose variance is that of all errors
    result = handle.predict(x, samples=5).variance
    torch.testing.assert_close(result, squares.mean().expand_as(result), rtol=1e-4, atol=0)
    with pytest.warns(UserWarning, match="residual lies on its bound, 2.061e-09"):
        fit = handle.fit(x, own, **NO_LEVELS)
    assert len(fit.on_bounds) == 1


def tokens_bert() -> Any:
    return bert("ForTokenClassification", num_hidden_layers=1, intermediate_size=16, vocab_size=30).eval()


def test_ignored_tokens_say_nothing_about_the_temperature() -> None:
    """Not whether all are right, nor how sure to be, and sentences without any label may come first."""
    model = tokens_bert()
    with torch.no_grad():
        model.classifier.weight.mul_(300)
        ids = torch.randint(0, 30, (150, 4))
        logits = model(ids).logits
    labels = torch.where(torch.rand(150, 4) < 0.8, logits.argmax(-1), torch.randint(0, CLASSES, (150, 4)))
    labels[:110] = IGNORED
    labels[110:, 2] = IGNORED
    known = labels != IGNORED
    fit = gpattention.attach(model).fit({"input_ids": ids, "labels": labels}, **QUICK, levels=("global",))
    expected = fit_temperature(logits[known][None], labels[known])
    assert fit.settings.temperature == pytest.approx(expected, rel=1e-4)
    assert 1.5 < expected < 90
    with pytest.raises(ValueError, match="got -100 for all of them"):
        gpattention.attach(model).fit({"input_ids": ids[:9], "labels": labels[:9]}, **QUICK)


def test_the_likelihood_averages_probabilities() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 7, 3), torch.randint(0, 3, (7,))
    result = log_likelihood(logits, labels, "classification", ZERO)
    probs = logits.softmax(-1).mean(0)
    torch.testing.assert_close(result, probs.gather(-1, labels[:, None])[:, 0].log())
    values, targets = torch.randn(9, 7, 2), torch.randn(7, 2)
    result = log_likelihood(values, targets, "regression", ZERO)
    normal = torch.distributions.Normal(values.mean(0), (values.var(0) + 1).sqrt())
    torch.testing.assert_close(result, normal.log_prob(targets).sum(-1))


def candidates(*result: Any) -> tuple[list[Candidate], list[Tensor]]:
    """Names, how many of two sites draw (-1: the last), mean log-likelihoods and margins, of one noise."""
    settings = gpattention.attach(Encoder()).settings
    made = [
        Candidate(
            name, replace(settings, draws=(drawn > 0, drawn not in (0, 1))), 0.0, -mean, *(margin or [0.01])
        )
        for name, drawn, mean, *margin in result
    ]
    noise = 0.1 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    noise = noise - noise.mean()
    return made, [mean + noise * (i + 1) for i, (_, _, mean, *_) in enumerate(result)]


SILENT = (("plain", 0, -1.0), ("temperature", 0, -0.9))


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ((*SILENT, ("global", 2, -0.5), ("heads", 2, -0.495)), "global"),
        ((*SILENT, ("global", 2, -0.5), ("heads", 2, -0.3)), "heads"),
        ((*SILENT, ("global", 2, -0.899), ("heads", 2, -1.2)), "temperature"),
        ((("plain", 0, -0.8), ("temperature", 0, -0.9), ("global", 2, -1.0)), "plain"),
        # behind the one without draws, and not taken for being simple
        ((("temperature", 0, -0.55), ("global", 2, -0.56, 0.2), ("heads", 2, -0.45)), "heads"),
        # as good, and cheaper: what is before the first draw runs once
        ((*SILENT, ("global", 2, -0.5), ("selected", -1, -0.499)), "selected"),
        # a gain of one and a half standard errors
        ((("plain", 0, -1.0), ("temperature", 0, -0.55), ("global", 2, -0.535)), "temperature"),
    ],
)
def test_draws_must_earn_themselves(result: Any, expected: str) -> None:
    made, scores = candidates(*result)
    best = max(scores, key=lambda score: float(score.mean()))
    assert made[_chosen(made, scores, best)].name == expected
    assert [c.passes for c in made] == [{0: 1.0, 2: 10.0, -1: 5.5}[drawn] for _, drawn, *_ in result]


class Fake:
    """A scorer that knows what every site is worth."""

    def __init__(self, gains: tuple[float, ...]) -> None:
        self._gains, self.options = gains, FitOptions()

    def finish(self, settings: Any, batches: Any) -> tuple[Any, float]:
        drawn = [gain for gain, on in zip(self._gains, settings.draws, strict=True) if on]
        return settings, -sum(drawn) + 0.5 * max(0, len(drawn) - 1)  # a price for every further one


def test_sites_are_chosen_greedily() -> None:
    model = nn.Sequential(*(Encoder() for _ in range(2)))
    handle = gpattention.attach(model)
    settings = replace(handle.settings, draws=(True,) * 4)
    chosen = _greedy_sites(Fake((0.1, 2.0, -1.0, 0.9)), settings, [])  # type: ignore[arg-type]
    assert chosen == (False, True, False, True)
    assert _greedy_sites(Fake((-1.0,) * 4), settings, []) == (False,) * 4  # type: ignore[arg-type]


def test_data_come_in_many_shapes() -> None:
    x, y = torch.randn(12, 5, 16), torch.arange(12) % 3
    pairs = [(x[:8], y[:8]), (x[8:], y[8:])]
    for data, labels in (((x, y), None), (x, y), ({"x": x, "labels": y}, None), (pairs, None)):
        batches = collect_batches(data, labels, None)
        assert torch.equal(torch.cat([batch.labels for batch in batches]), y)
    assert [batch.first_item for batch in collect_batches(pairs, None, None)] == [0, 8]
    assert [len(batch) for batch in collect_batches(pairs, None, 10)] == [8, 2]
    assert [len(batch) for batch in collect_batches(pairs, None, 8)] == [8]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
    assert [len(batch) for batch in collect_batches(loader, None, None)] == [5, 5, 2]


X = torch.randn(20, 5, 16)
Y = torch.arange(20) % CLASSES
ONE_STEP: dict[str, Any] = {"steps": 1, "samples": 2, "levels": ("global",)}


def fit_classes(data: Any = X, labels: Any = None) -> Any:
    return gpattention.attach(Encoder()).fit(data, labels, **ONE_STEP)


def fit_tokens(labels: Tensor) -> Any:
    return gpattention.attach(tokens_bert()).fit(torch.randint(0, 30, (20, 4)), labels, **ONE_STEP)


def fit_values(labels: Tensor, width: int = 1) -> None:
    check_labels(labels, (width,), "regression")


test_refusals = refusals([
    (lambda: FitOptions(samples=1), "samples.*1"),
    (lambda: FitOptions(steps=0), "steps.*0"),
    (lambda: FitOptions(levels=("all",)), "levels.*all"),  # type: ignore[arg-type]
    (lambda: FitOptions(levels="global"), "levels.*'global'"),  # type: ignore[arg-type]
    (lambda: FitOptions(alignment="some"), "alignment.*'some'"),  # type: ignore[arg-type]
    (lambda: FitOptions(items=2), "items.*2"),
    (lambda: fit_classes(), "inputs alone"),
    (lambda: fit_classes([]), "got none"),
    (lambda: fit_classes([{"x": X}]), "'labels', got keys x"),
    (lambda: fit_classes([X]), r"\(inputs, labels\), got Tensor"),
    (lambda: fit_classes((X[:3], Y[:3])), "at least 4 items.*got 3"),
    (lambda: fit_classes(X, Y[:2]), "a label for each of 20 .*got 2"),
    (lambda: fit_classes(X, Y.float()), "whole numbers.*got torch.float32"),
    (lambda: fit_classes(X, Y > 0), "whole numbers.*got torch.bool"),
    (lambda: fit_classes(X, nn.functional.one_hot(Y)), r"labels of shape \[B\], got shape \(20, 3\)"),
    (lambda: fit_classes(X, Y - 1), "labels from 0 to 2, or -100 .*got -1"),
    (lambda: fit_classes(X, Y + 5), "labels from 0 to 2, or -100 .*got 5"),
    (lambda: fit_classes(X, Y.tolist()), "labels to be a tensor .*got list"),
    (lambda: fit_classes(X, torch.tensor(1)), r"labels to be a tensor .*got a tensor of shape \(\)"),
    (lambda: fit_tokens(Y), r"labels of shape \[B, N\], got shape \(20,\)"),
    (lambda: fit_tokens(torch.zeros(20, 3, dtype=torch.long)), "labels of 4 tokens like the answers, got 3"),
    (lambda: fit_values(torch.randn(4, 2)), r"\[B, 1\], got shape \(4, 2\)"),
    (lambda: fit_values(torch.randn(4), 2), r"\[B, 2\], got shape \(4,\)"),
    (lambda: fit_values(torch.tensor([1.0, torch.nan])), "finite numbers, got 1 that are not"),
])  # fmt: skip
