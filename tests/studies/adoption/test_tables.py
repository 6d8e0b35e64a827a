"""Tables and pictures of a comparison, against numbers done by hand."""

import math
from pathlib import Path

import pytest

from gpattention.runs import Column
from gpattention.studies.adoption.cells import Cell, Cells
from gpattention.studies.adoption.comparison import (
    ALL_TITLES,
    BASELINES,
    COLA_COLUMNS,
    COLA_PANELS,
    SUITE,
    cells_csv,
    differences_figure,
    gap_of,
    results_of,
    summary_csv,
    to_markdown,
    write_comparison,
)
from gpattention.studies.adoption.methods import all_trainings

NLL = Column(SUITE, "test", "nll", head="in NLL")
MCC = Column(SUITE, "test", "mcc", head="in MCC")


def cell(method: str, seed: int, nll: float, mcc: float = 0.5, group: str = "g") -> Cell:
    return Cell(group, seed, method, {"test": {"nll": nll, "mcc": mcc}})


CELLS = [
    cell("plain", 0, 0.9), cell("plain", 1, 0.8), cell("plain", 2, 1.0),
    cell("temperature", 0, 0.7), cell("temperature", 1, 0.61), cell("temperature", 2, 0.8),
    cell("converted-cgp", 1, 0.5, 0.6),
]  # fmt: skip


RESULTS = results_of(CELLS)
METHODS = ["plain", "temperature", "converted-cgp"]


def test_mean_and_standard_error() -> None:
    found = NLL.find(RESULTS, "g", "plain")
    assert found.mean == pytest.approx(0.9)
    assert found.error == pytest.approx(0.1 / math.sqrt(3))
    lone = NLL.find(RESULTS, "g", "converted-cgp")
    assert (lone.mean, lone.error, lone.count) == (0.5, None, 1)
    assert Column(SUITE, "ood/x", "nll").find(RESULTS, "g", "plain") is None


def test_differences_are_paired_by_seed() -> None:
    found = gap_of(RESULTS, "g", "plain", "temperature", NLL)
    assert (found.basis, found.mean) == ("paired", pytest.approx((0.2 + 0.19 + 0.2) / 3))
    spread = math.sqrt(((0.2 - 0.59 / 3) ** 2 * 2 + (0.19 - 0.59 / 3) ** 2) / 2)
    assert found.error == pytest.approx(spread / math.sqrt(3))
    lone = gap_of(RESULTS, "g", "converted-cgp", "temperature", NLL)
    assert (lone.mean, lone.error) == (pytest.approx(-0.11), None)  # of seed 1 alone
    assert gap_of(RESULTS, "g", "plain", "attached", NLL) is None


def test_columns_over_several_sets() -> None:
    values = {"ood/a": {"auroc_entropy": 0.5}, "ood/b": {"auroc_entropy": 0.7}, "test": {"nll": 9.0}}
    results = results_of([Cell("g", 0, "m", values)])
    assert Column(SUITE, "ood/*", "auroc", "entropy").find(results, "g", "m").mean == pytest.approx(0.6)
    assert Column(SUITE, "ood/*", "auroc", "max_softmax").find(results, "g", "m") is None


def test_what_rounds_to_nothing_is_not_bold() -> None:
    cells = [cell("plain", s, 0.5 + 1e-5) for s in range(3)] + [cell("temperature", s, 0.5) for s in range(3)]
    assert gap_of(results_of(cells), "g", "plain", "temperature", NLL).clear
    assert "| plain | +0.000 ± 0.000 |" in to_markdown(cells, [NLL], ALL_TITLES)


