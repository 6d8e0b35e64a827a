"""Our figures beside the paper's: from synthetic runs whose every number is known."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy.stats import ttest_1samp, ttest_ind_from_stats

from gpattention.evaluation.records import Record
from gpattention.studies.paper import TABLES, PaperTable, paper_table
from gpattention.studies.paper.spec import MEASURES, Key, gathered, table_spec
from tests.studies.paper.runs import ALPHA, OOD, both, records_of, write_run, write_table_runs


def same(key: Key, value: float, seed: int) -> float:
    return value


def better(key: Key, value: float, seed: int) -> float:
    return value * (1.05 if MEASURES[key.metric].metric.larger else 0.95)


def worse(key: Key, value: float, seed: int) -> float:
    return value * (0.95 if MEASURES[key.metric].metric.larger else 1.05)


def told(table: PaperTable, kind: str) -> list[str]:
    return gathered(table.notes).get(kind, [])  # type: ignore[call-overload]


def verdicts(table: PaperTable) -> list[str]:
    return [claim.verdict for claim in table.claims]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("figure", "winner"), [(same, "tie"), (better, "ours"), (worse, "paper")])
def test_who_wins(name: str, figure: Callable[[Key, float, int], float], winner: str, tmp_path: Path) -> None:
    write_table_runs(tmp_path, name, figure)
    table = paper_table(name, tmp_path)
    printed = [cell for cell in table.cells if cell.key.part != "Average"]  # Average is recomputed in ours
    assert {cell.winner for cell in printed} == {winner}
    assert table.filled == len(table.cells) == len(table_spec(name).published())
    assert sum(table.wins.values()) == len(table.cells)
    assert told(table, "missing") == []


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_own_figures_give_the_papers_own_verdicts(name: str, tmp_path: Path) -> None:
    write_table_runs(tmp_path, name, same)
    table = paper_table(name, tmp_path)
    averaged = name == "table3"  # ours are right averages, the paper's are not
    for claim in table.claims:
        assert averaged or claim.ours == claim.paper
        assert claim.verdict == claim.paper_verdict
    wrong = [claim.text for claim in table.claims if claim.paper_verdict == "does not hold"]
    assert [text.split(" is ")[0] for text in wrong] == {
        "table3": ["asymmetric kernel attention"],  # best in 5 of 16, "no more than 4"
        "table4": ["a fixed alpha of 0.7 gives better averages in accuracy and calibration than 0.5 to 1.0 "
                   "(Appendix F.1)"],
    }.get(name, [])  # fmt: skip


def test_mean_and_standard_error_over_seeds(tmp_path: Path) -> None:
    def figure(key: Key, value: float, seed: int) -> float:
        return value * (1 + 0.01 * seed**2)

    write_table_runs(tmp_path, "table2", figure, seeds=(0, 1, 3))
    table = paper_table("table2", tmp_path)
    for cell in table.cells:
        printed, measured = both(cell)
        values = [figure(cell.key, printed.value, seed) for seed in (0, 1, 3)]
        assert measured.count == 3
        assert measured.mean == pytest.approx(fmean(values))
        assert measured.error == pytest.approx(stdev(values) / 3**0.5)
    row = table.rows[0]
    assert (row.recipe, row.runs, row.extra) == ("cifar10-sgpa", 3, False)
    assert "0 of the differences are clear (Student's t, 95 %)" in table.share
    assert not [text for text in told(table, "reduced") if "one seed" in text]


@pytest.mark.parametrize("name", ["table2", "table5"])
def test_clear_differences_are_counted(name: str, tmp_path: Path) -> None:
    """Against what the paper prints as it is; where it says how many runs it has, by Welch's test."""
    shifts = {-1: 0.3, 1: 0.5, 2: 0.1}
    write_table_runs(tmp_path, name, lambda k, v, s: v + shifts[s], seeds=(-1, 1, 2))
    table = paper_table(name, tmp_path)
    clear = []
    for cell in table.cells:
        paper, ours = both(cell)
        values = list(ours.values.values())
        if name == "table5":
            assert paper.sd is not None
            told = ttest_ind_from_stats(
                ours.mean, stdev(values), 3, paper.value, paper.sd, 3, equal_var=False
            )  # fmt: skip
        else:
            told = ttest_1samp(values, paper.value)
        assert cell.clear == (told.pvalue < 0.05)
        clear.append(cell.clear)
    assert f"{sum(clear)} of the differences are clear" in table.share


