"""Names that would do something, through all that writes tables: terminal, CSV, Markdown, LaTeX, HTML."""

import csv
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings

from gpattention.cli.bar import Bar, Bars, CountBar, Line
from gpattention.cli.evaluation_table import evaluation_table
from gpattention.cli.main import main
from gpattention.cli.predict import predictions_table
from gpattention.cli.status import _page
from gpattention.cli.sweep import sweep_table
from gpattention.cli.table import say, shortened, table
from gpattention.evaluation.records import Record, SuiteResult
from gpattention.experiments.predicting import InputPrediction
from gpattention.experiments.status import RunStatus
from gpattention.reports import build_report
from gpattention.runs import Column, OverSeeds
from gpattention.studies.adoption import comparison as adoption
from gpattention.studies.adoption.cells import Cell
from gpattention.studies.bench import tables as bench
from gpattention.studies.paper import PaperTable, paper_table, to_csv, to_latex, to_markdown
from gpattention.studies.paper.spec import Key
from gpattention.studies.reproduction.model_card import card_markdown
from gpattention.studies.reproduction.results.account import readme
from gpattention.studies.reproduction.results.choice import choice_markdown, choose
from gpattention.studies.reproduction.results.reading import read_results
from gpattention.studies.reproduction.results.summary import summary_csv, summary_markdown
from gpattention.studies.sweep import SweepResult, SweepRow, SweepSetting, sweep_csv, sweep_markdown
from gpattention.training import Recipe
from tests.reports.reading import read
from tests.reports.synthetic import synthetic_run
from tests.runs.nasty import NASTY, texts
from tests.studies.paper.runs import records_of, write_run
from tests.studies.reproduced import flat, write_plan, write_runs

FORMULA = "=+-@\t\r\n＝＋－＠"  # noqa: RUF001 - as a spreadsheet reads them


def nasty(test):
    for text in NASTY:
        test = example(text)(test)
    return settings(deadline=None, max_examples=40)(given(texts)(test))


def check_terminal(text: str) -> None:
    """Nothing but signs that are printed, spaces and our own line breaks."""
    for line in text.split("\n"):
        assert [c for c in line if not c.isprintable() and not c.isspace()] == [], line
        assert not set("\r\t\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029") & set(line), line


def check_csv(text: str) -> None:
    rows = list(csv.reader(io.StringIO(text)))
    assert len({len(row) for row in rows}) == 1
    assert text.count("\n") == len(rows)
    for cell in (cell for row in rows for cell in row):
        try:
            float(cell)
        except ValueError:
            assert cell[:1] not in tuple(FORMULA), cell
    check_terminal(text)


def check_markdown(page: str) -> None:
    """No HTML, links to elsewhere or pictures; rows of a table as wide as its head."""
    check_terminal(page)
    widths = 0
    for line in page.split("\n"):
        if not line.startswith("| "):
            widths = 0
            continue
        found = len(re.findall(r"(?<!\\)(?:\\\\)*\|", line))
        assert widths in (0, found), line
        widths = found
    parser = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False})
    for token in parser.parse(page):
        for part in (token, *(token.children or ())):
            assert part.type not in ("html_block", "html_inline", "image", "s_open", "blockquote_open"), line
            if part.type == "link_open":
                assert "://" not in str(part.attrs["href"])


def sweep_of(text: str) -> SweepResult:
    folder = Path("runs/sweep")
    rows = (
        SweepRow({"a.b": text}, 0, folder / "x" / "seed-0", 1, 0.5, -0.25),
        SweepRow({"a.b": "1"}, 0, folder / text.replace("/", "").replace("\x00", "") / "s", error=text),
    )
    settings = tuple(
        SweepSetting(row.settings, 1, 0, OverSeeds({0: 0.5}), OverSeeds({0: -0.25})) for row in rows
    )
    return SweepResult(Recipe(), folder, "accuracy", rows, settings, settings[0])


