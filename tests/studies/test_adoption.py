"""Tables, pictures and files of a comparison of methods, against numbers done by hand."""

import math
from functools import partial
from pathlib import Path

import pytest

from gpattention.runs import Column
from gpattention.studies.adoption import (
    CONTROL,
    HOST,
    TITLES,
    TRAININGS,
    Cell,
    converted,
)
from gpattention.studies.adoption_cola import COLUMNS, ColaSettings
from gpattention.studies.adoption_images import ImageSettings
from gpattention.studies.adoption_tables import (
    BASELINES,
    SUITE,
    cells_csv,
    differences_figure,
    gap_of,
    results_of,
    summary_csv,
    to_markdown,
    write_comparison,
)

NLL = Column(SUITE, "test", "nll", head="in NLL", group="in")
MCC = Column(SUITE, "test", "mcc", head="in MCC", group="in")


def cell(method: str, seed: int, nll: float, mcc: float = 0.5, group: str = "g") -> Cell:
    return Cell(group, seed, method, {"test": {"nll": nll, "mcc": mcc}})


CELLS = [
    cell("plain", 0, 0.9), cell("plain", 1, 0.8), cell("plain", 2, 1.0),
    cell("temperature", 0, 0.7), cell("temperature", 1, 0.61), cell("temperature", 2, 0.8),
    cell("converted-cgp", 1, 0.5, 0.6),
]  # fmt: skip
RESULTS = results_of(CELLS)


def test_differences_are_paired_by_seed() -> None:
    found = gap_of(RESULTS, "g", "plain", "temperature", NLL)
    assert (found.basis, found.mean) == ("paired", pytest.approx((0.2 + 0.19 + 0.2) / 3))
    spread = math.sqrt(((0.2 - 0.59 / 3) ** 2 * 2 + (0.19 - 0.59 / 3) ** 2) / 2)
    assert found.error == pytest.approx(spread / math.sqrt(3))
    lone = gap_of(RESULTS, "g", "converted-cgp", "temperature", NLL)
    assert (lone.mean, lone.error) == (pytest.approx(-0.11), None)  # of seed 1 alone
    assert gap_of(RESULTS, "g", "plain", "attached", NLL) is None
    values = {"ood/a": {"auroc_entropy": 0.5}, "ood/b": {"auroc_entropy": 0.7}, "test": {"nll": 9.0}}
    results = results_of([Cell("g", 0, "m", values)])  # a column over several sets
    assert Column(SUITE, "ood/*", "auroc", "entropy").find(results, "g", "m").mean == pytest.approx(0.6)
    assert Column(SUITE, "ood/*", "auroc", "max_softmax").find(results, "g", "m") is None


def test_markdown() -> None:
    lines = to_markdown(CELLS, [NLL, MCC, Column(SUITE, "ood/x", "nll", head="nowhere")]).splitlines()
    assert lines[0] == "## g"
    assert lines[2].startswith("Figures are on test items")
    assert lines[4] == "|  | in NLL | in MCC | seeds |"
    assert lines[6] == "| plain | 0.900 ± 0.058 | 0.500 ± 0.000 | 3 |"
    assert lines[8] == "| converted to cgp, tuned on | 0.500 | 0.600 | 1 |"
    assert "| plain | **+0.197 ± 0.003** | +0.000 ± 0.000 |" in lines
    assert "| converted to cgp, tuned on | -0.110 | +0.100 |" in lines
    assert "minus" not in to_markdown(CELLS[:3], [NLL])
    assert "minus tuned on" not in to_markdown(CELLS, [NLL], BASELINES)
    more = [*CELLS, cell("tuned-on+temperature", 1, 0.56, 0.55)]  # differences from the control as well
    before, after = to_markdown(more, [NLL, MCC], BASELINES).split("| minus tuned on, temperature |")
    assert "| converted to cgp, tuned on | -0.110 | +0.100 |" in before
    assert "| converted to cgp, tuned on | -0.060 | +0.050 |" in after
    assert "| temperature | +0.050 | -0.050 |" in after
    little = [cell("plain", s, 0.5 + 1e-5) for s in range(3)] + [
        cell("temperature", s, 0.5) for s in range(3)
    ]
    assert gap_of(results_of(little), "g", "plain", "temperature", NLL).clear
    assert "| plain | +0.000 ± 0.000 |" in to_markdown(little, [NLL])  # what rounds to nothing is not bold
    assert "g,1,converted-cgp,test,mcc,0.6\n" in cells_csv(CELLS)
    lines = summary_csv(CELLS, [NLL, MCC]).splitlines()
    assert lines[0].split(",")[-2:] == ["difference", "difference_standard_error"]
    assert [line for line in lines if line.startswith("g,converted-cgp,test,nll,1,0.5,,-0.1")] != []


