"""`gpattention paper`: prints or writes, and tells mistakes in one line."""

from pathlib import Path

import pytest

from gpattention.cli import main
from gpattention.studies.paper import FIGURES, TABLES
from tests.studies.paper.runs import layer_records, write_run, write_table_runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_table_runs(tmp_path / "runs", "table2", lambda key, value, seed: value)
    write_run(tmp_path / "runs" / "more", "cifar10-cgpt", layer_records([0.1] * 5), suite="oversmoothing")
    return tmp_path / "runs"


def test_prints_markdown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "table2", str(runs)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## Table 2, Section 5.2")
    assert (
        "100 of 100 cells filled. Better of 100 compared: ours in 0, the paper in 0, equal in 100." in printed
    )
    assert "61.746 ± 0.438‡" in printed
    assert "SCGPT 61.746‡ → 60.950" in printed


def test_prints_every_format(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "fig3", str(runs), "--format", "all"]) == 0
    printed = capsys.readouterr().out
    order = [printed.index(start) for start in ("## Figure 3", "table,block,line", r"\begin{table*}")]
    assert order == sorted(order)


def test_writes_files(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.tex"
    assert main(["paper", "table2", str(runs), "-o", str(out)]) == 0
    assert out.read_text().startswith(r"\begin{table*}")
    assert "100 of 100 cells filled" in capsys.readouterr().out
    assert main(["paper", "all", str(runs), "--format", "csv", "-o", str(tmp_path / "all")]) == 0
    pictures = {f"{name}{end}" for name in FIGURES for end in (".png", ".svg")}
    written = {file.name for file in (tmp_path / "all").iterdir()}
    assert written == {f"{name}.csv" for name in (*TABLES, *FIGURES)} | pictures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table2", "nowhere"], "no folder nowhere"),
        (["table2", "."], "expected runs in ., got none"),
        (["all", ".", "-o", "x.md"], "expected -o to be a folder for all tables, got x.md"),
    ],
)
def test_mistakes_take_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["paper", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_unknown_tables_and_pictures_of_tables_are_refused(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["paper", "table6", str(runs)])
    assert stop.value.code == 2
    assert "table6" in capsys.readouterr().err
    assert main(["paper", "table2", str(runs), "-o", str(runs / "x.svg")]) == 2
    assert "expected one of the figures" in capsys.readouterr().err
    assert not (runs / "x.svg").exists()
