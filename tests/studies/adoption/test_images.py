"""`adopt images`: the methods on trained vision transformers, resumable part by part."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpattention.data.corruptions import CORRUPTIONS
from gpattention.experiments import evaluate_run, train_recipe
from gpattention.experiments.judging import corrupted_source
from gpattention.studies.adoption.images import FOLDER, PRIOR_SCALES, ImageSettings, adopt_images
from gpattention.studies.adoption.methods import HOST_METHODS, Further, methods_of
from tests.experiments.tiny_runs import digits_recipe

QUICK = ImageSettings(
    kinds=(), samples=2, limit=60, device="cpu", fit={"steps": 1, "samples": 2, "levels": ("global",)}
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
    monkeypatch.setattr("gpattention.studies.adoption.images.predict_items", None)  # would fail
    assert adopt_images([runs / "tiny-softmax-seed1"], QUICK) == first
    assert any("regenerated" in note for note in first.notes)
    with pytest.raises(ValueError, match=r"other settings .*samples 2 instead of 3"):
        adopt_images([runs / "tiny-softmax-seed1"], replace(QUICK, samples=3))


def test_a_missing_method_alone_is_computed(runs: Path) -> None:
    run = runs / "tiny-kernel-seed0"
    first = adopt_images([run], replace(QUICK, parts=("clean",)))
    kept = run / FOLDER / "seed0" / "clean"
    before = {file.name: file.stat().st_mtime_ns for file in kept.glob("*.json")}
    (kept / "attached-global.json").unlink()
    timed: list[str] = []
    again = adopt_images(
        [run], replace(QUICK, parts=("clean",)), on_part=lambda what, seconds: timed.append(what)
    )
    assert timed == ["tiny-kernel-seed0 fit", "tiny-kernel-seed0 clean"]
    after = {file.name: file.stat().st_mtime_ns for file in kept.glob("*.json")}
    assert {name for name, time in after.items() if time != before[name]} == {"attached-global.json"}
    assert [(c.method, c.values) for c in again.cells] == [(c.method, c.values) for c in first.cells]


@pytest.mark.parametrize("attention", ["softmax", "kernel"])
def test_converted_and_tuned_on_with_their_control(runs: Path, attention: str) -> None:
    run = runs / f"tiny-{attention}-seed0"
    wanted = replace(QUICK, kinds=("direct", "cgp"), parts=("clean", "ood"))
    found = adopt_images([run], wanted)
    assert [c.method for c in found.cells] == list(methods_of(("direct", "cgp")))
    told = {c.method: c for c in found.cells}
    plain, tuned = told["plain"], told["tuned-on"]
    assert tuned.values["test"]["nll"] != plain.values["test"]["nll"]
    assert [row["epoch"] for row in tuned.detail["training"]["epochs"]] == [3]  # after the run's two
    drawn = told["converted-direct"].detail["training"]
    assert drawn["prior_scale"] in PRIOR_SCALES
    assert min(drawn["nll_before"], key=drawn["nll_before"].get) == str(drawn["prior_scale"])
    for kind in ("direct", "cgp"):
        draws, mean = told[f"converted-{kind}"], told[f"converted-{kind}-mean+temperature"]
        outside = [name for name in draws.values if name.startswith("ood/")]
        assert all("auroc_mutual_information" in draws.values[name] for name in outside)
        assert not any("auroc_mutual_information" in mean.values[name] for name in outside)
    again = adopt_images([run], replace(wanted, finished=True))
    assert again == found


def test_tuned_weights_are_read_not_trained(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs / "tiny-softmax-seed1"
    wanted = replace(QUICK, kinds=("direct",), parts=("clean",), further=Further(prior_scale=0.5))
    first = adopt_images([run], wanted)
    for file in (run / FOLDER / "seed1" / "clean").glob("converted-direct*.json"):
        file.unlink()
    monkeypatch.setattr("gpattention.studies.adoption.images.tune_on", None)  # would fail
    again = adopt_images([run], wanted)
    assert [(c.method, c.values) for c in again.cells] == [(c.method, c.values) for c in first.cells]
    for file in (run / FOLDER / "seed1" / "clean").glob("converted-direct*.json"):
        file.unlink()
    with pytest.raises(ValueError, match=r"converted-direct.safetensors was trained with .*0.5.* not with"):
        adopt_images([run], replace(wanted, further=Further(prior_scale=0.25)))


@pytest.mark.parametrize("attention", ["softmax", "kernel"])
def test_sparse_attention_in_the_place_of_trained(runs: Path, attention: str) -> None:
    wanted = replace(QUICK, kinds=("scgp",), parts=("clean",), further=Further(prior_scale=0.1))
    found = adopt_images([runs / f"tiny-{attention}-seed0"], wanted)
    drawn, mean = (
        next(c for c in found.cells if c.method == name)
        for name in ("converted-scgp", "converted-scgp-mean+temperature")
    )
    assert drawn.detail["training"]["prior_scale"] == 0.1
    assert 0 < drawn.values["test"]["nll"] < 5
    assert drawn.values["test"]["nll"] != mean.values["test"]["nll"]


def test_nothing_is_finished(runs: Path) -> None:
    with pytest.raises(ValueError, match="leave out --finished"):
        adopt_images([runs / "tiny-softmax-seed0"], replace(QUICK, samples=7, finished=True, parts=()))


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
    [
        ({"samples": 0}, "samples"),
        ({"parts": ("dirty",)}, "part to be one of"),
        ({"limit": 0}, "limit"),
        ({"kinds": ("kernel",)}, "kind to be one of"),
    ],
)
def test_refused_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(QUICK, **change)  # type: ignore[arg-type]
