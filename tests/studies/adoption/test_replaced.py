"""Finished results are of the weights and data that are there: others are never answered with them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data.places import VARIABLE
from gpattention.experiments import train_recipe
from gpattention.experiments.judging.weights import digest_of_weights
from gpattention.models import VisionTransformer
from gpattention.studies.adoption import images
from gpattention.studies.adoption.images import FOLDER, ImageResult, ImageSettings, adopt_images
from gpattention.studies.adoption.methods import Further
from gpattention.training import recipe_from_dict
from tests.data import official

QUICK = ImageSettings(
    parts=("clean",), kinds=(), samples=2, limit=20, device="cpu", types=("fog",), severities=(5,),
    fit={"steps": 1, "samples": 2, "levels": ("global",)},
)  # fmt: skip
TUNED = replace(QUICK, kinds=("direct",))
TEST = "cifar-10-batches-bin/test_batch.bin"
TRAIN = "cifar-10-batches-bin/data_batch_2.bin"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data with a run on it."""
    root = tmp_path_factory.mktemp("data")
    official.write_cifar10_binary(root, each=60)
    for file in root.glob("*/*.bin"):
        shade(file)
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


def adopt(root: Path, settings: ImageSettings = QUICK) -> ImageResult:
    return adopt_images([root / "run"], replace(settings, root=root))


def values(found: ImageResult, method: str = "temperature") -> dict:
    return next(dict(cell.values) for cell in found.cells if cell.method == method)


def cell_file(root: Path, part: str = "clean", method: str = "plain") -> Path:
    return root / "run" / FOLDER / "seed0" / part / f"{method}.json"


def shade(file: Path) -> None:
    """Classes as brightness: what cannot be learned at all has no temperature."""
    rows = np.fromfile(file, np.uint8).reshape(-1, 3073)
    rows[:, 1:] = rows[:, 1:] // 2 + 12 * rows[:, :1]
    rows.tofile(file)


def turn(file: Path) -> None:
    """Other pixels under the same labels."""
    rows = np.fromfile(file, np.uint8).reshape(-1, 3073)
    rows[:, 1:] = 255 - rows[:, 1:]
    rows.tofile(file)


def relabel(file: Path) -> None:
    """Other labels of the same pixels, whose normalisation a run compares by itself."""
    rows = np.fromfile(file, np.uint8).reshape(-1, 3073)
    rows[:, 0] = (rows[:, 0] + 1) % 10
    rows.tofile(file)


def go_on_training(run: Path) -> None:
    """Other weights in the place of those that are there, as a trainer saves them."""
    model = VisionTransformer.from_pretrained(run / "model")
    with torch.no_grad():
        model.head.weight *= 3.0
    model.save_pretrained(run / "model")


def save_own_set(root: Path, seed: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (9, 32, 32, 3), np.uint8)
    (root / "ood").mkdir(exist_ok=True)
    np.savez(root / "ood" / "mine.npz", images=images)


def anew(root: Path, place: Path, settings: ImageSettings = QUICK) -> ImageResult:
    """What a folder without earlier results comes to."""
    shutil.copytree(root, place)
    shutil.rmtree(place / "run" / FOLDER)
    return adopt(place, settings)


class TestOtherData:
    def test_replaced_test_images(self, root: Path, tmp_path: Path) -> None:
        before = adopt(root)
        turn(root / TEST)
        after = adopt(root)
        assert values(after) != values(before)
        assert values(after) == values(anew(root, tmp_path / "anew"))

    def test_a_replaced_set_of_ones_own_concerns_other_images_alone(self, root: Path) -> None:
        save_own_set(root, 0)
        wanted = replace(QUICK, parts=("clean", "ood"))
        before, clean = adopt(root, wanted), cell_file(root).read_bytes()
        save_own_set(root, 1)
        assert values(adopt(root, wanted))["ood/mine"] != values(before)["ood/mine"]
        assert cell_file(root).read_bytes() == clean

    def test_pictures_of_frost_that_came(self, root: Path) -> None:
        image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
        wanted = replace(QUICK, parts=("corrupted",), types=("frost",))
        before = adopt(root, wanted)
        (root / "frost").mkdir()
        picture = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
        image.fromarray(picture).save(root / "frost" / "frost1.png")
        assert values(adopt(root, wanted)) != values(before)

    def test_training_images_of_other_labels_are_tuned_on_again(self, root: Path, tmp_path: Path) -> None:
        before = adopt(root, TUNED)
        relabel(root / TRAIN)
        after, fresh = adopt(root, TUNED), anew(root, tmp_path / "anew", TUNED)
        for method in ("tuned-on", "converted-direct"):
            assert values(after, method) != values(before, method)
            assert values(after, method) == values(fresh, method)

    def test_a_cell_that_names_no_data_is_computed_again(self, root: Path) -> None:
        before = adopt(root)
        plain = json.loads(cell_file(root).read_text())
        del plain["settings"]["data"]
        plain["cell"]["values"]["test"]["nll"] = 7.0
        cell_file(root).write_text(json.dumps(plain))
        assert values(adopt(root), "plain") == values(before, "plain")


