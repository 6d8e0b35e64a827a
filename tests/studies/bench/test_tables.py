"""Tables, floors, figures and files of measurements."""

import csv
import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpattention.models import VisionConfig
from gpattention.studies.bench import machine, step_floors, tables, targets, words
from gpattention.studies.bench.floors import attention_flops
from gpattention.studies.bench.launches import KernelTime
from gpattention.studies.bench.length_case import LengthFigures
from gpattention.studies.bench.lengths import LengthResult, crossings_of, fits_of
from gpattention.studies.bench.machine import environment, in_words
from gpattention.studies.bench.plots import length_figure
from gpattention.studies.bench.posteriors import NAMES, PosteriorTimes
from gpattention.studies.bench.predictions import PredictResult, PredictRow
from gpattention.studies.bench.steps import StepResult, StepRow
from gpattention.studies.bench.tables import BenchTable, Quantity, to_csv, to_markdown
from gpattention.studies.bench.variants import VARIANTS

GAPS = {"paper-kernel": 1e-12}
STEPS = StepResult(
    rows=(
        StepRow("softmax", 0.003, 1.0, None, 4.0, 310.0, 448, (), "graph"),
        StepRow("cgp", 0.006, 2.0, 40.0, 2.0, 650.0, 800, ("roots_kernel",), "graph"),
        StepRow("paper-cgp", None, reason="out of memory", engine="none"),
    ),
    batch=100, repeats=5, at_once=10, seed=0, device="cuda", mode="auto", gaps=GAPS,
)  # fmt: skip
TABLE = BenchTable("T", (Quantity("a", "A"), Quantity("x", "X", ".1f", "x"), Quantity("y", "Y", "d")),
                   ({"a": "p|q", "x": 1.25}, {"a": "r", "x": None}), ("one", "two"))  # fmt: skip


def lengths(device: str = "cuda") -> LengthResult:
    rows = [LengthFigures("scgp", 1, n, n / 1e7, n / 2e7, n / 90, n / 100) for n in (65_536, 1_048_576)]
    rows += [LengthFigures("scgp", 4, n, n / 1e6, n / 2e6, 50.0, 40.0) for n in (1024, 4096)]
    rows += [LengthFigures("softmax", 4, n, n**2 / 2e9, n**2 / 2e9, 50.0, 40.0) for n in (1024, 4096)]
    rows += [LengthFigures("cgp", 4, 1024, 0.03, None, 1900.0, 1800.0)]
    rows += [LengthFigures("paper-cgp", 4, 2048, failure="out of memory")]
    found = tuple(rows)
    return LengthResult(found, fits_of(found), crossings_of(found), 5, 0, device, "auto", GAPS)


def column(table: BenchTable, name: str, key: str):
    return {row.get("name", row.get("model")): row for row in table.rows}[name].get(key)


class TestTable:
    def test_empty_columns_are_left_out_and_missing_values_shown(self) -> None:
        assert [c.key for c in TABLE.filled] == ["a", "x"]
        assert TABLE.cells == [["p|q", "1.2x"], ["r", "-"]]
        assert TABLE.right == (1,)

    def test_csv_is_not_rounded(self) -> None:
        rows = list(csv.DictReader(io.StringIO(to_csv(TABLE))))
        assert rows == [{"a": "p|q", "x": "1.25"}, {"a": "r", "x": ""}]

    def test_markdown(self) -> None:
        lines = to_markdown([TABLE], "facts", "gpattention bench step").splitlines()
        assert lines[0] == "facts"
        assert "Made by `gpattention bench step`." in lines
        assert lines[lines.index("## T") + 2 :][:4] == [
            "| A | X |", "| --- | ---: |", r"| p\|q | 1.2x |", "| r | - |",
        ]  # fmt: skip
        assert lines[-1] == "two."