def test_markdown() -> None:
    lines = to_markdown(
        CELLS, [NLL, MCC, Column(SUITE, "ood/x", "nll", head="nowhere")], ALL_TITLES
    ).splitlines()
    assert lines[0] == "## g"
    assert lines[2] == "|  | in NLL | in MCC | seeds |"
    assert lines[4] == "| plain | 0.900 ± 0.058 | 0.500 ± 0.000 | 3 |"
    assert lines[6] == "| converted to cgp, tuned on | **0.500** | **0.600** | 1 |"
    assert "| plain | **+0.197 ± 0.003** | +0.000 ± 0.000 |" in lines
    assert "| converted to cgp, tuned on | -0.110 | +0.100 |" in lines
    alone = to_markdown(CELLS[:3], [NLL], ALL_TITLES)
    assert "minus" not in alone


def test_differences_from_the_control_as_well() -> None:
    cells = [*CELLS, cell("tuned-on+temperature", 1, 0.56, 0.55)]
    assert "minus tuned on" not in to_markdown(CELLS, [NLL], ALL_TITLES, BASELINES)
    page = to_markdown(cells, [NLL, MCC], ALL_TITLES, BASELINES)
    before, after = page.split("| minus tuned on, temperature |")
    assert "| converted to cgp, tuned on | -0.110 | +0.100 |" in before
    assert "| converted to cgp, tuned on | -0.060 | +0.050 |" in after
    assert "| temperature | +0.050 | -0.050 |" in after


def test_csv_files_round_nothing() -> None:
    assert "g,1,converted-cgp,test,mcc,0.6\n" in cells_csv(CELLS)
    lines = summary_csv(CELLS, [NLL, MCC]).splitlines()
    assert lines[0].split(",")[-2:] == ["difference", "difference_standard_error"]
    assert [line for line in lines if line.startswith("g,converted-cgp,test,nll,1,0.5,,-0.1")] != []


def test_every_method_has_a_title() -> None:
    assert {name for one in all_trainings() for name in one.methods} == set(ALL_TITLES)
    assert len(set(ALL_TITLES.values())) == len(ALL_TITLES)
    assert {c.metric for c in COLA_COLUMNS} == {"mcc", "nll", "ece", "mce", "aurc"}


def test_a_picture_has_a_mark_for_every_difference() -> None:
    figure = differences_figure(RESULTS, "g", METHODS, {"NLL": {"in": NLL}, "MCC": {"in": MCC}}, ALL_TITLES)
    panels = figure.get_axes()
    assert [axes.get_title() for axes in panels] == ["NLL", "MCC"]
    marks = [float(c.lines[0].get_xdata()[0]) for c in panels[0].containers]
    assert marks == pytest.approx([0.59 / 3, -0.11])
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [
        "plain", "converted to cgp, tuned on",
    ]  # fmt: skip


def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    more = [cell("plain", 0, 0.3, group="h"), cell("temperature", 0, 0.2, group="h")]
    options = {"columns": COLA_COLUMNS, "panels": COLA_PANELS, "titles": ALL_TITLES, "about": ["Made here."]}
    first = write_comparison(tmp_path / "a", "x", [*CELLS, *more], **options)
    second = write_comparison(tmp_path / "b", "x", [*CELLS, *more], **options)
    assert [file.name for file in first] == [
        "x.md", "x.csv", "x-cells.csv", "x-g.png", "x-g.svg", "x-h.png", "x-h.svg",
    ]  # fmt: skip
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert first[0].read_text().startswith("Made here.\n\n## g\n")


def test_cells_round_trip(tmp_path: Path) -> None:
    store = Cells(tmp_path, {"epochs": 3, "types": ("a",)})
    assert store.read(1, "plain") is None
    made = Cell("g", 1, "plain", {"test": {"nll": 0.1}}, {"temperature": 1.5}, 2.0)
    store.write(made)
    assert store.read(1, "plain") == made
    assert Cells(tmp_path, {"types": ["a"], "epochs": 3}).read(1, "plain") == made
    with pytest.raises(ValueError, match="epochs 3 instead of 4"):
        Cells(tmp_path, {"epochs": 4, "types": ("a",)}).read(1, "plain")
