"""The folder of a run while it is trained: who may write into it, its checkpoints, and disks that are full.

A checkpoint is the whole state of a run in one safetensors file, never a pickle: model and optimiser tensors,
random-number states, and the counters as JSON in its metadata, with a SHA-256 of everything beside it
(`<name>.sha256`).  It is written atomically and checked on reading.
"""

import errno
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn, optim
from torch import distributed as dist

from gpattention.files import make_folder, parse_json, remove_leftovers, write_atomically
from gpattention.runs import Recipe, read_events, read_recipe
from gpattention.runs.recipe import describe_differences

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

FORMAT = "gpattention-checkpoint-1"
LOCK = ".lock"
# seconds: somebody may be looking whether a folder is in use; a file server may keep a lost machine's lock
PATIENCE: ContextVar[float] = ContextVar("patience", default=0.5)
FIRST_PHASE = "first-phase"
SHARED: Literal["shared"] = "shared"  # the event of a folder whose model was trained elsewhere
TAKEN = "first phase taken"  # the event of a run that goes on from another one's first phase
# of runs and of shared models: where one of these lies, somebody's work does
PARTS = (
    "model", "checkpoints", FIRST_PHASE, "post-mortem", "evaluation", "metrics.csv", "events.jsonl",
    "config.json", "model.safetensors", "recipe.toml",
)  # fmt: skip
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of some network file systems
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME = re.compile(r"step-(\d{8})\.safetensors$")


class TrainingStoppedError(RuntimeError):
    """The run was asked to stop; its state is saved."""


class TrainingFailedError(RuntimeError):
    """The run cannot go on; the message says why and what is saved."""


class RunInUseError(OSError):
    """Another process is training in this folder."""


class CheckpointError(RuntimeError):
    """A checkpoint that is truncated, altered, or not one of this run."""


# Who may write


@contextmanager
def opened_folder(folder: Path, recipe: Recipe, *, resume: bool, writes: bool) -> Iterator[None]:
    """A new folder with the recipe in it, or the one to resume, which must hold the same recipe.

    No other process can train in it until the block ends.  Of the processes of a run, one writes.
    """
    if resume:
        check_resumed(recipe, folder)
    if not writes:
        yield
        return
    if not resume:
        check_new(folder)
    make_folder(folder)
    with exclusive(folder):
        remove_leftovers(folder)
        if not resume:
            write_run_recipe(folder, recipe)
        yield


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; a process that dies frees it."""
    with (folder / LOCK).open("ab") as file:
        if fcntl is not None:
            _take(file, folder)
        yield


def in_use(folder: Path) -> bool | None:
    """Whether a process trains in a folder; None where nobody can say."""
    if fcntl is None:
        return None
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given free when the file is closed
    except BlockingIOError:
        return True
    except FileNotFoundError:  # begun before there were locks, or not begun
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return False


def _take(file: IO[bytes], folder: Path) -> None:
    start = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - start > PATIENCE.get():
                raise RunInUseError(
                    f"{folder} is being trained by another process: wait for it, or stop it first"
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return


def check_new(folder: Path, *, taking: bool = False) -> None:
    """Refuse a folder that a new run may not begin in: one that holds something of a run or of a model.

    Args:
        folder: where the run shall begin.
        taking: whether it takes over another's first phase; it then also begins in what such a one left
            that was killed.

    Raises:
        FileExistsError: the folder holds something.
        NotADirectoryError: it is a file.
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
        begun = read_recipe(folder)
    except ValueError as error:
        raise CheckpointError(f"{written} is not a recipe: {error}") from error
    if begun != recipe:
        raise CheckpointError(
            f"{written} describes another run than the one to resume: {describe_differences(begun, recipe)}. "
            "A changed recipe is a new run: choose another folder for it"
        )


def write_run_recipe(folder: Path, recipe: Recipe) -> Path:
    """Write `recipe.json`, which makes a folder a run."""
    written = folder / "recipe.json"
    write_atomically(written, (json.dumps(recipe.to_dict(), indent=2) + "\n").encode())
    return written


