"""`gpattention evaluate`: what is printed, and where results go."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpattention.cli.evaluate import evaluation_table, seeds_table
from gpattention.data.corruptions import CORRUPTIONS
from gpattention.evaluation import corrupted as corrupted_source
from gpattention.runs import Results, RunData, group
from gpattention.runs.records import Record, SuiteResult
from gpattention.training import train_recipe
from tests.cli.conftest import Run
from tests.runs.tiny_runs import digits_recipe

QUICK = ["--samples", "2", "--limit", "20", "--device", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def few_corruptions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corrupted_source, "CORRUPTIONS", {"fog": CORRUPTIONS["fog"]})
        patch.setattr(corrupted_source, "SEVERITIES", (3,))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train_recipe(digits_recipe(name=f"tiny-seed{seed}", seed=seed), folder / f"cgp{seed}")
    return folder


def test_a_table_with_accuracy_and_nll_beside_ece(runs: Path, run: Run) -> None:
    folder, suites = runs / "cgp0", ("clean", "corrupted", "ood", "selective")
    out, err = run("evaluate", folder, "--suite", ",".join(suites), *QUICK)
    assert out.startswith("on test items:\n")
    assert re.split(r"\s{2,}", out.splitlines()[1]) == [
        "run", "prediction", "accuracy", "NLL", "ECE", "corr. acc.", "corr. NLL", "corr. ECE", "OOD AUROC",
        "AURC",
    ]  # fmt: skip
    assert "cgp0  mc_dropout+temperature" in out
    assert "notes:\n  clean, corrupted, ood, selective: reduced: at most 20 items of each set" in out
    assert f"results: {folder / 'evaluation'}" in out
    assert "cgp0 corrupted 3 predictions in" in err
    assert {file.stem for file in (folder / "evaluation").glob("*.json")} == set(suites)


def test_a_folder_of_runs_with_seeds(runs: Path, run: Run) -> None:
    out, err = run("evaluate", runs, "--suite", "clean", "--predictors", "model,mean", *QUICK)
    # mc_dropout: of the evaluation before, and not lost
    for text in ("cgp0  ensemble", "on test items, mean ± standard error over seeds:", "±", "mc_dropout"):
        assert text in out
    assert "ensemble of 2 clean" in err


def test_runs_of_one_name_have_a_row_each(runs: Path, tmp_path: Path, run: Run) -> None:
    left_out = shutil.ignore_patterns("evaluation")
    for setting, name in (("a=1", "cgp0"), ("a=2", "cgp1")):
        shutil.copytree(runs / name, tmp_path / setting / "seed-0", ignore=left_out)
    again = (tmp_path / "a=1" / "seed-0").resolve()  # named twice, evaluated once
    out = run("evaluate", tmp_path, again, "--suite", "clean", "--predictors", "mean", *QUICK).out
    first, _, seeds = out.partition("on test items, mean")
    rows = [line.split()[0] for line in first.splitlines() if " mean " in line]
    assert rows == ["a=1/seed-0", "a=2/seed-0"]
    assert "tiny" in seeds
    assert out.count("results: ") == 2


def test_json(runs: Path, run: Run) -> None:
    folder = str(runs / "cgp1")
    out = run("evaluate", folder, "--suite", "efficiency,oversmoothing", "--json", *QUICK).out
    suites = json.loads(out)[folder]
    assert list(suites) == ["efficiency", "oversmoothing"]
    assert "curves" not in suites["efficiency"]
    assert {r["metric"] for r in suites["oversmoothing"]["records"]} == {"token_similarity"}


def result(suite: str, *records: Record, run: str = "a", seed: int = 0, data: str = "digits") -> SuiteResult:
    return SuiteResult(suite, run, data, seed, "cgp", 10, records)


def clean(accuracy: float, ece: float, predictor: str = "model", **detail: object) -> list[Record]:
    values = {"accuracy": accuracy, "nll": 1.0, "ece": ece}
    return [Record("test", predictor, metric, value, detail) for metric, value in values.items()]


class TestTable:
    def test_the_best_is_marked(self) -> None:
        runs = {
            "x": {"clean": result("clean", *clean(0.9, 0.2))},
            "y": {"clean": result("clean", *clean(0.8, 0.1))},
        }
        plain = evaluation_table(runs, bold=False).splitlines()
        assert plain[1].split() == ["x", "model", "*0.900", "1.000", "0.200"]
        assert plain[2].split() == ["y", "model", "0.800", "1.000", "*0.100"]  # equal values are not the best
        bold = evaluation_table(runs, bold=True)
        assert "\x1b[1m   0.900\x1b[0m" in bold
        assert "*" not in bold
        drawn = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in bold.splitlines()]
        assert len({len(line) for line in drawn}) == 1  # the columns end together

    def test_only_numbers_on_the_same_items_compete(self) -> None:
        records = [
            *clean(0.5, 0.2),
            *clean(0.4, 0.3, "mean"),
            *clean(0.9, 0.1, "ensemble", unseen_test_items=3),
        ]
        drawn = evaluation_table({"x": {"clean": result("clean", *records)}}, bold=False)
        assert "*0.500" in drawn
        assert "*0.900" not in drawn
        runs = {
            "x": {"clean": result("clean", *clean(0.9, 0.2))},
            "y": {"clean": result("clean", *clean(0.8, 0.1), data="cifar10")},
        }
        assert "*" not in evaluation_table(runs, bold=False)

    def test_runs_on_different_numbers_of_items(self) -> None:
        def judged(accuracy: float, items: int) -> dict[str, SuiteResult]:
            found = result("clean", *clean(accuracy, 0.1))
            return {"clean": replace(found, curves={"items": {"model": {"test": items}}})}

        runs = {"x": judged(0.9, 31), "y": judged(0.8, 2000), "z": judged(0.7, 2000)}
        drawn = evaluation_table(runs, bold=False)
        assert "*0.800" in drawn
        assert "*0.900" not in drawn
        assert drawn.endswith("on other items than most, so not compared: x model (31 items)")
        assert "*" not in evaluation_table({name: runs[name] for name in ("x", "y")}, bold=False)
        assert "compared" not in evaluation_table({name: runs[name] for name in ("y", "z")}, bold=False)

    def test_texts_have_their_own_columns(self) -> None:
        outside = Record("ood/out-of-domain", "model", "mcc", 0.25)
        inside = Record("test", "model", "mcc", 0.5)
        drawn = evaluation_table({"x": {"clean": result("clean", inside, outside)}}, bold=False)
        assert drawn.split("\n")[0].split() == ["run", "prediction", "MCC", "out", "MCC"]
        assert "MCC" not in evaluation_table({"x": {"clean": result("clean", inside)}}, bold=False)

    def test_sets_are_averaged_and_costs_are_the_runs_own(self) -> None:
        ood = [
            Record(f"ood/{n}", "model", "auroc", v, {"score": "entropy"}) for n, v in (("a", 0.5), ("b", 0.7))
        ]
        ood.append(Record("ood/a", "model", "auroc", 0.1, {"score": "energy"}))
        cost = [
            Record("train", "model", "train_epoch_seconds", value, {"tokens": tokens})
            for value, tokens in ((120.4, 64), (3.0, 16))
        ]
        suites = {"ood": result("ood", *ood), "efficiency": result("efficiency", *cost)}
        assert evaluation_table({"x": suites}, bold=False).splitlines()[1].split() == [
            "x", "model", "0.600", "120",
        ]  # fmt: skip

    def test_seeds(self) -> None:
        runs = [
            RunData(
                f"{seed}", suites={"clean": result("clean", *clean(v, 0.1), run=f"a-seed{seed}", seed=seed)}
            )
            for seed, v in ((0, 0.5), (1, 0.7))
        ]
        both, one = Results.of(group(runs)), Results.of(group(runs[:1]))
        drawn = seeds_table(both, ["clean"], bold=False)
        assert "a       model       0.600 ± 0.100" in drawn
        assert drawn.startswith("on test items, mean ± standard error over seeds:\n")
        assert seeds_table(both, ["ood"], bold=False) == ""
        assert seeds_table(one, ["clean"], bold=False) == ""