class TestWords:
    def test_steps_on_a_gpu_have_targets_and_their_source(self) -> None:
        table = words.step_table(STEPS)
        assert column(table, "cgp", "target_ms") == 6.0
        assert column(table, "cgp", "target_reference_mib") == 17306
        assert column(table, "cgp", "fused") == "roots_kernel"
        assert column(table, "softmax", "fused") == "none"
        assert column(table, "paper-cgp", "reason") == "out of memory"
        assert table.notes[-1] == targets.SOURCE
        assert "batch 100, median of 5 turns of 10 steps" in table.notes[0]

    def test_other_batches_and_machines_have_none(self) -> None:
        for other in (replace(STEPS, batch=50), replace(STEPS, device="cpu")):
            table = words.step_table(other)
            assert column(table, "cgp", "target_ms") is None
            assert targets.SOURCE not in table.notes
        assert column(table, "cgp", "engine") is None  # on a CPU there is one only
        assert column(table, "paper-cgp", "reason") == "out of memory"

    def test_floors_beside_what_was_measured(self) -> None:
        floors = step_floors(["softmax", "cgp"])
        table = words.floor_table(floors, STEPS)
        assert column(table, "cgp", "to_floor") == pytest.approx(0.006 / floors[1].seconds)
        assert column(table, "softmax", "launches_ms") == pytest.approx(448 * 2.2e-3)
        alone = words.floor_table(floors)
        assert "to_floor" not in [c.key for c in alone.filled]

    def test_a_profile_adds_up_to_the_step(self) -> None:
        kernels = (KernelTime("roots_kernel", 5, 0.003), KernelTime("matrix products", 40, 0.001))
        softmax, cgp, paper = STEPS.rows
        table = words.profile_table(replace(STEPS, rows=(softmax, replace(cgp, kernels=kernels), paper)))
        assert [(row["kernel"], row["launches"]) for row in table.rows] == [
            ("roots_kernel", 5), ("matrix products", 40), ("between kernels", None),
        ]  # fmt: skip
        assert {row["name"] for row in table.rows} == {"cgp"}  # the others have no profile
        assert sum(row["ms"] for row in table.rows) == pytest.approx(6)
        assert [row["share"] for row in table.rows] == pytest.approx([50, 100 / 6, 100 / 3])

    def test_lengths_have_their_targets(self) -> None:
        rows, fits = words.length_tables(lengths())
        by_case = {(r["model"], r["batch"], r["tokens"]): r for r in rows.rows}
        assert by_case["scgp", 1, 1_048_576]["target_ms"] == 200
        assert by_case["cgp", 4, 1024]["target_mib"] == 2048
        assert by_case["softmax", 4, 4096]["reference_ms"] == 6.2
        assert by_case["scgp", 4, 4096]["target_ms"] is None
        told = {(r["model"], r["batch"], r["what"]): r for r in fits.rows}
        assert told["scgp", 1, "time"]["target"] == 1.05
        assert told["softmax", 4, "time"]["exponent"] == pytest.approx(2.0)
        assert fits.notes[0] == (
            "time: scgp is faster than softmax from 4,096 tokens on, the lines cross at 2,000 "
            "(batch 4; target: from 4,096)"
        )
        assert rows.notes[-1] == targets.SOURCE
        alone = words.length_tables(lengths("cpu"))[0]
        assert not any(r["reference_ms"] for r in alone.rows)
        assert {r["target_mib"] for r in alone.rows} == {None, 4096}

    def test_never_faster_is_said(self) -> None:
        result = lengths()
        slow = replace(result, crossings={"time": {"faster_from": None, "crossing": None}})
        assert "at no measured length" in words.length_tables(slow)[1].notes[0]

    def test_predictions_have_the_target_of_their_size_alone(self) -> None:
        rows = (PredictRow("softmax", 0.1, 1, 1.0, 1e5), PredictRow("cgp", 1.4, 10, 14.0, 7e3))
        result = PredictResult(rows, 10_000, 10, None, None, 3, 0, "cuda", "auto", {})
        assert column(words.predict_table(result), "cgp", "target") == 1.5
        assert column(words.predict_table(replace(result, images=100)), "cgp", "target") is None
        assert "its own choice" in words.predict_table(result).notes[0]

    def test_posteriors_are_ratios(self) -> None:
        times = [PosteriorTimes(64, {name: 2.0 + i for i, name in enumerate(NAMES)})]
        assert words.posterior_table(times).rows[0] == {
            "tokens": 64, **{name: (2.0 + i) / 2 for i, name in enumerate(NAMES)},
        }  # fmt: skip