class TestOtherWeights:
    def test_of_the_host(self, root: Path, tmp_path: Path) -> None:
        before = adopt(root, TUNED)
        go_on_training(root / "run")
        after, fresh = adopt(root, TUNED), anew(root, tmp_path / "anew", TUNED)
        for method in ("plain", "tuned-on", "converted-direct"):
            assert values(after, method) != values(before, method)
            assert values(after, method) == values(fresh, method)

    def test_saved_meanwhile_are_not_those_of_the_numbers(self, root: Path) -> None:
        read = digest_of_weights(root / "run")

        def save(what: str, seconds: float) -> None:
            if what == "run clean":
                go_on_training(root / "run")

        adopt_images([root / "run"], replace(TUNED, root=root), on_part=save)
        kept = json.loads((root / "run" / FOLDER / "tuned-on-training.json").read_text())
        assert kept["settings"]["host"] == read != digest_of_weights(root / "run")
        assert json.loads(cell_file(root, method="tuned-on").read_text())["settings"]["model"] == read


class TestFewerItems:
    @pytest.mark.parametrize(
        ("less", "told"),
        [
            (
                {"limit": 12},
                r"more items \(limit: 20\), which limit 12 would replace: adopt as it was, or with",
            ),
            ({"severities": (1,)}, r"\(severities: 5\), which severities 1 would replace"),
            ({"types": ("snow",)}, r"\(types: fog\), which types snow would replace"),
        ],
    )
    def test_are_refused_before_any_work(
        self, root: Path, less: dict, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = replace(QUICK, parts=("corrupted",))
        adopt(root, wanted)
        before = cell_file(root, "corrupted").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr("gpattention.studies.adoption.images.predict_items", None)  # would fail
            with pytest.raises(ValueError, match=told):
                adopt(root, replace(wanted, parts=("clean", "corrupted"), **less))
        assert cell_file(root, "corrupted").read_bytes() == before
        adopt(root, replace(wanted, fresh=True, **less))
        assert cell_file(root, "corrupted").read_bytes() != before

    def test_are_refused_before_the_host_is_judged(self, root: Path) -> None:
        adopt(root, TUNED)
        for file in cell_file(root).parent.glob("*.json"):
            if not file.stem.startswith(("tuned", "converted")):
                file.unlink()
        with pytest.raises(
            ValueError, match=r"tuned-on.json has figures of the same weights with more items"
        ):
            adopt(root, replace(TUNED, limit=12))
        assert not cell_file(root).exists()

    def test_more_replace_them(self, root: Path, tmp_path: Path) -> None:
        adopt(root)
        more = replace(QUICK, limit=30)
        assert values(adopt(root, more)) == values(anew(root, tmp_path / "anew", more))

    def test_corruptions_do_not_concern_clean_images(self, root: Path) -> None:
        adopt(root)
        before = cell_file(root).read_bytes()
        adopt(root, replace(QUICK, types=("snow",), severities=(1,)))
        assert cell_file(root).read_bytes() == before

    def test_tuned_weights_do_not_depend_on_them(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        adopt(root, TUNED)
        monkeypatch.setattr(images, "tune_on", None)  # would fail
        more = adopt(root, replace(TUNED, limit=30))
        scales = more.cells[-1].detail["training"]["nll_before"]
        assert len(scales) == len(images.PRIOR_SCALES)


class TestFresh:
    def test_everything_is_computed_again(self, root: Path) -> None:
        before = adopt(root, TUNED)
        cell_file(root).write_text("{")  # damaged
        trained: list[str] = []
        settings = replace(TUNED, root=root, fresh=True)
        again = adopt_images([root / "run"], settings, on_part=lambda what, _: trained.append(what))
        assert [cell.values for cell in again.cells] == [cell.values for cell in before.cells]
        assert trained == [
            "run fit", "run clean", "run tuned-on", "run tuned-on clean", "run converted-direct",
            "run converted-direct clean",
        ]  # fmt: skip

    def test_other_settings_name_it(self, root: Path) -> None:
        adopt(root)
        with pytest.raises(ValueError, match=r"\(samples 2 instead of 3\): .* or --fresh"):
            adopt(root, replace(QUICK, samples=3))

    def test_it_contradicts_finished(self) -> None:
        with pytest.raises(ValueError, match=r"finished .* or fresh"):
            replace(QUICK, fresh=True, finished=True)


class TestFinishedOnly:
    finished = replace(QUICK, finished=True)

    def test_what_is_of_other_data_is_left_out(self, root: Path) -> None:
        adopt(root, replace(QUICK, parts=("clean", "corrupted")))
        adopt(root)
        turn(root / TEST)
        adopt(root)  # the clean part alone
        found = adopt(root, replace(self.finished, parts=("clean", "corrupted")))
        assert "corrupted/mean" not in values(found)
        assert any(note.startswith("run corrupted: of other weights or data") for note in found.notes)

    def test_without_the_data(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = adopt(root, replace(QUICK, parts=("clean", "corrupted")))
        elsewhere = tmp_path / "empty"
        elsewhere.mkdir()
        wanted = replace(self.finished, parts=("clean", "corrupted"), root=elsewhere)
        found = adopt_images([root / "run"], wanted)
        assert found.cells == made.cells
        assert any("its data are not here" in note for note in found.notes)
        monkeypatch.delenv(VARIABLE, raising=False)
        assert adopt_images([root / "run"], replace(wanted, root=None)).cells == made.cells
        with pytest.raises(FileNotFoundError):
            adopt_images([root / "run"], replace(wanted, finished=False))
        turn(root / TEST)
        adopt(root)  # the clean part alone
        with pytest.raises(ValueError, match=r"is of other data \(test\) than other finished results"):
            adopt_images([root / "run"], wanted)


def test_tuned_weights_name_their_data(root: Path) -> None:
    adopt(root, replace(TUNED, further=Further(prior_scale=0.1)))
    settings = json.loads((root / "run" / FOLDER / "converted-direct-training.json").read_text())["settings"]
    assert set(settings["data"]) == {"train", "chosen_on"}
