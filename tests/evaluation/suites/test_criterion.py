"""The criterion of plans: temperatures fitted to other items, and without the shift that is judged."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gpattention.evaluation.suites import SUITES
from gpattention.evaluation.suites.criterion import (
    BOTH,
    CLEAN,
    SHIFTED,
    Seen,
    criterion_findings,
    fitted_heats,
)
from gpattention.models import Signals
from tests.evaluation.cases import draws, some_labels
from tests.evaluation.evaluating import copies, evaluate_several

HEATS = ("temperature", "shift_temperature")
SHIFTS = ("blue", "dark", "turned")


def seen(seed: int, noise: float = 0.0, items: int = 40) -> Seen:
    """Over-confident logits, less often right with more noise."""
    logits = draws(items, seed=seed, scale=4.0)
    labels = some_labels(logits, seed)
    return Seen(
        logits + noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)), labels
    )


def half(seed: int) -> tuple[Seen, dict[str, Seen]]:
    return seen(seed), {name: seen(seed + i, noise=2.0 * i) for i, name in enumerate(SHIFTS, 1)}


def nll(several: list[Seen], temperature: float = 1.0) -> float:
    """By NumPy, from the mean of the draws' probabilities."""
    found = []
    for each in several:
        logits = each.logits.double().numpy() / temperature
        logits -= logits.max(-1, keepdims=True)
        probs = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).mean(0)
        found.append(-np.log(probs[np.arange(len(probs)), each.labels.numpy()]))
    return float(np.concatenate(found).mean())


def best(several: list[Seen]) -> float:
    """By narrowing down where the NLL is least."""
    low, high = 0.05, 50.0
    for _ in range(200):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, other) if nll(several, one) < nll(several, other) else (one, high)
    return (low + high) / 2


def test_it_is_what_numpy_computes() -> None:
    fitting, judging = half(10), half(20)
    found = {(r.set, r.predictor, r.metric): r.value for r in
             criterion_findings("model", fitting, judging, HEATS).records}  # fmt: skip
    clean, shifts = judging
    expected = {"": (dict.fromkeys(SHIFTS, 1.0), 1.0)}
    one = best([fitting[0]])
    expected["+temperature"] = (dict.fromkeys(SHIFTS, one), one)
    without = {name: best([fitting[1][k] for k in SHIFTS if k != name]) for name in SHIFTS}
    expected["+shift_temperature"] = (without, best(list(fitting[1].values())))
    assert len({round(t, 3) for t in without.values()}) == 3  # so that leaving one out is seen
    for suffix, (left_out, whole) in expected.items():
        each = {name: nll([shifts[name]], left_out[name]) for name in SHIFTS}
        of_clean, of_shifts = nll([clean], whole), float(np.mean(list(each.values())))
        label = f"model{suffix}"
        for name, value in each.items():
            assert found[f"{SHIFTED}/{name}", label, "nll"] == pytest.approx(value, abs=1e-5)
        assert found[CLEAN, label, "nll"] == pytest.approx(of_clean, abs=1e-5)
        assert found[SHIFTED, label, "nll"] == pytest.approx(of_shifts, abs=1e-5)
        assert found[BOTH, label, "nll"] == pytest.approx((of_clean + of_shifts) / 2, abs=1e-5)
    right = clean.logits.double().softmax(-1).mean(0).argmax(-1) == clean.labels
    assert found[CLEAN, "model", "accuracy"] == pytest.approx(right.double().mean())


def with_signals(part: Seen, seed: int) -> Seen:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(part.labels), 3, generator=generator, dtype=torch.float64)
    logits = part.logits.mean(0)
    tokens = torch.full((len(part.labels),), 5)
    return Seen(part.logits, part.labels, Signals(logits, features, None, None, tokens))


def test_adaptive_temperatures_leave_the_shift_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fitted:
        def __init__(self, temperature: float) -> None:
            self.constant = temperature

        def temperature(self, logits: Tensor, signals: Signals) -> Tensor:
            return torch.full((len(signals),), self.constant, dtype=torch.float64)

    left_out = dict(zip(SHIFTS, (3.0, 4.0, 5.0), strict=True))

    def cross_fit(
        logits: Tensor, signals: Signals, labels: Tensor, *, shifted: dict
    ) -> tuple[Fitted, dict[str, Fitted]]:
        assert tuple(shifted) == SHIFTS
        return Fitted(2.0), {name: Fitted(heat) for name, heat in left_out.items()}

    monkeypatch.setattr("gpattention.evaluation.suites.criterion.AdaptiveTemperature.cross_fit", cross_fit)
    fitting, judging = (
        (with_signals(clean, 0), {k: with_signals(v, 1) for k, v in shifts.items()})
        for clean, shifts in (half(10), half(20))
    )
    found = criterion_findings("model", fitting, judging, ("adaptive_temperature",))
    values = {(r.set, r.predictor): r.value for r in found.records if r.metric == "nll"}
    label = "model+adaptive_temperature"
    assert values[CLEAN, label] == pytest.approx(nll([judging[0]], 2.0), abs=1e-6)
    for name, heat in left_out.items():
        assert values[f"{SHIFTED}/{name}", label] == pytest.approx(nll([judging[1][name]], heat), abs=1e-6)
    with pytest.raises(ValueError, match="signals of the items, got none"):
        fitted_heats("adaptive_temperature", *half(10))


def test_what_has_no_best_temperature_is_said() -> None:
    fitting, judging = half(10), half(20)
    right = Seen(fitting[0].logits, fitting[0].logits.argmax(-1)[0])
    right = Seen(right.logits[:1], right.labels)
    found = criterion_findings("model", (right, fitting[1]), judging, ("temperature",))
    assert {r.predictor for r in found.records} == {"model"}
    assert found.notes[0].startswith("no criterion of model+temperature: all 40 items are classified right")


def test_of_a_run(pristine, tmp_path) -> None:
    """On halves of the validation items, of single runs alone, and only where it is asked for."""
    runs = copies(pristine[:2], tmp_path)
    quick = {"samples": 2, "device": "cpu", "predictors": ["model"], "limit": 24}
    found = evaluate_several(runs, ("criterion",), **quick)
    for run in runs:
        suite = found[run]["criterion"]
        assert {r.predictor for r in suite.records} == {"model", "model+temperature"}
        assert suite.curves["items"]["model"] == {CLEAN: 12, BOTH: 12}
    assert not SUITES["criterion"].usual
