"""Tables and pictures of a comparison, against numbers done by hand."""

import math
from pathlib import Path

import pytest

from gpattention.experiments.adoption.cells import Cell, Cells
from gpattention.experiments.adoption.columns import (
    ALL_TITLES,
    BASELINES,
    COLA_COLUMNS,
    COLA_PANELS,
)
from gpattention.experiments.adoption.plots import differences_figure
from gpattention.experiments.adoption.summary import Column, Mean, column_mean, paired_difference
from gpattention.experiments.adoption.tables import (
    T_VALUES,
    cells_csv,
    grouped,
    is_clear,
    summary_csv,
    to_markdown,
)
from gpattention.experiments.adoption.trainings import all_trainings
from gpattention.experiments.adoption.writing import write_comparison

NLL = Column("test", "nll", "in NLL")
MCC = Column("test", "mcc", "in MCC", larger=True)


def cell(method: str, seed: int, nll: float, mcc: float = 0.5, group: str = "g") -> Cell:
    return Cell(group, seed, method, {"test": {"nll": nll, "mcc": mcc}})


CELLS = [
    cell("plain", 0, 0.9), cell("plain", 1, 0.8), cell("plain", 2, 1.0),
    cell("temperature", 0, 0.7), cell("temperature", 1, 0.61), cell("temperature", 2, 0.8),
    cell("converted-cgp", 1, 0.5, 0.6),
]  # fmt: skip


def test_mean_and_standard_error() -> None:
    found = column_mean(CELLS[:3], NLL)
    assert found.value == pytest.approx(0.9)
    assert found.error == pytest.approx(0.1 / math.sqrt(3))
    assert column_mean(CELLS[6:], NLL) == Mean(0.5, None, 1)
    assert column_mean(CELLS, Column("ood/x", "nll", "")) is None


def test_differences_are_paired_by_seed() -> None:
    found = paired_difference(CELLS[:3], CELLS[3:6], NLL)
    assert (found.seeds, found.value) == (3, pytest.approx((0.2 + 0.19 + 0.2) / 3))
    spread = math.sqrt(((0.2 - 0.59 / 3) ** 2 * 2 + (0.19 - 0.59 / 3) ** 2) / 2)
    assert found.error == pytest.approx(spread / math.sqrt(3))
    lone = paired_difference(CELLS[6:], CELLS[3:6], NLL)
    assert lone == Mean(pytest.approx(-0.11), None, 1)  # of seed 1 alone
    assert paired_difference([cell("plain", 7, 1.0)], CELLS[3:6], NLL) is None


def test_columns_over_several_sets() -> None:
    values = {
        "ood/a": {"auroc": 0.5},
        "ood/b": {"auroc": 0.7},
        "ood/c": {"other": 9.0},
        "test": {"auroc": 0.0},
    }
    assert Column("ood/*", "auroc", "").of(Cell("g", 0, "m", values)) == pytest.approx(0.6)
    assert Column("none/*", "auroc", "").of(Cell("g", 0, "m", values)) is None


def test_clear_differences() -> None:
    assert is_clear(Mean(0.3, 0.1, 5))
    assert not is_clear(Mean(0.27, 0.1, 5))
    assert not is_clear(Mean(-0.4, 0.1, 3))
    assert is_clear(Mean(-0.23, 0.1, 50))
    assert not is_clear(Mean(0.222, 0.1, 11))  # t is 2.228
    assert not is_clear(Mean(9.0, None, 1))
    assert not is_clear(Mean(0.0004, 0.0, 5))
    assert not is_clear(None)
    from scipy.stats import t

    for seeds, value in T_VALUES.items():
        assert value == pytest.approx(t.ppf(0.975, seeds - 1), rel=1e-3)


def test_markdown() -> None:
    lines = to_markdown(CELLS, [NLL, MCC, Column("ood/x", "nll", "nowhere")], ALL_TITLES).splitlines()
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
    figure = differences_figure(grouped(CELLS)["g"], {"NLL": {"in": NLL}, "MCC": {"in": MCC}}, ALL_TITLES)
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
