"""Lengths: powers that are found again, cases in processes of their own, series that end with memory."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from gpattention.studies.bench import bench_lengths, length_case, lengths
from gpattention.studies.bench.fits import crossing, faster_from, fit_power
from gpattention.studies.bench.length_case import (
    LengthCase,
    LengthFigures,
    measure_apart,
    measure_length,
    module_of,
)
from gpattention.studies.bench.lengths import MODELS, SERIES, crossings_of, fits_of
from tests.models.graph_stand_in import stand_in


class TestPowers:
    @pytest.mark.parametrize("exponent", [0.0, 1.0, 2.5])
    def test_are_found_again(self, exponent: float) -> None:
        law = fit_power([(float(x), 3 * x**exponent) for x in (2, 8, 64, 100)])
        assert law.exponent == pytest.approx(exponent, abs=1e-12)
        assert law(10.0) == pytest.approx(3 * 10**exponent)
        assert (law.low, law.high) == (2, 100)

    def test_are_least_squares_of_logarithms(self) -> None:
        law = fit_power([(1.0, 1.0), (10.0, 1.0), (100.0, 1000.0)])
        assert law.exponent == pytest.approx(1.5)  # slope of (0, 0), (1, 0), (2, 3)

    def test_need_two_sizes(self) -> None:
        assert fit_power([]) is None
        assert fit_power([(4.0, 1.0), (4.0, 2.0)]) is None

    def test_crossing_of_two_powers(self) -> None:
        sizes = [2.0**i for i in range(1, 12)]
        ours, theirs = [(x, 300 * x) for x in sizes], [(x, x * x) for x in sizes]
        assert crossing(ours, theirs) == pytest.approx(300)  # straight lines in logarithms
        assert faster_from(ours, theirs) == 512
        assert crossing(theirs, ours) is None
        assert faster_from(theirs, ours) is None

    def test_faster_once_is_not_faster_from_there(self) -> None:
        ours, theirs = [(1.0, 1.0), (2.0, 9.0), (4.0, 1.0)], [(x, 5.0) for x in (1.0, 2.0, 4.0, 8.0)]
        assert faster_from(ours, theirs) == 4.0


class TestCase:
    @pytest.mark.parametrize("model", MODELS)
    def test_every_model(self, model: str) -> None:
        found = measure_length(LengthCase(model, 2, 5, repeats=1))
        assert found.failure is None
        assert (found.model, found.batch, found.tokens) == (model, 2, 5)
        assert (found.seconds or 0) > 0
        assert found.captured_seconds is None

    def test_modules_have_four_heads_of_32_and_seeded_weights(self) -> None:
        a, b = module_of("scgp"), module_of("scgp")
        assert (a.num_heads, a.head_dim) == (4, 32)
        assert torch.equal(a.query.weight, b.query.weight)

    @pytest.mark.slow
    def test_a_process_of_its_own_tells_its_memory(self) -> None:
        found = measure_apart(LengthCase("scgp", 1, 4096, repeats=1))
        assert found.failure is None
        assert 4 < found.own_mib < found.peak_mib  # the tokens alone are 2 MiB, and so is their gradient

    def test_a_process_of_its_own_is_told_the_case(self, monkeypatch) -> None:
        case, asked = LengthCase("cgp", 4, 64, fused="off"), []

        def program(command, **_):
            asked.append(LengthCase(**json.loads(command[-1])))
            figures = {"model": "cgp", "batch": 4, "tokens": 64, "seconds": 0.5, "peak_mib": 300.0}
            return SimpleNamespace(returncode=0, stdout="a warning\n" + json.dumps(figures), stderr="")

        monkeypatch.setattr(subprocess, "run", program)
        assert measure_apart(case) == LengthFigures("cgp", 4, 64, 0.5, peak_mib=300.0)
        assert asked == [case]

    def test_memory_of_a_gpu_is_the_allocator_s(self, monkeypatch) -> None:
        calls: list[str] = []
        for name, value in (("memory_allocated", 3), ("max_memory_allocated", 7)):
            monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
        length_case._clear(torch.device("cuda"))
        assert calls == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
        assert [length_case._memory(torch.device("cuda"), peak=p) for p in (False, True)] == [3, 7]

    @pytest.mark.parametrize(
        ("code", "told", "failure"),
        [
            (-9, "", "ended by the system"),
            (1, "a\nValueError: wrong", "ValueError: wrong"),
            (3, "", "exit code 3"),
        ],
    )
    def test_processes_that_fail(self, monkeypatch, code: int, told: str, failure: str) -> None:
        done = SimpleNamespace(returncode=code, stdout="", stderr=told)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        found = measure_apart(LengthCase("scgp", 1, 8))
        assert failure in (found.failure or "")
        assert found.seconds is None

    @pytest.mark.parametrize(
        ("error", "failure"),
        [
            (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
            (MemoryError(), "out of memory"),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
            (RuntimeError("something else\nat length"), "something else"),
        ],
        ids=repr,
    )
    def test_failures_are_told(self, monkeypatch, error: Exception, failure: str) -> None:
        def failing(*_):
            raise error

        monkeypatch.setattr(length_case, "_call", failing)
        assert measure_length(LengthCase("scgp", 1, 8)).failure == failure

    def test_captured_calls(self, monkeypatch) -> None:
        tapes = stand_in(monkeypatch)
        device = torch.device("cpu")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_stream=lambda _: None)
        )
        monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
        x = torch.zeros(3)
        took = length_case._captured_seconds(lambda: x.add_(1), LengthCase("cgp", 1, 4, repeats=2), device)
        assert (took or 0) > 0
        assert tapes[0].replays == 3
        assert x.tolist() == [5.0] * 3  # one to warm up, one captured (which here runs), three replays
        assert length_case._captured_seconds(lambda: None, LengthCase("paper-cgp", 1, 4), device) is None

        def refuse() -> None:
            raise RuntimeError("not while capturing")

        assert length_case._captured_seconds(refuse, LengthCase("cgp", 1, 4), device) is None


def figures(model: str, batch: int, **seconds: float) -> list[LengthFigures]:
    return [
        LengthFigures(model, batch, int(tokens[1:]), took, took / 2, 10.0, 5.0)
        for tokens, took in seconds.items()
    ]


class TestSeries:
    def test_ends_where_memory_does(self, monkeypatch) -> None:
        asked: list[tuple[str, int, int]] = []

        def measure(case: LengthCase) -> LengthFigures:
            asked.append((case.model, case.batch, case.tokens))
            if case.model == "paper-cgp" and case.tokens > 100:
                return LengthFigures(case.model, case.batch, case.tokens, failure="out of memory")
            return LengthFigures(case.model, case.batch, case.tokens, case.tokens / 1e6, None, 9.0, 3.0)

        monkeypatch.setattr(lengths, "measure_apart", measure)
        told: list[tuple[int, int]] = []
        result = bench_lengths(
            ["scgp", "paper-cgp"], repeats=1, longest=4096, progress=lambda *x: told.append(x)
        )
        assert asked == [
            *(("scgp", 1, n) for n in (1024, 2048, 4096)),
            *(("scgp", 4, n) for n in (1024, 2048, 4096)),
            ("paper-cgp", 4, 64),
            ("paper-cgp", 4, 128),
        ]
        assert told[-1] == (9, 9)
        assert result.rows[-1].failure == "out of memory"
        assert {(f.model, f.batch, f.what) for f in result.fits} == {
            ("scgp", b, what) for b in (1, 4) for what in ("time", "memory")
        }
        by_time = next(f for f in result.fits if (f.batch, f.what) == (1, "time"))
        assert (by_time.exponent, by_time.low, by_time.high) == (pytest.approx(1.0), 1024, 4096)
        assert result.gaps.keys() == {"paper-cgp"}
        assert result.baselines_hold

    def test_the_issue_s_ranges_are_measured(self) -> None:
        for device, longest in (("cuda", 1_048_576), ("cpu", 65_536)):
            found = {(model, batch): lengths for model, batch, lengths in SERIES[device]}
            assert found["scgp", 1][-1] == longest
            assert set(found["scgp", 4]) == set(found["softmax", 4])
            assert {model for model, _ in found} == set(MODELS)

    def test_crossings(self) -> None:
        rows = figures("scgp", 4, n1024=2.0, n2048=4.0, n4096=8.0)
        rows += figures("softmax", 4, n1024=1.0, n2048=4.0, n4096=16.0)
        found = crossings_of(rows)
        assert found["time"] == {"faster_from": 4096.0, "crossing": pytest.approx(2048.0)}
        assert found["captured time"]["faster_from"] == 4096.0
        assert crossings_of(rows[:3]) == {}

    def test_fits_have_their_factor(self) -> None:
        fit = fits_of(figures("cgp", 4, n64=64e-3, n128=512e-3))[0]
        assert (fit.what, fit.exponent) == ("time", pytest.approx(3.0))
        assert fit.factor * 64**fit.exponent == pytest.approx(64e-3)

    def test_mistakes(self) -> None:
        with pytest.raises(
            ValueError, match="expected kinds among softmax, scgp, cgp, paper-cgp, paper-scgp"
        ):
            bench_lengths(["sgpa"])
        with pytest.raises(ValueError, match="expected longest to be a whole number >= 1, got 0"):
            bench_lengths(["scgp"], longest=0)


def test_the_module_is_a_program(capsys) -> None:
    import runpy
    import sys

    case = {"model": "softmax", "batch": 1, "tokens": 4, "repeats": 1}
    argv, sys.argv = sys.argv, ["length_case", json.dumps(case)]
    try:
        with pytest.warns(RuntimeWarning, match="found in sys.modules"):
            runpy.run_module(length_case.__name__, run_name="__main__")
    finally:
        sys.argv = argv
    assert json.loads(capsys.readouterr().out)["tokens"] == 4