@nasty
def test_sweeps(text: str) -> None:
    result = sweep_of(text)
    check_csv(sweep_csv(result))
    check_markdown(sweep_markdown(result))
    check_terminal(sweep_table(result))


@nasty
def test_benchmarks(text: str) -> None:
    columns = (bench.Quantity("name", text), bench.Quantity("gap", "gap", "+.2f"))
    made = bench.BenchTable(text, columns, ({"name": text, "gap": -0.5}, {"name": None, "gap": 1.0}), (text,))
    check_csv(bench.to_csv(made))
    assert ",-0.5\n" in bench.to_csv(made)
    check_markdown(bench.to_markdown([made], "facts"))


@nasty
def test_adoption(text: str) -> None:
    cells = [
        Cell(text, seed, method, {"test": {"nll": 1.0 + seed - i}, text: {text: -1.0}})
        for i, method in enumerate((adoption.BASELINE, text))
        for seed in (0, 1)
    ]
    columns = [Column(adoption.SUITE, "test", "nll", head=text)]
    check_markdown(adoption.to_markdown(cells, columns, {}))
    check_csv(adoption.summary_csv(cells, columns))
    check_csv(adoption.cells_csv(cells))


@cache
def some_table(folder: Path) -> PaperTable:
    write_run(folder, "cifar10-x", records_of(Key("", "NLL", "Noise"), 2.0), suite="corrupted", notes=("n",))
    return paper_table("table2", folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paper")


@nasty
def test_the_papers_tables(place: Path, text: str) -> None:
    whole = some_table(place)
    made = replace(
        whole,
        title=text,
        rows=tuple(replace(row, label=text, group=text, recipe=text) for row in whole.rows[-2:]),
        notes=tuple(replace(note, text=text) for note in whole.notes),
    )
    check_markdown(to_markdown(made))
    check_csv(to_csv(made))
    tex = to_latex(made)
    check_terminal(tex)
    assert "\\input" not in tex
    body = re.sub(r"\\[{}]", "", tex)
    assert body.count("{") == body.count("}")
    rows = [line for line in tex.split("\n") if line.endswith(r" \\")]
    assert len({len(re.findall(r"(?<!\\)&", row)) for row in rows}) == 1


@nasty
def test_terminals(text: str) -> None:
    check_terminal(table(("a", text), [(text, "1"), ("x", text)]))
    check_terminal(shortened(text, 30))
    status = RunStatus(
        text, Path("x"), "failed", text, 1, 2, 0.5, None, None, 1.0, False, 1.0, text, (text,)
    )  # fmt: skip
    check_terminal(_page([status, status]))
    suite = SuiteResult(
        "clean", text, text, 0, "cgp", 1, tuple(Record("test", text, m, 0.5, {}) for m in ("nll", "accuracy"))
    )
    check_terminal(evaluation_table({text: {"clean": suite}, "other": {"clean": suite}}, bold=False))
    check_terminal(predictions_table([InputPrediction(text, text, 0.5, 0.1, 0.1, {text: 1.0})]))


@nasty
def test_bars_and_lines(text: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        _tell_all(text)
    check_terminal(out.getvalue())
    check_terminal(err.getvalue())
    assert out.getvalue().count("\n") == 1
    with redirect_stderr(drawn := io.StringIO()):
        Line().draw(text, last=True)
    check_terminal(drawn.getvalue().removeprefix("\r\x1b[K"))


def _tell_all(text: str) -> None:
    Line().say(text)
    bar = CountBar(text, text)
    bar(1, 1)
    bars = Bars()
    bars(text, 2, 2)
    bars.end()
    run = Bar(text, 1)
    run.validated(
        {"epoch": 1, "phase": text, "train_loss": 1.0, "validation_accuracy": 1, "validation_nll": 1}
    )
    say(text)
    say(text, error=True)


NAMES = [text for text in NASTY if text.strip() and "\udcff" not in text]


def test_pages_of_a_plan(tmp_path: Path) -> None:
    """Notes, devices, reasons, predictors and sets as records of others may have them."""
    plan = write_plan(tmp_path, ["softmax", "g|p <b>_x_ `c` $1"], seeds=(0, 1))
    write_runs(plan, tmp_path / "runs", flat, predictors=("model", *NAMES[::4]))
    for folder in (tmp_path / "runs").iterdir():
        for file in (folder / "evaluation").glob("*.json"):
            plain = json.loads(file.read_text())
            plain["notes"] = NAMES
            plain["environment"]["device"] = NASTY[0]
            for record in plain["records"]:
                record["set"] = record["set"].replace("ood/near", f"ood/{NASTY[2]}|<i>")
            file.write_text(json.dumps(plain))
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        events[0]["device"] = "".join(NAMES)
        (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    results = read_results(plan, tmp_path / "runs")
    pages = {
        "summary": summary_markdown(results),
        "choice": choice_markdown(results, choose(results)),
        "readme": readme(results, NAMES, ["summary.md", "training-g|p <b>_x_ `c` $1.csv"], ("a|b",)),
    }
    for page in pages.values():
        check_markdown(page)
    check_csv(summary_csv(results))
    run = results.runs[-1]
    contents = {
        "config.json": json.dumps({"model": "VisionTransformer", "config": {"depth": 1}}).encode(),
        "preprocessing/preprocessing.json": json.dumps(
            {
                "kind": "images", "classes": NAMES, "size": [8, 8], "channels": 1,
                "normalisation": {"mean": [0.5], "std": [0.5]},
            }
        ).encode(),
        "model.safetensors": b"",
    }  # fmt: skip
    check_markdown(card_markdown(run, results.models[-1], tmp_path, contents))


def test_a_report(tmp_path: Path) -> None:
    made = synthetic_run(
        "cgp", name="".join(NAMES), predictors=("model",), scores=("entropy",), suites=("clean", "ood")
    )
    plain = {
        suite: replace(found, notes=tuple(NAMES), run=NASTY[0], data="<b>" + NASTY[2])
        for suite, found in made.suites.items()
    }
    page = build_report([replace(made, suites=plain)], title="".join(NAMES))
    assert "<img src=x" not in page
    assert "<script>alert" not in page
    assert page.count("</script>") == 2  # data and our own
    assert not set("\x1b\x07\x00\x08\u202e\u2066\u2028\ufeff") & set(page)
    read(page)


def test_errors_and_folders_on_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for i, text in enumerate(NAMES):
        name = text.replace("/", "").replace("\x00", "").strip(".")
        folder = tmp_path / "runs" / f"{i}{name}"
        folder.mkdir(parents=True)
        (folder / "recipe.json").write_text(json.dumps(Recipe().to_dict()))
        (folder / "events.jsonl").write_text(
            json.dumps({"time": 1.0, "event": "failed", "step": 1, "reason": text}) + "\n"
        )
    assert main(["status"]) == 0
    told = capsys.readouterr()
    check_terminal(told.out)
    assert len(told.out.split("\n")) == 2 * len(NAMES) + 4
    for command in (
        ["evaluate", str(folder / "\x1b[2J")], ["report", "no\x1b[31m\nfolder", "-o", "x"],
        ["status", "\u202e"],
        ["train", "no\x07.toml"], ["predict", "\x1b]0;title\x07", "x"], ["paper", "table1", "\r"],
        ["reproduce", "\x1b.toml"], ["sweep", "a\nb.toml"], ["models", "run", "\x1b", "-o", "x"],
    ):  # fmt: skip
        assert main(command) == 2
        told = capsys.readouterr()
        check_terminal(told.out + told.err)
        assert told.err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["train", "--no-such\x1b[2J"])
    check_terminal(capsys.readouterr().err)
