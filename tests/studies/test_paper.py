"""The paper's figures as data, and ours beside them: from synthetic runs whose every number is known."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from scipy.stats import ttest_1samp, ttest_ind_from_stats

from gpattention.runs import group, read_run
from gpattention.runs.records import Record
from gpattention.studies.paper import (
    FIGURES,
    MEASURES,
    TABLES,
    Key,
    PaperTable,
    paper_table,
    published_values,
    table_spec,
)
from gpattention.studies.paper_tables import gathered
from tests.studies.paper_runs import (
    ALPHA,
    OOD,
    both,
    cost_records,
    layer_records,
    records_of,
    write_run,
    write_table_runs,
)

VARIABLE = "GPATTENTION_PAPER"
LABELS = {
    "table1": "tab:in-distribution",
    "table2": "tab:OOD CIFAR",
    "table3": "tab:ood detection2",
    "table4": "tab:OOD CIFAR10 appendix",
    "table5": "tab:OOD CIFAR100 appx",
}
SIZES = {"table1": 24, "table2": 100, "table3": 80, "table4": 60, "table5": 40}
NOISE = Key("", "NLL", "Noise")
Figure = Callable[[Key, float, int], float]


def notes(table: PaperTable | str, kind: str, folder: Path | None = None) -> list[str]:
    found = paper_table(table, folder) if isinstance(table, str) else table
    return gathered(found.notes).get(kind, [])  # type: ignore[call-overload]


def factor(change: float) -> Figure:
    """The paper's figure, better or worse by this share."""
    return lambda key, value, seed: value * (1 + change * (1 if MEASURES[key.metric].metric.larger else -1))


same = factor(0.0)


def verdicts(name: str, folder: Path) -> list[str]:
    return [claim.verdict for claim in paper_table(name, folder).claims]


# What the paper prints


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
    head, _, body = source_of(name).partition(r"\midrule")
    columns = [plain(cell) for cell in head.split(r"\toprule")[1].replace(r"\\", "").split("&")][2:]
    found, block = [], ""
    for line in body.split(r"\bottomrule")[0].replace(r"\midrule", "").split(r"\\"):
        first, *rest = line.split("&")
        if not rest:
            continue
        block = plain(first) or block
        for column, cell in zip(columns, rest[1:], strict=True):
            numbers = tuple(n.replace(",", ".") for n in re.findall(r"\d+[.,]\d+", cell))
            found.append((block, plain(rest[0]), column, numbers, "textbf" in cell))
    assert found == [
        (plain(v.group), plain(v.row), plain(v.column), tuple(v.printed.split(" ± ")), v.bold)
        for v in published_values(name)
    ]


# how parts may weigh in an average: by corruption, without glass blur, alike
READINGS = [dict(zip(("Noise", "Blur", "Weather", "Digital"), weights, strict=True))
            for weights in ((4, 5, 5, 5), (4, 4, 5, 5), (1, 1, 1, 1))]  # fmt: skip
