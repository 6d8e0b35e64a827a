"""Training steps and predictions: ratios of one run, engines with their reasons, turns, launches."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from gpattention import gp
from gpattention.models import VisionConfig
from gpattention.studies.bench import bench_posteriors, bench_predictions, bench_steps, launches, steps
from gpattention.studies.bench.posteriors import NAMES
from gpattention.studies.bench.timing import time_in_turns
from gpattention.studies.bench.variants import (
    PAPER_KERNEL,
    SLOW,
    SOFTMAX,
    VARIANTS,
    build,
    check_kinds,
    default_kinds,
)
from gpattention.training.engine import CaptureFailedError, EagerEngine, StepFailedError

SMALL = VisionConfig(width=16, heads=2, depth=1, image_size=8, patch=4)


class TestSteps:
    def test_ratios_are_those_of_the_times(self) -> None:
        told: list[tuple[int, int]] = []
        result = bench_steps(
            ["cgp", "paper-cgp"], batch=2, repeats=2, config=SMALL, progress=lambda *x: told.append(x)
        )
        assert [row.name for row in result.rows] == [SOFTMAX, "cgp", "paper-cgp", PAPER_KERNEL]
        seconds = {row.name: row.seconds for row in result.rows}
        for row in result.rows:
            assert row.seconds > 0
            assert row.to_softmax == pytest.approx(row.seconds / seconds[SOFTMAX])
            assert row.to_paper_kernel == pytest.approx(seconds[PAPER_KERNEL] / row.seconds)
            assert (row.engine, row.reason) == ("eager", "CUDA graphs need a CUDA device")
        by_name = {row.name: row for row in result.rows}
        assert by_name["cgp"].to_paper == pytest.approx(seconds["paper-cgp"] / seconds["cgp"])
        assert by_name[SOFTMAX].to_paper is None
        assert told == [(i, 12) for i in range(1, 13)]  # four models, one turn to warm up and two to measure
        assert (result.batch, result.repeats, result.device) == (2, 2, "cpu")
        assert set(result.gaps) == {"paper-cgp", PAPER_KERNEL}
        assert result.baselines_hold

    def test_every_variant_can_be_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        once = partial(time_in_turns, warm_up=0)
        monkeypatch.setattr(steps, "time_in_turns", once)
        result = bench_steps(tuple(VARIANTS), batch=2, repeats=1, config=SMALL)
        assert {row.name for row in result.rows} == set(VARIANTS)
        assert all(row.seconds is not None for row in result.rows)

    def test_a_captured_step_and_one_that_cannot_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Captured(EagerEngine):
            """The captured engine's part."""

            def step(self, batches, controls) -> None:
                if "Paper" in type(self._objective.model.blocks[0].attention).__name__:
                    raise CaptureFailedError("it reads results back")
                super().step(batches, controls)

        monkeypatch.setattr(steps, "GraphEngine", Captured)
        monkeypatch.setattr(
            steps, "_why_eager", lambda name, _: "asked for" if VARIANTS[name].eager else None
        )
        monkeypatch.setattr(steps, "WARM_UP", -1)
        calls: list[str] = []
        warmed = steps._warmed

        def one_step(name, *arguments, captured):
            engine = warmed(name, *arguments, captured=captured)
            calls.append(f"{name} {'graph' if captured else 'eager'}")
            steps._stepper(engine, steps._batch(SMALL, 2, 0, torch.device("cpu")))()
            return engine

        monkeypatch.setattr(steps, "_warmed", one_step)
        result = bench_steps(["cgp", "softmax-eager"], batch=2, repeats=1, config=SMALL)
        told = {row.name: (row.engine, row.reason) for row in result.rows}
        assert told == {
            SOFTMAX: ("graph", None),
            "cgp": ("graph", None),
            "softmax-eager": ("eager", "asked for"),
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
        warmed = steps._warmed

        def failing(name, *arguments, **options):
            if name == "cgp":
                raise error
            return warmed(name, *arguments, **options)

        monkeypatch.setattr(steps, "_warmed", failing)
        result = bench_steps(["cgp"], batch=1, repeats=1, config=SMALL)
        row = {row.name: row for row in result.rows}["cgp"]
        assert (row.seconds, row.reason, row.to_softmax) == (None, reason, None)
        assert result.rows[0].name == "softmax"
        assert result.rows[0].seconds > 0

    def test_memory_of_a_gpu_starts_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 42)
        assert steps._fresh_memory(torch.device("cuda")) == 42
        assert calls == ["synchronize", "empty_cache", "reset_peak_memory_stats"]

    def test_who_is_captured(self) -> None:
        assert steps._why_eager("cgp", torch.device("cuda")) is None
        assert steps._why_eager("softmax-eager", torch.device("cuda")) == "asked for"
        assert steps._why_eager("cgp", torch.device("cpu")) == "CUDA graphs need a CUDA device"

    def test_fused_kernels_are_switched_for_the_run(self) -> None:
        assert bench_steps([SOFTMAX], batch=1, repeats=1, config=SMALL, fused="off").mode == "off"
        with gp.fused_kernels("off"):
            assert bench_steps([SOFTMAX], batch=1, repeats=1, config=SMALL).mode == "off"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kinds": ["nothing"]}, "expected kinds among softmax, kernel"),
            ({"batch": 0}, "expected batch to be a whole number >= 1, got 0"),
            ({"repeats": 0}, "expected repeats to be a whole number >= 1, got 0"),
        ],
    )
    def test_mistakes(self, options, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            bench_steps(config=SMALL, **options)


class TestVariants:
    def test_the_same_seed_gives_the_same_weights(self) -> None:
        for name in ("scgp-8", "paper-scgp"):
            a, b, c = (build(name, SMALL, seed).state_dict() for seed in (0, 0, 1))
            assert all(torch.equal(a[key], b[key]) for key in a)
            assert not all(torch.equal(a[key], c[key]) for key in a)

    def test_what_is_slow_is_left_out_on_a_cpu(self) -> None:
        assert set(default_kinds(torch.device("cuda"))) == set(VARIANTS)
        left = set(VARIANTS) - set(default_kinds(torch.device("cpu")))
        assert left == {*SLOW, "softmax-eager"}
        check_kinds(tuple(VARIANTS))


class TestPredictions:
    def test_ratios_are_those_of_the_times(self) -> None:
        result = bench_predictions(["cgp", "kernel"], images=3, samples=2, repeats=1, config=SMALL)
        assert [(row.name, row.draws) for row in result.rows] == [("softmax", 1), ("cgp", 2), ("kernel", 1)]
        for row in result.rows:
            assert row.images_per_second == pytest.approx(3 / row.seconds)
            assert row.to_softmax == pytest.approx(row.seconds / (result.rows[0].seconds or 0))
        assert result.baselines_hold

    def test_memory_that_does_not_suffice(self, monkeypatch) -> None:
        from gpattention.models import VisionTransformer

        predict = VisionTransformer.predict

        def limited(self, *arguments, **options):
            if self.draws:
                raise torch.OutOfMemoryError
            return predict(self, *arguments, **options)

        monkeypatch.setattr(VisionTransformer, "predict", limited)
        rows = bench_predictions(["cgp"], images=2, samples=2, repeats=2, config=SMALL).rows
        assert (rows[1].seconds, rows[1].failure) == (None, "out of memory")
        assert rows[0].name == "softmax"
        assert rows[0].seconds > 0

    @pytest.mark.parametrize("name", ["images", "samples", "repeats"])
    def test_mistakes(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"expected {name} to be a whole number >= 1, got 0"):
            bench_predictions(["cgp"], config=SMALL, **{name: 0})


def test_times_are_medians_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []
    monkeypatch.setattr("gpattention.studies.bench.timing.time.perf_counter", lambda: clock[0])
    lasting = {"a": iter([90.0, 1.0, 2.0, 30.0]), "b": iter([90.0, 5.0, 5.0, 4.0])}

    def call(name: str) -> None:
        order.append(name)
        clock[0] += next(lasting[name])

    calls = {name: lambda name=name: call(name) for name in lasting}
    assert time_in_turns(calls, 3, torch.device("cpu")) == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b"] * 4


def test_several_calls_count_as_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("gpattention.studies.bench.timing.time.perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 3.0

    assert time_in_turns({"a": call}, 2, torch.device("cpu"), at_once=4, warm_up=0) == {"a": 3.0}
    assert clock[0] == 24.0


def test_posteriors_at_some_lengths() -> None:
    told: list[tuple[int, int]] = []
    times = bench_posteriors([3, 4], repeats=1, progress=lambda *x: told.append(x))
    assert [each.tokens for each in times] == [3, 4]
    assert all(tuple(each.seconds) == NAMES and min(each.seconds.values()) > 0 for each in times)
    assert told == [(i, 20) for i in range(1, 21)]
    with pytest.raises(ValueError, match="expected lengths and repeats >= 1"):
        bench_posteriors([0])


def test_launches_are_what_the_profiler_sees_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile:
        def __init__(self, activities) -> None:
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            pass

        def key_averages(self):
            seen = [
                ("roots", 15, 30.0, DeviceType.CUDA),
                ("Memset", 3, 3.0, DeviceType.CUDA),
                ("sm90_xmma_gemm_f32f32", 3, 45.0, DeviceType.CUDA),
                ("cutlass_80_simt_sgemm", 3, 15.0, DeviceType.CUDA),
                ("at::native::reduce", 6, 6.0, DeviceType.CUDA),
                ("cuLaunch", 9, 90.0, DeviceType.CPU),
            ]
            return [
                SimpleNamespace(key=k, count=c, self_device_time_total=t, device_type=d)
                for k, c, t, d in seen
            ]

    calls: list[int] = []
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(launches, "our_kernels", lambda: frozenset({"roots", "rows"}))
    counted = launches.count_launches(lambda: calls.append(1), torch.device("cuda"))
    assert (counted.number, counted.fused) == (10.0, ("roots",))
    assert len(calls) == 4
    told = [(each.name, each.launches, pytest.approx(1e6 * each.seconds)) for each in counted.times]
    assert told == [
        ("matrix products", 2.0, 20.0),
        ("roots", 5.0, 10.0),
        ("other operations", 2.0, 2.0),
        ("copies and fills", 1.0, 1.0),
    ]


def test_our_kernels_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import triton

    @triton.jit
    def some_kernel(x):
        pass

    module = ModuleType("gpattention.made_up")
    module.renamed = some_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gpattention.made_up", module)
    assert "some_kernel" in launches.our_kernels()
    monkeypatch.delitem(sys.modules, "triton")
    assert launches.our_kernels() == frozenset()
