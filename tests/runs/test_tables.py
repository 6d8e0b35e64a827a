"""Third-party text stays text in all that is written: terminals, CSV, Markdown, LaTeX and HTML."""

import csv
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpattention.cli.console import Bar, Bars, say, shortened, table
from gpattention.cli.evaluate import evaluation_table
from gpattention.cli.main import main
from gpattention.cli.predict import predictions_table
from gpattention.cli.status import _page
from gpattention.cli.train import sweep_table
from gpattention.evaluation import InputPrediction
from gpattention.files import visible
from gpattention.reports import build_report
from gpattention.reports.html import environment, render
from gpattention.runs import Column, OverSeeds, Recipe, Record, SuiteResult
from gpattention.runs.tables import (
    Markup,
    csv_text,
    latex,
    markdown,
    markdown_code,
    markdown_line,
    markdown_table,
)
from gpattention.studies import adoption, adoption_tables
from gpattention.studies import bench_tables as bench
from gpattention.studies import plan_results as plans
from gpattention.studies.model_card import card_markdown
from gpattention.studies.paper import Key, PaperTable, paper_table
from gpattention.studies.paper_tables import to_csv, to_latex, to_markdown
from gpattention.studies.sweep import SweepResult, SweepRow, SweepSetting, sweep_csv, sweep_markdown
from gpattention.training import RunStatus
from tests.reports.reading import read
from tests.reports.synthetic import synthetic_run
from tests.studies.paper_runs import records_of, write_run
from tests.studies.plan_runs import flat, write_plan, write_runs

NASTY = (
    "\x1b[2J\x1b[31mred", "\x9b31m", "two\nlines", "a\r\nb", "\ttab", "bell\x07", "nul\x00",
    "back\x08\x08\x08",
    "\u202egnp.exe", "\u2066isolate", "line\u2028break", "\ufeffbom", "lone \udcff", "\x85next",
    "=HYPERLINK(\"http://x\",\"y\")", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", " =1", "＝1",  # noqa: RUF001
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!-- ", "]]>", "&lt;b&gt;",
    '"><b>',
    "a | b", "a \\| b", "`code`", "``` fence", "**bold**", "_em_", "__init__", "~~gone~~", "[a](http://x)",
    "![a](x)", "<http://x>", "# heading", "> quote", "- item", "1. item", "1) item", "---", "===", "    code",
    "back\\", "\\", "|", "$x$", "\\input{/etc/passwd}", "\\\\", "%comment", "{", "}", "a_b^c", "#1", "--", "",
    " ", "None", "nan", "-inf", "dropout_draws", "0.5 ± 0.1",
)  # fmt: skip
NAMES = [text for text in NASTY if text.strip() and "\udcff" not in text]
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # noqa: RUF001 - as a spreadsheet reads them
# what our own macros look like in LaTeX
MACRO = re.compile(
    r"\\text[a-z]+\{\}|\\[{}&%$#_]|\$\\(?:pm|alpha|rightarrow|uparrow|downarrow)\$|\$\^\\d?dagger\$|-\{\}-"
)
texts = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(), max_size=6),
    st.text("=+-@\t\r\n|`*_~<>&[]()!#$%^{}\\\"' \x1b\u202e\udcffab1.", max_size=12),
    st.lists(st.sampled_from(NASTY), max_size=3).map("".join),
)


def nasty(test):
    for text in NASTY:
        test = example(text)(test)
    return settings(deadline=None, max_examples=60)(given(texts)(test))


def parsed(page: str) -> list:
    return pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False}).parse(page)


def check_terminal(*pages: str) -> None:
    """Nothing but signs that are printed, spaces and our own line breaks."""
    for line in "\n".join(pages).split("\n"):
        assert [c for c in line if not c.isprintable() and not c.isspace()] == [], line
        assert not set("\r\t\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029") & set(line), line


def check_csv(text: str) -> list[list[str]]:
    """As many cells in every row, on one line each, and none a formula."""
    rows = list(csv.reader(io.StringIO(text)))
    assert len({len(row) for row in rows}) == 1
    assert text.count("\n") == len(rows)
    for cell in (cell for row in rows for cell in row if cell.startswith(FORMULA)):
        float(cell)
    check_terminal(text)
    return rows


def check_markdown(page: str) -> None:
    """No HTML, links to elsewhere or pictures; rows of a table as wide as its head."""
    check_terminal(page)
    width = 0
    for line in page.split("\n"):
        found = len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) if line.startswith("| ") else 0
        assert 0 in (width, found) or width == found, line
        width = found
    for token in parsed(page):
        for part in (token, *(token.children or ())):
            assert part.type not in ("html_block", "html_inline", "image", "s_open", "blockquote_open"), part
            assert part.type != "link_open" or "://" not in str(part.attrs["href"])


# The functions that all writers use