DETECTORS = [dict.fromkeys(("KLMatching", "MaxSoftmax", "Entropy", "Energy-Based"), 1)]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_whole_and_what_it_says_of_averages_and_bold_type_is_so(name: str) -> None:
    spec, values, wrong = table_spec(name), published_values(name), list[bool]()
    assert len(values) == SIZES[name] == len({(v.group, v.row, v.column) for v in values})
    wanted = {
        Key(m, n, p) for m in spec.labels("model") for n in spec.labels("metric") for p in spec.own_parts
    }
    assert set(spec.published) == wanted
    said = "\n".join(remark["text"] for remark in spec.remarks)
    for key, value in spec.published.items():
        assert value.metric in MEASURES[key.metric].records
        assert value.place.startswith(f"Table {name[-1]};")
        assert value.printed.startswith(f"{value.value:.{value.digits}f}")
        rivals = [v for k, v in spec.published.items() if (k.metric, k.part) == (key.metric, key.part)]
        best = MEASURES[key.metric].metric.best([rival.value for rival in rivals])
        odd = any(v.bold and v.value != best for v in rivals) or not any(
            v.bold for v in rivals if v.value == best
        )
        assert odd == (f"{key.metric}, {key.part}: " in said)
        assert (value.recomputed is None) == (key.part not in ("Avg.", "Average"))
        if value.recomputed is None:
            continue
        means = [
            sum(spec.published[key._replace(part=p)].value * n for p, n in of.items()) / sum(of.values())
            for of in (DETECTORS if name == "table3" else READINGS)
        ]
        assert value.recomputed == pytest.approx(means[0], abs=10.0 ** -(value.digits + 2))
        wrong.append(all(abs(value.value - mean) > 10.0**-value.digits + 1e-9 for mean in means))
        far = abs(value.value - means[0]) > (0.1 if value.sd is None else value.sd)
        assert value.mark == ("" if not wrong[-1] else "‡" if far else "†")
    assert sum(wrong) == {"table2": 13, "table3": 10, "table4": 7, "table5": 5}.get(name, 0)
    assert not any(wrong) or f"{sum(wrong)} of {len(wrong)} averages are not the mean" in said


@pytest.mark.parametrize("name", [*TABLES, *FIGURES])
def test_descriptions_name_what_is_there(name: str) -> None:
    spec = table_spec(name)
    models, metrics, parts = (set(spec.labels(axis)) for axis in ("model", "metric", "part"))
    optional = {"against", "metrics", "parts", "at_least", "at_most", "within", "all", "rises"}
    assert spec.claims
    for claim in spec.claims:
        assert {*claim["models"], *claim.get("against", ())} <= models
        assert set(claim.get("metrics", ())) <= metrics
        assert set(claim.get("parts", ())) <= parts
        assert set(claim) - {"text", "models"} <= optional
    folder = Path(__file__).parents[2] / "recipes"
    for recipe in (recipe for model in spec.models for recipe in model["recipes"]):
        assert recipe.startswith(f"{spec.data}-")
        assert (folder / f"{recipe}.toml").is_file()


# Ours beside them


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("change", "winner"), [(0.0, "tie"), (0.05, "ours"), (-0.05, "paper")])
def test_who_wins(name: str, change: float, winner: str, tmp_path: Path) -> None:
    write_table_runs(tmp_path, name, factor(change))
    table = paper_table(name, tmp_path)
    printed = [cell for cell in table.cells if cell.key.part != "Average"]  # Average is recomputed in ours
    assert {cell.winner for cell in printed} == {winner}
    assert table.filled == len(table.cells) == len(table_spec(name).published)
    assert sum(table.wins.values()) == len(table.cells)
    assert notes(table, "missing") == []
    if winner != "tie":
        return
    for claim in table.claims:  # the paper's own figures give its own verdicts
        assert name == "table3" or claim.ours == claim.paper  # ours are right averages there
        assert claim.verdict == claim.paper_verdict
    wrong = [claim.text for claim in table.claims if claim.paper_verdict == "does not hold"]
    assert [text.split(" is ")[0] for text in wrong] == {
        "table3": ["asymmetric kernel attention"],  # best in 5 of 16, "no more than 4"
        "table4": ["a fixed alpha of 0.7 gives better averages in accuracy and calibration than 0.5 to 1.0 "
                   "(Appendix F.1)"],
    }.get(name, [])  # fmt: skip


