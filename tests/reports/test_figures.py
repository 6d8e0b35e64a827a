"""Figures show the numbers that they were given, and nothing of the user's settings or of pyplot."""

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from gpattention import reports
from gpattention.metrics import share_interval
from gpattention.reports import bars_figure, p_value_figure, reliability_figure, roc_figure, severity_figure
from gpattention.reports.drawing import WIDTH, drawing, shorten
from gpattention.reports.style import GAP, NEUTRAL, style_of
from tests.reports.synthetic import reliability, synthetic_run

NAMES = [
    "cgp",
    "_hidden",
    "$x^2",
    "<b>",
    "a very long name of a run that nobody would like to read in a legend",
]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def lines(figure: Figure) -> list[np.ndarray]:
    """Points of the lines inside the axes that have any."""
    return [np.array(line.get_xydata()) for line in figure.axes[0].get_lines()]


def test_reliability_bars_end_at_confidence_and_accuracy() -> None:
    bins = reliability(np.random.default_rng(0))
    figure = reliability_figure(bins)
    main, strip = figure.axes
    full, gaps = main.patches[::2], main.patches[1::2]
    known = [k for k, count in enumerate(bins["count"]) if count]
    assert len(full) == len(gaps) == len(known) < 15
    errors = [line.get_segments()[0][:, 1] for line in main.collections]
    for bar, gap, k, error in zip(full, gaps, known, errors, strict=True):
        few = bins["count"][k] < 10
        assert (bar.get_facecolor()[3] < 0.5) == few
        assert error == pytest.approx(share_interval(bins["accuracy"][k], bins["count"][k]))
        sure, right = bins["confidence"][k], bins["accuracy"][k]
        assert bar.get_x() == pytest.approx(bins["edges"][k])
        assert bar.get_height() == pytest.approx(min(sure, right))
        ends = sorted([gap.get_y(), gap.get_y() + gap.get_height()])
        assert ends == pytest.approx(sorted([sure, right]))
        over = gap.get_edgecolor()[:3] == matplotlib.colors.to_rgb(GAP)
        assert over == (sure > right and not few)
    shares = [bar.get_height() for bar in strip.patches]
    assert shares == pytest.approx([count / sum(bins["count"]) for count in bins["count"]])


def test_reliability_of_no_items() -> None:
    nothing = {"edges": [0, 0.5, 1], "confidence": [None, None], "accuracy": [None, None], "count": [0, 0]}
    figure = reliability_figure(nothing, style=style_of(3), title="none")
    assert len(figure.axes[0].patches) == 0
    assert "none" in texts(figure)


def test_one_seed_is_a_line_and_several_a_band() -> None:
    one = severity_figure({"a": [{0: 0.9, 1: 0.8, 5: 0.3}]}, y="accuracy")
    assert lines(one)[0].tolist() == [[0, 0.9], [1, 0.8], [5, 0.3]]
    assert [tick.get_text() for tick in one.axes[0].get_xticklabels()] == ["clean", "1", "5"]
    several = severity_figure({"a": [{1: 0.8, 2: 0.6}, {1: 0.6, 2: 0.2}]}, y="accuracy")
    assert lines(several)[0] == pytest.approx(np.array([[1, 0.7], [2, 0.4]]))
    (band,) = several.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(0.4 - 12.706 * 0.2, abs=1e-3)  # Student's t of two seeds
    assert several.axes[0].get_ylim()[0] > -1  # which may leave the axes
    bands = severity_figure(
        {"a": [{1: 0.8, 2: 0.6}]}, y="accuracy", bands={"a": [(1, 0.7, 0.9), (2, 0.5, 0.65)]}
    )
    assert bands.axes[0].collections[0].get_paths()[0].vertices[:, 1].max() == 0.9


def test_seeds_of_different_length_are_thin_lines() -> None:
    figure = reports.layers_figure({"a": [[0.1, 0.2], [0.3, None, 0.5]]}, y="floor share")
    assert [line.tolist() for line in lines(figure)] == [[[1, 0.1], [2, 0.2]], [[1, 0.3], [3, 0.5]]]


def test_training_marks_where_draws_begin() -> None:
    rows = synthetic_run().rows
    figure = reports.training_figure({"a": [rows]}, "floor_share")
    drawn = lines(figure)
    expected = [[row["epoch"], row["floor_share"]] for row in rows if row["floor_share"] is not None]
    assert drawn[0] == pytest.approx(np.array(expected))
    assert drawn[1][:, 0].tolist() == [10, 10]
    assert "draws begin" in texts(figure)
    moved = [{**row, "phase": "gp"} for row in rows]
    assert "draws begin" not in texts(reports.training_figure({"a": [moved]}, "alpha"))


def test_roc_and_risk_and_cost_are_the_points_given() -> None:
    curve = {"fpr": [0, 0.5, 1], "tpr": [0.2, 0.9, 1], "coverage": [0.1, 1], "risk": [0, 0.2]}
    roc = roc_figure({"a": [curve]})
    assert lines(roc)[0].tolist() == [[0, 0.2], [0.5, 0.9], [1, 1]]
    assert lines(roc)[1].tolist() == [[0, 0], [1, 1]]  # chance
    assert lines(reports.risk_coverage_figure({"a": [curve]}))[0].tolist() == [[0.1, 0], [1, 0.2]]
    cost = reports.cost_figure({"a": [[(32, 3), (8, 1)]]}, x="inducing points", y="seconds")
    assert lines(cost)[0].tolist() == [[8, 1], [32, 3]]