@nasty
def test_nothing_invisible_is_left(text: str) -> None:
    shown = visible(text)
    assert not set("\n\r\t\x1b\x07\x9b\u202e\u2066\u200f\u2028\ufeff\udcff") & set(shown)
    assert [c for c in shown if not c.isprintable() and c != "\u3000" and not c.isspace()] == []
    shown.encode()
    assert shown == text or not text.isprintable()


def test_what_is_shown() -> None:
    assert visible("a\x1b[31mb\nc\u202ed\udcff") == "a\\x1b[31mb\\nc\\u202ed\\udcff"
    assert visible("two\nlines", keep="\n") == "two\nlines"
    plain = "naïve größe αβ 数字 no\u00a0break {}[]()\\|*_`"
    assert visible(plain) == plain


@nasty
def test_csv_has_no_formulas(text: str) -> None:
    rows = check_csv(csv_text(["name", text], [[text, 1], [-0.5, text]]))
    assert {rows[0][1], rows[1][0], rows[2][1]} <= {visible(text), f"'{visible(text)}", text.strip()}


def test_numbers_stay_numbers() -> None:
    cells = [-1, -0.25, 1e-9, None, "-3.5", "+0.1", "-1e-3", "", "0.5 ± 0.1", "-a", "=1", "-1+1", True]
    assert csv_text(["x"], [[cell] for cell in cells]).split("\n")[1:-1] == [
        "-1", "-0.25", "1e-09", '""', "-3.5", "+0.1", "-1e-3", '""', "0.5 ± 0.1", "'-a", "'=1", "'-1+1",
        "True",
    ]  # fmt: skip


@nasty
def test_markdown_says_the_text_and_nothing_else(text: str) -> None:
    cells = [[text, Markup(f"**{markdown(text)}**")], [markdown_code(text), "1"]]
    check_markdown(markdown_table([text, "b"], cells))
    wanted = visible(" ".join(text.split()))
    for written, expected in (
        (f"x {markdown(text)} y", [f"x {wanted} y"]),
        (f"- {markdown_line(text)}\n- next", [wanted, "next"]),
        (markdown_table(["a", "b"], [[text, "z"]]), ["a", "b", wanted, "z"]),
    ):
        found = parsed(written)
        kinds = {token.type for token in found} | {c.type for t in found for c in t.children or ()}
        assert not kinds & {
            "html_inline", "html_block", "link_open", "image", "em_open", "strong_open", "s_open",
            "code_inline", "code_block", "fence", "heading_open", "blockquote_open", "ordered_list_open",
            "hr", "softbreak", "hardbreak",
        }, (written, kinds)  # fmt: skip
        said = ["".join(c.content for c in t.children or ()) for t in found if t.type == "inline"]
        shown = [" ".join(each.split()) for each in said]
        assert [x for x in shown if x] == [" ".join(x.split()) for x in expected if x.split()]
    code = parsed(f"x {markdown_code(text)} y")[1].children
    assert [token.content.strip() for token in code if token.type == "code_inline"] == [wanted.strip()]
    assert {token.type for token in code} == {"text", "code_inline"}


@nasty
def test_latex_has_no_command_but_ours(text: str) -> None:
    left = MACRO.sub("", latex(text))
    assert not set(left) & set("\\{}&%$#_^~\n"), left


@nasty
def test_html_has_no_element_but_ours(text: str) -> None:
    data = environment().from_string('<script type="application/json">{{ data|tojson }}</script>')
    page = str(render("notes", text, [(text, f"x {text}")])) + data.render(data={"name": text, text: 1})
    tree = read(f"<html><body>{page}</body></html>")
    tags = ["html", "body", "aside", "h4", "ul", "li", "code", "script"]
    assert [element.tag for element in tree.all()] == tags
    for shown in (tree.one("h4").text, tree.one("code").text.removeprefix("x ")):
        assert shown.split() == visible(text, keep="\n\t").split()
    assert page.count("</script>") == 1
    assert page.replace("\n", "").replace("\t", "").isprintable() or "\u3000" in page or "\u00a0" in page


# The writers


@nasty
def test_sweeps(text: str) -> None:
    folder = Path("runs/sweep")
    rows = (
        SweepRow({"a.b": text}, Recipe(), folder / "x" / "seed-0", 1, 0.5, -0.25),
        SweepRow(
            {"a.b": "1"}, Recipe(), folder / text.replace("/", "").replace("\x00", "") / "s", error=text
        ),
    )
    tried = tuple(
        SweepSetting(row.settings, 1, 0, OverSeeds({0: 0.5}), OverSeeds({0: -0.25})) for row in rows
    )
    result = SweepResult(Recipe(), folder, "accuracy", rows, tried, tried[0])
    check_csv(sweep_csv(result))
    check_markdown(sweep_markdown(result))
    check_terminal(sweep_table(result))


