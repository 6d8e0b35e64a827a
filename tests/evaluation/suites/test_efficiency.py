"""Suite `efficiency`: which sizes, what is scaled, and what memory is counted."""

from dataclasses import replace

import pytest
import torch

from gpattention.evaluation.suites import EfficiencyPlan, efficiency, efficiency_findings
from gpattention.evaluation.suites.efficiency import METRICS, peak_memory
from gpattention.models import TextConfig, VisionConfig
from tests.models.small_models import layer, text, vision

CPU = torch.device("cpu")
PLAN = EfficiencyPlan(batch=4, training_items=100, samples=2, steps=1)


@pytest.mark.parametrize(("config", "expected"), [
    (VisionConfig(attention="cgp"), [(None, 64), (None, 16), (None, 256)]),  # its own size first
    (VisionConfig(attention=layer("scgp", num_inducing=12)),
     [(12, 64), (12, 16), (12, 256), (8, 64), (16, 64), (32, 64)]),
    (VisionConfig(attention="sgpa"), [(32, 64), (32, 16), (32, 256), (8, 64), (16, 64)]),  # its default
    (VisionConfig(attention=layer("scgp", num_inducing=(6, 3))),
     [(6, 64), (6, 16), (6, 256), (8, 64), (16, 64), (32, 64)]),
    (TextConfig(max_length=9, attention="cgp"), [(None, 9), (None, 4), (None, 18)]),
    (VisionConfig(image_size=4, attention="cgp"), [(None, 1), (None, 4)]),  # half a patch is one
])  # fmt: skip
def test_sizes(config: VisionConfig | TextConfig, expected: list[tuple[int | None, int]]) -> None:
    assert list(efficiency.planned_sizes(config, PLAN)) == expected


def test_only_layers_that_have_inducing_points_change() -> None:
    mixed = VisionConfig(depth=2, attention=("softmax", layer("scgp", num_inducing=4)))
    changed = [s for (inducing, _), s in efficiency.planned_sizes(mixed, PLAN).items() if inducing == 16]
    assert [dict(each.options) for each in changed[0].layers] == [{}, {"num_inducing": 16}]


@pytest.mark.parametrize("kind", ["images", "texts", "contextual"])
def test_records(kind: str) -> None:
    if kind == "images":
        model, tokens = vision("scgp", dtype=torch.float32), 4
    else:
        model, tokens = text("cgp", contextual_width=3 if kind == "contextual" else 0), 9
    seen = []
    plan = EfficiencyPlan(2, 100, samples=2, steps=1, inducing=(8,), lengths=(0.5,))
    found = efficiency_findings(model, plan, CPU, lambda done, total: seen.append((done, total)))
    planned = list(efficiency.planned_sizes(model.config, plan))
    assert seen == [(i + 1, len(planned)) for i in range(len(planned))]
    assert [(r.metric, r.detail["inducing"], r.detail["tokens"]) for r in found.records] == [
        (metric, inducing, length) for inducing, length in planned for metric in METRICS
    ]
    assert planned[0][1] == tokens
    assert all(record.value > 0 for record in found.records)


def test_time_is_scaled_to_an_epoch_and_to_one_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "measure_cost", lambda *a, **k: (2.0, 8.0, 3.0, 5.0))
    found = efficiency_findings(vision("cgp"), PLAN, CPU)
    values = {r.metric: r.value for r in found.records}
    assert values == dict(zip(METRICS, (50.0, 2.0, 3.0, 5.0), strict=True))  # 25 steps of 4 items
    large = efficiency_findings(vision("cgp"), replace(PLAN, batch=100), CPU)
    assert large.records[0].value == pytest.approx(2 * 100 / 16)  # a CPU takes fewer items and says so
    assert "reduced: 16 items a step on the CPU, where training has 100" in large.notes


def test_the_global_random_numbers_are_left_alone() -> None:
    model = vision("softmax")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    efficiency_findings(model, EfficiencyPlan(2, 10, 1, steps=1, lengths=(1,)), CPU)
    assert torch.get_rng_state().equal(before)


def test_memory_is_what_lives_at_once_without_views_and_what_was_there() -> None:
    old = torch.zeros(1 << 12)

    def work() -> None:
        first = torch.zeros(1 << 10)  # 4 KiB
        second = torch.zeros(1 << 8)  # 1 KiB
        del first
        torch.zeros(1 << 9)
        del second

    assert peak_memory(work, CPU) == 5 << 10
    assert peak_memory(lambda: old.view(64, 64).mT[3:].add_(1), CPU) == 0


def test_training_holds_at_least_weights_gradients_and_moments() -> None:
    model = vision("softmax", dtype=torch.float32)
    weights = sum(p.numel() * 4 for p in model.parameters())
    x, y = torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)

    def build() -> torch.nn.Module:
        return type(model)(model.config)

    *_, training, predicting = efficiency.measure_cost(build, x, y, samples=0, steps=1)
    assert training * efficiency.MEBIBYTE > 4 * weights
    assert weights < predicting * efficiency.MEBIBYTE < training * efficiency.MEBIBYTE