@pytest.mark.parametrize("name", ["table2", "table5"])
def test_means_errors_and_clear_differences(name: str, tmp_path: Path) -> None:
    """Against what the paper prints as it is; where it says how many runs it has, by Welch's test."""
    shifts = {-1: 0.3, 1: 0.5, 2: 0.1}
    write_table_runs(tmp_path, name, lambda k, v, s: v + shifts[s], seeds=(-1, 1, 2))
    table = paper_table(name, tmp_path)
    for cell in table.cells:
        paper, ours = both(cell)
        values = [paper.value + shift for shift in shifts.values()]
        assert ours.count == 3
        assert ours.mean == pytest.approx(fmean(values))
        assert ours.error == pytest.approx(stdev(values) / 3**0.5)
        test = ttest_1samp(list(ours.values.values()), paper.value)
        if name == "table5":
            spread = stdev(ours.values.values())
            test = ttest_ind_from_stats(ours.mean, spread, 3, paper.value, paper.sd, 3, equal_var=False)
        assert cell.clear == (test.pvalue < 0.05)
    clear = sum(cell.clear for cell in table.cells)
    assert f"{clear} of the differences are clear (Student's t, 95 %)" in table.share
    assert (table.rows[0].runs, table.rows[0].extra) == (3, False)
    assert not [text for text in notes(table, "reduced") if "one seed" in text]


def test_rows_that_are_missing_are_named(tmp_path: Path) -> None:
    write_table_runs(tmp_path, "table2", same, models=("SGPA", "SCGPT"))
    write_run(tmp_path, "cifar10-cgpt", [], suite="clean")
    table = paper_table("table2", tmp_path)
    assert table.share.startswith(
        "40 of 100 cells filled. Better of 40 compared: ours in 0, the paper in 0, "
    )
    how = "`gpattention evaluate RUN --suite corrupted` makes it"
    assert notes(table, "missing") == [
        "Kernel (asym): no run of the recipe cifar10-kernel",
        "Kernel (sym): no run of the recipe cifar10-kernel-symmetric",
        f"CGPT: cifar10-cgpt has no evaluation for this; {how}",
    ]
    row = next(row for row in table.rows if row.label == "CGPT")
    assert [cell.winner for cell in row.cells] == [None] * 5
    # 14 of 16 needs CGPT or SCGPT; SCGPT alone has 14.  What needs all baselines cannot be said
    assert verdicts("table2", tmp_path) == ["holds", "missing", "missing", "missing"]


def test_a_missing_rival_does_not_save_a_claim(tmp_path: Path) -> None:
    """SCGPT worse than one baseline is not better than all, whatever the others are."""
    write_table_runs(tmp_path, "table2", same, models=("Kernel (asym)",))
    write_table_runs(tmp_path, "table2", lambda k, v, s: 10.0, models=("SCGPT",))
    claims = {claim.text.split(" (")[0]: claim for claim in paper_table("table2", tmp_path).claims}
    claim = claims["SCGPT is better than all baselines in every calibration metric and category"]
    assert (claim.verdict, claim.ours.so, claim.ours.measured) == ("does not hold", 0, 12)
    assert claims["SCGPT has the best average accuracy"].verdict == "does not hold"


def test_pooled_errors_do_not_stand_for_batch_means(tmp_path: Path) -> None:
    records = [
        Record("corrupted/noise", "model", "ece", 0.1),
        Record("corrupted/noise", "model+temperature", "batch_ece", 0.1),
        Record("corrupted/noise", "model", "batch_mce", float("nan")),
        Record("corrupted/noise", "model", "nll", 1.0),
    ]
    write_run(tmp_path, "cifar10-cgpt", records, suite="corrupted")
    key = Key("SCGPT", "Acc", "Avg.")  # printed 61.746, its own line gives 60.950
    write_run(tmp_path, "cifar10-scgpt", records_of(key, 61.3), suite="corrupted")
    table = paper_table("table2", tmp_path)
    assert [cell.key for cell in table.cells if cell.ours] == [key, Key("CGPT", "NLL", "Noise")]
    missing = notes(table, "missing")
    assert "CGPT: cifar10-cgpt has no batch_ece for Noise, Blur, Weather, Digital, Avg." in missing
    assert "CGPT: cifar10-cgpt has no nll for Blur, Weather, Digital, Avg." in missing
    cell = next(cell for cell in table.cells if cell.key == key)  # an average that decides the winner
    assert (cell.winner, cell.winner_recomputed, cell.paper.mark) == ("paper", "ours", "‡")
    text = "SCGPT, Acc, Avg.: better against the printed average is paper, against the recomputed one ours"
    assert text in notes(table, "paper")