def test_runs_named_with_their_seed_are_one_recipe(tmp_path: Path) -> None:
    key = Key("CGPT", "Acc", "Avg.")
    for seed in (0, 1):
        write_run(
            tmp_path, f"cifar10-cgpt-seed{seed}", records_of(key, 50.0 + seed), suite="corrupted", seed=seed
        )
    _, found = both(next(c for c in paper_table("table2", tmp_path).cells if c.key == key))
    assert (found.mean, found.count) == (pytest.approx(50.5), 2)


def test_rows_that_are_missing_are_told(tmp_path: Path) -> None:
    write_table_runs(tmp_path, "table2", same, models=("SGPA", "SCGPT"))
    write_run(tmp_path, "cifar10-cgpt", [], suite="clean")
    table = paper_table("table2", tmp_path)
    assert (table.filled, len(table.cells)) == (40, 100)
    assert table.share.startswith(
        "40 of 100 cells filled. Better of 40 compared: ours in 0, the paper in 0, "
    )
    how = "`gpattention evaluate RUN --suite corrupted` makes it"
    assert told(table, "missing") == [
        "Kernel (asym): no run of the recipe cifar10-kernel",
        "Kernel (sym): no run of the recipe cifar10-kernel-symmetric",
        f"CGPT: cifar10-cgpt has no evaluation for this; {how}",
    ]
    row = next(row for row in table.rows if row.label == "CGPT")
    assert [cell.winner for cell in row.cells] == [None] * 5
    # 14 of 16 needs CGPT or SCGPT; SCGPT alone has 14.  What needs all baselines cannot be said
    assert verdicts(table) == ["holds", "missing", "missing", "missing"]


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
    table = paper_table("table2", tmp_path)
    assert [cell.key for cell in table.cells if cell.ours] == [Key("CGPT", "NLL", "Noise")]
    assert "CGPT: cifar10-cgpt has no batch_ece for Noise, Blur, Weather, Digital, Avg." in told(
        table, "missing"
    )
    assert "CGPT: cifar10-cgpt has no nll for Blur, Weather, Digital, Avg." in told(table, "missing")


def test_further_models_of_ours_follow(tmp_path: Path) -> None:
    key = Key("SGPA", "Acc", "Noise")
    for name in ("cifar10-softmax", "cifar10-cgpt-rows", "cifar10-cgpt-paper-literal", "cifar10-cgpt"):
        write_run(tmp_path, name, records_of(key, 40.0), suite="corrupted")
    write_run(tmp_path, "cifar100-cgpt", records_of(key, 40.0), suite="corrupted")
    table = paper_table("table2", tmp_path)
    extras = [row for row in table.rows if row.extra]
    labels = ["cifar10-cgpt-paper-literal (ours)", "cifar10-cgpt-rows (ours)", "cifar10-softmax (ours)"]
    assert [row.label for row in extras] == labels  # under accuracy only, where they have a figure
    assert {row.group for row in extras} == {"Acc ↑"}
    assert all(cell.paper is None and cell.winner is None for row in extras for cell in row.cells)
    assert (table.filled, len(table.cells)) == (1, 100)
    fourth = paper_table("table4", tmp_path)
    assert {row.recipe for row in fourth.rows if row.extra} == {"cifar10-cgpt", "cifar10-cgpt-rows"}
    literal = next(row for row in fourth.rows if row.label == f"CGPT ({ALPHA} = 0.5 → 1.0)")
    assert literal.recipe == "cifar10-cgpt-paper-literal"


def test_a_shortened_recipe_fills_the_row_unless_the_whole_one_is_there(tmp_path: Path) -> None:
    key = Key("CGPT", "Acc", "Noise")
    write_run(tmp_path, "cifar10-cgpt-short", records_of(key, 40.0), suite="corrupted", phases={"epochs": 4})
    row = next(row for row in paper_table("table2", tmp_path).rows if row.label == "CGPT")
    assert row.recipe == "cifar10-cgpt-short"
    text = "cifar10-cgpt-short: fills the row CGPT, as cifar10-cgpt has no evaluation"
    assert text in told(paper_table("table2", tmp_path), "reduced")
    write_run(tmp_path, "cifar10-cgpt", [], suite="clean")  # whole, but not evaluated on corrupted images
    row = next(row for row in paper_table("table2", tmp_path).rows if row.label == "CGPT")
    assert row.recipe == "cifar10-cgpt-short"
    write_run(tmp_path, "cifar10-cgpt", records_of(key, 50.0), suite="corrupted")
    table = paper_table("table2", tmp_path)
    assert next(row for row in table.rows if row.label == "CGPT").recipe == "cifar10-cgpt"
    assert [row.recipe for row in table.rows if row.extra] == ["cifar10-cgpt-short"]


