"""Strangeness: densities against brute force, valid p-values, honest choice of parts, and hard cases."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, ks_2samp, kstest
from sklearn.metrics import roc_auc_score
from torch import Tensor

from gpattention.evaluation import PARTS, Strangeness
from gpattention.models import Signals
from gpattention.numerics import NonFiniteError
from gpattention.strangeness.strangeness import (
    FORMAT,
    LengthEffect,
    PartScores,
    available_parts,
    choose_weights,
    weights_without,
)
from tests.evaluation.cases import seeded
from tests.oracles import strangeness as oracles
from tests.refusals import refusals
from tests.threads import at_once

CLASSES, WIDTH, HEADS = 4, 8, 6
CENTRES = 2 * torch.randn(CLASSES, WIDTH, generator=seeded(100))
WEIGHT, BIAS = torch.randn(CLASSES, WIDTH, generator=seeded(101)), torch.randn(CLASSES, generator=seeded(102))
HEAD = (WEIGHT, BIAS)
MIX = torch.randn(HEADS, HEADS, generator=seeded(103))
SITES = tuple(f"blocks.{i // 2}.attention head {i % 2}" for i in range(HEADS))


def usual(items: int, seed: int, *, lengths: bool = False) -> tuple[Signals, Tensor]:
    """Items of four classes with profiles whose heads go together, and their labels."""
    g = seeded(seed)
    labels = torch.randint(CLASSES, (items,), generator=g)
    features = CENTRES[labels] + torch.randn(items, WIDTH, generator=g)
    tokens = torch.randint(4, 65, (items,), generator=g) if lengths else torch.full((items,), 64)
    profiles = [torch.randn(items, HEADS, generator=g) @ MIX for _ in range(2)]
    if lengths:  # as means over tokens are: moved by length, and less certain of few
        profiles = [x * (16 / tokens[:, None]).sqrt() + tokens[:, None].log() for x in profiles]
    return Signals(features @ WEIGHT.mT + BIAS, features, *profiles, tokens, SITES), labels


def moved(signals: Signals, field: str, by: float, column: int | None = None) -> Signals:
    value = getattr(signals, field).clone()
    if column is None:
        value += by
    else:
        value[:, column] += by
    return replace(signals, **{field: value})


HELD_OUT, LABELS = usual(500, 0)
NEW = usual(60, 1)[0]


def shifts(seed: int = 10, items: int = 80) -> dict[str, Signals]:
    return {
        f"{field} {by}": moved(usual(items, seed + i)[0], field, by)
        for i, (field, by) in enumerate([("variance", 3.0), ("variance", -3.0), ("features", 1.0)])
    }


def of(signals: Signals, field: str) -> np.ndarray:
    return getattr(signals, field).double().numpy()


def test_every_part_equals_brute_force() -> None:
    fitted = Strangeness.fit(HELD_OUT, LABELS, tuple(PARTS), head=HEAD)
    densities, weighing, _ = Strangeness.split(500)
    inside, classes = HELD_OUT[densities], LABELS[densities].numpy()
    assert fitted.scores.parts == tuple(PARTS)
    usual_x, z = of(inside, "features"), fitted.scores(NEW).numpy()

    def expected(items: Signals) -> dict[str, np.ndarray]:
        x, probs = of(items, "features"), items.logits.double().softmax(-1).numpy()
        return {
            "entropy": -(probs * np.log(probs)).sum(-1),
            "max_softmax": 1 - probs.max(-1),
            "energy": -np.log(np.exp(of(items, "logits")).sum(-1)),
            "gen": oracles.generalised_entropy(probs, 0.1, 100),
            "mahalanobis": 0.5 * np.log1p(oracles.mahalanobis(x, usual_x, classes)),
            "mahalanobis_normed": 0.5
            * np.log1p(oracles.mahalanobis(oracles.unit(x), oracles.unit(usual_x), classes)),
            "relative_mahalanobis": oracles.relative_mahalanobis(x, usual_x, classes),
            "relative_mahalanobis_normed": oracles.relative_mahalanobis(
                oracles.unit(x), oracles.unit(usual_x), classes
            ),
            "knn": oracles.knn(x, usual_x, 10),
            "vim": oracles.vim(x, usual_x, WEIGHT.double().numpy(), BIAS.double().numpy()),
            "variance_density": 0.5
            * np.log1p(oracles.profile_distance(of(items, "variance"), of(inside, "variance"))),
            "attention_density": 0.5
            * np.log1p(
                oracles.profile_distance(of(items, "attention_entropy"), of(inside, "attention_entropy"))
            ),
        }

    ours, units = expected(NEW), expected(HELD_OUT[weighing])
    for k, name in enumerate(PARTS):
        standard = (ours[name] - units[name].mean()) / units[name].std()
        assert z[:, k] == pytest.approx(standard, rel=1e-4, abs=1e-4), name  # logits are of float32 products
    assert fitted.score(NEW).numpy() == pytest.approx(z.mean(-1))
    p = oracles.p_values(fitted.score(NEW).numpy(), fitted.calibration.numpy())
    assert fitted.p_value(NEW).numpy() == pytest.approx(p, abs=0)


def test_strange_on_either_side() -> None:
    fitted = Strangeness.fit(HELD_OUT, LABELS, ["variance_density"])
    for by in (-6.0, 6.0):
        assert float(fitted.p_value(moved(NEW, "variance", by)).median()) < 0.01
    assert 0.2 < float(fitted.p_value(NEW).median()) < 0.8


def test_which_parts_can_be_had() -> None:
    bare = replace(HELD_OUT, variance=None, attention_entropy=None)
    features = {name for name, part in PARTS.items() if part.reads == "features"}
    logits = {name for name, part in PARTS.items() if part.reads == "logits"}
    assert set(available_parts(bare, 4, HEAD)) == features | logits
    assert set(available_parts(HELD_OUT, 4)) == set(PARTS) - {"vim"}
    regression = replace(bare, logits=bare.logits[:, :1])
    assert set(available_parts(regression)) == {"mahalanobis", "mahalanobis_normed", "knn"}
    assert Strangeness.fit(bare).scores.parts == ("entropy", "mahalanobis")
    assert Strangeness.fit(HELD_OUT).weights.tolist() == [0.25] * 4


def test_predicted_classes_stand_in_for_labels() -> None:
    predicted = HELD_OUT.logits.argmax(-1)
    one, other = Strangeness.fit(HELD_OUT), Strangeness.fit(HELD_OUT, predicted)
    assert one.score(NEW).equal(other.score(NEW))


def test_p_values_are_valid() -> None:
    """Every new item has its own fit, so that its p-value is one of an exactly uniform distribution."""
    found, items = [], 60
    for seed in range(300):
        signals, labels = usual(items + 1, 1000 + seed, lengths=seed % 2 == 0)
        fitted = Strangeness.fit(signals[:items], labels[:items], seed=seed)
        found.append(float(fitted.p_value(signals[items:])))
    steps = torch.rand(len(found), generator=seeded(0)).numpy() / (len(fitted.calibration) + 1)
    assert kstest(np.array(found) - steps, "uniform").pvalue > 0.001


@pytest.mark.parametrize("choose", [False, True])
def test_false_alarms_are_as_many_as_promised(choose: bool) -> None:
    signals, labels = usual(3000, 2)
    fitted = Strangeness.fit(signals, labels, shifted=shifts() if choose else None)
    new = usual(3000, 3)[0]
    assert ks_2samp(fitted.calibration.numpy(), fitted.score(new).numpy()).pvalue > 0.001
    n, m = len(fitted.calibration), len(new)
    for rate in (0.01, 0.05, 0.2):
        most = int(rate * (n + 1) + 1e-9)  # calibration items and the new one itself
        low, high = betabinom(m, most, n + 1 - most).interval(0.999)
        assert low <= int(fitted.flag(new, rate).sum()) <= high


def test_nothing_but_scores_comes_from_calibration_items() -> None:
    """Their labels, and their shifted copies, may be anything."""
    calibrating = Strangeness.split(500)[2]
    labels = LABELS.clone()
    labels[calibrating] = (labels[calibrating] + 1) % CLASSES
    copies = {f"{by}": moved(HELD_OUT, "variance", by) for by in (-3.0, 2.0, 4.0)}
    odd = {name: _replaced(copy, calibrating) for name, copy in copies.items()}
    origins = torch.arange(500)
    one = Strangeness.fit(HELD_OUT, LABELS, shifted=copies, origins=origins)
    other = Strangeness.fit(HELD_OUT, labels, shifted=odd, origins=origins)
    assert one.weights.equal(other.weights)
    assert one.score(NEW).equal(other.score(NEW))
    assert one.p_value(NEW).equal(other.p_value(NEW))


def _replaced(signals: Signals, where: Tensor) -> Signals:
    features = signals.features.clone()
    features[where] = 50.0
    return replace(signals, features=features)


def test_split_is_disjoint_and_whole() -> None:
    parts = Strangeness.split(503, seed=4)
    assert [len(part) for part in parts] == [201, 100, 202]
    assert torch.cat(parts).sort().values.equal(torch.arange(503))
    assert not torch.cat(parts).equal(torch.cat(Strangeness.split(503, seed=5)))


# Choice of parts


def test_parts_are_chosen_that_tell_shifts() -> None:
    only = {f"{by}": moved(usual(80, 20)[0], "variance", by) for by in (-4.0, 3.0, 5.0)}
    fitted = Strangeness.fit(HELD_OUT, LABELS, shifted=only, head=HEAD)
    assert fitted.weights.sum() == pytest.approx(1)
    assert bool((fitted.weights > 0).all())
    assert "variance_density" in fitted.scores.parts
    assert float(fitted.weights[fitted.scores.parts.index("variance_density")]) > 0.5
    assert set(fitted.judged) == set(only)
    equal = Strangeness.fit(HELD_OUT, LABELS)
    far = moved(usual(200, 21)[0], "variance", 4.0)
    assert _auroc(fitted, far) > _auroc(equal, far)


def _auroc(fitted: Strangeness, strange: Signals) -> float:
    inside, outside = fitted.score(usual(200, 22)[0]), fitted.score(strange)
    return float(roc_auc_score([0] * len(inside) + [1] * len(outside), torch.cat([inside, outside]).numpy()))


def test_shifts_are_judged_by_fits_without_them() -> None:
    """A poisoned shift changes the fits that judge the others, and not the one that judges it."""
    g = seeded(30)
    clean = torch.randn(200, 5, generator=g).double()
    shifted = {name: torch.randn(100, 5, generator=g).double() for name in ("a", "b", "c")}
    shifted["a"][:, 0] += 2
    shifted["b"][:, 0] += 2
    shifted["c"][:, 1] += 2
    poisoned = shifted | {"c": torch.zeros(100, 5).double()}
    poisoned["c"][:, 4] = 40.0
    start = torch.full((5,), 0.2).double()
    assert weights_without("c", clean, shifted).equal(weights_without("c", clean, poisoned))
    for name in ("a", "b"):
        assert not weights_without(name, clean, shifted).equal(weights_without(name, clean, poisoned))
    weights, judged = choose_weights(clean, shifted, start)
    without = weights_without("c", clean, shifted)
    allowed = [*without, start]
    assert any(judged["c"] == pytest.approx(_column_auroc(clean @ w, shifted["c"] @ w)) for w in allowed)
    assert float(weights.sum()) == pytest.approx(1)


def _column_auroc(inside: Tensor, outside: Tensor) -> float:
    return float(roc_auc_score([0] * len(inside) + [1] * len(outside), torch.cat([inside, outside]).numpy()))


def test_equal_weights_stay_where_nothing_is_gained() -> None:
    """Each shift is seen by a part that no other shift asks for."""
    clean = torch.randn(300, 4, generator=seeded(40)).double()
    shifted = {}
    for k in range(4):
        shifted[str(k)] = torch.randn(100, 4, generator=seeded(41 + k)).double()
        shifted[str(k)][:, k] += 3
    start = torch.full((4,), 0.25).double()
    weights, judged = choose_weights(clean, shifted, start)
    assert weights.equal(start)
    expected = {name: _column_auroc(clean @ start, z @ start) for name, z in shifted.items()}
    assert judged == pytest.approx(expected)


# Length


def test_length_alone_is_not_strange() -> None:
    signals, labels = usual(1500, 50, lengths=True)
    new = usual(1500, 51, lengths=True)[0]
    short = new[new.tokens < 12]
    parts = ["variance_density", "attention_density"]
    with_length, without = (
        np.mean(
            [
                Strangeness.fit(signals, labels, parts, regress_length=yes, seed=seed)
                .flag(short, 0.05)
                .double()
                .mean()
                for seed in range(3)
            ]
        )
        for yes in (True, False)
    )
    assert with_length < 0.15
    assert without > 2 * with_length


def test_effect_of_length_by_least_squares() -> None:
    g = seeded(60)
    t = torch.rand(400, generator=g).double() * 4
    noise = 0.05 * torch.randn(400, 2, generator=g).double()
    straight = torch.stack([2 * t, -t], 1) + noise
    found = LengthEffect.fit(t, straight)
    slope = np.polyfit(t.numpy(), straight.numpy(), 1)[0]
    assert len(found.hinges) == 0
    expected = (t.numpy() - t.numpy().mean())[:, None] * slope
    assert found(t).numpy() == pytest.approx(expected)
    bent = torch.stack([(t - 2).clamp_min(0) * 3, t], 1) + noise
    piecewise = LengthEffect.fit(t, bent)
    assert len(piecewise.hinges) == 3
    assert float((bent - piecewise(t)).std(0).max()) < 0.15
    outside = torch.tensor([-10.0, 99.0]).double()
    assert piecewise(outside).equal(piecewise(torch.stack([t.min(), t.max()])))  # no extrapolation


def test_the_share_of_length_is_shown() -> None:
    signals, labels = usual(1000, 70, lengths=True)
    fitted = Strangeness.fit(signals, labels)
    new = usual(300, 71, lengths=True)[0]
    length = fitted.explain(new).length
    assert float(length[new.tokens < 8].mean()) > 1
    typical = (new.tokens.double().log() - signals.tokens.double().log().mean()).abs() < 0.2
    assert float(length[typical].abs().mean()) < 0.3
    assert bool((Strangeness.fit(HELD_OUT).explain(NEW).length == 0).all())  # lengths are the same


# Explanations


@pytest.mark.parametrize(
    ("field", "part"), [("variance", "variance_density"), ("attention_entropy", "attention_density")]
)
@pytest.mark.parametrize("column", [0, 3, 5])
def test_the_perturbed_head_is_named(field: str, part: str, column: int) -> None:
    fitted = Strangeness.fit(HELD_OUT, LABELS)
    found = fitted.explain(moved(NEW, field, 12.0, column))
    assert found.part.count(part) > 55
    assert found.site.count(SITES[column]) > 55
    assert found.contributions.sum(-1).numpy() == pytest.approx(found.score.numpy())
    assert SITES[column] in str(found)
    squared = found.sites[part].sum(-1)
    inside = HELD_OUT[Strangeness.split(500)[0]]
    expected = oracles.profile_distance(of(moved(NEW, field, 12.0, column), field), of(inside, field))
    assert squared.numpy() == pytest.approx(expected)


def test_without_profiles_no_site_is_named() -> None:
    bare = {"variance": None, "attention_entropy": None}
    found = Strangeness.fit(replace(HELD_OUT, **bare)).explain(replace(NEW, **bare))
    assert found.site == (None,) * len(NEW)
    assert set(found.part) <= {"entropy", "mahalanobis"}


# Hard cases


def _one_column(signals: Signals) -> Signals:
    return replace(signals, variance=signals.variance[:, :1], sites=SITES[:1], entropy_sites=SITES)


HARD: dict[str, Any] = {
    "few": lambda s: s,
    "one class": lambda s: replace(s, logits=s.logits * 0 + torch.tensor([5.0, 0, 0, 0])),
    "regression": lambda s: replace(s, logits=s.logits[:, :1]),
    "embeddings": lambda s: replace(s, logits=s.logits[:, :0]),
    "constant heads": lambda s: replace(s, variance=torch.full_like(s.variance, 0.3)),
    "one constant head": lambda s: moved(moved(s, "variance", 0.0), "variance", 0.0, 2),
    "collinear": lambda s: replace(s, variance=s.variance[:, :1].expand(-1, HEADS)),
    "one column": _one_column,
    "constant features": lambda s: replace(s, features=torch.ones_like(s.features)),
    "zero features": lambda s: replace(s, features=torch.zeros_like(s.features)),
}


@pytest.mark.parametrize("change", HARD.values(), ids=HARD)
@pytest.mark.parametrize("items", [10, 40])
@pytest.mark.parametrize("lengths", [False, True])
def test_hard_cases_do_not_fail(change: Any, items: int, lengths: bool) -> None:
    signals, new = change(usual(items, 80, lengths=lengths)[0]), change(usual(30, 81, lengths=lengths)[0])
    parts = available_parts(
        signals, len(signals.logits.argmax(-1).unique()) if signals.logits.shape[1] else 1
    )
    offered = [name for name in parts if not name.startswith("relative")]  # a split may leave one class
    for fitted in (Strangeness.fit(signals), Strangeness.fit(signals, None, offered)):
        assert bool(fitted.score(new).isfinite().all())
        p = fitted.p_value(new)
        assert bool(((p > 0) & (p <= 1)).all())
        assert len(fitted.explain(new).site) == 30


def test_a_constant_head_that_moves_is_seen() -> None:
    def constant(signals: Signals, value: float) -> Signals:
        variance = signals.variance.clone()
        variance[:, 2] = value
        return replace(signals, variance=variance)

    fitted = Strangeness.fit(constant(HELD_OUT, 0.25), LABELS, ["variance_density"])
    p = [float(fitted.p_value(constant(NEW, value)).median()) for value in (0.25, 9.0)]
    assert p[0] > 0.1 > 0.02 > p[1]


def test_more_classes_than_items() -> None:
    labels = torch.arange(40)
    logits = torch.randn(40, 50, generator=seeded(90))
    signals = replace(usual(40, 91)[0], logits=logits)
    fitted = Strangeness.fit(signals, labels, available_parts(signals, 40))
    assert bool(fitted.score(signals).isfinite().all())


# Use


def test_recalibration_needs_items_alone() -> None:
    fitted = Strangeness.fit(HELD_OUT, LABELS)
    other = moved(usual(400, 95)[0], "variance", 5.0)
    again = fitted.recalibrate(other)
    new = moved(usual(400, 96)[0], "variance", 5.0)
    assert float(fitted.flag(new, 0.05).double().mean()) > 0.3
    assert float(again.flag(new, 0.05).double().mean()) < 0.12
    assert again.score(new).equal(fitted.score(new))
    assert len(fitted.calibration) == 200


@pytest.mark.parametrize("lengths", [False, True])
def test_saved_is_the_same_to_the_bit(lengths: bool, tmp_path: Path) -> None:
    signals, labels = usual(300, 97, lengths=lengths)
    fitted = Strangeness.fit(signals, labels, tuple(PARTS), head=HEAD)
    new = usual(50, 98, lengths=lengths)[0]
    fitted.save(tmp_path / "a" / "b")
    again = Strangeness.load(tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "strangeness.json", "strangeness.safetensors",
    ]  # fmt: skip
    for one, other in (
        (fitted.score, again.score),
        (fitted.p_value, again.p_value),
        (fitted.flag, again.flag),
    ):
        assert one(new).equal(other(new))
    assert str(fitted.explain(new)) == str(again.explain(new))
    chosen = Strangeness.fit(signals, labels, shifted=shifts())
    chosen.save(tmp_path)
    assert Strangeness.load(tmp_path).judged == chosen.judged


def test_threads_share_one() -> None:
    fitted = Strangeness.fit(HELD_OUT, LABELS)
    expected = fitted.p_value(NEW)
    found = at_once([lambda: fitted.p_value(NEW)] * 8)
    assert all(p.equal(expected) for p in found)


def test_signals_that_no_part_reads_may_differ() -> None:
    fitted = Strangeness.fit(HELD_OUT, LABELS, ["mahalanobis"])
    assert fitted.score(NEW).equal(fitted.score(replace(NEW, variance=None)))


def _saved(folder: Path, change: Any) -> Strangeness:
    Strangeness.fit(HELD_OUT, LABELS).save(folder)
    change(folder)
    return Strangeness.load(folder)


FITTED = Strangeness.fit(HELD_OUT, LABELS)
test_refusals = refusals(
    [
        (lambda: Strangeness.fit(HELD_OUT[:9]), "signals of at least 10", "9"),
        (lambda: Strangeness.fit(HELD_OUT, LABELS[:4]), "labels", r"\(4,\)"),
        (lambda: Strangeness.fit(HELD_OUT, LABELS + 1), "labels from 0 to 3", "4"),
        (lambda: Strangeness.fit(HELD_OUT, parts=["vim"]), "parts", "vim"),
        (lambda: Strangeness.fit(HELD_OUT, parts=["odd"]), "parts", "odd"),
        (lambda: Strangeness.fit(HELD_OUT, parts=[]), "parts", r"\[\]"),
        (lambda: Strangeness.fit(HELD_OUT, seed=0.5), "seed", "0.5"),
        (lambda: Strangeness.fit(HELD_OUT, shifted={"a": NEW}), "at least two shifts", "'a': 60"),
        (lambda: Strangeness.fit(HELD_OUT, shifted={"a": NEW, "b": NEW[:0]}), "shifts with items", "'b': 0"),
        (
            lambda: Strangeness.fit(HELD_OUT, shifted={"a": NEW, "b": NEW}, origins=torch.arange(9)),
            "origins of the 60 items of 'a'", "9",
        ),
        (lambda: FITTED.flag(NEW, 0.004), "rate from 0.00498", "0.004"),
        (lambda: FITTED.flag(NEW, 1.0), "rate", "1.0"),
        (lambda: FITTED.flag(NEW, float("nan")), "rate", "nan"),
        (lambda: FITTED.recalibrate(NEW[:0]), "at least one item", "0"),
        (lambda: FITTED.score(replace(NEW, variance=None)), "signals with variance of", "None"),
        (lambda: FITTED.score(replace(NEW, sites=SITES[::-1], entropy_sites=SITES)), "variance of", "head 1"),
        (lambda: FITTED.score(replace(NEW, features=NEW.features[:, 1:])), "features of 8", "7"),
        (lambda: FITTED.score(replace(NEW, logits=NEW.logits[:, 1:])), "logits of 4", "3"),
        (
            lambda folder: _saved(folder, lambda f: (f / "strangeness.safetensors").write_bytes(b"1")),
            "strangeness.safetensors", "sha256",
        ),
        (
            lambda folder: _saved(folder, lambda f: (f / "strangeness.json").write_text('{"format": "x"}')),
            "strangeness.json.*format", "x",
        ),
        (
            lambda folder: _saved(
                folder, lambda f: (f / "strangeness.json").write_text(f'{{"format": "{FORMAT}"}}')
            ),
            "strangeness.json", "parts",
        ),
    ]
)  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_signals_must_be_finite(value: float) -> None:
    wrong = moved(NEW, "features", value, 1)
    with pytest.raises(NonFiniteError, match="60 non-finite numbers in features"):
        FITTED.score(wrong)


def test_scores_of_parts_stand_alone() -> None:
    """What the choice of a temperature takes from here: some columns of all scores."""
    densities, scaling, _ = Strangeness.split(500)
    scores = PartScores.fit(HELD_OUT, LABELS, None, densities, scaling)
    some = scores.only([4, 0])
    assert some.parts == (scores.parts[4], scores.parts[0])
    assert some(NEW).equal(scores(NEW)[:, [4, 0]])
    assert scores.only([])(NEW).shape == (60, 0)
