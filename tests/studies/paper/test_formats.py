"""Markdown, CSV and LaTeX of the side-by-side tables: the same numbers, names escaped, layout whole."""

import csv
import io
import re
from pathlib import Path

import pytest

from gpattention.runs.tables import latex
from gpattention.studies.paper import (
    FORMATS,
    TABLES,
    PaperTable,
    paper_table,
    rendered,
    to_csv,
    to_latex,
    to_markdown,
    write_table,
)
from gpattention.studies.paper.spec import Key
from tests.studies.paper.runs import both, records_of, write_run, write_table_runs


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> PaperTable:
    write_table_runs(tmp_path, request.param, lambda k, v, s: v * (1.02 + 0.01 * s), seeds=(0, 1))
    return paper_table(request.param, tmp_path)


def grid(text: str) -> list[list[str]]:
    """The first table of a Markdown page, as cells."""
    block = text.split("\n\n")[2]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]


def test_markdown_has_the_papers_layout(table: PaperTable) -> None:
    head, rule, *lines = grid(to_markdown(table))
    assert head == [*table.headings, "", *table.columns]
    assert {len(line) for line in (head, rule, *lines)} == {len(head)}
    assert len(lines) == 2 * len(table.rows) > 0
    for row, paper, ours in zip(table.rows, lines[::2], lines[1::2], strict=True):
        assert (paper[1], paper[2]) == (row.label, "paper")
        assert (ours[1], ours[2]) == ("", "ours, 2 runs")
        for cell, theirs, mine in zip(row.cells, paper[3:], ours[3:], strict=True):
            printed, measured = both(cell)
            assert theirs.strip("*") == printed.printed + cell.mark
            assert mine.strip("*") == f"{measured.mean:.{cell.digits}f} ± {measured.error:.{cell.digits}f}"
            assert (theirs.startswith("**"), mine.startswith("**")) == {
                "paper": (True, False), "ours": (False, True), "tie": (False, False), None: (False, False),
            }[cell.winner]  # fmt: skip
    assert [line[0] for line in lines if line[0]] == list(dict.fromkeys(row.group for row in table.rows))


def test_csv_holds_every_number_unrounded(table: PaperTable) -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    cells = [cell for row in table.rows for cell in row.cells]
    assert len(lines) == len(cells) > 0
    for line, cell in zip(lines, cells, strict=True):
        assert (line["model"], line["metric"], line["part"]) == cell.key
        printed, measured = both(cell)
        assert float(line["ours"]) == measured.mean
        assert float(line["ours_standard_error"]) == measured.error
        assert float(line["paper"]) == printed.value
        assert line["paper_sd"] == ("" if printed.sd is None else str(printed.sd))
        assert line["winner"] == cell.winner
        assert line["place"] == printed.place
        assert line["better"] == ("larger" if cell.measure.metric.larger else "smaller")


def test_latex_is_balanced(table: PaperTable) -> None:
    tex = to_latex(table)
    body = tex.split(r"\toprule")[1].split(r"\bottomrule")[0]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 1 + 2 * len(table.rows)
    columns = 3 + len(table.columns)
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {columns - 1}
    assert rf"\begin{{tabular}}{{lll{'r' * len(table.columns)}}}" in tex
    assert body.count(r"\midrule") == len({row.group for row in table.rows})
    for opened in re.findall(r"\\begin\{(\w+\*?)\}", tex):
        assert tex.count(rf"\begin{{{opened}}}") == tex.count(rf"\end{{{opened}}}") == 1
    plain = re.sub(r"\\[{}]", "", tex)
    assert plain.count("{") == plain.count("}")
    assert len(re.findall(r"(?<!\\)\$", tex)) % 2 == 0
    tex.encode("ascii")  # what is not is a command
    assert body.count(r"\textbf") == sum(cell.winner in ("ours", "paper") for cell in table.cells)


def test_claims_and_notes_stand_below(table: PaperTable) -> None:
    page, tex = to_markdown(table), to_latex(table)
    for claim in table.claims:
        assert f"{claim.paper}: {claim.paper_verdict} | {claim.ours} | **{claim.verdict}**" in page
        assert latex(claim.text) in tex
    assert table.share in page
    assert "How to read:" in page
    for note in table.notes:
        assert latex(note.text) in tex


def test_names_are_latex_text(tmp_path: Path) -> None:
    key = Key("", "NLL", "Noise")
    write_run(
        tmp_path, "cifar10-<b>|x_y&50%", records_of(key, 2.0), suite="corrupted", notes=("a\n\n# *b* `c",)
    )
    table = paper_table("table2", tmp_path)
    page = to_markdown(table)
    assert r"cifar10-\<b>\|x_y&50% (ours)" in page
    assert r"a # \*b\* \`c" in page
    assert {len(re.split(r"(?<!\\)\|", line)) for line in page.split("\n\n")[2].splitlines()} == {10}
    assert r"cifar10-\textless{}b\textgreater{}\textbar{}x\_y\&50\% (ours)" in to_latex(table)
    assert r"a \# *b* \textasciigrave{}c" in to_latex(table)


def test_missing_figures_are_said_to_be_missing(tmp_path: Path) -> None:
    write_run(tmp_path, "cifar10-cgpt", records_of(Key("", "NLL", "Noise"), 1.5), suite="corrupted")
    table = paper_table("table2", tmp_path)
    lines = grid(to_markdown(table))
    assert sum(line.count("missing") for line in lines) == 99
    assert to_latex(table).split(r"\bottomrule")[0].count("& missing") == 99
    assert to_csv(table).count("cifar10-cgpt,1.688,0.033,,ours,no,Table 2; block NLL; line 4\n") == 1


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        ("a_b & 5% #1 $x$ {y}", r"a\_b \& 5\% \#1 \$x\$ \{y\}"),
        ("~^\\", r"\textasciitilde{}\textasciicircum{}\textbackslash{}"),
        ("1 ± 2 → 3", r"1 $\pm$ 2 $\rightarrow$ 3"),
        ("run --suite", "run -{}-suite"),
    ],
)
def test_latex_signs(text: str, tex: str) -> None:
    assert latex(text) == tex


def test_files(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "cifar10-cgpt", [], suite="clean")
    table = paper_table("table2", tmp_path / "runs")
    files = write_table(table, tmp_path / "out")
    assert [file.name for file in files] == ["table2.md", "table2.csv", "table2.tex"]
    for file, form in zip(files, FORMATS, strict=True):
        assert file.read_text() == rendered(table, form)
    (file,) = write_table(table, tmp_path / "deep" / "mine.tex")
    assert file.read_text() == to_latex(table)
    assert [f.name for f in write_table(table, tmp_path / "one", ("csv",))] == ["table2.csv"]
    with pytest.raises(ValueError, match="expected format to be one of markdown, csv, latex, got 'html'"):
        rendered(table, "html")