class TestFloors:
    def test_products_of_softmax_by_hand(self) -> None:
        config = VisionConfig(depth=1, width=8, heads=2, image_size=8, patch=4, channels=1)
        floor = step_floors(["softmax"], batch=3, config=config)[0]
        tokens = 3 * 4
        forward = 2 * tokens * 8 * 8 * (3 + 1 + 2) + 3 * 2 * (2 * 2 * 4 * 4 * 4) + 2 * tokens * 16 * 8
        assert floor.flops == 3 * forward
        assert floor.launches == 55
        assert floor.seconds == max(floor.flop_seconds, floor.byte_seconds, floor.launch_seconds)

    @pytest.mark.parametrize("name", [n for n in VARIANTS if not n.startswith("paper")])
    def test_grow_with_the_batch_and_are_positive(self, name: str) -> None:
        one, two = (step_floors([name], batch=b)[0] for b in (50, 100))
        assert two.flops == pytest.approx(2 * one.flops)
        assert one.bytes_moved < two.bytes_moved < 2 * one.bytes_moved  # weights are there once
        assert one.launches == two.launches

    def test_the_exact_model_is_cubic_and_the_sparse_one_linear(self) -> None:
        for name, power in (("cgp", 8), ("cgp-kl", 8), ("direct", 8), ("scgp-16", 2), ("softmax", 4)):
            ratio = attention_flops(name, 200_000, 32) / attention_flops(name, 100_000, 32)
            assert ratio == pytest.approx(power, rel=0.01)
        assert attention_flops("sgpa-32", 64, 32) > attention_flops("sgpa-8", 64, 32)

    def test_kinds(self) -> None:
        assert {f.name for f in step_floors()} == {
            n for n, v in VARIANTS.items() if not n.startswith("paper") and not v.eager
        }
        with pytest.raises(ValueError, match="expected kinds among"):
            step_floors(["nothing"])


class TestEnvironment:
    def test_tells_versions_date_and_machine(self) -> None:
        facts = environment(torch.device("cpu"))
        assert facts["torch"] == torch.__version__
        assert {"gpattention", "date", "device", "threads", "python"} <= set(facts)
        assert "cuda" not in facts
        assert facts["device"] in in_words(facts)

    def test_of_a_gpu(self, monkeypatch) -> None:
        from types import SimpleNamespace

        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30)
        )
        monkeypatch.setattr(machine, "_said", lambda command: f"{command[0]} said")
        facts = environment(torch.device("cuda"))
        assert (facts["device"], facts["memory"]) == ("some GPU", "80 GiB")
        assert facts["driver"] == "nvidia-smi said"
        assert facts.get("commit", "git said+") == "git said+"

    def test_programs_that_take_too_long_say_nothing(self, monkeypatch) -> None:
        def hang(*_, **__):
            raise subprocess.TimeoutExpired("echo", 20)

        monkeypatch.setattr(subprocess, "run", hang)
        assert machine._said(["echo", "words"]) is None

    def test_sources_outside_a_repository_have_no_commit(self, monkeypatch, tmp_path: Path) -> None:
        monkeypatch.setattr(machine, "SOURCE", tmp_path / "src")
        assert machine._commit() is None

    def test_programs_that_are_missing_or_fail_say_nothing(self) -> None:
        assert machine._said(["no-such-program-here"]) is None
        assert machine._said(["false"]) is None
        assert machine._said(["echo", "words"]) == "words"
        assert machine._version("no_such_package_here") is None


class TestFiles:
    def document(self) -> dict:
        from dataclasses import asdict

        return {"environment": environment(torch.device("cpu")), "length": asdict(lengths())}

    def test_a_folder_has_numbers_tables_and_figures(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        rows, fits = words.length_tables(lengths())
        files = tables.write_folder(
            tmp_path / "new", "length", self.document(), {"length": rows, "length-fits": fits}, "command"
        )
        assert sorted(file.name for file in files) == [
            "length-fits.csv", "length-memory.png", "length-memory.svg", "length-time.png",
            "length-time.svg", "length.csv", "length.json", "length.md",
        ]  # fmt: skip
        assert "## Length" in (tmp_path / "new/length.md").read_text()
        assert json.loads((tmp_path / "new/length.json").read_text())["length"]["device"] == "cuda"

    def test_figures_come_later_where_there_is_no_matplotlib(self, tmp_path: Path, monkeypatch) -> None:
        pytest.importorskip("matplotlib")
        with monkeypatch.context() as patch:
            patch.setattr(tables, "find_spec", lambda _: None)
            files = tables.write_folder(tmp_path, "length", self.document(), {})
        assert {file.suffix for file in files} == {".json", ".md"}
        drawn = tables.draw_folder(tmp_path)
        again = {file: file.read_bytes() for file in drawn if file.suffix == ".svg"}
        assert len(drawn) == 4
        tables.draw_folder(tmp_path)
        assert all(file.read_bytes() == content for file, content in again.items())

    def test_nothing_to_draw(self, tmp_path: Path) -> None:
        (tmp_path / "other.json").write_text("[1]")
        with pytest.raises(ValueError, match="no measured lengths in"):
            tables.draw_folder(tmp_path)

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