def test_a_picture_has_a_mark_for_every_difference() -> None:
    figure = differences_figure(RESULTS, "g", ["plain", "temperature", "converted-cgp"], [NLL, MCC])
    panels = figure.get_axes()
    assert [axes.get_title() for axes in panels] == ["MCC", "NLL"]
    marks = [float(c.lines[0].get_xdata()[0]) for c in panels[1].containers]
    assert marks == pytest.approx([0.59 / 3, -0.11])
    words = [label.get_text() for label in panels[0].get_yticklabels()]
    assert words == ["plain", "converted to cgp, tuned on"]


def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    cells = [*CELLS, cell("plain", 0, 0.3, group="h"), cell("temperature", 0, 0.2, group="h")]
    first, second = (write_comparison(tmp_path / a, "x", cells, COLUMNS, about=["Made here."]) for a in "ab")
    assert [file.name for file in first] == [
        "x.md", "x.csv", "x-cells.csv", "x-g.png", "x-g.svg", "x-h.png", "x-h.svg",
    ]  # fmt: skip
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert first[0].read_text().startswith("Made here.\n\n## g\n")


def test_methods_by_training() -> None:
    assert len(set(TITLES.values())) == len(TITLES) == sum(len(training.titles) for training in TRAININGS)
    assert ColaSettings(kinds=()).trainings == (HOST,)
    for start, control in (("host", ["tuned-on"]), ("pretrained", [])):
        given = ColaSettings(kinds=("cgp",), convert_from=start).trainings
        assert [training.name for training in given] == ["host", *control, converted("cgp", start).name]
    assert [*CONTROL.titles, *converted("cgp").titles] == [
        "tuned-on", "tuned-on+temperature",
        "converted-cgp", "converted-cgp+temperature", "converted-cgp-mean+temperature",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (partial(ColaSettings, convert_from="scratch"), "convert_from", "'scratch'"),
        (partial(ColaSettings, epochs=0), "epochs", "0"),
        (partial(ColaSettings, learning_rate=0.0), "learning_rate", "0.0"),
        (partial(ColaSettings, regularizer=-1.0), "regularizer", "-1.0"),
        (partial(ImageSettings, further_epochs=1.5), "further_epochs", "1.5"),
        (partial(ImageSettings, further_learning_rate=float("nan")), "further_learning_rate", "nan"),
        (partial(ImageSettings, further_prior_scale=-0.1), "further_prior_scale", "-0.1"),
        (partial(ImageSettings, further_regularizer=-1.0), "further_regularizer", "-1.0"),
        (partial(ImageSettings, samples=0), "samples", "0"),
        (partial(ImageSettings, parts=("dirty",)), "part", "'dirty'"),
        (partial(ImageSettings, limit=0), "limit", "0"),
        (partial(ImageSettings, convert_from="pretrained"), "convert_from", "'pretrained'"),
        (partial(ImageSettings, fresh=True, finished=True), "finished .* or fresh", "both"),
        (partial(ColaSettings, kinds=("magic",)), "kinds to be one of direct", "'magic'"),
        (partial(ColaSettings, seeds=()), "at least one of seeds", "none"),
        (partial(ColaSettings, further_prior_scale=None), "further_prior_scale", "None"),
    ],
)
def test_refusals(call: partial, field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"expected {field}.*got {value}"):
        call()
