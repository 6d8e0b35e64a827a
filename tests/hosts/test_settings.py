"""Settings of an attached model in a folder: they come back to the bit, or not at all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpattention
from gpattention.hosts import Handle
from gpattention.hosts.settings import Settings, load_settings, save_settings
from tests.hosts.hosts import CLASSES, ITEMS, make

RECORD_FILE, NUMBERS_FILE = "attached.json", "attached.safetensors"


@pytest.fixture(scope="module")
def host() -> Any:
    return make("bert")


@pytest.fixture(scope="module")
def fitted(host: Any) -> Handle:
    handle = gpattention.attach(host.model)
    labels = torch.arange(ITEMS) % CLASSES
    handle.fit(host.inputs, labels, steps=2, samples=2, select=False, levels=("global",))
    return handle


def check_equal(found: Settings, saved: Settings) -> None:
    for name in ("scale", "noise", "power"):
        torch.testing.assert_close(getattr(found, name), getattr(saved, name), rtol=0, atol=0)
    for name in ("draws", "temperature", "residual"):
        assert getattr(found, name) == getattr(saved, name)
    for mine, theirs in zip(found.frames, saved.frames, strict=True):
        assert [torch.equal(x, getattr(theirs, name)) for name, x in vars(mine).items()] == [True] * 6


def test_everything_comes_back(host: Any, fitted: Handle, tmp_path: Path) -> None:
    assert any(frame is not None for frame in fitted.settings.frames)
    for saved in (fitted, gpattention.attach(host.model)):
        saved.save(tmp_path / "new" / "folder")
        again, handed = gpattention.attach(host.model), gpattention.attach(host.model)
        again.load(str(tmp_path / "new" / "folder"))
        handed.load_state_dict(saved.state_dict())
        check_equal(again.settings, saved.settings)
        check_equal(handed.settings, saved.settings)
    tmp_path = tmp_path / "new" / "folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD_FILE, NUMBERS_FILE]
    with pytest.raises(ValueError, match=f"{tmp_path}: expected the settings of sites"):
        gpattention.attach(make("encoder").model).load(tmp_path)
    with pytest.raises(ValueError, match="state: expected the settings of sites"):
        gpattention.attach(make("encoder").model).load_state_dict(fitted.state_dict())
    with pytest.raises(ValueError, match="differs in power"):
        again.load_state_dict({name: x for name, x in fitted.state_dict().items() if name != "power"})


def test_numbers_of_another_save_are_refused(host: Any, fitted: Handle, tmp_path: Path) -> None:
    """As a process leaves them that was killed between the two files."""
    fitted.save(tmp_path)
    record = (tmp_path / RECORD_FILE).read_bytes()
    gpattention.attach(host.model).save(tmp_path)
    (tmp_path / RECORD_FILE).write_bytes(record)
    other = gpattention.attach(host.model)
    before = other.settings
    with pytest.raises(ValueError, match=f"{NUMBERS_FILE}: expected the numbers that {RECORD_FILE} was writ"):
        other.load(tmp_path)
    assert other.settings is before


def test_numbers_that_are_not_finite_are_refused_by_name(fitted: Handle, tmp_path: Path) -> None:
    settings = replace(fitted.settings, noise=torch.full_like(fitted.settings.scale, torch.nan))
    save_settings(tmp_path, ["site"], settings)
    with pytest.raises(ValueError, match=rf"{NUMBERS_FILE}: expected finite numbers, got nan in noise"):
        load_settings(tmp_path)
    save_settings(tmp_path, ["site"], replace(fitted.settings, temperature=float("nan")))
    with pytest.raises(ValueError, match=rf"{RECORD_FILE} is not JSON: expected finite numbers, got NaN"):
        load_settings(tmp_path)


FORMAT = "expected format 'gpattention-attached-1', got"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (RECORD_FILE, {"format": "other"}, f"{RECORD_FILE}: {FORMAT} 'other'"),
        (RECORD_FILE, {"more": 1}, rf"{RECORD_FILE}: .*a difference in \['more'\]"),
        (RECORD_FILE, {"framed": 0.5}, f"{RECORD_FILE}: expected framed to be a list of bool, got 0.5"),
        (RECORD_FILE, {"draws": 1}, f"{RECORD_FILE}: expected draws to be a list of bool, got 1"),
        (RECORD_FILE, {"sites": [1]}, rf"{RECORD_FILE}: expected sites to be a list of str, got \[1\]"),
        (RECORD_FILE, "[]", f"{RECORD_FILE}: expected an object"),
        (RECORD_FILE, "{", f"{RECORD_FILE} is not JSON"),
        (RECORD_FILE, None, f"no file .*{RECORD_FILE}"),
        (NUMBERS_FILE, None, f"no file .*{NUMBERS_FILE}"),
    ],
)
def test_foreign_missing_and_broken_files_are_refused(
    fitted: Handle, tmp_path: Path, file: str, change: Any, message: str
) -> None:
    fitted.save(tmp_path)
    path = tmp_path / file
    if change is None:
        path.unlink()
    else:
        whole = isinstance(change, str)
        path.write_text(change if whole else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        fitted.load(tmp_path)
