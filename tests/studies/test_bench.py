"""Training steps and predictions: ratios of one run, engines with their reasons, turns, launches, floors."""

import sys
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from gpattention import gp
from gpattention.models import VisionConfig, VisionTransformer
from gpattention.studies import bench
from gpattention.studies.bench import (
    PAPER_KERNEL,
    SLOW,
    SOFTMAX,
    VARIANTS,
    attention_flops,
    bench_predictions,
    bench_steps,
    build,
    default_kinds,
    step_floors,
    time_in_turns,
)
from gpattention.training.engine import CaptureFailedError, EagerEngine, StepFailedError

SMALL = VisionConfig(width=16, heads=2, depth=1, image_size=8, patch=4)


class TestSteps:
    def test_ratios_are_those_of_the_times(self) -> None:
        calls: list[tuple[int, int]] = []
        with gp.fused_kernels("off"):
            result = bench_steps(
                ["cgp", "paper-cgp"], batch=2, repeats=2, config=SMALL, progress=lambda *x: calls.append(x)
            )
        assert [row["name"] for row in result.rows] == [SOFTMAX, "cgp", "paper-cgp", PAPER_KERNEL]
        by_name = {row["name"]: row for row in result.rows}
        seconds = {name: row["seconds"] for name, row in by_name.items()}
        for row in result.rows:
            assert row["seconds"] > 0
            assert row["to_softmax"] == pytest.approx(row["seconds"] / seconds[SOFTMAX])
            assert row["to_paper_kernel"] == pytest.approx(seconds[PAPER_KERNEL] / row["seconds"])
            assert (row["engine"], row["reason"]) == ("eager", "CUDA graphs need a CUDA device")
        assert by_name["cgp"]["to_paper"] == pytest.approx(seconds["paper-cgp"] / seconds["cgp"])
        assert by_name[SOFTMAX]["to_paper"] is None
        assert calls == [(i, 12) for i in range(1, 13)]  # four models, one turn to warm up and two to measure
        assert [result.facts[key] for key in ("batch", "repeats", "device", "mode")] == [2, 2, "cpu", "off"]
        assert set(result.gaps) == {"paper-cgp", PAPER_KERNEL}
        assert result.baselines_hold

    def test_sequences_of_any_length_without_the_paper_kernel_unless_it_is_named(self) -> None:
        result = bench_steps(["kernel"], batch=1, repeats=1, tokens=17, config=SMALL)
        assert ([row["name"] for row in result.rows], result.facts["tokens"]) == ([SOFTMAX, "kernel"], 17)
        result = bench_steps([PAPER_KERNEL], batch=1, repeats=1, tokens=3, config=SMALL)
        assert [row["name"] for row in result.rows] == [SOFTMAX, PAPER_KERNEL]
        with pytest.raises(ValueError, match=r"tokens.*got 0"):
            bench_steps(["kernel"], batch=1, repeats=1, tokens=0, config=SMALL)

    def test_every_variant_can_be_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench, "time_in_turns", partial(time_in_turns, warm_up=0))
        result = bench_steps(tuple(VARIANTS), batch=2, repeats=1, config=SMALL, fused="off")
        assert {row["name"] for row in result.rows} == set(VARIANTS)
        assert all(row["seconds"] is not None for row in result.rows)
        assert result.facts["mode"] == "off"
        assert set(default_kinds(torch.device("cuda"))) == set(VARIANTS)
        left = set(VARIANTS) - set(default_kinds(torch.device("cpu")))
        assert left == {*SLOW, "softmax-eager"}  # what is slow is left out on a CPU
        for name in ("scgp-8", "paper-scgp"):
            a, b, c = (build(name, SMALL, seed).state_dict() for seed in (0, 0, 1))
            assert all(torch.equal(a[key], b[key]) for key in a)
            assert not all(torch.equal(a[key], c[key]) for key in a)

    def test_a_captured_step_and_one_that_cannot_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Captured(EagerEngine):
            """The captured engine's part."""

            def step(self, batches, controls) -> None:
                if "Paper" in type(self._objective.model.blocks[0].attention).__name__:
                    raise CaptureFailedError("it reads results back")
                super().step(batches, controls)

        stepper, calls = bench._stepper, list[str]()

        def one_step(name, *arguments, captured):
            step = stepper(name, *arguments, captured=captured)
            calls.append(f"{name} {'graph' if captured else 'eager'}")
            step()
            return step

        monkeypatch.setattr(bench, "GraphEngine", Captured)
        monkeypatch.setattr(bench, "why_no_graph", lambda hardware, _: None if hardware.graphs else "off")
        monkeypatch.setattr(bench, "_stepper", one_step)
        result = bench_steps(["cgp", "softmax-eager"], batch=2, repeats=1, config=SMALL)
        assert {row["name"]: (row["engine"], row["reason"]) for row in result.rows} == {
            SOFTMAX: ("graph", None),
            "cgp": ("graph", None),
            "softmax-eager": ("eager", "off"),
            PAPER_KERNEL: ("eager", "it reads results back"),
        }
        assert calls[-2:] == [f"{PAPER_KERNEL} graph", f"{PAPER_KERNEL} eager"]

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (torch.OutOfMemoryError("CUDA out of memory\nTried"), "out of memory"),
            (StepFailedError(0, "loss is nan"), "loss is nan"),
        ],
    )
    def test_a_model_that_fails_leaves_the_others(self, monkeypatch, error: Exception, reason: str) -> None:
        stepper = bench._stepper

        def failing(name, *arguments, **options):
            if name == "cgp":
                raise error
            return stepper(name, *arguments, **options)

        monkeypatch.setattr(bench, "_stepper", failing)
        result = bench_steps(["cgp"], batch=1, repeats=1, config=SMALL)
        row = {row["name"]: row for row in result.rows}["cgp"]
        assert (row["seconds"], row["reason"], row["to_softmax"]) == (None, reason, None)
        assert result.rows[0]["name"] == "softmax"
        assert result.rows[0]["seconds"] > 0


