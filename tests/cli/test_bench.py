"""`gpattention bench`: tables on the terminal, files in a folder, exit codes."""

import json
from pathlib import Path

import pytest
import torch

from gpattention.cli import bench
from gpattention.models import VisionConfig
from gpattention.studies.bench import PAPER_KERNEL, SOFTMAX, bench_steps
from gpattention.studies.bench_lengths import LengthCase
from gpattention.studies.bench_tables import environment
from tests.cli.conftest import Run

SMALL = VisionConfig(width=16, heads=2, depth=1, image_size=8, patch=4)


def measured(case: LengthCase) -> dict:
    """Without measuring."""
    return case.row(seconds=case.tokens * 1e-5, peak_mib=900.0, own_mib=case.tokens / 99)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one layer, lengths that are not run."""
    monkeypatch.setattr(bench, "bench_steps", lambda *a, **o: bench_steps(*a, **o, config=SMALL))
    monkeypatch.setattr("gpattention.studies.bench_lengths.measure_apart", measured)


@pytest.mark.usefixtures("small")
class TestStep:
    def test_prints_a_table_and_writes_numbers(self, tmp_path: Path, run: Run) -> None:
        file = tmp_path / "new" / "bench.json"
        options = ["--kinds", "kernel", "--batch", "1", "--repeats", "1", "--device", "cpu"]
        output = run("bench", "step", *options, "--json", str(file), "--out", str(tmp_path)).out
        document = json.loads(file.read_text())
        names = [row["name"] for row in document["step"]["rows"]]
        assert names == [SOFTMAX, "kernel", PAPER_KERNEL]
        assert all(f"\n{name} " in output for name in names)
        facts = environment(torch.device("cpu"))
        assert document["environment"].keys() == facts.keys()
        assert document["environment"]["torch"] == torch.__version__
        assert document["settings"]["kinds"] == "kernel"
        assert document["settings"]["seed"] == 0
        assert {file.name for file in tmp_path.iterdir()} == {"new", "step.json", "step.md", "step.csv"}
        page = (tmp_path / "step.md").read_text()
        assert f"`gpattention bench step --kinds kernel --batch 1 --repeats 1 --seed 0 --json {file}" in page

    def test_a_baseline_that_is_not_the_same_attention_fails(self, monkeypatch, run: Run) -> None:
        monkeypatch.setattr("gpattention.studies.bench_paper.gap_to_ours", lambda _: 1e-3)
        options = ["--kinds", "softmax", "--batch", "1", "--repeats", "1", "--device", "cpu"]
        output = run("bench", "step", *options, code=1).out
        assert "differ from our mathematics by paper-kernel 1e-03" in output


@pytest.mark.usefixtures("small")
def test_lengths(tmp_path: Path, run: Run) -> None:
    options = ["--kinds", "scgp,softmax", "--longest", "4096", "--device", "cpu", "--out", str(tmp_path)]
    output = run("bench", "length", *options).out
    assert "Fitted powers of the number of tokens" in output
    assert "at no measured length" in output  # equal times are not faster
    rows = json.loads((tmp_path / "length.json").read_text())["length"]["rows"]
    assert [row["tokens"] for row in rows] == [1024, 2048, 4096] * 3
    assert (tmp_path / "length-fits.csv").read_text().startswith("model,batch,what,exponent")


@pytest.mark.usefixtures("small")
def test_figures_without_matplotlib_are_drawn_later(tmp_path: Path, monkeypatch, run: Run) -> None:
    pytest.importorskip("matplotlib")
    with monkeypatch.context() as patch:
        patch.setattr("gpattention.studies.bench_tables.find_spec", lambda _: None)
        options = ["--kinds", "scgp", "--longest", "2048", "--device", "cpu", "--out", str(tmp_path)]
        assert f"gpattention bench plot {tmp_path}" in run("bench", "length", *options).out
    assert run("bench", "plot", tmp_path).out.count("written: ") == 4
    assert (tmp_path / "length-time.svg").read_text().startswith("<?xml")


def test_predictions(run: Run) -> None:
    options = ["--kinds", "kernel", "--images", "2", "--samples", "2", "--repeats", "1", "--device", "cpu"]
    output = run("bench", "predict", *options, "--eager").out
    assert "images/s" in output
    assert "2 images on the device, 2 samples" in output


@pytest.mark.usefixtures("small")
def test_the_cpu_part_has_all_tables(tmp_path: Path, run: Run) -> None:
    options = ["--kinds", "softmax", "--batch", "1", "--repeats", "1", "--out", str(tmp_path)]
    output = run("bench", "cpu", *options).out
    assert "ms/step" in output
    assert "65,536" in output
    assert {"cpu.json", "cpu.md", "cpu-step.csv", "cpu-length.csv"} <= {
        file.name for file in tmp_path.iterdir()
    }


def test_floors(run: Run) -> None:
    output = run("bench", "floor", "--kinds", "softmax,scgp-16").out
    assert "computed, not measured" in output
    assert output.count("\nscgp-16 ") == 1