def test_kernels_are_told_apart(tmp_path: Path) -> None:
    for name, value in (("cifar10-kernel", 41.0), ("cifar10-kernel-symmetric", 42.0)):
        write_run(tmp_path, name, records_of(Key("", "Acc", "Noise"), value), suite="corrupted")
    found = {cell.key.model: cell.ours.mean for cell in paper_table("table2", tmp_path).cells if cell.ours}
    assert found == {"Kernel (asym)": pytest.approx(41.0), "Kernel (sym)": pytest.approx(42.0)}


def test_ood_sets_missing_or_standing_in_are_told(tmp_path: Path) -> None:
    records = [
        Record(f"ood/{name}", "model", metric, value, {"score": score})
        for name, value in (("textures-subset", 0.6), ("tinyimagenet32-standin", 0.8), ("digits", 0.1))
        for metric in ("auroc", "fpr95")
        for score in ("kl_matching", "entropy", "mutual_information")
    ]
    write_run(tmp_path, "cifar10-scgpt", records, suite="ood")
    table = paper_table("table3", tmp_path)
    found = {(c.key.part, c.key.metric): c.ours.mean for row in table.rows for c in row.cells if c.ours}
    assert found == {
        (part, metric): pytest.approx(70.0)
        for part in ("KLMatching", "Entropy", "KLMatching, nearest class", "Mutual information")
        for metric in ("AUROC", "FPR@95")
    }
    assert table.filled == 4  # detectors of the paper only, and no average without all four
    assert [row.label for row in table.rows if row.extra] == [
        "KLMatching, nearest class",
        "Mutual information",
    ]
    lines = told(table, "stand-in")
    assert "cifar10-scgpt: textures-subset stands for Textures" in lines
    assert "cifar10-scgpt: tinyimagenet32-standin stands for TinyImageNetCrop" in lines
    assert "cifar10-scgpt: FPR@95 is fpr95, as the evaluation has no fpr95_out" in lines
    assert "cifar10-scgpt: KLMatching is kl_matching, as the evaluation has no kl_matching_predicted" in lines
    only = "cifar10-scgpt: mean over Textures, TinyImageNetCrop only; no figures for LSUNCrop, LSUNResize"
    assert only in told(table, "reduced")


def test_the_right_set_goes_before_a_stand_in(tmp_path: Path) -> None:
    records = [
        Record(f"ood/{name}", "model", "auroc", value, {"score": "entropy"})
        for name, value in (*((name, 0.5) for name in OOD), ("tinyimagenet-resize", 0.9))
    ]
    write_run(tmp_path, "cifar10-sgpa", records, suite="ood")
    table = paper_table("table3", tmp_path)
    (cell,) = [cell for cell in table.cells if cell.ours]
    assert both(cell)[1].mean == pytest.approx(50.0)
    assert told(table, "stand-in") == []


def test_an_average_that_decides_the_winner_is_told(tmp_path: Path) -> None:
    key = Key("SCGPT", "Acc", "Avg.")  # printed 61.746, its own line gives 60.950
    write_run(tmp_path, "cifar10-scgpt", records_of(key, 61.3), suite="corrupted")
    table = paper_table("table2", tmp_path)
    cell = next(cell for cell in table.cells if cell.key == key)
    assert (cell.winner, cell.winner_recomputed, cell.mark) == ("paper", "ours", "‡")
    text = "SCGPT, Acc, Avg.: better against the printed average is paper, against the recomputed one ours"
    assert text in told(table, "paper")


def test_folders_without_runs_and_broken_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected runs in .*, got none"):
        paper_table("table2", tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        paper_table("table2", tmp_path / "nowhere")
    (tmp_path / "recipe.json").write_text("[]")
    with pytest.raises(ValueError, match=r"recipe\.json: expected an object"):
        paper_table("table2", tmp_path)
