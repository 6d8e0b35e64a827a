"""Where corrupted images come from: published, regenerated, made as needed; and no more than is wanted."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpattention.data import CIFAR10, load_cifar, regenerate
from gpattention.data.corruptions import CORRUPTIONS, corrupt
from gpattention.evaluation import corrupted
from gpattention.evaluation.corrupted import CorruptedSource, Corruptions, corrupt_test_set
from tests.data import official
from tests.evaluation.conftest import TYPES

REGENERATED = "CIFAR-10-C-regenerated"


def wanted(root: Path, **more: Any) -> Corruptions:
    return Corruptions("cifar10", load_cifar(CIFAR10, root, subset=True), root, **more)


def opened(root: Path, **more: Any) -> CorruptedSource:
    return wanted(root, **more).open()


def found(root: Path, **more: Any) -> CorruptedSource:
    """Without making any."""
    return wanted(root, **more).open(progress=lambda *_: pytest.fail("made again"))


def origin(root: Path, **more: Any) -> dict:
    return wanted(root, **more).origin()


def arrays(root: Path) -> set[str]:
    """Of regenerated images, below the root."""
    files = root.glob(f"{REGENERATED}*/*.npy")
    return {str(file.relative_to(root)) for file in files if file.name != "labels.npy"}


def write_published(root: Path, types: tuple[str, ...] = TYPES) -> dict[str, np.ndarray]:
    written = official.write_corrupted(root, 12, types)
    labels = load_cifar(CIFAR10, root, subset=True).test.labels.numpy()
    np.save(root / "CIFAR-10-C" / "labels.npy", np.tile(labels, 5))
    return written


def test_published_arrays_come_first(root: Path, few: None) -> None:
    written = write_published(root, ("snow", "fog"))
    source, some = opened(root), opened(root, types=["snow"], severities=[4])
    assert (source.name, source.types) == ("cifar10-c", ("fog", "snow"))
    assert source.notes == ("corruptions missing: contrast; means are over the others",)
    assert some.notes == ("reduced: snow at severities 4 only",)
    for images, start in ((source.images("snow", 3), 24), (some.images("snow", 4), 36)):
        assert images.equal(torch.from_numpy(written["snow"][start : start + 12]).permute(0, 3, 1, 2))
    with pytest.raises(ValueError, match="expected corruptions among fog, snow at severities among 1, 2"):
        opened(root, types=["contrast"])


def test_else_they_are_regenerated_and_kept(root: Path, few: None) -> None:
    official.write_corrupted(root, 3, TYPES)
    steps: list[tuple[int, int]] = []
    source = wanted(root).open(progress=lambda *x: steps.append(x))
    assert source.name == "cifar10-c-regenerated"
    assert steps[-1] == (3 * 5 * 12, 3 * 5 * 12)
    clean = load_cifar(CIFAR10, root, subset=True).test.images
    assert source.images("contrast", 4).equal(corrupt(clean, "contrast", 4))
    other, origin = source.notes
    assert other == "the corrupted images in CIFAR-10-C are not of this test set and were not used"
    assert "CIFAR-10-C (regenerated), not the published files" in origin
    assert "generated pictures" in origin
    before = (root / REGENERATED / "fog.npy").stat().st_mtime_ns
    assert found(root).name == source.name
    assert (root / REGENERATED / "fog.npy").stat().st_mtime_ns == before


def test_a_stopped_regeneration_goes_on(root: Path, few: None) -> None:
    """After, or before its first array; with a limit what is not whole is passed over."""
    source = opened(root, types=["fog"])
    assert arrays(root) == {f"{REGENERATED}/fog.npy"}
    assert (source.types, source.severities) == (("fog",), (1, 2, 3, 4, 5))
    assert source.notes[0] == "reduced: fog at severities 1, 2, 3, 4, 5 only"
    assert not any("missing" in note for note in source.notes)
    assert opened(root, types=["fog"], limit=5).name == "cifar10-c-regenerated"
    made = opened(root, limit=5)
    assert (made.name, made.types, len(made.images("fog", 1))) == ("made as needed", TYPES, 5)
    (root / REGENERATED / "fog.npy").unlink()
    assert opened(root).types == TYPES
    assert arrays(root) == {f"{REGENERATED}/{each}.npy" for each in TYPES}


def test_a_regenerated_folder_of_fewer_severities(root: Path, few: None) -> None:
    data = load_cifar(CIFAR10, root, subset=True).test
    regenerate(data.images, data.labels, root / REGENERATED, names=TYPES, severities=(2, 4))
    source = opened(root)
    assert source.severities == (2, 4)
    assert source.notes[-1] == "severities 2, 4 only"


def test_pictures_of_frost_are_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrupted, "CORRUPTIONS", {"frost": CORRUPTIONS["frost"]})
    plain = origin(root, limit=4)
    assert (plain["source"], plain["frost"]) == ("made as needed", "generated pictures")
    (root / "frost").mkdir()
    described = []
    for seed in (0, 1):
        picture = np.random.default_rng(seed).integers(0, 256, (200, 300, 3), np.uint8)
        Image.fromarray(picture).save(root / "frost" / "frost1.png")
        described.append(origin(root, limit=4)["frost"])
    assert len({plain["frost"], *described}) == 3
    assert origin(root)["frost"] == described[1]
    source = opened(root, limit=4)
    assert not (root / REGENERATED).exists()  # with a limit nothing is written
    assert "frost: given pictures" in source.notes[0]
    clean = load_cifar(CIFAR10, root, subset=True).test.images[:4]
    frost = [torch.from_numpy(picture).permute(2, 0, 1)]
    assert source.images("frost", 3).equal(corrupt(clean, "frost", 3, frost=frost))


def test_some_severities_do_not_stand_in_the_way_of_all(root: Path, few: None) -> None:
    source = opened(root, types=["snow"], severities=[5, 2])
    assert (source.types, source.severities) == (("snow",), (2, 5))
    assert arrays(root) == {f"{REGENERATED}-severities-2-5/snow.npy"}
    clean = load_cifar(CIFAR10, root, subset=True).test.images
    again = found(root, types=["snow"], severities=[2, 5])
    assert again.images("snow", 2).equal(corrupt(clean, "snow", 2))
    assert opened(root).types == TYPES
    assert found(root, severities=[3]).severities == (3,)


def test_a_folder_with_just_that_is_taken(root: Path, few: None) -> None:
    """As `gpattention data corrupt cifar10 --types fog --severities 3` writes it."""
    corrupt_test_set("cifar10", root, types=["fog"], severities=[3], subset=True)
    source = found(root, types=["fog"], severities=[3])
    assert (source.types, source.severities) == (("fog",), (3,))
    # more of the same severities goes on there, all severities go elsewhere
    assert opened(root, severities=[3]).types == TYPES
    assert arrays(root) == {f"{REGENERATED}/{each}.npy" for each in TYPES}
    assert opened(root, severities=[1, 2, 3, 4, 5]).severities == (1, 2, 3, 4, 5)
    assert f"{REGENERATED}-severities-1-2-3-4-5/fog.npy" in arrays(root)


def test_an_origin_is_that_of_what_will_be_read(root: Path, few: None) -> None:
    """The same before and after images are made; published ones by a sample."""
    made = origin(root)
    assert made["source"] == "cifar10-c-regenerated"
    assert not (root / REGENERATED).exists()
    opened(root)
    assert origin(root) == made == origin(root, limit=5)
    write_published(root)
    before, part = origin(root), origin(root, types=["fog"])
    assert before["source"] == "cifar10-c"
    array = np.load(root / "CIFAR-10-C" / "snow.npy")
    np.save(root / "CIFAR-10-C" / "snow.npy", 255 - array)
    assert origin(root) != before
    assert origin(root, types=["fog"]) == part
    shutil.rmtree(root / "CIFAR-10-C")
    assert origin(root) == made
