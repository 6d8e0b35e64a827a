"""Tables, figures and files of measurements."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpattention.studies import bench_tables as tables
from gpattention.studies.bench import Measurement, step_floors
from gpattention.studies.bench_lengths import LengthCase, summarised
from gpattention.studies.bench_tables import BenchTable, environment, in_words, length_figure

GAPS = {"paper-kernel": 1e-12}


def step(name: str, seconds: float | None, **more: object) -> dict:
    keys = ("to_softmax", "to_paper", "to_paper_kernel", "peak_mib", "launches", "fused", "reason")
    return {"name": name, "seconds": seconds, **dict.fromkeys(keys), "engine": "graph", "kernels": (), **more}


def measurement(rows: tuple, **facts: object) -> Measurement:
    usual = {"repeats": 5, "at_once": 10, "seed": 0, "device": "cuda", "mode": "auto"}
    return Measurement(rows, {**usual, **facts}, GAPS)


ROWS = (
    step("softmax", 0.003, to_softmax=1.0, to_paper_kernel=4.0, peak_mib=310.0, launches=448, fused=()),
    step("cgp", 0.006, to_softmax=2.0, to_paper=40.0, launches=800, fused=("roots_kernel",)),
    step("paper-cgp", None, reason="out of memory", engine="none"),
)
STEPS = measurement(ROWS, batch=100, tokens=64)
TABLE = BenchTable("T", (("a", "A", "", ""), ("x", "X", ".1f", "x"), ("y", "Y", "d", "")),
                   ({"a": "p|q", "x": 1.25}, {"a": "r", "x": None}), ("one", "two"))  # fmt: skip


def lengths(device: str = "cuda") -> Measurement:
    def row(model: str, batch: int, tokens: int, *found: float | None) -> dict:
        keys = ("seconds", "captured_seconds", "peak_mib", "own_mib")
        return LengthCase(model, batch, tokens).row(**dict(zip(keys, found, strict=True)))

    rows = [row("scgp", 1, n, n / 1e7, n / 2e7, n / 90, n / 100) for n in (65_536, 1_048_576)]
    rows += [row("scgp", 4, n, n / 1e6, n / 2e6, 50.0, 40.0) for n in (1024, 4096)]
    rows += [row("softmax", 4, n, n**2 / 2e9, n**2 / 2e9, 50.0, 40.0) for n in (1024, 4096)]
    rows += [row("cgp", 4, 1024, 0.03, None, 1900.0, 1800.0)]
    rows += [LengthCase("paper-cgp", 4, 2048).row(failure="out of memory")]
    return summarised(rows, GAPS, repeats=5, seed=0, device=device, mode="auto")


def column(table: BenchTable, name: str, key: str):
    return {row.get("name", row.get("model")): row for row in table.rows}[name].get(key)


def test_tables_leave_empty_columns_out_and_csv_is_not_rounded() -> None:
    assert [c[0] for c in TABLE.filled] == ["a", "x"]
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(TABLE))))
    assert rows == [{"a": "p|q", "x": "1.25"}, {"a": "r", "x": ""}]
    lines = tables.to_markdown([TABLE], "facts", "gpattention bench step").splitlines()
    assert lines[0] == "facts"
    assert "Made by `gpattention bench step`." in lines
    cells = ["| A | X |", "| --- | ---: |", r"| p\|q | 1.2x |", "| r | - |"]
    assert lines[lines.index("## T") + 2 :][:4] == cells
    assert lines[-1] == "two."


class TestWords:
    def test_steps_on_a_gpu_have_targets_and_their_source(self) -> None:
        table = tables.step_table(STEPS)
        assert column(table, "cgp", "target_ms") == 6.0
        assert column(table, "cgp", "target_reference_mib") == 17306
        assert column(table, "cgp", "fused") == "roots_kernel"
        assert column(table, "softmax", "fused") == "none"
        assert column(table, "paper-cgp", "reason") == "out of memory"
        assert table.notes[-1] == tables.REFERENCE
        assert "batch 100, 64 tokens, median of 5 turns of 10 steps" in table.notes[0]

    def test_other_batches_and_machines_have_none(self) -> None:
        for other in (
            measurement(ROWS, batch=50, tokens=64),
            measurement(ROWS, batch=100, tokens=64, device="cpu"),
        ):
            table = tables.step_table(other)
            assert column(table, "cgp", "target_ms") is None
            assert tables.REFERENCE not in table.notes
        assert column(table, "cgp", "engine") is None  # on a CPU there is one only
        assert column(table, "paper-cgp", "reason") == "out of memory"

    def test_floors_beside_what_was_measured(self) -> None:
        floors = step_floors(["softmax", "cgp"])
        table = tables.floor_table(floors, STEPS)
        assert column(table, "cgp", "to_floor") == pytest.approx(0.006 / floors[1]["seconds"])
        assert column(table, "softmax", "launches_ms") == pytest.approx(448 * 2.2e-3)
        alone = tables.floor_table(floors)
        assert "to_floor" not in [c[0] for c in alone.filled]

    def test_a_profile_adds_up_to_the_step(self) -> None:
        kernels = [
            {"name": "roots_kernel", "launches": 5, "seconds": 0.003},
            {"name": "matrix products", "launches": 40, "seconds": 0.001},
        ]
        softmax, cgp, paper = ROWS
        table = tables.profile_table(replace(STEPS, rows=(softmax, {**cgp, "kernels": kernels}, paper)))
        assert [(row["kernel"], row["launches"]) for row in table.rows] == [
            ("roots_kernel", 5), ("matrix products", 40), ("between kernels", None),
        ]  # fmt: skip
        assert {row["name"] for row in table.rows} == {"cgp"}  # the others have no profile
        assert sum(row["ms"] for row in table.rows) == pytest.approx(6)
        assert [row["share"] for row in table.rows] == pytest.approx([50, 100 / 6, 100 / 3])

    def test_lengths_have_their_targets(self) -> None:
        result = lengths()
        rows, fits = tables.length_tables(result)
        by_case = {(r["model"], r["batch"], r["tokens"]): r for r in rows.rows}
        assert by_case["scgp", 1, 1_048_576]["target_ms"] == 200
        assert by_case["cgp", 4, 1024]["target_mib"] == 2048
        assert by_case["softmax", 4, 4096]["reference_ms"] == 6.2
        assert by_case["scgp", 4, 4096].get("target_ms") is None
        by_fit = {(r["model"], r["batch"], r["what"]): r for r in fits.rows}
        assert by_fit["scgp", 1, "time"]["target"] == 1.05
        assert by_fit["softmax", 4, "time"]["exponent"] == pytest.approx(2.0)
        assert fits.notes[0] == (
            "time: scgp is faster than softmax from 4,096 tokens on, the lines cross at 2,000 "
            "(batch 4; target: from 4,096)"
        )
        assert rows.notes[-1] == tables.REFERENCE
        alone = tables.length_tables(lengths("cpu"))[0]
        assert not any("reference_ms" in r for r in alone.rows)
        assert {r.get("target_mib") for r in alone.rows} == {None, 4096}
        never = {"crossings": {"time": {"faster_from": None, "crossing": None}}}
        slow = replace(result, facts={**result.facts, **never})
        assert "at no measured length" in tables.length_tables(slow)[1].notes[0]

    def test_predictions_have_the_target_of_their_size_alone(self) -> None:
        row = {"name": "cgp", "seconds": 1.4, "draws": 10, "to_softmax": 14.0, "images_per_second": 7e3}
        result = measurement((row,), images=10_000, samples=10, batch_size=None)
        assert column(tables.predict_table(result), "cgp", "target") == 1.5
        fewer = measurement((row,), images=100, samples=10, batch_size=None)
        assert column(tables.predict_table(fewer), "cgp", "target") is None
        assert "its own choice" in tables.predict_table(result).notes[0]


class TestEnvironment:
    def test_versions_date_and_machine(self) -> None:
        facts = environment(torch.device("cpu"))
        assert facts["torch"] == torch.__version__
        assert {"gpattention", "date", "device", "threads", "python"} <= set(facts)
        assert "cuda" not in facts
        assert facts["device"] in in_words(facts)

    def test_of_a_gpu(self, monkeypatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30)
        )
        monkeypatch.setattr(tables, "_output", lambda *command: f"{command[0]} said")
        facts = environment(torch.device("cuda"))
        assert (facts["device"], facts["memory"]) == ("some GPU", "80 GiB")
        assert facts["driver"] == "nvidia-smi said"
        assert facts.get("commit", "git said") == "git said"


class TestFiles:
    def document(self) -> dict:
        return {"environment": environment(torch.device("cpu")), "length": lengths().to_dict()}

    def test_a_folder_has_numbers_tables_and_figures(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        rows, fits = tables.length_tables(lengths())
        files = tables.write_folder(
            tmp_path / "new", "length", self.document(), {"length": rows, "length-fits": fits}, "command"
        )
        assert sorted(file.name for file in files) == [
            "length-fits.csv", "length-memory.png", "length-memory.svg", "length-time.png",
            "length-time.svg", "length.csv", "length.json", "length.md",
        ]  # fmt: skip
        assert "## Length" in (tmp_path / "new/length.md").read_text()
        assert json.loads((tmp_path / "new/length.json").read_text())["length"]["device"] == "cuda"

    def test_figures_are_logarithmic_with_points_and_fitted_lines(self) -> None:
        pytest.importorskip("matplotlib")
        rows = self.document()["length"]["rows"]
        axes = length_figure(rows, "time").axes[0]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        # scgp twice and softmax have two lengths and so a line; cgp has one point
        assert len(axes.lines) == 3 * 2 + 1
        points, line = axes.lines[0], axes.lines[1]
        assert list(points.get_xdata()) == [65_536, 1_048_576]
        assert list(line.get_ydata()) == pytest.approx(list(points.get_ydata()))  # an exact power
        labels = [text.get_text() for text in length_figure(rows, "memory").texts]
        assert any(label.startswith("scgp, batch 1: 1.00") for label in labels)
