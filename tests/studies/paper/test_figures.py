"""The paper's plots: which direction holds in our runs, and the same plots of ours."""

from pathlib import Path

import pytest

from gpattention.experiments.reporting import read_run
from gpattention.runs import group
from gpattention.studies.paper import FIGURES, paper_figure, paper_table, write_table
from gpattention.studies.paper.spec import Key
from tests.studies.paper.runs import cost_records, layer_records, write_run


def costs(folder: Path, sparse: dict[int, float], seconds: float, rival_seconds: float = 25.0) -> Path:
    rival = {8: 700.0, 16: 800.0, 32: 1100.0}
    write_run(folder, "cifar10-scgpt", cost_records(sparse, seconds), suite="efficiency")
    write_run(folder, "cifar10-sgpa", cost_records(rival, rival_seconds), suite="efficiency")
    return folder


def verdicts(name: str, folder: Path) -> list[str]:
    return [claim.verdict for claim in paper_table(name, folder).claims]


def test_cost_by_inducing_inputs(tmp_path: Path) -> None:
    costs(tmp_path, {8: 600.0, 16: 700.0, 32: 900.0}, seconds=30.0)
    table = paper_table("fig2", tmp_path)
    found = {cell.key: cell.ours.mean for cell in table.cells if cell.ours}
    assert found[Key("SCGPT", "Memory", "16")] == 700.0  # not the one of 1024 tokens
    assert found[Key("SGPA", "Epoch", "32")] == 25.0
    assert table.share == "12 of 12 cells filled. The paper prints no numbers."
    assert [claim.verdict for claim in table.claims] == ["holds", "holds"]
    assert all(claim.paper is None and claim.paper_verdict is None for claim in table.claims)


@pytest.mark.parametrize(
    ("sparse", "seconds", "expected"),
    [
        ({8: 600.0, 16: 900.0, 32: 900.0}, 37.5, ["does not hold", "holds"]),  # exactly 1.5 times as long
        ({8: 600.0, 16: 700.0, 32: 900.0}, 37.6, ["holds", "does not hold"]),
        ({8: 600.0, 16: 700.0}, 10.0, ["missing", "missing"]),
        ({8: 800.0}, 10.0, ["does not hold", "missing"]),  # what is missing cannot mend it
    ],
)
def test_direction_of_costs(
    sparse: dict[int, float], seconds: float, expected: list[str], tmp_path: Path
) -> None:
    assert verdicts("fig2", costs(tmp_path, sparse, seconds)) == expected


@pytest.mark.parametrize("first", [0, 1])
def test_layers_count_from_one_however_they_are_numbered(first: int, tmp_path: Path) -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    write_run(tmp_path, "cifar10-cgpt", layer_records(values, first=first), suite="oversmoothing")
    row = next(row for row in paper_table("fig3", tmp_path).rows if row.label == "CGPT")
    assert [cell.ours.mean for cell in row.cells if cell.ours] == values
    assert [cell.key.part for cell in row.cells] == ["1", "2", "3", "4", "5"]


def test_oversmoothing_holds_or_not(tmp_path: Path) -> None:
    low, high = layer_records([0.1, 0.1, 0.1, 0.1, 0.2]), layer_records([0.1, 0.2, 0.3, 0.4, 0.5])
    for name, records in (("cgpt", low), ("sgpa", high)):
        write_run(tmp_path, f"cifar10-{name}", records, suite="oversmoothing")
    assert verdicts("fig3", tmp_path) == ["holds", "missing"]
    write_run(tmp_path, "cifar10-kernel", high, suite="oversmoothing")
    assert verdicts("fig3", tmp_path) == ["holds", "missing"]
    write_run(tmp_path, "cifar10-scgpt", low, suite="oversmoothing")
    assert verdicts("fig3", tmp_path) == ["holds", "holds"]
    write_run(tmp_path, "cifar10-scgpt", high, suite="oversmoothing")  # both must be less alike, not one
    assert verdicts("fig3", tmp_path) == ["holds", "does not hold"]


