"""`adopt images` on trained models: resumable part by part, and never of other weights or data."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpattention.evaluation import EvaluationSettings, evaluate_run
from gpattention.evaluation.run import digest_of_weights
from gpattention.models import VisionTransformer
from gpattention.runs import recipe_from_dict
from gpattention.studies.adoption import HOST, AdoptionResult
from gpattention.studies.adoption_images import FOLDER, PRIOR_SCALES, ImageSettings, adopt_images
from gpattention.training import train_recipe
from tests.data import official
from tests.runs.tiny_runs import digits_recipe

FIT = {"steps": 1, "samples": 2, "levels": ("global",)}
QUICK = ImageSettings(
    kinds=(), samples=2, limit=60, device="cpu", fit=FIT, types=("fog", "contrast"),
    severities=(1, 5),
)  # fmt: skip
CLEAN = replace(QUICK, parts=("clean",))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for attention, seeds in (("softmax", (0, 1)), ("kernel", (0,)), ("cgp", (0,))):
        for seed in seeds:
            name = f"tiny-{attention}-seed{seed}"
            train_recipe(digits_recipe(attention, name=name, seed=seed), folder / name)
    return folder


def test_every_method_of_every_run_that_can_be_attached_to(runs: Path) -> None:
    found = adopt_images([runs], QUICK)
    assert {(c.group, c.seed) for c in found.cells} == {
        ("tiny-softmax", 0), ("tiny-softmax", 1), ("tiny-kernel", 0),
    }  # fmt: skip
    for group in ("tiny-softmax", "tiny-kernel"):
        methods = [c.method for c in found.cells if (c.group, c.seed) == (group, 0)]
        assert methods == list(HOST.titles)
    assert any("tiny-cgp-seed0 is left out" in note for note in found.notes)

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
    wanted = {"samples": 2, "limit": 60, "predictors": ("model",), "device": "cpu"}
    evaluated = evaluate_run(run, EvaluationSettings(suites=("clean", "ood"), **wanted))
    for metric in ("accuracy", "nll", "ece", "aurc"):
        assert cell.values["test"][metric] == pytest.approx(evaluated["clean"].value("test", metric))
    for name in (name for name in cell.values if name.startswith("ood/")):
        expected = evaluated["ood"].value(name, "auroc", score="entropy")
        assert cell.values[name]["auroc_entropy"] == pytest.approx(expected)


@pytest.mark.parametrize(("attention", "kinds"), [("softmax", ("direct",)), ("kernel", ("cgp",))])
def test_converted_and_tuned_on_with_their_control(
    runs: Path, attention: str, kinds: tuple[str, ...]
) -> None:
    run = runs / f"tiny-{attention}-seed0"
    wanted = replace(QUICK, kinds=kinds, parts=("clean", "ood"))
    found = adopt_images([run], wanted)
    assert [c.method for c in found.cells] == [m for of in wanted.trainings for m in of.titles]
    cells = {c.method: c for c in found.cells}
    plain, tuned = cells["plain"], cells["tuned-on"]
    assert tuned.values["test"]["nll"] != plain.values["test"]["nll"]
    assert [row["epoch"] for row in tuned.detail["training"]["epochs"]] == [3]  # after the run's two
    for kind in kinds:
        draws, mean = cells[f"converted-{kind}"], cells[f"converted-{kind}-mean+temperature"]
        drawn = draws.detail["training"]
        assert min(drawn["nll_before"], key=drawn["nll_before"].get) == str(drawn["prior_scale"])
        assert [float(scale) for scale in drawn["nll_before"]] == list(PRIOR_SCALES)
        assert 0 < draws.values["test"]["nll"] < 5
        assert draws.values["test"]["nll"] != mean.values["test"]["nll"]
        outside = [name for name in draws.values if name.startswith("ood/")]
        assert all("auroc_mutual_information" in draws.values[name] for name in outside)
        assert not any("auroc_mutual_information" in mean.values[name] for name in outside)
    assert adopt_images([run], replace(wanted, finished=True)) == found


def test_runs_and_results_that_are_refused(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "tiny-kernel-seed0", tmp_path / "run")
    adopt_images([run], CLEAN)
    for broken, message in (({"settings": {}}, "is not a finished result"), ([], "expected an object")):
        (file,) = (run / FOLDER).glob("clean-host-*.json")
        file.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=rf"clean-host-\w+.json:? {message}"):
            adopt_images([run], CLEAN)
    with pytest.raises(ValueError, match="at least one run of softmax or kernel"):
        adopt_images([runs / "tiny-cgp-seed0"], QUICK)
    with pytest.raises(ValueError, match="leave out --finished"):
        adopt_images([run], replace(QUICK, samples=7, finished=True, parts=()))
    with pytest.raises(FileNotFoundError, match="got none with a model"):
        adopt_images([run / FOLDER], QUICK)
    config = {"width": 16, "heads": 2, "depth": 1, "dropout": 0.0}
    recipe = digits_recipe(name="tiny-softmax-seed0", model={"attention": "softmax", "config": config})
    train_recipe(recipe, tmp_path / "dry")
    found = adopt_images([tmp_path / "dry"], CLEAN)
    assert [c.method for c in found.cells] == [m for m in HOST.titles if not m.startswith("mc_dropout")]
    assert [note for note in found.notes if note.startswith("dry: MC dropout is left out")] != []
    with pytest.raises(ValueError, match="one run for each seed of tiny-softmax"):
        adopt_images([runs / "tiny-softmax-seed0", tmp_path / "dry"], QUICK)


FEW = replace(CLEAN, limit=20, types=("fog",), severities=(5,))
TUNED = replace(FEW, kinds=("direct",))
TEST = "cifar-10-batches-bin/test_batch.bin"
TRAIN = "cifar-10-batches-bin/data_batch_2.bin"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data with a run on it."""
    root = tmp_path_factory.mktemp("data")
    official.write_cifar10_binary(root, each=60)
    for file in root.glob("*/*.bin"):
        change(file, shade)
    config = {"width": 16, "heads": 2, "depth": 1, "patch": 16}
    recipe = recipe_from_dict(
        {
            "name": "tiny",
            "data": {"name": "cifar10", "options": {"subset": True}},
            "model": {"attention": "softmax", "config": config},
            "optimizer": {"batch_size": 54},
            "phases": {"epochs": 4},
        }
    )
    train_recipe(recipe, root / "run", root=root)
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """One that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "data")


def adopt(root: Path, settings: ImageSettings = FEW) -> AdoptionResult:
    return adopt_images([root / "run"], replace(settings, root=root))


def values(found: AdoptionResult, method: str = "temperature") -> dict:
    return next(dict(cell.values) for cell in found.cells if cell.method == method)


def cell_file(root: Path, part: str = "clean", training: str = "host") -> Path:
    (file,) = (root / "run" / FOLDER).glob(f"{part}-{training}-*.json")
    return file


def change(file: Path, how: Callable[[np.ndarray], None]) -> None:
    """Rows of a label and pixels."""
    rows = np.fromfile(file, np.uint8).reshape(-1, 3073)
    how(rows)
    rows.tofile(file)


def shade(rows: np.ndarray) -> None:
    """Classes as brightness: what cannot be learned at all has no temperature."""
    rows[:, 1:] = rows[:, 1:] // 2 + 12 * rows[:, :1]


def turn(rows: np.ndarray) -> None:
    """Other pixels under the same labels."""
    rows[:, 1:] = 255 - rows[:, 1:]


def relabel(rows: np.ndarray) -> None:
    """Other labels of the same pixels, whose normalisation a run compares by itself."""
    rows[:, 0] = (rows[:, 0] + 1) % 10


def go_on_training(run: Path) -> None:
    """Other weights in the place of those that are there, as a trainer saves them."""
    model = VisionTransformer.from_pretrained(run / "model")
    with torch.no_grad():
        model.head.weight *= 3.0
    model.save_pretrained(run / "model")


def anew(root: Path, place: Path, settings: ImageSettings = FEW) -> AdoptionResult:
    """What a folder without earlier results comes to."""
    shutil.copytree(root, place)
    shutil.rmtree(place / "run" / FOLDER)
    return adopt(place, settings)


class TestOtherData:
    @pytest.mark.parametrize(("file", "how", "methods"), [
        (TEST, turn, ("plain", "temperature")), (TRAIN, relabel, ("tuned-on", "converted-direct")),
        ("", None, ("plain", "tuned-on", "converted-direct")),
    ])  # fmt: skip
    def test_images_labels_or_weights(
        self, root: Path, tmp_path: Path, file: str, how: Any, methods: tuple[str, ...]
    ) -> None:
        before = adopt(root, TUNED)
        change(root / file, how) if file else go_on_training(root / "run")
        after, fresh = adopt(root, TUNED), anew(root, tmp_path / "anew", TUNED)
        for method in methods:
            assert values(after, method) != values(before, method)
            assert values(after, method) == values(fresh, method)


def test_weights_saved_meanwhile_are_not_those_of_the_numbers(root: Path) -> None:
    read = digest_of_weights(root / "run")

    def save(what: str, done: int, total: int) -> None:
        if what == "run clean" and done == total:
            go_on_training(root / "run")

    adopt_images([root / "run"], replace(TUNED, root=root), save)
    kept = json.loads(cell_file(root, training="tuned-on").read_text())
    assert kept["settings"]["host"] == read != digest_of_weights(root / "run")


def test_fewer_items_and_other_corruptions_replace_nothing(root: Path, tmp_path: Path) -> None:
    wanted = replace(FEW, parts=("clean", "corrupted"))
    first = adopt(root, wanted)
    kept = {file: file.read_bytes() for file in (root / "run" / FOLDER).rglob("*.json")}
    for less in ({"limit": 12}, {"severities": (1,)}, {"types": ("snow",)}, {"samples": 3}):
        other = replace(wanted, **less)
        assert values(adopt(root, other)) == values(anew(root, tmp_path / str(less), other))
    assert all(file.read_bytes() == content for file, content in kept.items())
    assert adopt(root, replace(wanted, finished=True)) == first


class TestFinishedOnly:
    wanted = replace(FEW, parts=("clean", "corrupted"))
    finished = replace(wanted, finished=True)

    def test_what_is_of_other_data_is_left_out(self, root: Path) -> None:
        adopt(root, self.wanted)
        change(root / TEST, turn)
        adopt(root)  # the clean part alone
        assert "corrupted/mean" not in values(adopt(root, self.finished))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The best temperature lies on its bound")  # a tiny model guesses
@pytest.mark.parametrize("attention", ["softmax", "kernel"])
def test_every_row_on_a_gpu_is_that_of_the_cpu(tmp_path: Path, attention: str) -> None:
    config = {"width": 32, "heads": 2, "depth": 2, "dropout": 0.0}  # masks are drawn otherwise on a GPU
    recipe = digits_recipe(attention, name="tiny", model={"attention": attention, "config": config})
    train_recipe(recipe, tmp_path / "cpu" / "tiny")
    shutil.copytree(tmp_path / "cpu" / "tiny", tmp_path / "cuda" / "tiny")
    settings = ImageSettings(
        kinds=("direct", "cgp"), parts=("clean", "ood"), samples=4, limit=200,
        further_prior_scale=0.3,
        fit={"steps": 5, "samples": 2, "levels": ("global",)},
    )  # fmt: skip
    found = {
        device: {
            (cell.method, name, metric): value
            for cell in adopt_images([tmp_path / device], replace(settings, device=device)).cells
            for name, values in cell.values.items()
            for metric, value in values.items()
            if metric in ("nll", "aurc", "auroc_entropy")
        }
        for device in ("cpu", "cuda")
    }
    assert found["cuda"] == pytest.approx(found["cpu"], rel=2e-2, abs=5e-3)
