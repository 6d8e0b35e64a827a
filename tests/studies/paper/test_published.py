"""The paper's figures as data: against the paper's source where it is at hand, and against each other."""

import os
import re
from pathlib import Path
from statistics import fmean

import pytest

from gpattention.studies.paper import FIGURES, TABLES, published_values
from gpattention.studies.paper.checks import check_averages, told_bold
from gpattention.studies.paper.spec import MEASURES, Key, table_spec
from tests.studies.paper.runs import ALPHA

VARIABLE = "GPATTENTION_PAPER"
LABELS = {
    "table1": "tab:in-distribution",
    "table2": "tab:OOD CIFAR",
    "table3": "tab:ood detection2",
    "table4": "tab:OOD CIFAR10 appendix",
    "table5": "tab:OOD CIFAR100 appx",
}
SIZES = {"table1": 24, "table2": 100, "table3": 80, "table4": 60, "table5": 40}
CASES = [(table, key) for table in TABLES for key in check_averages(table_spec(table))]


def source_of(name: str) -> str:
    """The table's environment in the paper's LaTeX."""
    place = os.environ.get(VARIABLE)
    if not place:
        pytest.skip(f"{VARIABLE} does not name the paper's LaTeX source")
    tex = Path(place).read_text()
    end = tex.index(rf"\label{{{LABELS[name]}}}")
    return tex[tex.rindex(r"\begin{table*}", 0, end) : end]


def plain(tex: str) -> str:
    """A label without its commands: letters, digits and a few signs."""
    tex = tex.replace(r"\alpha", ALPHA).replace(r"\rightarrow", "→")
    tex = re.sub(r"\\(up|down)arrow|\\text(bf)?|\\bf|\\multirow\{\d+\}\{\*\}", "", tex)
    return re.sub(r"[${}\s]", "", tex)


@pytest.mark.parametrize("name", TABLES)
def test_every_figure_is_the_papers(name: str) -> None:
    tex = source_of(name)
    head, _, body = tex.partition(r"\midrule")
    columns = [plain(cell) for cell in head.split(r"\toprule")[1].replace(r"\\", "").split("&")][2:]
    found, group = [], ""
    for line in body.split(r"\bottomrule")[0].replace(r"\midrule", "").split(r"\\"):
        first, *rest = line.split("&")
        if not rest:
            continue
        group = plain(first) or group
        label, cells = plain(rest[0]), rest[1:]
        for column, cell in zip(columns, cells, strict=True):
            numbers = re.findall(r"\d+[.,]\d+", cell)
            found.append(
                (group, label, column, tuple(n.replace(",", ".") for n in numbers), "textbf" in cell)
            )
    ours = [
        (plain(v.group), plain(v.row), plain(v.column), tuple(v.printed.split(" ± ")), v.bold)
        for v in published_values(name)
    ]
    assert ours == found


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_whole(name: str) -> None:
    spec, values = table_spec(name), published_values(name)
    assert len(values) == SIZES[name]
    assert len({(v.group, v.row, v.column) for v in values}) == len(values)
    wanted = {
        Key(model.label, measure.label, part.label)
        for model in spec.models
        for measure in spec.metrics
        for part in spec.parts
        if not part.extra
    }
    assert set(spec.published()) == wanted
    for key, value in spec.published().items():
        assert value.metric in MEASURES[key.metric].records
        assert value.place.startswith(f"Table {name[-1]};")
        assert value.printed.startswith(f"{value.value:.{value.digits}f}")


def test_tables_2_and_4_share_two_models() -> None:
    second, fourth = table_spec("table2").published(), table_spec("table4").published()
    twins = {"SGPA": "SGPA", f"CGPT ({ALPHA} = 0.5 → 1.0)": "CGPT"}
    shared = {key: value for key, value in fourth.items() if key.model in twins}
    assert len(shared) == 40
    for key, value in shared.items():
        twin = second[key._replace(model=twins[key.model])]
        assert (value.value, value.sd) == (twin.value, twin.sd)


@pytest.mark.parametrize(("table", "key"), CASES)
def test_averages_are_recomputed_from_their_parts(table: str, key: Key) -> None:
    """By repeating each category once per corruption, or each detector once."""
    spec = table_spec(table)
    values = spec.published()
    counts = {"Noise": 4, "Blur": 5, "Weather": 5, "Digital": 5}
    if table == "table3":
        counts = {"KLMatching": 1, "MaxSoftmax": 1, "Entropy": 1, "Energy-Based": 1}
    every = [values[key._replace(part=part)].value for part, n in counts.items() for _ in range(n)]
    check = check_averages(spec)[key]
    assert check.recomputed == pytest.approx(fmean(every))
    gap = abs(values[key].value - fmean(every))
    if gap <= 1.9 * values[key].rounding:
        assert check.mark == ""
    if check.mark == "‡":
        assert gap > (values[key].sd or 0.1)


def test_the_known_inconsistencies_are_flagged() -> None:
    second = check_averages(table_spec("table2"))
    sparse = second[Key("SCGPT", "Acc", "Avg.")]
    assert (sparse.printed.value, round(sparse.recomputed, 2), sparse.mark) == (61.746, 60.95, "‡")
    third = check_averages(table_spec("table3"))
    marks = {model: "".join(third[Key(model, m, "Average")].mark or "." for m in
             ("AUROC", "AUPR-IN", "AUPR-OUT", "FPR@95")) for model in
             ("Kernel (sym)", "Kernel (asym)", "SGPA", "SCGPT")}  # fmt: skip
    assert marks == {"Kernel (sym)": "‡‡‡‡", "Kernel (asym)": ".†‡.", "SGPA": "....", "SCGPT": "‡‡‡‡"}
    assert check_averages(table_spec("table1")) == {}
    wrong = {
        name: [c.follows for c in check_averages(table_spec(name)).values()].count(False) for name in TABLES
    }
    assert wrong == {"table1": 0, "table2": 13, "table3": 10, "table4": 7, "table5": 5}


def test_bold_type_that_is_not_the_best_is_told() -> None:
    told = {name: [note.text for note in told_bold(table_spec(name))] for name in TABLES}
    assert told["table1"] == told["table2"] == told["table5"] == []
    assert told["table3"] == [
        "FPR@95, Entropy: nothing is in bold, but the best figure is Kernel (asym)'s 70.78"
    ]
    assert [text.partition(":")[0] for text in told["table4"]] == ["ECE, Blur", "ECE, Digital"]


@pytest.mark.parametrize("name", [*TABLES, *FIGURES])
def test_claims_and_averages_name_what_is_there(name: str) -> None:
    spec = table_spec(name)
    models, metrics, parts = (set(spec.labels(axis)) for axis in ("model", "metric", "part"))
    assert spec.claims
    for claim in spec.claims:
        assert set(claim.models) | set(claim.against) <= models
        assert set(claim.metrics) <= metrics
        assert set(claim.parts) <= parts
    if spec.average:
        assert {spec.average.part, *spec.average.of} <= parts
    for model in spec.models:
        assert all(recipe.startswith(f"{spec.data}-") for recipe in model.recipes)


def test_recipes_of_the_rows_exist() -> None:
    folder = Path(__file__).parents[3] / "recipes"
    named = {r for name in (*TABLES, *FIGURES) for model in table_spec(name).models for r in model.recipes}
    assert sorted(name for name in named if not (folder / f"{name}.toml").is_file()) == []


def test_unknown_names_are_refused() -> None:
    for ask in (published_values, table_spec):
        with pytest.raises(ValueError, match=r"expected name to be one of table1, .*fig4, got 'table6'"):
            ask("table6")
    assert published_values("fig2") == ()
