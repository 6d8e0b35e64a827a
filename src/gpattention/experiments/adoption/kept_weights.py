"""Trained weights as files: with what they depend on, whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from gpattention.data.places import check_name
from gpattention.experiments.adoption.earlier import standing
from gpattention.models.storage import make_folder, read_tensors, write_atomically
from gpattention.reading import read_object


class KeptWeights:
    """Those of several trainings, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was told of finished weights, None without any, or with those from other weights or data.

        Those of other settings are an error.
        """
        file = self._record(name)
        if not (self._file(name).is_file() and file.is_file()):
            return None
        told: dict[str, Any] = read_object(file, nonfinite=True)
        state = standing(told["settings"], json.loads(json.dumps(dict(settings))))
        if state == "with other settings":
            raise ValueError(
                f"{self._file(name)} was trained with {told['settings']}, not with {dict(settings)}: choose "
                "another folder for the runs, or --fresh (fresh=True) to replace it"
            )
        return told if state == "same" else None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """For `load_state_dict`."""
        return read_tensors(self._file(name))

    def write(
        self, name: str, settings: Mapping[str, Any], model: nn.Module, told: Mapping[str, Any]
    ) -> None:
        """The weights first: a record says that they are whole."""
        make_folder(self._folder)
        tensors = {key: x.detach().cpu().contiguous().clone() for key, x in model.state_dict().items()}
        write_atomically(self._file(name), save(tensors))
        plain = {"settings": dict(settings), **told}
        write_atomically(self._record(name), (json.dumps(plain, indent=1) + "\n").encode())

    def _file(self, name: str) -> Path:
        return self._folder / check_name("the file of trained weights", f"{name}.safetensors")

    def _record(self, name: str) -> Path:
        return self._folder / f"{name}-training.json"
