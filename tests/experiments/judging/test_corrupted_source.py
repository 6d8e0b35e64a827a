"""Where corrupted images come from: published, regenerated, made as needed; and no more than is wanted."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from gpattention.data import CIFAR10, load_cifar
from gpattention.data.corruptions import CORRUPTIONS, corrupt, regenerate
from gpattention.experiments.judging import corrupted_source
from gpattention.experiments.judging.corrupted_source import corrupted_origin, made_as_needed, open_corrupted
from gpattention.experiments.judging.corrupting import corrupt_test_set
from tests.data import official
from tests.experiments.judging.conftest import TYPES

REGENERATED = "CIFAR-10-C-regenerated"


def opened(root: Path, **more: object) -> corrupted_source.CorruptedSource:
    return open_corrupted("cifar10", load_cifar(CIFAR10, root, subset=True), root, **more)


def origin(root: Path, **more: object) -> dict:
    return corrupted_origin("cifar10", load_cifar(CIFAR10, root, subset=True), root, **more)


def arrays(root: Path) -> set[str]:
    """Of regenerated images, below the root."""
    return {str(file.relative_to(root)) for file in root.glob(f"{REGENERATED}*/*.npy")
            if file.name != "labels.npy"}  # fmt: skip


def write_published(root: Path, types: tuple[str, ...] = TYPES) -> dict[str, np.ndarray]:
    written = official.write_corrupted(root, 12, types)
    labels = load_cifar(CIFAR10, root, subset=True).test.labels.numpy()
    np.save(root / "CIFAR-10-C" / "labels.npy", np.tile(labels, 5))
    return written


class TestCorrupted:
    def test_published_arrays_come_first(self, root: Path, few: None) -> None:
        written = write_published(root)
        source = opened(root)
        assert (source.name, source.types, source.notes) == ("cifar10-c", TYPES, ())
        expected = torch.from_numpy(written["snow"][24:36]).permute(0, 3, 1, 2)
        assert source.images("snow", 3).equal(expected)

    def test_missing_types_are_named(self, root: Path, few: None) -> None:
        write_published(root, ("snow",))
        assert opened(root).types == ("snow",)
        assert opened(root).notes == ("corruptions missing: fog, contrast; means are over the others",)

    def test_else_they_are_regenerated_and_kept(self, root: Path, few: None) -> None:
        told = []
        source = opened(root, progress=lambda done, total: told.append((done, total)))
        assert source.name == "cifar10-c-regenerated"
        assert told[-1] == (3 * 5 * 12, 3 * 5 * 12)
        clean = load_cifar(CIFAR10, root, subset=True).test.images
        assert source.images("contrast", 4).equal(corrupt(clean, "contrast", 4))
        assert "CIFAR-10-C (regenerated), not the published files" in source.notes[0]
        assert "generated pictures" in source.notes[0]
        before = (root / "CIFAR-10-C-regenerated" / "fog.npy").stat().st_mtime_ns
        again = opened(root, progress=lambda *_: pytest.fail("made again"))
        assert again.name == source.name
        assert (root / "CIFAR-10-C-regenerated" / "fog.npy").stat().st_mtime_ns == before

    def test_a_stopped_regeneration_goes_on(self, root: Path, few: None) -> None:
        data = load_cifar(CIFAR10, root, subset=True).test
        regenerate(data.images, data.labels, root / "CIFAR-10-C-regenerated", names=["fog"])
        assert opened(root).types == TYPES

    def test_arrays_of_another_test_set_are_not_used(self, root: Path, few: None) -> None:
        official.write_corrupted(root, 3, TYPES)
        source = opened(root)
        assert source.name == "cifar10-c-regenerated"
        assert (
            source.notes[0] == "the corrupted images in CIFAR-10-C are not of this test set and were not used"
        )

    def test_fewer_severities_are_told(self, root: Path, few: None) -> None:
        data = load_cifar(CIFAR10, root, subset=True).test
        folder = root / "CIFAR-10-C-regenerated"
        regenerate(data.images, data.labels, folder, names=TYPES, severities=(2, 4))
        source = opened(root)
        assert source.severities == (2, 4)
        assert source.notes[-1] == "severities 2, 4 only"

    def test_with_a_limit_nothing_is_written(self, root: Path, few: None) -> None:
        source = opened(root, limit=5)
        assert source.name == "made as needed"
        assert len(source.images("fog", 1)) == 5
        assert not (root / "CIFAR-10-C-regenerated").exists()

    def test_pictures_of_frost_are_taken(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
        (root / "frost").mkdir()
        picture = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
        image.fromarray(picture).save(root / "frost" / "frost1.png")
        monkeypatch.setattr(corrupted_source, "CORRUPTIONS", {"frost": CORRUPTIONS["frost"]})
        source = opened(root, limit=4)
        assert "frost: given pictures" in source.notes[0]
        clean = load_cifar(CIFAR10, root, subset=True).test.images[:4]
        frost = [torch.from_numpy(picture).permute(2, 0, 1)]
        assert source.images("frost", 3).equal(corrupt(clean, "frost", 3, frost=frost))

    def test_all_nineteen_of_five_severities(self) -> None:
        source = made_as_needed(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        assert (len(source.types), source.severities) == (19, (1, 2, 3, 4, 5))
        assert len(source.notes) == 1  # the published size


class TestWhatIsWanted:
    def test_only_that_is_made(self, root: Path, few: None) -> None:
        source = opened(root, types=["fog"])
        assert arrays(root) == {f"{REGENERATED}/fog.npy"}
        assert (source.types, source.severities) == (("fog",), (1, 2, 3, 4, 5))
        assert source.notes[0] == "reduced: fog at severities 1, 2, 3, 4, 5 only"
        assert not any("missing" in note for note in source.notes)
        opened(root)  # the rest joins it
        assert arrays(root) == {f"{REGENERATED}/{each}.npy" for each in TYPES}

    def test_some_severities_do_not_stand_in_the_way_of_all(self, root: Path, few: None) -> None:
        source = opened(root, types=["snow"], severities=[5, 2])
        assert (source.types, source.severities) == (("snow",), (2, 5))
        assert arrays(root) == {f"{REGENERATED}-severities-2-5/snow.npy"}
        clean = load_cifar(CIFAR10, root, subset=True).test.images
        assert source.images("snow", 5).equal(corrupt(clean, "snow", 5))
        again = opened(root, types=["snow"], severities=[2, 5], progress=lambda *_: pytest.fail("made again"))
        assert again.images("snow", 2).equal(corrupt(clean, "snow", 2))
        assert opened(root).types == TYPES
        assert opened(root, severities=[3], progress=lambda *_: pytest.fail("made again")).severities == (3,)

    def test_a_folder_with_just_that_is_taken(self, root: Path, few: None) -> None:
        """As `gpattention data corrupt cifar10 --types fog --severities 3` writes it."""
        corrupt_test_set("cifar10", root, types=["fog"], severities=[3], subset=True)
        wanted = {"types": ["fog"], "severities": [3]}
        source = opened(root, **wanted, progress=lambda *_: pytest.fail("made again"))
        assert (source.types, source.severities) == (("fog",), (3,))
        assert source.notes[0] == "reduced: fog at severities 3 only"
        # more of the same severities goes on there, all severities go elsewhere
        assert opened(root, severities=[3]).types == TYPES
        assert arrays(root) == {f"{REGENERATED}/{each}.npy" for each in TYPES}
        assert opened(root, severities=[1, 2, 3, 4, 5]).severities == (1, 2, 3, 4, 5)
        assert f"{REGENERATED}-severities-1-2-3-4-5/fog.npy" in arrays(root)

    def test_of_published_arrays(self, root: Path, few: None) -> None:
        written = write_published(root, ("snow", "fog"))
        source = opened(root, types=["snow"], severities=[4])
        assert source.images("snow", 4).equal(torch.from_numpy(written["snow"][36:48]).permute(0, 3, 1, 2))
        assert source.notes == ("reduced: snow at severities 4 only",)
        with pytest.raises(ValueError, match="expected corruptions among fog, snow at severities among 1, 2"):
            opened(root, types=["contrast"])

    def test_a_regeneration_stopped_before_its_first_array(self, root: Path, few: None) -> None:
        opened(root, types=["fog"])
        (root / REGENERATED / "fog.npy").unlink()
        assert opened(root).types == TYPES

    def test_a_limit_passes_over_what_is_not_whole(self, root: Path, few: None) -> None:
        opened(root, types=["fog"])
        assert opened(root, types=["fog"], limit=5).name == "cifar10-c-regenerated"
        assert opened(root, limit=5).types == TYPES


class TestOrigin:
    def test_pictures_of_frost(self, root: Path) -> None:
        image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
        plain = origin(root, limit=5)
        assert (plain["source"], plain["frost"]) == ("made as needed", "generated pictures")
        (root / "frost").mkdir()
        found = []
        for colour in (0, 9):
            image.fromarray(np.full((200, 300, 3), colour, np.uint8)).save(root / "frost" / "frost1.png")
            found.append(origin(root, limit=5)["frost"])
        assert len({plain["frost"], *found}) == 3
        assert origin(root)["frost"] == found[1]

    def test_it_is_the_same_before_and_after_they_are_made(self, root: Path, few: None) -> None:
        before = origin(root)
        assert before["source"] == "cifar10-c-regenerated"
        assert not (root / REGENERATED).exists()
        opened(root)
        assert origin(root) == before == origin(root, limit=5)

    def test_published_ones_are_told_by_a_sample(self, root: Path, few: None) -> None:
        made = origin(root)
        write_published(root)
        before = origin(root)
        assert before["source"] == "cifar10-c" != made["source"]
        part = origin(root, types=["fog"])
        array = np.load(root / "CIFAR-10-C" / "snow.npy")
        np.save(root / "CIFAR-10-C" / "snow.npy", 255 - array)
        assert origin(root) != before
        assert origin(root, types=["fog"]) == part
        shutil.rmtree(root / "CIFAR-10-C")
        assert origin(root) == made
