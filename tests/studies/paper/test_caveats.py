"""What keeps our runs from being the paper's experiment is said under the table."""

from pathlib import Path
from typing import Any

import pytest

from gpattention.evaluation.records import Record
from gpattention.studies.paper import paper_table
from gpattention.studies.paper.spec import Key, Note, gathered
from tests.studies.paper.runs import records_of, write_run

NOISE = Key("", "NLL", "Noise")


def told(table: str, folder: Path, kind: str = "reduced") -> list[str]:
    return gathered(paper_table(table, folder).notes).get(kind, [])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("cifar10-cgpt", {"phases": {"kernel_epochs": 10, "epochs": 20}},
         "10 + 20 epochs, in the paper 200 + 400"),
        ("cifar10-cgpt", {"phases": {"kernel_epochs": 0, "epochs": 600}},
         "600 epochs, in the paper 200 + 400"),
        (
            "cifar10-kernel",
            {"phases": {"epochs": 30}},
            "30 epochs; the paper's own models 600, of this one it does not say",
        ),
        ("cifar10-sgpa", {"optimizer": {"batch_size": 25}}, "optimizer.batch_size = 25, in the paper 100"),
        ("cifar10-scgpt", {"model": {"attention": "scgp", "options": {"num_inducing": 8}}},
         "model.options.num_inducing = 8, in the paper 16"),
        ("cifar10-cgpt", {"model": {"config": {"depth": 2}}}, "model.config.depth = 2, in the paper 5"),
        ("cifar10-cgpt", {}, "alpha 0 to 0.01 per token and dimension, in the paper 0.5 to 1 of another sum"),
        (
            "cifar10-cgpt",
            {"regularizer": {"start": 0.7, "end": 0.7, "normalised": False}},
            "alpha 0.7, in the paper 0.5 to 1",
        ),
        ("cifar10-sgpa", {"data": {"name": "cifar10", "options": {"subset": True}}},
         "trained with data.options.subset = True"),
        ("cifar10-sgpa", {}, "one seed, so no standard error"),
    ],
)  # fmt: skip
def test_what_a_recipe_changes(name: str, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    write_run(tmp_path, name, records_of(NOISE, 2.0), suite="corrupted", **changes)
    assert f"{name}: {text}" in told("table2", tmp_path)


def test_a_run_as_in_the_paper_is_not_complained_of(tmp_path: Path) -> None:
    alpha = {"start": 0.5, "end": 1.0, "normalised": False}
    for name in ("cifar10-cgpt", "cifar10-kernel"):
        for seed in (0, 1):
            write_run(tmp_path, name, records_of(NOISE, 2.0), suite="corrupted", seed=seed, regularizer=alpha)
    assert told("table2", tmp_path) == []
    assert told("table2", tmp_path, "stand-in") == []


@pytest.mark.parametrize(
    ("contextual", "text"),
    [
        ({"kind": "none"}, "learned embeddings alone, in the paper elmo beside them"),
        ({"kind": "hf", "path": "mini"}, "hf (mini) stands for elmo as contextual embedding"),
        ("glove", "glove stands for elmo as contextual embedding"),
    ],
)
def test_other_embeddings_than_elmo_are_stand_ins(contextual: Any, text: str, tmp_path: Path) -> None:
    options = {"name": "cola", "options": {"contextual": contextual}}
    records = [Record("test", "model", "mcc", 0.3)]
    write_run(tmp_path, "cola-cgpt", records, suite="clean", data=options)
    assert told("table1", tmp_path, "stand-in") == [f"cola-cgpt: {text}"]


def test_elmo_is_no_stand_in_and_epochs_are_counted_over_both_phases(tmp_path: Path) -> None:
    records = [Record("test", "model", "mcc", 0.3)]
    write_run(tmp_path, "cola-sgpa", records, suite="clean", phases={"kernel_epochs": 20, "epochs": 30})
    assert told("table1", tmp_path, "stand-in") == []
    assert not [text for text in told("table1", tmp_path) if "epochs" in text]
    write_run(tmp_path, "cola-cgpt", records, suite="clean", phases={"epochs": 5})
    assert "cola-cgpt: 5 epochs, in the paper 50" in told("table1", tmp_path)


def test_notes_of_evaluations_are_told_once_with_their_recipes(tmp_path: Path) -> None:
    notes = ("corruptions regenerated, frost overlays generated",)
    for name in ("cifar10-cgpt", "cifar10-sgpa", "cifar10-softmax"):
        write_run(tmp_path, name, records_of(NOISE, 2.0), suite="corrupted", notes=notes)
    write_run(tmp_path / "other", "cifar10-scgpt", [], suite="clean", notes=("of another suite",))
    assert told("table2", tmp_path, "stand-in") == [
        f"cifar10-sgpa, cifar10-cgpt, cifar10-softmax: {notes[0]}"
    ]


def test_notes_that_say_their_kind_stand_there(tmp_path: Path) -> None:
    notes = ("reduced: the first 100 of 10000 images", "missing: lsun-crop", "note: other")
    write_run(tmp_path, "cifar10-cgpt", records_of(NOISE, 2.0), suite="corrupted", notes=notes)
    assert "cifar10-cgpt: the first 100 of 10000 images" in told("table2", tmp_path)
    assert "cifar10-cgpt: lsun-crop" in told("table2", tmp_path, "missing")
    assert told("table2", tmp_path, "stand-in") == ["cifar10-cgpt: note: other"]


def test_fewer_corruptions_and_subsets_are_told(tmp_path: Path) -> None:
    records = [
        Record(f"corrupted/{corruption}/{severity}", "model", "nll", 2.0)
        for corruption in ("fog", "snow")
        for severity in (1, 5)
    ]
    run = write_run(tmp_path, "cifar10-cgpt", [*records, *records_of(NOISE, 2.0)], suite="corrupted")
    file = run / "evaluation" / "corrupted.json"
    file.write_text(file.read_text().replace('"data": "cifar10"', '"data": "cifar10-subset"'))
    assert "cifar10-cgpt: 4 of 95 corruptions and severities" in told("table2", tmp_path)
    assert told("table2", tmp_path, "stand-in") == ["cifar10-cgpt: evaluated on cifar10-subset"]


def test_further_models_say_how_long_they_were_trained(tmp_path: Path) -> None:
    write_run(tmp_path, "cifar10-softmax", records_of(NOISE, 2.0), suite="corrupted", phases={"epochs": 30})
    assert "cifar10-softmax: 30 epochs, the paper's models 600" in told("table2", tmp_path)
    write_run(tmp_path, "cifar10-softmax", records_of(NOISE, 2.0), suite="corrupted")
    assert not [text for text in told("table2", tmp_path) if "epochs" in text]


def test_seeds_twice_and_recipes_that_differ_are_told(tmp_path: Path) -> None:
    for place, epochs in (("a", 400), ("b", 20)):
        write_run(tmp_path / place, "cifar10-cgpt", records_of(NOISE, 2.0), suite="corrupted",
                  phases={"kernel_epochs": 200, "epochs": epochs})  # fmt: skip
    write_run(tmp_path / "c", "cifar10-cgpt", records_of(NOISE, 3.0), suite="corrupted",
              phases={"kernel_epochs": 200, "epochs": 400})  # fmt: skip
    lines = told("table2", tmp_path)
    name = "cifar10-cgpt phases.epochs=400"  # of two recipes of that name the one that has more runs
    assert f"{name}: several runs of seed 0, which count once, by their mean" in lines
    table = paper_table("table2", tmp_path)
    row = next(row for row in table.rows if row.label == "CGPT" and row.group.startswith("NLL"))
    assert (row.recipe, row.cells[0].ours.mean) == (name, 2.5)
    assert [row.recipe for row in table.rows if row.extra] == ["cifar10-cgpt phases.epochs=20"]


def test_the_number_of_the_papers_runs_is_told_where_it_is_known(tmp_path: Path) -> None:
    write_run(tmp_path, "cifar100-sgpa", records_of(NOISE, 2.0), suite="corrupted")
    assert "cifar100-sgpa: one seed, so no standard error; the paper has 3 runs" in told("table5", tmp_path)


def test_notes_are_gathered_in_order() -> None:
    notes = [
        Note("reading", "r"),
        Note("missing", "m", "a"),
        Note("missing", "m", "b"),
        Note("missing", "m", "a"),
    ]
    assert gathered(notes) == {"missing": ["a, b: m"], "reading": ["r"]}
    assert list(gathered(notes)) == ["missing", "reading"]
