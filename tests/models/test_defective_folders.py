"""Model folders that are not whole: the error names the file and the tensor, and no model comes back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpattention.models import TextTransformer, Transformer, VisionTransformer
from tests.models.small_models import vision


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vision("cgp", dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def refused(
    folder: Path, error: type[Exception], *parts: str, model: type[Transformer] = VisionTransformer
) -> None:
    """Loading raises, and the message holds all the parts."""
    with pytest.raises(error) as raised:
        model.from_pretrained(folder)
    assert [part for part in parts if part not in str(raised.value)] == []


class TestDefects:
    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_missing_files(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        refused(folder, FileNotFoundError, f"no file {folder / name}")

    def test_missing_folder(self, folder: Path) -> None:
        refused(folder / "none", FileNotFoundError, f"no file {folder / 'none' / 'config.json'}")

    def test_another_class(self, folder: Path) -> None:
        message = "config.json: expected model 'TextTransformer', got 'VisionTransformer'"
        refused(folder, ValueError, str(folder), message, model=TextTransformer)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format_version": 2}, "expected format_version 1, got 2"),
            ({"format_version": None}, "expected format_version 1, got None"),
            ({"author": "me"}, "expected a 'config' and no ['author']"),
            ({"config": [1]}, "expected a 'config'"),
            ({"config": {"depht": 2}}, "unknown keys in VisionConfig: depht"),
            ({"config": {"depth": "2"}}, "expected depth to be a whole number >= 1, got '2'"),
            (
                {"config": {"attention": 3}},
                "expected attention to be a list of one entry per layer, got 3",
            ),
            ({"config": {"attention": [{"kind": "cgp", "options": {"noise": -1}}], "depth": 1}}, "got -1"),
        ],
    )
    def test_config(self, folder: Path, change: dict[str, Any], message: str) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        refused(folder, ValueError, str(path), message)

    @pytest.mark.parametrize("content", ["", "{", "\udcff", "[1]", "3"])
    def test_config_is_no_object(self, folder: Path, content: str) -> None:
        (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
        refused(folder, ValueError, str(folder / "config.json"))

    @pytest.mark.parametrize("keep", [0, 5, 100, -1])
    def test_truncated_weights(self, folder: Path, keep: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        refused(folder, ValueError, f"{path} is not a whole safetensors file")

    def test_foreign_weights(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file({"w": torch.zeros(2)}, path)
        refused(folder, ValueError, str(path), "does not fit its config", "missing ['attend.weight'", "['w']")

    def test_missing_and_extra_tensors(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        missing = {name: x for name, x in tensors.items() if name != "blocks.1.attention.noise.raw"}
        save_file(missing, path)
        refused(folder, ValueError, str(path), "missing ['blocks.1.attention.noise.raw'], unexpected []")
        save_file(tensors | {"extra": torch.zeros(1)}, path)
        refused(folder, ValueError, str(path), "missing [], unexpected ['extra']")

    def test_wrong_shape_and_type(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"head.weight": torch.zeros(4, 16)}, path)
        refused(folder, ValueError, str(path), "expected head.weight of shape (3, 16), got (4, 16)")
        save_file(tensors | {"head.weight": torch.zeros(3, 16, dtype=torch.int64)}, path)
        refused(
            folder, ValueError, str(path), "expected head.weight of floating-point numbers, got torch.int64"
        )
