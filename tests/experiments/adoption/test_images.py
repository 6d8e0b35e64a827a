"""`adopt images`: the methods on trained vision transformers, resumable part by part."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpattention.data.corruptions import CORRUPTIONS
from gpattention.experiments import evaluate_run, train_recipe
from gpattention.experiments.adoption.images import FOLDER, ImageSettings, adopt_images
from gpattention.experiments.adoption.methods import HOST_METHODS
from gpattention.experiments.judging import corrupted_source
from tests.experiments.tiny_runs import digits_recipe

QUICK = ImageSettings(
    samples=2, limit=60, device="cpu", fit={"steps": 1, "samples": 2, "levels": ("global",)}
)


@pytest.fixture(scope="module", autouse=True)
def few_corruptions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            corrupted_source, "CORRUPTIONS", {name: CORRUPTIONS[name] for name in ("fog", "contrast")}
        )
        patch.setattr(corrupted_source, "SEVERITIES", (1, 5))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for attention, seeds in (("softmax", (0, 1)), ("kernel", (0,)), ("cgp", (0,))):
        for seed in seeds:
            name = f"tiny-{attention}-seed{seed}"
            train_recipe(digits_recipe(attention, name=name, seed=seed), folder / name)
    return folder


def test_every_method_of_every_run_that_can_be_attached_to(runs: Path) -> None:
    timed: list[str] = []
    found = adopt_images([runs], QUICK, on_part=lambda what, seconds: timed.append(what))
    assert {(c.group, c.seed) for c in found.cells} == {
        ("tiny-softmax", 0), ("tiny-softmax", 1), ("tiny-kernel", 0),
    }  # fmt: skip
    for group in ("tiny-softmax", "tiny-kernel"):
        methods = [c.method for c in found.cells if (c.group, c.seed) == (group, 0)]
        assert methods == list(HOST_METHODS)
    assert any("tiny-cgp-seed0 is left out" in note for note in found.notes)
    assert timed[:4] == [f"tiny-kernel-seed0 {part}" for part in ("fit", "clean", "corrupted", "ood")]

    by_name = {(c.group, c.seed, c.method): c.values for c in found.cells}
    plain, heated = (by_name["tiny-softmax", 0, name] for name in ("plain", "temperature"))
    for name in ("test", "corrupted/mean"):
        assert plain[name]["accuracy"] == heated[name]["accuracy"]  # a temperature changes no label
    assert heated["validation"]["nll"] <= plain["validation"]["nll"] + 1e-9  # it was fitted there
    four = [plain[f"corrupted/{t}/{s}"]["nll"] for t in ("fog", "contrast") for s in (1, 5)]
    assert plain["corrupted/mean"]["nll"] == pytest.approx(sum(four) / 4)
    outside = {name: set(values) for name, values in heated.items() if name.startswith("ood/")}
    assert len(outside) >= 2
    assert all(names == {"auroc_entropy", "auroc_max_softmax"} for names in outside.values())
    drawn = by_name["tiny-softmax", 0, "mc_dropout"]
    assert all("auroc_mutual_information" in drawn[name] for name in outside)


def test_plain_is_what_evaluate_says(runs: Path) -> None:
    run = runs / "tiny-softmax-seed0"
    cell = adopt_images([run], QUICK).cells[0]
    told = evaluate_run(run, ["clean", "ood"], device="cpu", samples=2, limit=60, predictors=("model",))
    for metric in ("accuracy", "nll", "ece", "aurc"):
        assert cell.values["test"][metric] == pytest.approx(told["clean"].value("test", metric))
    for name in (name for name in cell.values if name.startswith("ood/")):
        expected = told["ood"].value(name, "auroc", score="entropy")
        assert cell.values[name]["auroc_entropy"] == pytest.approx(expected)


def test_finished_parts_are_read_not_computed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = adopt_images([runs / "tiny-softmax-seed1"], QUICK)
    monkeypatch.setattr("gpattention.experiments.adoption.images.predict_items", None)  # would fail
    assert adopt_images([runs / "tiny-softmax-seed1"], QUICK) == first
    assert any("regenerated" in note for note in first.notes)
    with pytest.raises(ValueError, match=r"other settings .*samples 2 instead of 3"):
        adopt_images([runs / "tiny-softmax-seed1"], replace(QUICK, samples=3))


def test_a_run_without_dropout_has_one_method_less(tmp_path: Path) -> None:
    config = {"width": 16, "heads": 2, "depth": 1, "dropout": 0.0}
    recipe = digits_recipe("softmax", model={"attention": "softmax", "config": config})
    train_recipe(recipe, tmp_path / "dry")
    found = adopt_images([tmp_path / "dry"], replace(QUICK, parts=("clean",)))
    assert [c.method for c in found.cells] == [m for m in HOST_METHODS if not m.startswith("mc_dropout")]
    assert [note for note in found.notes if note.startswith("dry: MC dropout is left out")] != []


def test_a_damaged_cell_is_told_by_its_file(runs: Path) -> None:
    run = runs / "tiny-kernel-seed0"
    adopt_images([run], replace(QUICK, parts=("clean",)))
    file = run / FOLDER / "seed0" / "clean" / "plain.json"
    whole = file.read_text()
    try:
        for broken in (
            "{",
            json.dumps({"format": "other"}),
            json.dumps({"format": "gpattention-adoption-1"}),
        ):
            file.write_text(broken)
            with pytest.raises(ValueError, match=r"plain.json is not a finished cell"):
                adopt_images([run], replace(QUICK, parts=("clean",)))
    finally:
        file.write_text(whole)


def test_nothing_to_attach_to(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run of softmax or kernel"):
        adopt_images([runs / "tiny-cgp-seed0"], QUICK)
    with pytest.raises(FileNotFoundError, match="got none with a model"):
        adopt_images([tmp_path], QUICK)
    same = tmp_path / "copy"
    train_recipe(digits_recipe("softmax", name="tiny-softmax-seed0"), same)
    with pytest.raises(ValueError, match="one run for each seed of tiny-softmax"):
        adopt_images([runs / "tiny-softmax-seed0", same], QUICK)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"samples": 0}, "samples"), ({"parts": ("dirty",)}, "part to be one of"), ({"limit": 0}, "limit")],
)
def test_refused_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(QUICK, **change)  # type: ignore[arg-type]