def test_similarity_that_rises_with_depth(tmp_path: Path) -> None:
    write_run(tmp_path, "cifar100-cgpt", layer_records([0.5, 0.4]), suite="oversmoothing")
    assert verdicts("fig4", tmp_path) == ["missing", "missing"]
    rising, falling = [0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.2, 0.1]
    for values, expected in ((rising, "holds"), (falling, "does not hold")):
        write_run(tmp_path, "cifar100-sgpa", layer_records(values), suite="oversmoothing")
        assert verdicts("fig4", tmp_path)[1] == expected


def test_the_plots_show_the_figures(tmp_path: Path) -> None:
    for seed, values in ((0, [0.1, 0.2, 0.3, 0.4, 0.5]), (1, [0.3, 0.4, 0.5, 0.6, 0.7])):
        write_run(tmp_path, "cifar10-cgpt", layer_records(values), suite="oversmoothing", seed=seed)
    figure = paper_figure(paper_table("fig3", tmp_path))
    attention, block = figure.axes
    assert (attention.get_title(), attention.get_xlabel()) == ("Similarity after attention ↓", "layer")
    line = attention.get_lines()[0]
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
    assert list(line.get_ydata()) == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["CGPT"]
    assert list(block.get_lines()[0].get_xdata()) == [1, 2, 3, 4, 5]
    costs(tmp_path, {8: 600.0, 16: 700.0, 32: 900.0}, seconds=30.0)
    for panel in paper_figure(paper_table("fig2", tmp_path)).axes:
        assert panel.get_ylim()[0] == 0
        assert len(panel.get_lines()) >= 2


def test_some_of_the_runs(tmp_path: Path) -> None:
    """Two runs are in the folder and one is asked for: its figures alone."""
    folders = [
        write_run(tmp_path, "cifar10-cgpt", layer_records([value] * 5), suite="oversmoothing", seed=seed)
        for seed, value in ((0, 0.2), (1, 0.6))
    ]
    one = group([read_run(folders[1])])
    for runs, expected in ((tmp_path, 0.4), (one, 0.6)):
        (line, *_) = paper_figure(paper_table("fig3", runs)).axes[0].get_lines()
        assert list(line.get_ydata()) == pytest.approx([expected] * 5)


def test_long_names_do_not_press_the_panels_together(tmp_path: Path) -> None:
    names = [f"cifar10-a-model-with-a-very-long-name-{i}" for i in range(4)]
    for name in names:
        write_run(tmp_path, name, layer_records([0.1, 0.2, 0.3, 0.4, 0.5]), suite="oversmoothing")
    figure = paper_figure(paper_table("fig3", tmp_path))
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"{name} (ours)" for name in names]
    assert all(panel.get_position().width > 0.35 for panel in figure.axes)


def test_a_plot_without_runs_says_so_and_tables_have_none(tmp_path: Path) -> None:
    write_run(tmp_path, "cifar10-cgpt", [], suite="clean")
    figure = paper_figure(paper_table("fig4", tmp_path))
    assert {text.get_text() for panel in figure.axes for text in panel.texts} == {"no runs"}
    with pytest.raises(ValueError, match="expected one of the figures fig2, fig3, fig4, got 'table2'"):
        paper_figure(paper_table("table2", tmp_path))


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "cifar10-cgpt", [], suite="clean")
    table = paper_table("fig2", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'gpattention\[train\]'"):
        paper_figure(table)


@pytest.mark.parametrize("name", FIGURES)
def test_files_of_a_figure(name: str, tmp_path: Path) -> None:
    runs = costs(tmp_path / "runs", {8: 600.0, 16: 700.0, 32: 900.0}, seconds=30.0)
    table = paper_table(name, runs)
    files = write_table(table, tmp_path / "out")
    assert [file.name for file in files] == [
        f"{name}{end}" for end in (".md", ".csv", ".tex", ".png", ".svg")
    ]
    assert files[3].read_bytes().startswith(b"\x89PNG")
    drawn = files[4].read_bytes()
    assert b"<svg" in drawn
    (again,) = write_table(table, tmp_path / "again.svg")
    assert again.read_bytes() == drawn  # the same runs, the same file
