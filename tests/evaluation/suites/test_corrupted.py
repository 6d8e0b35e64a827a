"""Suite `corrupted`: means over types, severities and categories."""

import numpy as np
import pytest
import torch

from gpattention.data.corruptions import CATEGORIES
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites import corrupted_records, corruption_means
from gpattention.evaluation.suites.reliability import PooledReliability, reliability_curve
from gpattention.metrics import reliability_bins
from tests.evaluation.suites.cases import predicted


def test_records_of_one_set() -> None:
    found = corrupted_records("fog", 3, "model", predicted(), batch=20)
    assert {record.set for record in found} == {"corrupted/fog/3"}
    assert {"accuracy", "nll", "ece", "batch_ece"} <= {record.metric for record in found}


def test_means_of_all_nineteen() -> None:
    rng = np.random.default_rng(0)
    values = {
        (each, severity): rng.random()
        for types in CATEGORIES.values()
        for each in types
        for severity in range(1, 6)
    }
    records = [Record(f"corrupted/{c}/{s}", "model", "ece", value) for (c, s), value in values.items()]
    means = {record.set: record for record in corruption_means(records, CATEGORIES)}
    assert set(means) == {f"corrupted/{name}" for name in (*CATEGORIES, "mean")}
    for name, types in CATEGORIES.items():
        expected = np.mean([value for (c, _), value in values.items() if c in types])
        assert means[f"corrupted/{name}"].value == pytest.approx(expected)
    assert means["corrupted/mean"].value == pytest.approx(np.mean(list(values.values())))
    assert means["corrupted/mean"].detail["types"] == 19


def test_a_type_does_not_weigh_more_for_having_more_severities() -> None:
    records = [Record(f"corrupted/fog/{s}", "model", "nll", float(s)) for s in (1, 2, 3)]
    records.append(Record("corrupted/snow/1", "model", "nll", 10.0))
    means = {record.set: record.value for record in corruption_means(records, CATEGORIES)}
    assert means == {"corrupted/weather": 6.0, "corrupted/mean": 6.0}  # no noise, no blur


def test_predictors_and_metrics_stay_apart() -> None:
    records = [
        Record("corrupted/fog/1", predictor, metric, value, detail)
        for predictor, metric, value, detail in (
            ("model", "ece", 1.0, {}),
            ("model", "nll", 2.0, {}),
            ("model+temperature", "ece", 3.0, {"temperature": 1.5}),
        )
    ]
    means = [record for record in corruption_means(records, CATEGORIES) if record.set == "corrupted/mean"]
    assert [(r.predictor, r.metric, r.value) for r in means] == [
        ("model", "ece", 1.0),
        ("model", "nll", 2.0),
        ("model+temperature", "ece", 3.0),
    ]
    assert means[-1].detail == {"temperature": 1.5, "types": 1}


def test_pooled_reliability_is_that_of_all_items_together() -> None:
    generator = torch.Generator().manual_seed(0)
    pooled, logits, labels = PooledReliability(), [], []
    for count in (7, 30, 1):
        logits.append(torch.randn(2, count, 4, generator=generator, dtype=torch.float64))
        labels.append(torch.randint(0, 4, (count,), generator=generator))
        pooled.add(Predicted.from_logits(logits[-1], labels[-1]))
    whole = Predicted.from_logits(torch.cat(logits, 1), torch.cat(labels))
    expected = reliability_curve(reliability_bins(whole.prediction.probs, whole.known_labels))
    found = pooled.curve()
    assert found["count"] == expected["count"]
    for key in ("edges", "confidence", "accuracy"):
        assert found[key] == pytest.approx(expected[key])


def test_no_reliability_of_nothing() -> None:
    with pytest.raises(ValueError, match="expected at least one set, got none"):
        PooledReliability().curve()