def test_further_models_of_ours_follow(tmp_path: Path) -> None:
    key = Key("SGPA", "Acc", "Noise")
    kinds = ("softmax", "cgpt-rows", "cgpt-paper-literal", "cgpt-seed1", "kernel", "kernel-symmetric")
    for i, kind in enumerate(kinds):
        write_run(tmp_path, f"cifar10-{kind}", records_of(key, 40.0 + i), suite="corrupted", seed=i)
    write_run(tmp_path, "cifar10-cgpt", records_of(key, 44.0), suite="corrupted")
    write_run(tmp_path, "cifar100-cgpt", records_of(key, 40.0), suite="corrupted")
    table = paper_table("table2", tmp_path)
    extras = [row for row in table.rows if row.extra]
    labels = ["cifar10-cgpt-paper-literal (ours)", "cifar10-cgpt-rows (ours)", "cifar10-softmax (ours)"]
    assert [row.label for row in extras] == labels  # under accuracy only, where they have a figure
    assert {row.group for row in extras} == {"Acc ↑"}
    assert all(cell.paper is None and cell.winner is None for row in extras for cell in row.cells)
    found = {c.key.model: (c.ours.mean, c.ours.count) for c in table.cells if c.ours}
    assert found == {  # a seed at the end of a name is no part of it
        "Kernel (asym)": (pytest.approx(44.0), 1),
        "Kernel (sym)": (pytest.approx(45.0), 1),
        "CGPT": (pytest.approx(43.5), 2),
    }
    fourth = paper_table("table4", tmp_path)
    assert {row.recipe for row in fourth.rows if row.extra} == {"cifar10-cgpt", "cifar10-cgpt-rows"}
    literal = next(row for row in fourth.rows if row.label == f"CGPT ({ALPHA} = 0.5 → 1.0)")
    assert literal.recipe == "cifar10-cgpt-paper-literal"


def test_a_shortened_recipe_fills_the_row_unless_the_whole_one_is_there(tmp_path: Path) -> None:
    key = Key("CGPT", "Acc", "Noise")

    def recipe() -> str | None:
        return next(row for row in paper_table("table2", tmp_path).rows if row.label == "CGPT").recipe

    write_run(tmp_path, "cifar10-cgpt-short", records_of(key, 40.0), suite="corrupted", phases={"epochs": 4})
    assert recipe() == "cifar10-cgpt-short"
    text = "cifar10-cgpt-short: fills the row CGPT, as cifar10-cgpt has no evaluation"
    assert text in notes("table2", "reduced", tmp_path)
    write_run(tmp_path, "cifar10-cgpt", [], suite="clean")  # whole, but not evaluated on corrupted images
    assert recipe() == "cifar10-cgpt-short"
    write_run(tmp_path, "cifar10-cgpt", records_of(key, 50.0), suite="corrupted")
    assert recipe() == "cifar10-cgpt"
    extras = [row.recipe for row in paper_table("table2", tmp_path).rows if row.extra]
    assert extras == ["cifar10-cgpt-short"]


