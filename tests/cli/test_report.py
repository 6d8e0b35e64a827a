"""`gpattention report`: run folders in, one page out, mistakes in one line."""

import json
from pathlib import Path

import pytest

from gpattention.cli import main
from gpattention.evaluation.records import write_suite
from gpattention.experiments.reporting import read_runs, write_report
from gpattention.runs import RunData
from gpattention.training.records import append_event, write_metrics
from tests.reports.reading import read
from tests.reports.synthetic import synthetic_run


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


def test_a_folder_of_runs_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("softmax", "cgp"):
        write_run(tmp_path / "runs" / kind, small(kind))
    output = tmp_path / "made" / "report.html"
    runs, again = str(tmp_path / "runs"), str(tmp_path / "runs" / "cgp")
    assert main(["report", runs, again, "-o", str(output), "--title", "Both & more"]) == 0
    told = capsys.readouterr().out
    assert f"report: {output} (" in told
    assert "MB)" in told
    tree = read(output.read_text())
    assert tree.one("title").text == "Both & more"
    assert [m.text.split()[0] for m in tree.one("table", class_="key summary").one("tbody").children] == [
        "cgp",
        "softmax",
    ]
    assert len(tree.all("figure")) > 5


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    run = small("cgp")
    (read_back,) = read_runs([write_run(tmp_path / "cgp", run)])
    assert read_back.name == "cgp"
    assert read_back.recipe == run.recipe
    assert [row["phase"] for row in read_back.rows] == [row["phase"] for row in run.rows]
    assert [row["floor_share"] for row in read_back.rows] == [row["floor_share"] for row in run.rows]
    assert [event["event"] for event in read_back.events] == ["warm start", "finished"]
    assert read_back.suites["clean"].records == run.suites["clean"].records
    assert read_back.curve("clean", "reliability") == run.curve("clean", "reliability")


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / place / "cgp", small("cgp")) for place in ("a/x", "b/x", "c/y")]
    assert [run.name for run in read_runs(folders)] == ["a/x/cgp", "b/x/cgp", "y/cgp"]


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
def test_broken_files_are_named(
    file: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "cgp", small("cgp"))
    (folder / file).write_text(content)
    assert main(["report", str(folder), "-o", str(tmp_path / "report.html")]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert file in told
    assert not (tmp_path / "report.html").exists()


def test_folders_without_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 2
    assert "expected a run in or below" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_a_folder_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", small("cgp"))
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path)]) == 2
    assert f"expected output (-o) to be a file, got the folder {tmp_path}" in capsys.readouterr().err
