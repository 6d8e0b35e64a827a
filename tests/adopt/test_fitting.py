"""Fitting to held-out data: what must be found, and that it never hurts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import gpattention
from gpattention.adopt import fitting, stages
from gpattention.adopt.batches import collect_batches
from gpattention.adopt.fitting import Candidate, Fit, FitOptions, _chosen, bounds_reached
from gpattention.adopt.labels import IGNORED
from gpattention.adopt.likelihood import log_likelihood
from gpattention.adopt.selection import greedy_sites
from gpattention.adopt.stages import NOISES
from gpattention.evaluation.temperature import fit_temperature
from gpattention.metrics import nll
from tests.adopt.hosts import CLASSES, Encoder

ZERO = torch.zeros(())
QUICK: dict[str, Any] = {"steps": 6, "samples": 4}


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


def test_an_overconfident_model_is_softened() -> None:
    model = Loud(6.0)
    handle = gpattention.attach(model)
    heard: list[tuple[str, int, int]] = []
    x, labels = labelled(model, 200, 1)
    fit = handle.fit(x, labels, **QUICK, progress=lambda *told: heard.append(told))
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
    assert stages[:5] == ["frames", "start", "global", "sites", "heads"]
    assert stages[-1] == "choice"
    for line in ("plain", "* ", "temperature", "draws"):
        assert line in str(fit) == repr(fit)  # also where a notebook shows it
    assert bool((handle.settings.noise >= NOISES[0]).all())


def test_draws_alone_soften_too() -> None:
    model = Loud(6.0)
    fit = gpattention.attach(model).fit(
        labelled(model, 150, 1), **QUICK, temperature=False, levels=("global",)
    )
    assert [c.name for c in fit.candidates if c.name != "selected"] == ["plain", "global"]
    assert all(c.settings.temperature == 1 for c in fit.candidates)
    assert fit.candidates[1].nll < fit.candidates[0].nll
    assert bool((fit.candidates[1].settings.scale > 0).all())


def test_a_calibrated_model_is_left_as_it_is() -> None:
    model = Loud(1.0)
    handle = gpattention.attach(model)
    fit = handle.fit(labelled(model, 200, 1), **QUICK, select=False)
    best = min(c.nll for c in fit.candidates)
    chosen = next(c for c in fit.candidates if c.name == fit.chosen)
    assert chosen.nll - best <= chosen.margin + 1e-9
    assert chosen.draws == 0
    assert fit.chosen in ("plain", "temperature")
    x, _ = labelled(model, 20, 3)
    drawn, plain = handle.predict(x, samples=3), handle.predict(x, samples=0)
    assert torch.equal(drawn.label, plain.label)


def test_a_temperature_alone_is_that_of_all_items() -> None:
    model = Loud(6.0)
    x, labels = labelled(model, 60, 1)
    fit = gpattention.attach(model).fit(x, labels, **QUICK, levels=(), select=False)
    assert fit.chosen == "temperature"
    with torch.no_grad():
        logits = model.eval()(x)[None]
    assert fit.settings.temperature == pytest.approx(fit_temperature(logits, labels), rel=1e-4)
    partly = fit.candidates[1].settings.temperature  # fitted to three fifths
    assert partly != pytest.approx(fit.settings.temperature, rel=1e-3)
    assert f"all items ask for: {fit.settings.temperature:.3f}" in str(fit)


def all_right(items: int) -> tuple[Loud, Tensor, Tensor]:
    """A model, inputs that it is surest of, and its own classes of them."""
    model = Loud(3.0).eval()
    x = torch.randn(10 * items, 5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        probs = model(x).softmax(-1)
    surest = probs.amax(-1).topk(items).indices
    return model, x[surest], probs[surest].argmax(-1)


def test_nothing_is_sharpened_where_every_item_is_right() -> None:
    model, x, labels = all_right(300)
    handle = gpattention.attach(model)
    foreign = 10 * torch.randn(200, 5, 16, generator=torch.Generator().manual_seed(2))
    before = handle.predict(foreign, samples=0).confidence
    fit = handle.fit(x, labels, **QUICK)
    assert all(c.settings.temperature == 1 for c in fit.candidates)
    assert fit.settings.temperature == 1
    after = handle.predict(foreign, samples=8).confidence
    assert float(after.mean()) <= float(before.mean()) + 1e-6
    assert "The temperature is 1: all 300 items are right" in fit.reason
    assert fit.reason in repr(fit)


@pytest.mark.parametrize(("items", "factor", "shown"), [(40, 0.8, False), (400, 0.6, True)])
def test_sharpening_must_be_shown(items: int, factor: float, shown: bool) -> None:
    model = Loud(factor)  # too unsure
    handle = gpattention.attach(model)
    fit = handle.fit(labelled(model, items, 5), **QUICK, levels=("global",), select=False)
    assert (fit.settings.temperature < 1) == shown
    assert ("excludes 1" if shown else "holds 1") in fit.reason
    assert fit.on_bounds == ()


def test_a_temperature_on_its_bound_is_told() -> None:
    """Labels that have nothing to do with a sure model: no temperature inside the bounds is best."""
    model = Loud(6.0)
    x, labels = labelled(model, 100, 1)
    with pytest.warns(UserWarning, match="temperature lies on its bound, 100; 100 is taken") as heard:
        fit = gpattention.attach(model).fit(x, (labels + 1) % CLASSES, **QUICK, levels=(), select=False)
    assert heard[0].filename == __file__
    assert fit.settings.temperature == 100
    assert len(fit.on_bounds) == 1
    assert fit.on_bounds[0] in repr(fit)
    model = Loud(0.02)  # so unsure that few labels exclude nothing
    x, labels = labelled(model, 20, 2)
    with torch.no_grad():
        least = model.eval()(x).argmin(-1)
    with pytest.warns(UserWarning, match="temperature lies on its bound, 100; 1 is taken"):
        fit = gpattention.attach(model).fit(x, least, **QUICK, levels=(), select=False)
    assert fit.settings.temperature == 1
    assert "holds 1" in fit.reason


def test_a_residual_on_its_bound_is_told() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    model.head = nn.Linear(16, 1)
    x = torch.randn(40, 5, 16)
    handle = gpattention.attach(model, task="regression")
    own = handle.predict(x, samples=0).mean
    with pytest.warns(UserWarning, match="residual lies on its bound: 2.061e-09, the bound is 2.061e-09"):
        fit = handle.fit(x, own, **QUICK, levels=(), select=False)
    assert len(fit.on_bounds) == 1


def test_settings_on_their_bounds_are_named() -> None:
    settings = gpattention.attach(Encoder()).settings
    settings = replace(settings, power=torch.full_like(settings.power, 0.5))
    assert bounds_reached(settings) == ()
    for name, value in (("scale", 30.0), ("noise", NOISES[0]), ("noise", NOISES[1]), ("power", 1.0)):
        numbers = getattr(settings, name).clone()
        numbers[0, 1] = value
        (told,) = bounds_reached(replace(settings, **{name: numbers}))
        assert f"Fitted {name} lies on its bound: {value:.4g} at 1 of 4 heads" in told
        assert bounds_reached(replace(settings, **{name: numbers}, draws=(False, True))) == ()


def test_a_noise_on_its_bound_is_told_by_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = (0.09999, 0.10001)  # around where it starts
    monkeypatch.setattr(stages, "NOISES", narrow)
    monkeypatch.setitem(stages.BOUNDS, "noise", narrow)
    monkeypatch.setattr(fitting, "CLEAR", -1e9)  # draws are made whatever they gain
    model = Loud(6.0)
    with pytest.warns(UserWarning, match="Fitted noise lies on its bound: 0.[01]+9* at . of 4 heads"):
        fit = gpattention.attach(model).fit(
            labelled(model, 60, 1), **QUICK, temperature=False, levels=("heads",), select=False
        )
    assert fit.chosen == "heads"


def test_fits_repeat() -> None:
    model = Loud(4.0)
    data = labelled(model, 60, 1)
    first, second = (gpattention.attach(model).fit(data, **QUICK, select=False) for _ in range(2))
    assert first.chosen == second.chosen
    for a, b in zip(first.candidates, second.candidates, strict=True):
        torch.testing.assert_close(a.settings.scale, b.settings.scale)
        assert a.nll == pytest.approx(b.nll, rel=1e-5)


def test_inference_mode_makes_no_difference() -> None:
    fits = []
    for inferring in (False, True):
        model = Loud(6.0)
        handle = gpattention.attach(model)
        x, labels = labelled(model, 60, 1)
        with torch.inference_mode(inferring):
            fits.append(str(handle.fit(x, labels, **QUICK)))
    assert fits[0] == fits[1]


def test_the_mode_and_the_weights_stay() -> None:
    model = Loud(4.0).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    data = labelled(model, 40, 1)
    model.train()
    gpattention.attach(model).fit(data, **QUICK, levels=("sites",), select=False)
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_frames_are_those_of_the_data() -> None:
    model = Loud(2.0)
    handle = gpattention.attach(model)
    x, labels = labelled(model, 40, 1)
    handle.fit(x, labels, **QUICK, levels=("global",), select=False)
    (frame, _) = handle.settings.frames
    site = handle.sites[0].module
    with torch.no_grad():
        q, k, v = nn.functional.linear(x[fitted_to(40)], site.in_proj_weight, site.in_proj_bias).chunk(3, -1)
    shrink = 8**-0.25
    torch.testing.assert_close(frame.q0.flatten(), q.mean((0, 1)) * shrink, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(frame.k0.flatten(), k.mean((0, 1)) * shrink, rtol=1e-4, atol=1e-5)
    rms = v.unflatten(-1, (2, 8)).square().mean((0, 1, 3)).sqrt()
    torch.testing.assert_close(frame.unit, rms, rtol=1e-4, atol=1e-5)


def test_fitted_means_are_still_the_hosts() -> None:
    model = Loud(2.0)
    handle = gpattention.attach(model)
    x, labels = labelled(model, 40, 1)
    handle.fit(x, labels, **QUICK, levels=("heads",), select=False)
    with torch.no_grad():
        torch.testing.assert_close(handle.process_mean(x), model.eval()(x), rtol=1e-5, atol=1e-5)


def test_regression_fits_the_residual() -> None:
    torch.manual_seed(0)
    model = Encoder()
    model.head = nn.Linear(16, 1)
    x = torch.randn(100, 5, 16)
    with torch.no_grad():
        errors = 0.3 * torch.randn(100, 1)
        targets = model.eval()(x) + errors
    handle = gpattention.attach(model, task="regression")
    fit = handle.fit(x, targets, **QUICK, levels=("global",), select=False)
    assert [c.name for c in fit.candidates] == ["plain", "global"]
    squares = errors.square()
    assert fit.candidates[0].settings.residual == pytest.approx(
        float(squares[fitted_to(100)].mean()), rel=1e-4
    )
    assert fit.chosen == "plain"  # whose variance is that of all errors
    told = handle.predict(x, samples=5).variance
    torch.testing.assert_close(told, squares.mean().expand_as(told), rtol=1e-4, atol=0)


def test_tokens_fit_without_the_ignored() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30,
        num_labels=CLASSES,
    )  # fmt: skip
    model = transformers.BertForTokenClassification(config)
    ids, labels = torch.randint(0, 30, (30, 4)), torch.randint(0, CLASSES, (30, 4))
    labels[:, 0] = IGNORED
    handle = gpattention.attach(model)
    batch = {"input_ids": ids, "labels": labels}
    fit = handle.fit([batch], **QUICK, levels=("global",))
    assert isinstance(fit, Fit)
    assert len(fit.settings.draws) == 1
    garbage = {"input_ids": ids, "labels": torch.where(labels == IGNORED, IGNORED, labels)}
    again = gpattention.attach(model).fit(garbage, **QUICK, levels=("global",))
    assert again.candidates[0].nll == pytest.approx(fit.candidates[0].nll)


def test_ignored_tokens_say_nothing_about_the_temperature() -> None:
    """Not whether all are right, nor how sure to be, and sentences without any label may come first."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30,
        num_labels=CLASSES,
    )  # fmt: skip
    model = transformers.BertForTokenClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(300)
        ids = torch.randint(0, 30, (150, 4))
        logits = model(ids).logits
    labels = torch.where(torch.rand(150, 4) < 0.8, logits.argmax(-1), torch.randint(0, CLASSES, (150, 4)))
    labels[:110] = IGNORED
    labels[110:, 2] = IGNORED
    fit = gpattention.attach(model).fit(
        {"input_ids": ids, "labels": labels}, **QUICK, levels=("global",), select=False
    )
    known = labels != IGNORED
    expected = fit_temperature(logits[known][None], labels[known])
    assert fit.settings.temperature == pytest.approx(expected, rel=1e-4)
    assert 1.5 < expected < 90
    right = torch.where(known, logits.argmax(-1), IGNORED)
    fit = gpattention.attach(model).fit(
        {"input_ids": ids, "labels": right}, **QUICK, levels=("global",), select=False
    )
    assert fit.settings.temperature == 1
    assert f"all {int(known.sum())} items are right" in fit.reason
    with pytest.raises(ValueError, match="got -100 for all of them"):
        gpattention.attach(model).fit({"input_ids": ids[:9], "labels": labels[:9]}, **QUICK)