def test_ood_sets_missing_or_standing_in_are_named(tmp_path: Path) -> None:
    def write(recipe: str, values: dict[str, float], metrics: str, scores: str) -> None:
        records = [
            Record(f"ood/{name}", "model", metric, value, {"score": score})
            for name, value in values.items()
            for metric in metrics.split()
            for score in scores.split()
        ]
        write_run(tmp_path / recipe, recipe, records, suite="ood")

    sets = {"textures-subset": 0.6, "tinyimagenet32-standin": 0.8, "digits": 0.1}
    write("cifar10-scgpt", sets, "auroc fpr95", "kl_matching entropy mutual_information")
    table = paper_table("table3", tmp_path)
    found = {(c.key.part, c.key.metric): c.ours.mean for row in table.rows for c in row.cells if c.ours}
    extras = ["KLMatching, nearest class", "Mutual information"]
    parts = ("KLMatching", "Entropy", *extras)
    assert found == {(part, m): pytest.approx(70.0) for part in parts for m in ("AUROC", "FPR@95")}
    assert table.filled == 4  # detectors of the paper only, and no average without all four
    assert [row.label for row in table.rows if row.extra] == extras
    assert {
        "cifar10-scgpt: textures-subset stands for Textures",
        "cifar10-scgpt: tinyimagenet32-standin stands for TinyImageNetCrop",
        "cifar10-scgpt: FPR@95 is fpr95, as the evaluation has no fpr95_out",
        "cifar10-scgpt: KLMatching is kl_matching, as the evaluation has no kl_matching_predicted",
    } <= set(notes(table, "stand-in"))
    only = "cifar10-scgpt: mean over Textures, TinyImageNetCrop only; no figures for LSUNCrop, LSUNResize"
    assert only in notes(table, "reduced")
    write("cifar10-sgpa", {**dict.fromkeys(OOD, 0.5), "tinyimagenet-resize": 0.9}, "auroc", "entropy")
    table = paper_table("table3", tmp_path / "cifar10-sgpa")
    (cell,) = [cell for cell in table.cells if cell.ours]
    assert both(cell)[1].mean == pytest.approx(50.0)  # the right set goes before a stand-in
    assert notes(table, "stand-in") == []


def test_folders_without_runs_broken_recipes_and_unknown_names_are_refused(tmp_path: Path) -> None:
    for folder, message in ((tmp_path, r"expected runs in .*, got none"), (tmp_path / "none", "no folder")):
        with pytest.raises(FileNotFoundError, match=message):
            paper_table("table2", folder)
    (tmp_path / "recipe.json").write_text("[]")
    with pytest.raises(ValueError, match=r"recipe\.json: expected an object"):
        paper_table("table2", tmp_path)
    for ask in (published_values, table_spec):
        with pytest.raises(ValueError, match=r"name .*table1, .*fig4, got 'table6'"):
            ask("table6")
    assert published_values("fig2") == ()


# Figures: which direction holds in our runs


def costs(folder: Path, sparse: dict[int, float], seconds: float) -> Path:
    rival = {8: 700.0, 16: 800.0, 32: 1100.0}
    write_run(folder, "cifar10-scgpt", cost_records(sparse, seconds), suite="efficiency")
    write_run(folder, "cifar10-sgpa", cost_records(rival, 25.0), suite="efficiency")
    return folder


@pytest.mark.parametrize(
    ("sparse", "seconds", "expected"),
    [
        ({8: 600.0, 16: 700.0, 32: 900.0}, 30.0, ["holds", "holds"]),
        ({8: 600.0, 16: 900.0, 32: 900.0}, 37.5, ["does not hold", "holds"]),  # exactly 1.5 times as long
        ({8: 600.0, 16: 700.0, 32: 900.0}, 37.6, ["holds", "does not hold"]),
        ({8: 600.0, 16: 700.0}, 10.0, ["missing", "missing"]),
        ({8: 800.0}, 10.0, ["does not hold", "missing"]),  # what is missing cannot mend it
    ],
)
def test_cost_by_inducing_inputs(
    sparse: dict[int, float], seconds: float, expected: list[str], tmp_path: Path
) -> None:
    table = paper_table("fig2", costs(tmp_path, sparse, seconds))
    found = {cell.key: cell.ours.mean for cell in table.cells if cell.ours}
    assert found[Key("SCGPT", "Memory", "8")] == sparse[8]  # not the one of 1024 tokens
    assert found[Key("SGPA", "Epoch", "32")] == 25.0
    assert table.share == f"{6 + 2 * len(sparse)} of 12 cells filled. The paper prints no numbers."
    assert [claim.verdict for claim in table.claims] == expected
    assert all(claim.paper is None and claim.paper_verdict is None for claim in table.claims)


