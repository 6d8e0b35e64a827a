"""Counts of what a fuzz did and found, and children in which a case may do its worst."""

import os
import pickle
import random
import resource
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

WRONG, TRACEBACK, OUTSIDE, BITS = FAULTS = ("wrong answers", "tracebacks", "files outside", "differing bits")
CASES_OF_A_SEED = 1_000_000  # case n of seed s has the number s * 1,000,000 + n


@dataclass
class Tally:
    """What one area counted; `faults` tells each fault with the case that repeats it."""

    area: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, str]] = field(default_factory=list)
    case: int = 0

    def add(self, what: str, number: int = 1) -> None:
        self.counts[what] += number

    def fault(self, kind: str, what: str) -> None:
        """Something that must not be."""
        self.counts[kind] += 1
        self.faults.append((kind, f"{what}\n    make fuzz CASE={self.area}:{self.case}"))

    def clean(self) -> bool:
        return not self.faults


Check = Callable[[random.Random, Tally], None]  # one case: all that is random comes from the generator


def run_cases(area: str, check: Check, cases: Iterable[int], until: float | None = None) -> Tally:
    """Run the cases in order, to the end or to that time on the monotonic clock."""
    tally = Tally(area)
    for case in cases:
        if until is not None and time.monotonic() > until:
            break
        tally.case = case
        tally.add("cases")
        torch.manual_seed(case)
        try:
            with warnings.catch_warnings():  # which the tests take for errors
                warnings.simplefilter("ignore")
                check(random.Random(case), tally)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            tally.fault(TRACEBACK, f"{type(error).__name__} at {where}: {str(error)[:300]}")
    return tally


def torch_generator(r: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(r.getrandbits(62))


# --- children ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a child ended: its function returned, raised, left by itself, was too slow or was killed."""

    kind: str  # "returned", "raised", "left", "too slow", "killed"
    value: Any = None  # what it returned; the code it left with; the signal
    error: str = ""  # type and message of what it raised
    family: tuple[str, ...] = ()  # names of the error's classes
    where: str = ""  # the innermost line

    @property
    def refused(self) -> bool:
        """An error that a caller can expect of bad input."""
        return self.kind == "raised" and bool({"ValueError", "OSError", "ImportError"} & {*self.family})


def in_child(
    function: Callable[[], Any], *, seconds: float = 20.0, memory: int | None = 1 << 30, quiet: bool = True
) -> Outcome:
    """Call the function in a forked process that may not take more time, nor more memory than now."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(function, writing, memory, quiet)
    os.close(writing)
    told, late = _read_all(reading, time.monotonic() + seconds)
    os.close(reading)
    if late:
        with suppress(ProcessLookupError):  # its own children too, where it leads a group
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if late:
        return Outcome("too slow", seconds)
    if told:
        return pickle.loads(told)  # of our own child
    code = os.waitstatus_to_exitcode(status)
    return Outcome("left" if code >= 0 else "killed", abs(code))


def _be_child(function: Callable[[], Any], writing: int, memory: int | None, quiet: bool) -> None:
    code = 1
    try:
        warnings.simplefilter("default")
        torch.set_num_threads(1)  # threads do not survive a fork
        if memory is not None:
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
        if quiet:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
        try:
            outcome = Outcome("returned", function())
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome = Outcome(
                "raised", getattr(error, "code", None), f"{type(error).__name__}: {error}"[:2000],
                tuple(c.__name__ for c in type(error).__mro__), f"{place.filename}:{place.lineno}",
            )  # fmt: skip
        told = pickle.dumps(outcome)
        while told:
            told = told[os.write(writing, told) :]
        code = 0
    finally:
        os._exit(code)


def _read_all(reading: int, until: float) -> tuple[bytes, bool]:
    """All that comes until the end, and whether the time was over before it."""
    found = b""
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            return found, True
        block = os.read(reading, 1 << 16)
        if not block:
            return found, False
        found += block


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of its own inside one that nothing else writes into."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as outer:
        inner = Path(outer) / "a" / "b" / "inner"
        inner.mkdir(parents=True)
        yield inner


def listing(folder: Path, *, but: Path | None = None) -> dict[str, tuple[int, int]]:
    """Size and time of every file in and below a folder, but for one below it."""
    found: dict[str, tuple[int, int]] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if but is None or Path(place) / name != but]
        for name in (*folders, *files):
            about = os.lstat(os.path.join(place, name))
            size = 0 if name in folders else about.st_size
            found[os.path.join(place, name)] = (size, 0 if name in folders else about.st_mtime_ns)
    return found