def test_distributions_of_p_values_are_steps_with_the_test_set_first() -> None:
    near = {"p": [0.1, 0.1, 0.5], "share": [1 / 3, 2 / 3, 1]}
    test = {"p": [0.1, 0.6], "share": [0.5, 1]}
    figure = p_value_figure({"near": [near], "test": [test]}, style=style_of(2))
    of_test, of_near, diagonal = lines(figure)
    assert of_test.tolist() == [[0, 0], [0.1, 0.5], [0.6, 1], [1, 1]]
    assert of_near == pytest.approx(np.array([[0, 0], [0.1, 2 / 3], [0.5, 1], [1, 1]]))
    assert diagonal.tolist() == [[0, 0], [1, 1]]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours == [NEUTRAL, style_of(2).colour, NEUTRAL]
    assert {"test", "near"} <= set(texts(figure))
    seeds = p_value_figure({"test": [test, {"p": [0.1, 0.3], "share": [0.5, 1]}]})
    assert lines(seeds)[0].tolist() == [[0, 0], [0.1, 0.5], [0.3, 0.75], [0.6, 1], [1, 1]]  # their mean
    assert len(seeds.axes[0].collections) == 1  # the band


def test_corruptions_are_dots_at_their_means() -> None:
    values = {"a": {"fog": [0.2, 0.4], "snow": [0.5]}, "b": {"fog": [0.9]}}
    figure = reports.corruption_figure(values, x="ECE")
    dots = {tuple(line[:, 0]) for line in lines(figure) if line.shape != (2, 2) or line[0, 0] != 0.0}
    assert {(0.3000000000000001, 0.5), (0.30000000000000004, 0.5), (0.9,)} & dots
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["fog", "snow"]


def test_bars_are_as_long_as_their_means_with_their_interval() -> None:
    figure = bars_figure({"a": [4.0, 5.0, 6.0], "b": [2.0]}, x="seconds")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [5.0, 2.0]
    assert {"5.00", "2.00"} <= set(texts(figure))
    (line,) = axes.collections[0].get_segments()
    assert line[:, 0] == pytest.approx([5 - 4.3027 / 3**0.5, 5 + 4.3027 / 3**0.5], abs=1e-3)
    assert axes.get_xlim()[1] > 5 + 4.3 / 3**0.5


def test_distributions_are_shares_of_each_set() -> None:
    histogram = {"edges": [0, 1, 2], "in": [30, 10], "out": [0, 5]}
    figure = reports.outlier_figure({"a": histogram, "b": histogram}, x="entropy", title="near")
    assert len(figure.axes) == 2
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [[0, 0.75, 1], [0, 0, 1]]


@pytest.mark.parametrize("count", [1, 5])
def test_legends_name_every_model_within_the_figure(count: int) -> None:
    figure = severity_figure({name: [{1: 0.5, 2: 0.6}] for name in NAMES[:count]}, y="ECE", title="t")
    for name in NAMES[:count]:
        assert shorten(name) in texts(figure)
    figure.draw_without_rendering()
    for text in figure.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= WIDTH + 8
    legend = min(text.get_window_extent().y1 for text in figure.texts if text.get_text() == "t")
    assert legend > figure.axes[0].get_window_extent().y1


def test_settings_of_the_user_neither_matter_nor_change() -> None:
    before = matplotlib.rcParams["font.size"]
    with matplotlib.rc_context({"font.size": 30, "text.parse_math": True}):
        figure = bars_figure({"$a": [1.0]}, x="s")
        assert matplotlib.rcParams["font.size"] == 30
    assert matplotlib.rcParams["font.size"] == before
    assert max(text.get_fontsize() for text in figure.findobj(matplotlib.text.Text)) < 20


def test_pyplot_is_left_alone_and_matplotlib_comes_late() -> None:
    code = (
        "import sys, gpattention.reports as r; assert 'matplotlib' not in sys.modules;"
        "r.bars_figure({'a': [1.0]}, x='s'); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"gpattention\[train\]"):
        bars_figure({"a": [1.0]}, x="s")


@pytest.mark.parametrize("letters", [3, 20, 40, 58, 90])
def test_titles_and_names_stay_inside_the_picture(letters: int) -> None:
    name = ("cifar10-direct-rows-augmented:" * 4)[:letters]
    figures = [
        bars_figure({name: [0.7], "b": [0.6]}, x="AUROC", title=name),
        severity_figure({name: [{0: 0.1, 5: 0.9}]}, y="NLL", title=name),
    ]
    for figure in figures:
        with drawing():
            figure.draw_without_rendering()
            whole = figure.bbox
            found = figure.findobj(matplotlib.text.Text)
            shown = [text for text in found if text.get_text().startswith(name[:3])]
            assert len(shown) >= 2
            for text in shown:
                box = text.get_window_extent()
                assert whole.x0 <= box.x0 < box.x1 <= whole.x1, text.get_text()
