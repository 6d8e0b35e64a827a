"""Suite `corrupted`: means over types, severities and categories."""

import numpy as np
import pytest
import torch

from gpattention.data.corruptions import CATEGORIES
from gpattention.evaluation.predictions import Predicted
from gpattention.evaluation.suites import corruption_means
from gpattention.evaluation.suites.corrupted import pool_reliability
from gpattention.evaluation.suites.findings import reliability_curve
from gpattention.metrics import reliability_bins
from gpattention.metrics.classification import reliability
from gpattention.runs.records import Record


def test_means_of_all_nineteen() -> None:
    rng = np.random.default_rng(0)
    types = [each for category in CATEGORIES.values() for each in category]
    values = {(each, severity): rng.random() for each in types for severity in range(1, 6)}
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
    given = [("model", "ece", 1.0, {}), ("model", "nll", 2.0, {}), ("hot", "ece", 3.0, {"temperature": 1.5})]
    records = [Record("corrupted/fog/1", *each) for each in given]
    means = [record for record in corruption_means(records, CATEGORIES) if record.set == "corrupted/mean"]
    expected = [
        (predictor, metric, value, {**detail, "types": 1}) for predictor, metric, value, detail in given
    ]
    assert [(r.predictor, r.metric, r.value, dict(r.detail)) for r in means] == expected


def test_pooled_reliability_is_that_of_all_items_together() -> None:
    generator = torch.Generator().manual_seed(0)
    pooled, logits, labels = None, [], []
    for count in (7, 30, 1):
        logits.append(torch.randn(2, count, 4, generator=generator, dtype=torch.float64))
        labels.append(torch.randint(0, 4, (count,), generator=generator))
        pooled = pool_reliability(pooled, Predicted.from_logits(logits[-1], labels[-1]))
    whole = Predicted.from_logits(torch.cat(logits, 1), torch.cat(labels))
    expected = reliability_curve(reliability_bins(whole.prediction.probs, whole.known_labels))
    found = reliability_curve(reliability(pooled))
    assert found["count"] == expected["count"]
    for key in ("edges", "confidence", "accuracy"):
        assert found[key] == pytest.approx(expected[key])