@nasty
def test_benchmarks(text: str) -> None:
    columns = (("name", text, "", ""), ("gap", "gap", "+.2f", ""))
    made = bench.BenchTable(text, columns, ({"name": text, "gap": -0.5}, {"name": None, "gap": 1.0}), (text,))
    assert check_csv(bench.to_csv(made))[1][1] == "-0.5"
    check_markdown(bench.to_markdown([made], "facts"))


@nasty
def test_adoption(text: str) -> None:
    cells = [
        adoption.Cell(text, seed, method, {"test": {"nll": 1.0 + seed - i}, text: {text: -1.0}})
        for i, method in enumerate((adoption.TEMPERATURE, text))
        for seed in (0, 1)
    ]
    columns = [Column(adoption_tables.SUITE, "test", "nll", head=text)]
    check_markdown(adoption_tables.to_markdown(cells, columns))
    check_csv(adoption_tables.summary_csv(cells, columns))
    check_csv(adoption_tables.cells_csv(cells))


@pytest.fixture(scope="module")
def of_paper(tmp_path_factory: pytest.TempPathFactory) -> PaperTable:
    folder = tmp_path_factory.mktemp("paper")
    write_run(folder, "cifar10-x", records_of(Key("", "NLL", "Noise"), 2.0), suite="corrupted", notes=("n",))
    return paper_table("table2", folder)


@nasty
def test_the_papers_tables(of_paper: PaperTable, text: str) -> None:
    made = replace(
        of_paper,
        spec=replace(of_paper.spec, title=text),
        rows=tuple(replace(row, label=text, group=text, recipe=text) for row in of_paper.rows[-2:]),
        notes=tuple(replace(note, text=text) for note in of_paper.notes),
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
    status = RunStatus(
        text, Path("x"), "failed", text, 1, 2, 0.5, None, None, 1.0, False, 1.0, text, (text,)
    )  # fmt: skip
    records = tuple(Record("test", text, metric, 0.5, {}) for metric in ("nll", "accuracy"))
    suite = {"clean": SuiteResult("clean", text, text, 0, "cgp", 1, records)}
    check_terminal(
        table(("a", text), [(text, "1"), ("x", text)]),
        shortened(text, 30),
        _page([status, status]),
        evaluation_table({text: suite, "other": suite}, bold=False),
        predictions_table([InputPrediction(text, text, 0.5, 0.1, 0.1, {text: 1.0})]),
    )
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        bar = Bar(text, text)
        bar.log(text)
        bar(1, 1, text)
        bars = Bars()
        bars(text, 2, 2)
        bars.close()
        say(text)
        say(text, error=True)
    check_terminal(out.getvalue(), err.getvalue())
    assert (out.getvalue().count("\n"), err.getvalue().count("\n")) == (1, 4)


def test_pages_of_a_plan(tmp_path: Path) -> None:
    """Notes, devices, reasons, predictors and sets as third-party records may have them."""
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
    results = plans.read_results(plan, tmp_path / "runs")
    check_csv(plans.summary_csv(results))
    images = {
        "kind": "images", "classes": NAMES, "size": [8, 8], "channels": 1,
        "normalisation": {"mean": [0.5], "std": [0.5]},
    }  # fmt: skip
    contents = {
        "config.json": json.dumps({"model": "VisionTransformer", "config": {"depth": 1}}).encode(),
        "preprocessing/preprocessing.json": json.dumps(images).encode(),
        "model.safetensors": b"",
    }
    for page in (
        plans.summary_markdown(results),
        plans.choice_markdown(results, plans.rank(results)),
        plans.readme(results, NAMES, ["summary.md", "training-g|p <b>_x_ `c` $1.csv"]),
        card_markdown(results.runs[-1], results.models[-1], tmp_path, contents),
    ):
        check_markdown(page)


def test_a_report(tmp_path: Path) -> None:
    made = synthetic_run(
        "cgp", name="".join(NAMES), predictors=("model",), scores=("entropy",), suites=("clean", "ood")
    )
    suites = {
        suite: replace(found, notes=tuple(NAMES), run=NASTY[0], data="<b>" + NASTY[2])
        for suite, found in made.suites.items()
    }
    page = build_report([replace(made, suites=suites)], title="".join(NAMES))
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
        event = {"time": 1.0, "event": "failed", "step": 1, "reason": text}
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    check_terminal(shown)
    assert len(shown.split("\n")) == 2 * len(NAMES) + 4
    for command in (
        ["evaluate", str(folder / "\x1b[2J")], ["report", "no\x1b[31m\nfolder", "-o", "x"],
        ["status", "\u202e"], ["train", "--no-such\x1b[2J"],
        ["train", "no\x07.toml"], ["predict", "\x1b]0;title\x07", "x"], ["paper", "table1", "\r"],
        ["reproduce", "\x1b.toml"], ["sweep", "a\nb.toml"], ["models", "run", "\x1b", "-o", "x"],
    ):  # fmt: skip
        assert main(command) == 2
        shown = capsys.readouterr()
        check_terminal(shown.out + shown.err)
        assert shown.err.count("\n") == 1
