"""Training that dies at its k-th file operation, or finds the disk full, and is resumed: the same bits."""

import atexit
import errno
import functools
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning_fabric  # noqa: F401 - once here, not in every child
import torch

from gpattention.training import fit
from gpattention.training.folder import read_checkpoint
from tests.fuzz.tally import BITS, OUTSIDE, TRACEBACK, WRONG, Outcome, Tally, in_child, listing, scratch
from tests.training.toy import toy_data, toy_recipe

KILLED, SECONDS = 9, 60.0
ATTENTIONS = ("cgp", "scgp", "kernel", "softmax")
EXPECTED = {"checkpoints", "events.jsonl", "first-phase", "metrics.csv", "model", "recipe.json", ".lock"}


def recipe(attention: str, select: str) -> Any:
    options = {"num_inducing": 3} if attention == "scgp" else {}
    return toy_recipe(
        attention, phases__kernel_epochs=1, phases__epochs=2, model__options=options,
        optimizer__batch_size=16, checkpoint__select=select, checkpoint__keep=1,
    )  # fmt: skip


@functools.cache
def whole(attention: str, select: str) -> tuple[Path, int]:
    """A run that nothing disturbed, and how many file operations it took."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-whole-")) / "run"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    outcome = in_child(functools.partial(train, folder, attention, select), seconds=SECONDS, memory=None)
    if outcome.kind != "returned":
        raise RuntimeError(f"the undisturbed run failed: {outcome}")
    return folder, outcome.value


def train(
    folder: Path, attention: str, select: str, *, resume: bool = False, at: int = 0, how: str = "none"
) -> int:
    """Train with every file operation counted; at that one it goes wrong.  The number of operations."""
    count = 0

    def guarded(operation: Callable[..., Any], mine: Callable[..., bool]) -> Callable[..., Any]:
        def inner(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            if not mine(*arguments):
                return operation(*arguments, **options)
            count += 1
            if count == at and how == "before":
                os._exit(KILLED)
            if count == at and how == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            result = operation(*arguments, **options)
            if count == at and how == "after":
                os._exit(KILLED)
            return result

        return inner

    def inside(path: Any, *_: Any) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(folder)

    def regular(file: Any, *_: Any) -> bool:
        return Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(folder)

    torch.set_num_threads(1)
    for name in ("replace", "unlink", "mkdir", "rename"):
        setattr(os, name, guarded(getattr(os, name), inside))
    os.fsync = guarded(os.fsync, regular)
    Path.open = guarded(Path.open, lambda path, mode="r", *_: inside(path) and mode not in ("r", "rb"))  # type: ignore[method-assign]
    fit(recipe(attention, select), toy_data(), folder, resume=resume)
    return count


def check(r: random.Random, tally: Tally) -> None:
    """One or two disturbances, then a resume to the end."""
    attention, select = r.choice(ATTENTIONS), r.choice(["best", "last", "best-nll"])
    reference, operations = whole(attention, select)
    with scratch() as inner:
        folder = inner / "run"
        before = listing(inner.parents[2], but=folder)
        for _ in range(r.choice([1, 1, 2])):
            how = r.choice(["before", "after", "full"])
            at = r.randint(1, operations)
            resume = (folder / "recipe.json").is_file()
            if not resume:
                shutil.rmtree(folder, ignore_errors=True)
            earlier = leftovers(folder)  # of a kill
            outcome = attempt(folder, attention, select, resume=resume, at=at, how=how)
            tally.add("disturbed")
            note(outcome, f"{attention} {select}: {how} at operation {at}", tally)
            if how == "full":
                tally.add("full disks")
                if left := sorted(set(leftovers(folder)) - set(earlier)):
                    tally.fault(WRONG, f"{attention} {select}: full at operation {at} leaves {left[0]}")
        resume = (folder / "recipe.json").is_file()
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        done = attempt(folder, attention, select, resume=resume)
        label = f"{attention} {select}: {how} at operation {at}, then resumed"
        if done.kind != "returned":
            tally.fault(TRACEBACK, f"{label}: {done.error or done} at {done.where}")
            return
        compare(folder, reference, label, tally)
        if left := leftovers(folder):
            tally.fault(WRONG, f"{label}: {left[0]} is left over")
        if listing(inner.parents[2], but=folder) != before:
            tally.fault(OUTSIDE, label)


def attempt(folder: Path, attention: str, select: str, **options: Any) -> Outcome:
    return in_child(
        functools.partial(train, folder, attention, select, **options), seconds=SECONDS, memory=None
    )


def note(outcome: Outcome, label: str, tally: Tally) -> None:
    """Ends that are in order: killed where asked, done before, or an error that names the full disk."""
    if outcome.kind in ("left", "returned"):
        return
    known = {"TrainingFailedError", "OSError", "CheckpointError"} & {*outcome.family}
    if outcome.kind == "raised" and known and "full" not in label.split(":")[1]:
        tally.fault(TRACEBACK, f"{label}: {outcome.error[:200]}")
    elif not known:
        tally.fault(TRACEBACK, f"{label}: {outcome.error[:200] or outcome} at {outcome.where}")
    elif "No space left" not in outcome.error:
        tally.fault(WRONG, f"{label}: the error does not say that the disk is full: {outcome.error[:200]}")


def compare(folder: Path, reference: Path, label: str, tally: Tally) -> None:
    for file in ("model/model.safetensors", "model/config.json", "metrics.csv", "recipe.json"):
        tally.add("comparisons")
        if (folder / file).read_bytes() != (reference / file).read_bytes():
            tally.fault(BITS, f"{label}: {file} has other bytes")
    last = [sorted(f.glob("checkpoints/*.safetensors"))[-1] for f in (folder, reference)]
    tally.add("comparisons")
    if last[0].name != last[1].name or checkpoint_tensors(last[0]) != checkpoint_tensors(last[1]):
        tally.fault(BITS, f"{label}: the last checkpoint differs")


def checkpoint_tensors(file: Path) -> dict[str, bytes]:
    return {name: x.numpy().tobytes() for name, x in read_checkpoint(file).tensors.items()}


def leftovers(folder: Path) -> list[str]:
    """Files that no run without a disturbance has."""
    if not folder.is_dir():
        return []
    strange = {f.name for f in folder.iterdir()} - EXPECTED - {"post-mortem"}
    hidden = [f.name for f in folder.rglob(".*") if f.name != ".lock"]
    return sorted({*strange, *hidden})
