"""Suite `efficiency`: which sizes, what is scaled, and what memory is counted."""

import pytest
import torch

from gpattention.evaluation import cost
from gpattention.evaluation.cost import Cost, peak_memory
from gpattention.evaluation.suites import EfficiencyPlan, efficiency, efficiency_findings
from gpattention.models import TextConfig, VisionConfig
from tests.models.small_models import layer, text, vision

CPU = torch.device("cpu")
PLAN = EfficiencyPlan(batch=4, training_items=100, samples=2, steps=1)
METRICS = ("train_epoch_seconds", "predict_seconds", "train_peak_mib", "predict_peak_mib")


def sizes(config: VisionConfig | TextConfig) -> list[tuple[int | None, int]]:
    return [(size.inducing, size.tokens) for size in efficiency.planned_sizes(config, PLAN)]


class TestSizes:
    def test_its_own_first_then_lengths(self) -> None:
        assert sizes(VisionConfig(attention="cgp")) == [(None, 64), (None, 16), (None, 256)]

    def test_inducing_points(self) -> None:
        sparse = VisionConfig(attention=layer("scgp", num_inducing=12))
        assert sizes(sparse) == [(12, 64), (12, 16), (12, 256), (8, 64), (16, 64), (32, 64)]
        assert sizes(VisionConfig(attention="sgpa"))[0] == (32, 64)  # its default
        assert sizes(VisionConfig(attention=layer("scgp", num_inducing=(6, 3))))[0] == (6, 64)

    def test_only_layers_that_have_them_change(self) -> None:
        mixed = VisionConfig(depth=2, attention=("softmax", layer("scgp", num_inducing=4)))
        changed = [s.config for s in efficiency.planned_sizes(mixed, PLAN) if s.inducing == 16]
        assert [dict(each.options) for each in changed[0].layers] == [{}, {"num_inducing": 16}]

    def test_sentences(self) -> None:
        assert sizes(TextConfig(max_length=9, attention="cgp")) == [(None, 9), (None, 4), (None, 18)]

    def test_an_image_of_one_patch_stays_one(self) -> None:
        assert sizes(VisionConfig(image_size=4, attention="cgp")) == [(None, 1), (None, 4)]


@pytest.mark.parametrize("kind", ["images", "texts", "contextual"])
def test_records(kind: str) -> None:
    if kind == "images":
        model, tokens = vision("scgp", dtype=torch.float32), 4
    else:
        model, tokens = text("cgp", contextual_width=3 if kind == "contextual" else 0), 9
    told = []
    plan = EfficiencyPlan(2, 100, samples=2, steps=1, inducing=(8,), lengths=(0.5,))
    found = efficiency_findings(model, plan, CPU, lambda done, total: told.append((done, total)))
    planned = [(size.inducing, size.tokens) for size in efficiency.planned_sizes(model.config, plan)]
    assert told == [(i + 1, len(planned)) for i in range(len(planned))]
    assert [(r.metric, r.detail["inducing"], r.detail["tokens"]) for r in found.records] == [
        (metric, inducing, length) for inducing, length in planned for metric in METRICS
    ]
    assert planned[0][1] == tokens
    assert all(record.value > 0 for record in found.records)


def test_time_is_scaled_to_an_epoch_and_to_one_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "measure_cost", lambda *a, **k: Cost(2.0, 8.0, 3.0, 5.0))
    found = efficiency_findings(vision("cgp"), PLAN, CPU)
    assert {r.metric: r.value for r in found.records} == {
        "train_epoch_seconds": 50.0,  # 25 steps of 4 items
        "predict_seconds": 2.0,
        "train_peak_mib": 3.0,
        "predict_peak_mib": 5.0,
    }


def test_a_cpu_takes_fewer_items_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "measure_cost", lambda *a, **k: Cost(1.0, 1.0, 1.0, 1.0))
    large = EfficiencyPlan(batch=100, training_items=1000, samples=2)
    found = efficiency_findings(vision("cgp"), large, CPU)
    assert found.records[0].value == pytest.approx(1000 / 16)
    assert "reduced: 16 items a step on the CPU, where training has 100" in found.notes


def test_the_global_random_numbers_are_left_alone() -> None:
    model = vision("softmax")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    efficiency_findings(model, EfficiencyPlan(2, 10, 1, steps=1, lengths=(1,)), CPU)
    assert torch.get_rng_state().equal(before)


class TestPeakMemory:
    def test_counts_what_lives_at_once(self) -> None:
        def work() -> None:
            first = torch.zeros(1 << 10)  # 4 KiB
            second = torch.zeros(1 << 8)  # 1 KiB
            del first
            torch.zeros(1 << 9)
            del second

        assert peak_memory(work, CPU) == 5 << 10

    def test_views_and_what_was_there_cost_nothing(self) -> None:
        old = torch.zeros(1 << 12)

        def work() -> None:
            old.view(64, 64).mT[3:].add_(1)

        assert peak_memory(work, CPU) == 0

    def test_training_holds_at_least_weights_gradients_and_moments(self) -> None:
        model = vision("softmax", dtype=torch.float32)
        weights = sum(p.numel() * 4 for p in model.parameters())
        x, y = torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)

        def build() -> torch.nn.Module:
            return type(model)(model.config)

        found = cost.measure_cost(build, x, y, samples=0, steps=1)
        assert found.train_peak_mib * cost.MEBIBYTE > 4 * weights
        assert weights < found.predict_peak_mib * cost.MEBIBYTE < found.train_peak_mib * cost.MEBIBYTE
