"""The folder of a run: what may be written into it, and what happens when the disk is full."""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpattention.models import Transformer
from gpattention.models.storage import make_folder, remove_leftovers, write_atomically
from gpattention.reading import read_json
from gpattention.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from gpattention.training.differences import told_differences
from gpattention.training.lock import exclusive
from gpattention.training.recipe import Recipe, recipe_from_dict
from gpattention.training.records import append_event, read_events, write_metrics
from gpattention.training.results import TrainingFailedError

FIRST_PHASE = "first-phase"
SHARED = "shared"  # the event of a folder whose model was trained elsewhere
TAKEN = "first phase taken"  # the event of a run that goes on from another one's first phase
# of runs and of shared models: where one of these lies, somebody's work does
PARTS = (
    "model", "checkpoints", FIRST_PHASE, "post-mortem", "evaluation", "metrics.csv", "events.jsonl",
    "config.json", "model.safetensors", "recipe.toml",
)  # fmt: skip
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_new(folder: Path, *, taking: bool = False) -> None:
    """A folder that a new run may begin in: one that holds nothing of a run or of a model.

    One that is `taking` over another's first phase also begins in what such a one left that was killed.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"expected {folder} to be a folder, got a file")
    if (folder / "recipe.json").exists():
        raise FileExistsError(f"{folder} holds a run already: resume it, or choose another folder")
    if taking and [event.get("event") for event in read_events(folder)] == [TAKEN]:
        return
    found = next((name for name in PARTS if (folder / name).exists()), None)
    if found is not None:
        raise FileExistsError(
            f"{folder} holds no run (no recipe.json), but {found}, which training would overwrite: choose "
            "another folder, or move it away"
        )


def check_resumed(recipe: Recipe, folder: Path) -> None:
    """A run goes on with the recipe that it was begun with, and with no other."""
    written = folder / "recipe.json"
    if not written.is_file():
        raise CheckpointError(f"nothing to resume in {folder}: no recipe.json")
    if any(event.get("event") == SHARED for event in read_events(folder)):
        raise CheckpointError(
            f"nothing to resume in {folder}: it holds a shared model, whose training is not there; "
            "train its recipe into another folder"
        )
    try:
        begun = recipe_from_dict(read_json(written, nonfinite=True))
    except ValueError as error:
        raise CheckpointError(f"{written} is not a recipe: {error}") from error
    if begun != recipe:
        raise CheckpointError(
            f"{written} describes another run than the one to resume: {told_differences(begun, recipe)}. "
            "A changed recipe is a new run: choose another folder for it"
        )


def write_run_recipe(folder: Path, recipe: Recipe) -> Path:
    """What makes a folder a run."""
    written = folder / "recipe.json"
    write_atomically(written, (json.dumps(recipe.to_dict(), indent=2) + "\n").encode())
    return written


class RunFolder:
    """One process of a run writes; the others read only."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path, self._writes = path, writes

    @contextmanager
    def opened(self, recipe: Recipe, *, resume: bool) -> Iterator[None]:
        """A new folder with the recipe in it, or the one to resume, which must hold the same recipe.

        No other process can train in it until the block ends.
        """
        if resume:
            check_resumed(recipe, self.path)
        if not self._writes:
            yield
            return
        if not resume:
            check_new(self.path)
        make_folder(self.path)
        with exclusive(self.path):
            remove_leftovers(self.path)
            if not resume:
                write_run_recipe(self.path, recipe)
            yield

    def event(self, kind: str, **details: Any) -> None:
        """A line in `events.jsonl`."""
        if self._writes:
            with self._full_disk():
                append_event(self.path, kind, **details)

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """`metrics.csv`, whole."""
        if self._writes:
            with self._full_disk():
                write_metrics(self.path, rows)

    def save_model(self, model: Transformer) -> None:
        """`model/`: the weights that the run chose."""
        if self._writes:
            with self._full_disk():
                model.save_pretrained(self.path / "model")

    def checkpoint(self, step: int, checkpoint: Checkpoint, *, keep: int | None) -> None:
        """A state to resume from; the older ones stay until it is whole on the disk.

        With `keep=None` it is the end of the first phase, which is kept for other runs.
        """
        if self._writes:
            with self._full_disk():
                place = FIRST_PHASE if keep is None else "checkpoints"
                write_checkpoint(self.path / place, step, checkpoint, keep=keep or 1)

    def last_checkpoint(self) -> Checkpoint | None:
        """The newest, or None where there is none yet."""
        found = list_checkpoints(self.path / "checkpoints")
        return read_checkpoint(found[-1]) if found else None

    def post_mortem(self, step: int, checkpoint: Checkpoint) -> Path:
        """The state before a step that failed."""
        return write_checkpoint(self.path / "post-mortem", step, checkpoint, keep=1)

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            found = list_checkpoints(self.path / "checkpoints")
            kept = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
            help = "Make room" if error.errno in _FULL else "Make it writable"
            raise TrainingFailedError(
                f"cannot write {error.filename or self.path}: {error.strerror or error}; {kept}. "
                f"{help} and resume the run."
            ) from error