def test_the_likelihood_averages_probabilities() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 7, 3), torch.randint(0, 3, (7,))
    told = log_likelihood(logits, labels, "classification", log_temperature=ZERO, log_residual=ZERO)
    probs = logits.softmax(-1).mean(0)
    torch.testing.assert_close(told, probs.gather(-1, labels[:, None])[:, 0].log())
    values, targets = torch.randn(9, 7, 2), torch.randn(7, 2)
    told = log_likelihood(values, targets, "regression", log_temperature=ZERO, log_residual=ZERO)
    normal = torch.distributions.Normal(values.mean(0), (values.var(0) + 1).sqrt())
    torch.testing.assert_close(told, normal.log_prob(targets).sum(-1))


def candidates(*told: tuple[str, int, float]) -> tuple[list[Candidate], list[Tensor]]:
    """Names, how many of two sites draw, and mean log-likelihoods; all differ by the same noise."""
    settings = gpattention.attach(Encoder()).settings
    made = [
        Candidate(name, replace(settings, draws=(drawn > 0, drawn > 1)), 0.0, -mean, 0.01)
        for name, drawn, mean in told
    ]
    noise = 0.1 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    noise = noise - noise.mean()
    return made, [mean + noise * (i + 1) for i, (_, _, mean) in enumerate(told)]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((("plain", 0, -1.0), ("temperature", 0, -0.9), ("global", 2, -0.5), ("heads", 2, -0.495)), "global"),
        ((("plain", 0, -1.0), ("temperature", 0, -0.9), ("global", 2, -0.5), ("heads", 2, -0.3)), "heads"),
        (
            (("plain", 0, -1.0), ("temperature", 0, -0.9), ("global", 2, -0.899), ("heads", 2, -1.2)),
            "temperature",
        ),
        ((("plain", 0, -0.8), ("temperature", 0, -0.9), ("global", 2, -1.0)), "plain"),
        # a gain of one and a half standard errors
        ((("plain", 0, -1.0), ("temperature", 0, -0.55), ("global", 2, -0.535)), "temperature"),
    ],
)
def test_draws_must_earn_themselves(told: Any, expected: str) -> None:
    made, scores = candidates(*told)
    best = max(scores, key=lambda score: float(score.mean()))
    assert made[_chosen(made, scores, best)].name == expected