def test_layers_count_from_one(tmp_path: Path) -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    folders = [
        write_run(tmp_path, "cifar10-cgpt", layer_records(of), suite="oversmoothing", seed=seed)
        for seed, of in enumerate((values, [value + 0.2 for value in values]))
    ]
    one = group([read_run(folders[1])])  # of two runs in the folder one is asked for: its figures alone
    for runs, shift in ((tmp_path, 0.1), (one, 0.2)):
        row = next(row for row in paper_table("fig3", runs).rows if row.label == "CGPT")
        assert [cell.ours.mean for cell in row.cells if cell.ours] == pytest.approx(
            [v + shift for v in values]
        )
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
    write_run(tmp_path, "cifar100-cgpt", layer_records([0.5, 0.4]), suite="oversmoothing")
    assert verdicts("fig4", tmp_path) == ["missing", "missing"]
    rising, falling = [0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.2, 0.1]
    for values, expected in ((rising, "holds"), (falling, "does not hold")):
        write_run(tmp_path, "cifar100-sgpa", layer_records(values), suite="oversmoothing")
        assert verdicts("fig4", tmp_path)[1] == expected


# What keeps our runs from being the paper's experiment


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("cifar10-cgpt", {"phases": {"kernel_epochs": 10, "epochs": 20}},
         "10 + 20 epochs, in the paper 200 + 400"),
        ("cifar10-cgpt", {"phases": {"kernel_epochs": 0, "epochs": 600}},
         "600 epochs, in the paper 200 + 400"),
        ("cifar10-kernel", {"phases": {"epochs": 30}},
         "30 epochs; the paper's own models 600, of this one it does not say"),
        ("cifar10-softmax", {"phases": {"epochs": 30}}, "30 epochs, the paper's models 600"),
        ("cifar10-sgpa", {"optimizer": {"batch_size": 25}}, "optimizer.batch_size = 25, in the paper 100"),
        ("cifar10-scgpt", {"model": {"attention": "scgp", "options": {"num_inducing": 8}}},
         "model.options.num_inducing = 8, in the paper 16"),
        ("cifar10-cgpt", {"model": {"config": {"depth": 2}}}, "model.config.depth = 2, in the paper 5"),
        ("cifar10-cgpt", {}, "alpha 0 to 0.01 per token and dimension, in the paper 0.5 to 1 of another sum"),
        ("cifar10-cgpt", {"regularizer": {"start": 0.7, "end": 0.7, "normalised": False}},
         "alpha 0.7, in the paper 0.5 to 1"),
        ("cifar10-sgpa", {"data": {"name": "cifar10", "options": {"subset": True}}},
         "trained with data.options.subset = True"),
        ("cifar10-sgpa", {}, "one seed, so no standard error"),
        ("cifar100-sgpa", {}, "one seed, so no standard error; the paper has 3 runs"),
        ("cola-cgpt", {"phases": {"epochs": 5}}, "5 epochs, in the paper 50"),
        *(("cola-cgpt", {"data": {"name": "cola", "options": {"contextual": contextual}}}, text)
          for contextual, text in (
            ({"kind": "none"}, "learned embeddings alone, in the paper elmo beside them"),
            ({"kind": "hf", "path": "mini"}, "hf (mini) stands for elmo as contextual embedding"),
            ("glove", "glove stands for elmo as contextual embedding"))),
    ],
)  # fmt: skip
def test_what_a_recipe_changes(name: str, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    table = {"cifar10": "table2", "cifar100": "table5", "cola": "table1"}[name.partition("-")[0]]
    records = [Record("test", "model", "mcc", 0.3)] if table == "table1" else records_of(NOISE, 2.0)
    write_run(tmp_path, name, records, suite="clean" if table == "table1" else "corrupted", **changes)
    kind = "stand-in" if "contextual" in str(changes) else "reduced"
    assert f"{name}: {text}" in notes(table, kind, tmp_path)


def test_runs_as_in_the_paper_are_not_complained_of(tmp_path: Path) -> None:
    alpha = {"start": 0.5, "end": 1.0, "normalised": False}
    for seed in (0, 1):
        for name in ("cifar10-cgpt", "cifar10-kernel", "cifar10-softmax"):
            write_run(tmp_path, name, records_of(NOISE, 2.0), suite="corrupted", seed=seed, regularizer=alpha)
        phases = {"kernel_epochs": 20, "epochs": 30}  # counted over both
        write_run(tmp_path, "cola-cgpt", [Record("test", "model", "mcc", 0.3)], suite="clean", phases=phases)
    assert notes("table2", "reduced", tmp_path) == notes("table2", "stand-in", tmp_path) == []
    assert notes("table1", "stand-in", tmp_path) == []
    assert not [text for text in notes("table1", "reduced", tmp_path) if "epochs" in text]


def test_notes_of_evaluations_stand_once_with_their_recipes_and_under_their_kind(tmp_path: Path) -> None:
    common = ("corruptions regenerated, frost overlays generated",)
    own = ("reduced: the first 100 of 10000 images", "missing: lsun-crop", "note: other")
    places = [f"corrupted/{corruption}/{severity}" for corruption in ("fog", "snow") for severity in (1, 5)]
    fewer = [Record(place, "model", "nll", 2.0) for place in places]
    for name, further in (("cgpt", own), ("sgpa", ()), ("softmax", ())):
        records = [*records_of(NOISE, 2.0), *(fewer if name == "cgpt" else ())]
        run = write_run(tmp_path, f"cifar10-{name}", records, suite="corrupted", notes=(*common, *further))
    write_run(tmp_path / "other", "cifar10-scgpt", [], suite="clean", notes=("of another suite",))
    file = run / "evaluation" / "corrupted.json"
    file.write_text(file.read_text().replace('"data": "cifar10"', '"data": "cifar10-subset"'))
    assert notes("table2", "stand-in", tmp_path) == [
        f"cifar10-sgpa, cifar10-cgpt, cifar10-softmax: {common[0]}", "cifar10-cgpt: note: other",
        "cifar10-softmax: evaluated on cifar10-subset",
    ]  # fmt: skip
    reduced = notes("table2", "reduced", tmp_path)
    assert "cifar10-cgpt: the first 100 of 10000 images" in reduced
    assert "cifar10-cgpt: 4 of 95 corruptions and severities" in reduced
    assert "cifar10-cgpt: lsun-crop" in notes("table2", "missing", tmp_path)


def test_seeds_twice_and_recipes_that_differ_are_noted(tmp_path: Path) -> None:
    for place, value, epochs in (("a", 2.0, 400), ("b", 2.0, 20), ("c", 3.0, 400)):
        write_run(tmp_path / place, "cifar10-cgpt", records_of(NOISE, value), suite="corrupted",
                  phases={"kernel_epochs": 200, "epochs": epochs})  # fmt: skip
    name = "cifar10-cgpt phases.epochs=400"  # of two recipes of that name the one that has more runs
    text = f"{name}: several runs of seed 0, which count once, by their mean"
    assert text in notes("table2", "reduced", tmp_path)
    table = paper_table("table2", tmp_path)
    row = next(row for row in table.rows if row.label == "CGPT" and row.group.startswith("NLL"))
    assert (row.recipe, row.cells[0].ours.mean) == (name, 2.5)
    assert [row.recipe for row in table.rows if row.extra] == ["cifar10-cgpt phases.epochs=20"]
