"""`gpattention report` and `paper`: run folders in, one page or the paper's tables out."""

import json
from pathlib import Path

import pytest

from gpattention.reports import write_report
from gpattention.runs import RunData, read_runs
from gpattention.runs.records import append_event, write_metrics, write_suite
from gpattention.studies.paper import FIGURES, TABLES
from tests.cli.conftest import Run
from tests.reports.reading import read
from tests.reports.synthetic import synthetic_run
from tests.studies.paper_runs import layer_records, write_table_runs
from tests.studies.paper_runs import write_run as write_paper_run


def write_run(folder: Path, run: RunData) -> Path:
    """As training and evaluation would."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(run.recipe))
    write_metrics(folder, run.rows)
    for event in run.events:
        append_event(folder, **{"kind" if key == "event" else key: value for key, value in event.items()})
    for suite in run.suites.values():
        write_suite(folder, suite)
    return folder


def small(kind: str, seed: int = 0) -> RunData:
    return synthetic_run(kind, seed, suites=("clean",), predictors=("model",))


def test_a_folder_of_runs_becomes_a_page(tmp_path: Path, run: Run) -> None:
    for kind in ("softmax", "cgp"):
        write_run(tmp_path / "runs" / kind, small(kind))
    output, runs = tmp_path / "made" / "report.html", tmp_path / "runs"
    out = run("report", runs, runs / "cgp", "-o", output, "--title", "Both & more").out
    assert f"report: {output} (" in out
    assert "MB)" in out
    tree = read(output.read_text())
    assert tree.one("title").text == "Both & more"
    models = tree.one("table", class_="key summary").one("tbody").children
    assert [model.text.split()[0] for model in models] == ["cgp", "softmax"]
    assert len(tree.all("figure")) > 5


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "recipe.json").write_text('{"name": "new", "broken": "\\ud800"}')
    (folder / "events.jsonl").write_text('{"event": "resumed"}\n{"ev')  # half a line
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert "gpattention evaluate" in page
    assert [event["event"] for event in read_runs([folder])[0].events] == ["resumed"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("recipe.json", "{", "recipe.json is not JSON"),
        ("recipe.json", "[]", "expected an object, got list"),
        ("events.jsonl", "{\n", "events.jsonl, line 1 is not JSON"),
        ("events.jsonl", "{}\n[]\n", "events.jsonl, line 2: expected a JSON object, got list"),
        ("evaluation/clean.json", "{}", "not an evaluation of this library"),
        ("evaluation/clean.json", "[]", "not an evaluation of this library"),
    ],
)
def test_broken_files_are_named(file: str, content: str, message: str, tmp_path: Path, run: Run) -> None:
    folder = write_run(tmp_path / "cgp", small("cgp"))
    (folder / file).write_text(content)
    err = run("report", folder, "-o", tmp_path / "report.html", code=2).err
    assert message in err
    assert file in err
    assert not (tmp_path / "report.html").exists()


@pytest.fixture(scope="module")
def paper_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("paper") / "runs"
    write_table_runs(runs, "table2", lambda key, value, seed: value)
    write_paper_run(runs / "more", "cifar10-cgpt", layer_records([0.1] * 5), suite="oversmoothing")
    return runs


def test_paper_prints_tables(paper_runs: Path, run: Run) -> None:
    printed = run("paper", "table2", paper_runs).out
    assert printed.startswith("## Table 2, Section 5.2")
    filled = "100 of 100 cells filled. Better of 100 compared: ours in 0, the paper in 0, equal in 100."
    for text in (filled, "61.746 ± 0.438‡", "SCGPT 61.746‡ → 60.950"):
        assert text in printed
    printed = run("paper", "fig3", paper_runs, "--format", "all").out
    order = [printed.index(start) for start in ("## Figure 3", "table,block,line", r"\begin{table*}")]
    assert order == sorted(order)


def test_paper_writes_files(paper_runs: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "table.tex"
    assert "100 of 100 cells filled" in run("paper", "table2", paper_runs, "-o", out).out
    assert out.read_text().startswith(r"\begin{table*}")
    run("paper", "all", paper_runs, "--format", "csv", "-o", tmp_path / "all")
    pictures = {f"{name}{end}" for name in FIGURES for end in (".png", ".svg")}
    written = {file.name for file in (tmp_path / "all").iterdir()}
    assert written == {f"{name}.csv" for name in (*TABLES, *FIGURES)} | pictures
    err = run("paper", "table2", paper_runs, "-o", tmp_path / "x.svg", code=2).err
    assert "expected one of the figures" in err
    assert not (tmp_path / "x.svg").exists()