@contextmanager
def disk_errors_explained(folder: Path) -> Iterator[None]:
    """Turn failed writes into an error that says what is left and what helps."""
    try:
        yield
    except OSError as error:
        help = "Make room" if error.errno in _FULL else "Make it writable"
        raise TrainingFailedError(
            f"cannot write {error.filename or folder}: {error.strerror or error}; "
            f"{what_is_left(folder)}. {help} and resume the run."
        ) from error


def what_is_left(folder: Path) -> str:
    """The last good checkpoint of a run, in words."""
    found = list_checkpoints(folder / "checkpoints")
    return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"


# Checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and everything else a run needs to go on, as JSON values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `step-` and eight digits; only then drop the oldest beyond `keep`."""
    make_folder(folder)
    path = folder / f"step-{step:08d}.safetensors"
    tensors = {name: x.detach().cpu().contiguous() for name, x in checkpoint.tensors.items()}
    content = save(tensors, {"format": FORMAT, "state": json.dumps(checkpoint.state)})
    digest = hashlib.sha256(content).hexdigest()
    # the checksum first: a checkpoint that is listed has one, whenever the process is killed
    write_atomically(path.with_suffix(".sha256"), f"{digest}\n".encode())
    write_atomically(path, content)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
        old.with_suffix(".sha256").unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; `CheckpointError` if it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint {path}")
    digest_file = path.with_suffix(".sha256")
    if not digest_file.is_file():
        raise CheckpointError(f"{path} has no checksum {digest_file.name}: not written by this library")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    # whatever bytes a damaged one holds, it is not equal then
    wanted = digest_file.read_bytes().decode(errors="replace").strip()
    if found != wanted:
        raise CheckpointError(
            f"{path} is truncated or altered: its checksum is {found[:12]}..., "
            f"{digest_file.name} says {wanted[:12]!r}..."
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{path}: expected format {FORMAT}, got {metadata.get('format')!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return Checkpoint(tensors, parse_json(metadata["state"], path, nonfinite=True))
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this library: {error}") from error


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*.safetensors") if _NAME.search(path.name))


def pack(
    model: nn.Module,
    optimizer: optim.Optimizer,
    counters: Mapping[str, Any],
    random: Sequence[Mapping[str, Tensor]],
) -> Checkpoint:
    """Model, optimiser and every process's random-number states as tensors, counters as JSON."""
    tensors = {f"model.{name}": x for name, x in model.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(x) for name, x in entries.items()}
    for rank, states in enumerate(random):
        tensors |= {f"random.{rank}.{name}": x for name, x in states.items()}
    # safetensors refuses tensors that share memory, as tied weights do
    return Checkpoint({name: x.clone() for name, x in tensors.items()}, dict(counters))


def unpack(checkpoint: Checkpoint, model: nn.Module, optimizer: optim.Optimizer, rank: int = 0) -> None:
    """Put everything back; a checkpoint of another model is refused before anything changes."""
    weights = _below("model.", checkpoint.tensors)
    wanted = model.state_dict()
    if set(weights) != set(wanted) or any(weights[n].shape != wanted[n].shape for n in wanted):
        raise CheckpointError("the checkpoint holds another model than the recipe describes")
    model.load_state_dict(weights)
    state: dict[int, dict[str, Tensor]] = {}
    for name, x in _below("optimizer.", checkpoint.tensors).items():
        index, _, entry = name.partition(".")
        state.setdefault(int(index), {})[entry] = x
    put_state(optimizer, state)
    random = _below(f"random.{rank}.", checkpoint.tensors)  # none for a process that was not there
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    device = next(model.parameters()).device
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], device)


def put_state(optimizer: optim.Optimizer, state: Mapping[Any, Any]) -> None:
    """Another optimiser's state of the same parameters, with this one's own options."""
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_states(device: torch.device, world_size: int) -> list[dict[str, Tensor]]:
    """The states of every process, of its own device; all of them must call it together."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    if world_size == 1:
        return [own]
    states: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
    dist.all_gather_object(states, own)
    return states


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
