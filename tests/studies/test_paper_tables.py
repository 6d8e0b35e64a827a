"""Markdown, CSV, LaTeX and plots of the paper's tables: the same numbers, names escaped, layout whole."""

import csv
import io
import re
import sys
from pathlib import Path

import pytest

from gpattention.runs.tables import latex
from gpattention.studies.paper import FIGURES, TABLES, Key, Note, PaperTable, paper_table
from gpattention.studies.paper_tables import (
    FORMATS,
    gathered,
    paper_figure,
    to_csv,
    to_latex,
    to_markdown,
    write_table,
)
from tests.studies.paper_runs import (
    both,
    cost_records,
    layer_records,
    records_of,
    write_run,
    write_table_runs,
)

NOISE = Key("", "NLL", "Noise")


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
    for row, paper, ours in zip(table.rows, lines[::2], lines[1::2], strict=True):
        assert (paper[1], paper[2]) == (row.label, "paper")
        assert (ours[1], ours[2]) == ("", "ours, 2 runs")
        for cell, theirs, mine in zip(row.cells, paper[3:], ours[3:], strict=True):
            printed, measured = both(cell)
            assert theirs.strip("*") == printed.printed + printed.mark
            assert mine.strip("*") == f"{measured.mean:.{cell.digits}f} ± {measured.error:.{cell.digits}f}"
            assert theirs.startswith("**") == (cell.winner == "paper")
            assert mine.startswith("**") == (cell.winner == "ours")
    assert [line[0] for line in lines if line[0]] == list(dict.fromkeys(row.group for row in table.rows))


def test_csv_holds_every_number_unrounded(table: PaperTable) -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    cells = [cell for row in table.rows for cell in row.cells]
    for line, cell in zip(lines, cells, strict=True):
        assert (line["model"], line["metric"], line["part"]) == cell.key
        printed, measured = both(cell)
        assert float(line["ours"]) == measured.mean
        assert float(line["ours_standard_error"]) == measured.error
        assert float(line["paper"]) == printed.value
        assert line["paper_sd"] == ("" if printed.sd is None else str(printed.sd))
        assert (line["winner"], line["place"]) == (cell.winner, printed.place)
        assert line["better"] == ("larger" if cell.measure.metric.larger else "smaller")


def test_latex_is_balanced(table: PaperTable) -> None:
    tex = to_latex(table)
    body = tex.split(r"\toprule")[1].split(r"\bottomrule")[0]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 1 + 2 * len(table.rows)
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {2 + len(table.columns)}
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
    assert all(latex(note.text) in tex for note in table.notes)


def test_names_are_text_and_missing_figures_are_said_to_be_missing(tmp_path: Path) -> None:
    name, notes = "cifar10-<b>|x_y&50%", ("a\n\n# *b* `c",)
    write_run(tmp_path, "cifar10-cgpt", records_of(NOISE, 1.5), suite="corrupted")
    table = paper_table("table2", tmp_path)
    assert sum(line.count("missing") for line in grid(to_markdown(table))) == 99
    assert to_latex(table).split(r"\bottomrule")[0].count("& missing") == 99
    assert to_csv(table).count("cifar10-cgpt,1.688,0.033,,ours,no,Table 2; block NLL; line 4\n") == 1
    write_run(tmp_path, name, records_of(NOISE, 2.0), suite="corrupted", notes=notes)
    page, tex = (form(paper_table("table2", tmp_path)) for form in (to_markdown, to_latex))
    assert r"cifar10-\<b>\|x_y&50% (ours)" in page
    assert r"a # \*b\* \`c" in page
    assert {len(re.split(r"(?<!\\)\|", line)) for line in page.split("\n\n")[2].splitlines()} == {10}
    assert r"cifar10-\textless{}b\textgreater{}\textbar{}x\_y\&50\% (ours)" in tex
    assert r"a \# *b* \textasciigrave{}c" in tex
    notes = [Note("reading", "r"), *(Note("missing", "m", recipe) for recipe in "aba")]
    assert list(gathered(notes).items()) == [("missing", ["a, b: m"]), ("reading", ["r"])]


def test_files(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "cifar10-cgpt", [], suite="clean")
    table = paper_table("table2", tmp_path / "runs")
    files = write_table(table, tmp_path / "out")
    assert [file.name for file in files] == ["table2.md", "table2.csv", "table2.tex"]
    assert [file.read_text() for file in files] == [form(table) for form in FORMATS.values()]
    (file,) = write_table(table, tmp_path / "deep" / "mine.tex")
    assert file.read_text() == to_latex(table)
    assert [f.name for f in write_table(table, tmp_path / "one", ("csv",))] == ["table2.csv"]


def write_layers(folder: Path) -> None:
    for seed, values in ((0, [0.1, 0.2, 0.3, 0.4, 0.5]), (1, [0.3, 0.4, 0.5, 0.6, 0.7])):
        write_run(folder, "cifar10-cgpt", layer_records(values), suite="oversmoothing", seed=seed)


def test_the_plots_show_the_figures(tmp_path: Path) -> None:
    write_layers(tmp_path)
    names = [f"cifar10-a-model-with-a-very-long-name-{i}" for i in range(4)]
    for name in names:
        write_run(tmp_path, name, layer_records([0.1, 0.2, 0.3, 0.4, 0.5]), suite="oversmoothing")
    figure = paper_figure(paper_table("fig3", tmp_path))
    attention, block = figure.axes
    assert (attention.get_title(), attention.get_xlabel()) == ("Similarity after attention ↓", "layer")
    line = attention.get_lines()[0]
    assert list(line.get_xdata()) == list(block.get_lines()[0].get_xdata()) == [1, 2, 3, 4, 5]
    assert list(line.get_ydata()) == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["CGPT", *(f"{name} (ours)" for name in names)]
    figure.draw_without_rendering()
    assert all(panel.get_position().width > 0.35 for panel in figure.axes)  # whatever the names
    for name in ("cifar10-scgpt", "cifar10-sgpa"):
        write_run(tmp_path, name, cost_records({8: 600.0, 16: 700.0}, 30.0), suite="efficiency")
    for panel in paper_figure(paper_table("fig2", tmp_path)).axes:
        assert panel.get_ylim()[0] == 0
        assert len(panel.get_lines()) >= 2


def test_a_plot_without_runs_says_so_and_tables_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "cifar10-cgpt", [], suite="clean")
    table = paper_table("fig4", tmp_path)
    assert {text.get_text() for panel in paper_figure(table).axes for text in panel.texts} == {"no runs"}
    with pytest.raises(ValueError, match="figures fig2, fig3, fig4, got 'table2'"):
        paper_figure(paper_table("table2", tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'gpattention\[train\]'"):
        paper_figure(table)


@pytest.mark.parametrize("name", FIGURES)
def test_files_of_a_figure(name: str, tmp_path: Path) -> None:
    write_layers(tmp_path / "runs")
    table = paper_table(name, tmp_path / "runs")
    files = write_table(table, tmp_path / "out")
    assert [file.name for file in files] == [
        f"{name}{end}" for end in (".md", ".csv", ".tex", ".png", ".svg")
    ]
    assert files[3].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in files[4].read_bytes()
    (again,) = write_table(table, tmp_path / "again.svg")
    assert again.read_bytes() == files[4].read_bytes()  # the same runs, the same file