class TestPredictions:
    def test_ratios_are_those_of_the_times(self) -> None:
        result = bench_predictions(["cgp", "kernel"], images=3, samples=2, repeats=1, config=SMALL)
        assert [(row["name"], row["draws"]) for row in result.rows] == [
            ("softmax", 1),
            ("cgp", 2),
            ("kernel", 1),
        ]
        for row in result.rows:
            assert row["images_per_second"] == pytest.approx(3 / row["seconds"])
            assert row["to_softmax"] == pytest.approx(row["seconds"] / (result.rows[0]["seconds"] or 0))
        assert result.baselines_hold

    def test_memory_that_does_not_suffice(self, monkeypatch) -> None:
        predict = VisionTransformer.predict

        def limited(self, *arguments, **options):
            if self.draws:
                raise torch.OutOfMemoryError
            return predict(self, *arguments, **options)

        monkeypatch.setattr(VisionTransformer, "predict", limited)
        rows = bench_predictions(["cgp"], images=2, samples=2, repeats=2, config=SMALL).rows
        assert (rows[1]["seconds"], rows[1]["failure"]) == (None, "out of memory")
        assert rows[0]["name"] == "softmax"
        assert rows[0]["seconds"] > 0


def test_times_are_medians_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []
    monkeypatch.setattr("gpattention.studies.bench.time.perf_counter", lambda: clock[0])
    lasting = {"a": iter([90.0, 1.0, 2.0, 30.0]), "b": iter([90.0, 5.0, 5.0, 4.0]), "c": repeat(3.0)}

    def call(name: str) -> None:
        order.append(name)
        clock[0] += next(lasting[name])

    calls = {name: partial(call, name) for name in "ab"}
    assert time_in_turns(calls, 3, torch.device("cpu")) == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b"] * 4
    several = time_in_turns({"c": partial(call, "c")}, 2, torch.device("cpu"), at_once=4, warm_up=0)
    assert several == {"c": 3.0}  # their mean
    assert order.count("c") == 8


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (partial(bench_steps, ["nothing"]), "kinds to be one of softmax, kernel", "'nothing'"),
        (partial(bench_steps, batch=0), "batch", "0"),
        (partial(bench_steps, repeats=0), "repeats", "0"),
        *((partial(bench_predictions, ["cgp"], **{name: 0}), name, "0")
          for name in ("images", "samples", "repeats")),
        (partial(step_floors, ["nothing"]), "kinds", "'nothing'"),
    ],
)  # fmt: skip
def test_refusals(call: partial, field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"expected {field}.* got {value}"):
        call()


def test_launches_are_what_the_profiler_sees_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        ("roots", 15, 30.0, DeviceType.CUDA), ("Memset", 3, 3.0, DeviceType.CUDA),
        ("sm90_xmma_gemm_f32f32", 3, 45.0, DeviceType.CUDA), ("cutlass_simt", 3, 15.0, DeviceType.CUDA),
        ("at::native::reduce", 6, 6.0, DeviceType.CUDA), ("cuLaunch", 9, 90.0, DeviceType.CPU),
    ]  # fmt: skip
    names = ("key", "count", "self_device_time_total", "device_type")
    events = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in seen]
    profile = SimpleNamespace(key_averages=lambda: events)
    calls: list[int] = []
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(profile))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(bench, "our_kernels", lambda: frozenset({"roots", "rows"}))
    counted = bench.count_launches(lambda: calls.append(1), torch.device("cuda"))
    assert (counted["launches"], counted["fused"]) == (10.0, ["roots"])
    assert len(calls) == 4
    found = [(k["name"], k["launches"], pytest.approx(1e6 * k["seconds"])) for k in counted["kernels"]]
    assert found == [
        ("matrix products", 2.0, 20.0), ("roots", 5.0, 10.0), ("other operations", 2.0, 2.0),
        ("copies and fills", 1.0, 1.0),
    ]  # fmt: skip


def test_our_kernels_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import triton

    @triton.jit
    def some_kernel(x):
        pass

    module = ModuleType("gpattention.made_up")
    module.renamed = some_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpattention.made_up", module)
    assert "some_kernel" in bench.our_kernels()
    monkeypatch.delitem(sys.modules, "triton")
    assert bench.our_kernels() == frozenset()


class TestFloors:
    def test_products_of_softmax_by_hand(self) -> None:
        config = VisionConfig(depth=1, width=8, heads=2, image_size=8, patch=4, channels=1)
        floor = step_floors(["softmax"], batch=3, config=config)[0]
        tokens = 3 * 4
        forward = 2 * tokens * 8 * 8 * (3 + 1 + 2) + 3 * 2 * (2 * 2 * 4 * 4 * 4) + 2 * tokens * 16 * 8
        assert (floor["flops"], floor["launches"]) == (3 * forward, 55)
        assert floor["shares"] == (floor["flops"] / 67e12, floor["bytes_moved"] / 4.8e12, 55 * 2.2e-6)
        assert floor["seconds"] == max(floor["shares"])

    def test_the_exact_model_is_cubic_and_the_sparse_one_linear(self) -> None:
        for name, power in (("cgp", 8), ("cgp-kl", 8), ("direct", 8), ("scgp-16", 2), ("softmax", 4)):
            ratio = attention_flops(name, 200_000, 32) / attention_flops(name, 100_000, 32)
            assert ratio == pytest.approx(power, rel=0.01)
        assert attention_flops("sgpa-32", 64, 32) > attention_flops("sgpa-8", 64, 32)