def test_what_is_near_the_best_must_gain_too() -> None:
    """A candidate behind the one without draws is not taken for being simple."""
    made, scores = candidates(("temperature", 0, -0.55), ("global", 2, -0.56), ("heads", 2, -0.45))
    made[1] = replace(made[1], margin=0.2)
    assert made[_chosen(made, scores, scores[2])].name == "heads"


class Fake:
    """A scorer that knows what every site is worth."""

    def __init__(self, gains: tuple[float, ...]) -> None:
        self._gains = gains

    def some(self, batches: Any) -> Any:
        return batches

    def finish(self, settings: Any, batches: Any) -> tuple[Any, float]:
        drawn = [gain for gain, on in zip(self._gains, settings.draws, strict=True) if on]
        return settings, -sum(drawn) + 0.5 * max(0, len(drawn) - 1)  # a price for every further one


def test_sites_are_chosen_greedily() -> None:
    model = nn.Sequential(*(Encoder() for _ in range(2)))
    handle = gpattention.attach(model)
    settings = replace(handle.settings, draws=(True,) * 4)
    chosen = greedy_sites(Fake((0.1, 2.0, -1.0, 0.9)), settings, [], lambda *told: None)  # type: ignore[arg-type]
    assert chosen == (False, True, False, True)
    assert greedy_sites(Fake((-1.0,) * 4), settings, [], lambda *told: None) == (False,) * 4  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("data", "labels", "why"),
    [
        (torch.zeros(3, 2), None, "inputs alone"),
        ([], None, "got none"),
        (torch.zeros(3, 2), torch.zeros(2), "a label for each of 3"),
        ([{"x": torch.zeros(3)}], None, "with 'labels'"),
        ([torch.zeros(3)], None, r"\(inputs, labels\), got Tensor"),
    ],
)
def test_other_data_are_refused(data: Any, labels: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        collect_batches(data, labels, None)


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 1},
        {"steps": 0},
        {"levels": ("all",)},
        {"levels": "global"},
        {"alignment": "some"},
        {"items": 2},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        FitOptions(**options)


def test_too_few_items_are_refused() -> None:
    model = Loud(1.0)
    with pytest.raises(ValueError, match="at least 4 items"):
        gpattention.attach(model).fit(labelled(model, 3, 1), **QUICK)
