"""Finished cells as files: one JSON for each seed and method, whole or not at all."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpattention.models.storage import write_atomically

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
    """A folder of them, all computed with the same settings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self._settings = folder, json.loads(json.dumps(dict(settings)))

    def read(self, seed: int, method: str, part: str = "") -> Cell | None:
        """None where it is not finished; cells of other settings are an error."""
        path = self._path(seed, method, part)
        if not path.is_file():
            return None
        try:
            plain = json.loads(path.read_text())
            if plain["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {plain['format']!r}")
            cell = Cell(**plain["cell"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a finished cell: {error}; delete it to compute it anew"
            ) from error
        self._check(path, plain.get("settings", {}))
        return cell

    def write(self, cell: Cell, part: str = "") -> Path:
        """Replace what is there; where a cell is computed in parts, each has its own file."""
        path = self._path(cell.seed, cell.method, part)
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = {"format": FORMAT, "settings": self._settings, "cell": asdict(cell)}
        write_atomically(path, (json.dumps(plain, indent=1) + "\n").encode())
        return path

    def _check(self, path: Path, found: Mapping[str, Any]) -> None:
        differing = [
            f"{key} {found.get(key)!r} instead of {self._settings.get(key)!r}"
            for key in sorted({*found, *self._settings})
            if found.get(key) != self._settings.get(key)
        ]
        if differing:
            raise ValueError(
                f"{path} was computed with other settings ({', '.join(differing)}): choose another folder "
                "for the runs, or delete it"
            )

    def _path(self, seed: int, method: str, part: str) -> Path:
        return self.folder / f"seed{seed}" / part / f"{method}.json"
