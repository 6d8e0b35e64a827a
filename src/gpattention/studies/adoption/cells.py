"""What is finished, as files that say what they depend on: cells, and trained weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from safetensors.torch import save
from torch import Tensor, nn

from gpattention.data.places import NoRootError, check_name
from gpattention.experiments.judging.earlier import REDUCING, check_as_much
from gpattention.models.storage import make_folder, read_tensors, write_atomically
from gpattention.reading import read_object

# What was finished earlier: whether it answers what is asked now, or is of other weights or data.

T = TypeVar("T")
DATA = "data"  # key of settings: what the data hold, by name; None where they are not on this machine
WEIGHTS = ("model", "host", "encoder")  # keys of settings: digests of the weights that all starts from
Standing = Literal["same", "of other weights", "of other items", "with other settings"]


def standing(found: Mapping[str, Any], asked: Mapping[str, Any]) -> Standing:
    """How settings of something finished stand to those asked for.

    Data that are not here cannot be compared; what does not say which data it is of is never the same.
    """
    differing = differing_keys(found, asked)
    if not differing:
        return "same"
    if any(key in WEIGHTS for key in differing):
        return "of other weights"
    return "of other items" if {*differing} <= {DATA, *REDUCING} else "with other settings"


def differing_keys(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Keys of settings that do not agree, sorted."""
    unknown = asked.get(DATA, {}) is None and found.get(DATA) is not None
    return sorted(
        key for key in {*found, *asked} if found.get(key) != asked.get(key) and not (key == DATA and unknown)
    )


def here(bring: Callable[[], T], *, needed: bool) -> T | None:
    """What data say of themselves; None where they cannot be had here and nothing is to be computed."""
    try:
        return bring()
    except (FileNotFoundError, ImportError, NoRootError):
        if needed:
            raise
        return None


# Trained weights as files: with what they depend on, whole or not at all.


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


# Finished cells as files: one JSON for each seed and method, whole or not at all.

FORMAT = "gpattention-adoption-1"


@dataclass(frozen=True)
class Cell:
    """What one method came to with one seed."""

    group: str  # the model: rows of one group are compared with each other
    seed: int
    method: str
    values: Mapping[str, Mapping[str, float]]  # by set, by metric
    detail: Mapping[str, Any] = field(default_factory=dict)  # temperatures, choices, notes
    seconds: float = 0.0  # of fitting and predicting


class Cells:
    """A folder of them, all computed with the same settings.

    Args:
        folder: has a folder for each seed.
        settings: all that figures depend on: digests of weights, what the data hold (see `earlier`), and how
            it was computed.
        fresh: whether none counts as finished.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder, self._settings, self._fresh = folder, json.loads(json.dumps(dict(settings))), fresh

    def read(
        self, seed: int, method: str, part: str = "", unchecked: dict[Any, Any] | None = None
    ) -> Cell | None:
        """None where it is not finished, or of other weights or data, or of fewer items.

        `ValueError` where it has more items, or other settings.  Where the data are not here, cells must be
        of the same as others: `unchecked` gathers what they name.
        """
        path = self._path(seed, method, part)
        if self._fresh or not path.is_file():
            return None
        try:
            plain = read_object(path, nonfinite=True)
            if plain["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {plain['format']!r}")
            cell = Cell(**plain["cell"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a finished cell: {error}; delete it to compute it anew"
            ) from error
        found = plain.get("settings", {})
        if not self._is_answer(path, found):
            return None
        if self._settings.get(DATA, {}) is None and unchecked is not None:
            _check_alike(path, seed, found[DATA], unchecked)
        return cell

    def has(self, seed: int, method: str, part: str = "") -> bool:
        """Whether there is a file, of whatever settings."""
        return self._path(seed, method, part).is_file()

    def write(self, cell: Cell, part: str = "") -> Path:
        """Replace what is there; where a cell is computed in parts, each has its own file."""
        path = self._path(cell.seed, cell.method, part)
        make_folder(path.parent)
        plain = {"format": FORMAT, "settings": self._settings, "cell": asdict(cell)}
        write_atomically(path, (json.dumps(plain, indent=1) + "\n").encode())
        return path

    def _is_answer(self, path: Path, found: Mapping[str, Any]) -> bool:
        asked, state = self._settings, standing(found, self._settings)
        if state in ("same", "of other weights"):
            return state == "same"
        check_as_much(asked, found, path, "adopt")
        if state == "with other settings":
            told = [
                f"{key} {found.get(key)!r} instead of {asked.get(key)!r}"
                for key in differing_keys(found, asked)
                if key != DATA
            ]
            raise ValueError(
                f"{path} was computed with other settings ({', '.join(told)}): choose another folder "
                "for the runs, or --fresh (fresh=True) to replace it"
            )
        return False

    def _path(self, seed: int, method: str, part: str) -> Path:
        return self.folder / f"seed{seed}" / part / check_name("the file of a method", f"{method}.json")


def _check_alike(path: Path, seed: int, named: Mapping[str, Any], others: dict[Any, Any]) -> None:
    for name, content in named.items():
        if others.setdefault((seed, name), content) != content:
            raise ValueError(
                f"{path} is of other data ({name}) than other finished results: name the folder of the "
                "datasets (--data) to tell which are of what is there"
            )
