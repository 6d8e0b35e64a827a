"""Lengths: powers that are found again, cases in processes of their own, series that end with memory."""

from types import SimpleNamespace

import pytest
import torch

from gpattention.studies import bench_lengths, scheduler
from gpattention.studies.bench_lengths import (
    MODELS,
    SERIES,
    LengthCase,
    fit_power,
    measure_apart,
    measure_length,
    module_of,
    overtaking,
    summarised,
)
from tests.models.graph_stand_in import stand_in
from tests.studies.test_scheduler import Started


def test_powers_and_where_they_cross() -> None:
    for exponent in (0.0, 1.0, 2.5):
        law = fit_power([(float(x), 3 * x**exponent) for x in (2, 8, 64, 100)])
        assert law == (pytest.approx(exponent, abs=1e-12), pytest.approx(3))
    law = fit_power([(1.0, 1.0), (10.0, 1.0), (100.0, 1000.0)])
    assert law[0] == pytest.approx(1.5)  # slope of (0, 0), (1, 0), (2, 3)
    assert fit_power([]) is fit_power([(4.0, 1.0), (4.0, 2.0)]) is None
    sizes = [2.0**i for i in range(1, 12)]
    ours, theirs = [(x, 300 * x) for x in sizes], [(x, x * x) for x in sizes]
    # straight lines in logarithms
    assert overtaking(ours, theirs) == {"faster_from": 512, "crossing": pytest.approx(300)}
    assert overtaking(theirs, ours) == {"faster_from": None, "crossing": None}
    assert overtaking(theirs[:3], ours[:3]) == {"faster_from": 2.0, "crossing": None}
    ours, theirs = [(1.0, 1.0), (2.0, 9.0), (4.0, 1.0)], [(x, 5.0) for x in (1.0, 2.0, 4.0, 8.0)]
    assert overtaking(ours, theirs)["faster_from"] == 4.0  # faster once is not faster from there


class TestCase:
    @pytest.mark.parametrize("model", MODELS)
    def test_every_model(self, model: str) -> None:
        found = measure_length(LengthCase(model, 2, 5, repeats=1))
        assert (found["model"], found["batch"], found["tokens"]) == (model, 2, 5)
        assert found["seconds"] > 0
        assert found["failure"] is found["captured_seconds"] is None
        a, b = module_of(model), module_of(model)
        assert (a.num_heads, a.head_dim) == (4, 32)
        assert torch.equal(a.query.weight, b.query.weight)

    @pytest.mark.slow
    def test_a_process_of_its_own_measures_its_memory(self) -> None:
        found = measure_apart(LengthCase("scgp", 1, 4096, repeats=1))
        assert found["failure"] is None
        assert (
            4 < found["own_mib"] < found["peak_mib"]
        )  # the tokens alone are 2 MiB, and so is their gradient

    def test_a_process_of_its_own_may_be_ended_by_the_system(self, monkeypatch) -> None:
        monkeypatch.setattr(scheduler, "_start", Started(exitcode=-9))
        found = measure_apart(LengthCase("cgp", 4, 64))
        assert found["failure"] == "its process was killed by SIGKILL (out of memory?)"
        assert found["seconds"] is None

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
    def test_failures_are_reported(self, monkeypatch, error: Exception, failure: str) -> None:
        def failing(*_):
            raise error

        monkeypatch.setattr(bench_lengths, "_call", failing)
        assert measure_length(LengthCase("scgp", 1, 8))["failure"] == failure

    def test_captured_calls(self, monkeypatch) -> None:
        tapes = stand_in(monkeypatch)
        device = torch.device("cpu")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_stream=lambda _: None)
        )
        monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
        x = torch.zeros(3)
        took = bench_lengths._captured_seconds(lambda: x.add_(1), LengthCase("cgp", 1, 4, repeats=2), device)
        assert (took or 0) > 0
        assert tapes[0].replays == 3
        assert x.tolist() == [5.0] * 3  # one to warm up, one captured (which here runs), three replays
        assert bench_lengths._captured_seconds(lambda: None, LengthCase("paper-cgp", 1, 4), device) is None

        def refuse() -> None:
            raise RuntimeError("not while capturing")

        assert bench_lengths._captured_seconds(refuse, LengthCase("cgp", 1, 4), device) is None


class TestSeries:
    def test_ends_where_memory_does(self, monkeypatch) -> None:
        asked: list[tuple[str, int, int]] = []

        def measure(case: LengthCase) -> dict:
            asked.append((case.model, case.batch, case.tokens))
            if case.model == "paper-cgp" and case.tokens > 100:
                return case.row(failure="out of memory")
            return case.row(seconds=case.tokens / 1e6, peak_mib=9.0, own_mib=3.0)

        monkeypatch.setattr(bench_lengths, "measure_apart", measure)
        calls: list[tuple[int, int]] = []
        result = bench_lengths.bench_lengths(
            ["scgp", "paper-cgp"], repeats=1, longest=4096, progress=lambda *x: calls.append(x)
        )
        assert asked == [
            *(("scgp", 1, n) for n in (1024, 2048, 4096)),
            *(("scgp", 4, n) for n in (1024, 2048, 4096)),
            ("paper-cgp", 4, 64),
            ("paper-cgp", 4, 128),
        ]
        assert calls[-1] == (9, 9)
        assert result.rows[-1]["failure"] == "out of memory"
        fits = {(f["model"], f["batch"], f["what"]): f for f in result.facts["fits"]}
        assert set(fits) == {("scgp", b, what) for b in (1, 4) for what in ("time", "memory")}
        found = fits["scgp", 1, "time"]
        assert (found["exponent"], found["low"], found["high"]) == (pytest.approx(1.0), 1024, 4096)
        assert result.gaps.keys() == {"paper-cgp"}
        assert result.baselines_hold

    def test_fits_and_crossings(self) -> None:
        def rows_of(model: str, batch: int, **seconds: float) -> list[dict]:
            rest = {"peak_mib": 10.0, "own_mib": 5.0}
            cases = ((LengthCase(model, batch, int(n[1:])), s) for n, s in seconds.items())
            return [case.row(seconds=s, captured_seconds=s / 2, **rest) for case, s in cases]

        rows = rows_of("scgp", 4, n1024=2.0, n2048=4.0, n4096=8.0)
        rows += rows_of("softmax", 4, n1024=1.0, n2048=4.0, n4096=16.0)
        found = summarised(rows, {}).facts["crossings"]
        assert found["time"] == {"faster_from": 4096.0, "crossing": pytest.approx(2048.0)}
        assert found["captured time"]["faster_from"] == 4096.0
        assert summarised(rows[:3], {}).facts["crossings"] == {}
        fit = summarised(rows_of("cgp", 4, n64=64e-3, n128=512e-3), {}).facts["fits"][0]
        assert (fit["what"], fit["exponent"]) == ("time", pytest.approx(3.0))
        assert fit["factor"] * 64 ** fit["exponent"] == pytest.approx(64e-3)
        for series in SERIES.values():
            assert series["scgp", 4] == series["softmax", 4]
            assert {model for model, _ in series} == set(MODELS)
        for options, message in (({"models": ["sgpa"]}, r"kinds to be one of softmax, scgp, .* got 'sgpa'"),
                                 ({"longest": 0}, r"longest .* got 0")):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                bench_lengths.bench_lengths(**options)
