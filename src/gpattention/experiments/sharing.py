"""One GPU for several processes at the same time: NVIDIA's Multi-Process Service around a piece of work.

Without it the kernels of processes on one GPU take turns.  Models of the paper's size leave most of a large
GPU idle, so that runs side by side gain from it.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
# drivers that are mounted into a container are not always on the path
FURTHER = ("/usr/local/nvidia/bin", "/usr/bin")
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PATIENCE = 30.0  # seconds for the service to start, or to stop when its last process is gone


class SharingError(OSError):
    """The service is not installed, or did not start."""


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Processes that are started inside share the GPUs; the service ends with the block.

    Where CUDA_MPS_PIPE_DIRECTORY is set already, the service that it names is used and left running.  The
    settings of the GPU are not touched.  A process that crashes on the GPU takes those beside it down.
    """
    if os.environ.get(PIPE):
        yield
        return
    program = shutil.which(CONTROL, path=os.pathsep.join((os.environ.get("PATH", ""), *FURTHER)))
    if program is None:
        raise SharingError(
            f"expected {CONTROL} of NVIDIA's driver on the path to share a GPU, got none; "
            "without sharing the processes take turns, which is slower and otherwise the same"
        )
    place = Path(tempfile.mkdtemp(prefix="gpattention-mps-"))
    ours = {PIPE: str(place), LOG: str(place)}
    with _exits_on_signals():
        started, said = _call([program, "-d"], ours)
        if started != 0:
            _end(program, place, ours)
            raise SharingError(f"{program} did not start: {said or f'exit code {started}'}")
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            _end(program, place, ours)


def _end(program: str, place: Path, ours: dict[str, str]) -> None:
    """Tell the service to quit; one that does not is ended by its number, and if that fails told of."""
    code, _ = _call([program], ours, "quit\n")
    number = place / f"{CONTROL}.pid"
    if code != 0 and number.is_file():
        try:
            os.kill(int(number.read_text()), signal.SIGTERM)
            code = 0
        except (ValueError, OSError):
            pass
    if code != 0 and any(place.iterdir()):  # without its folder nobody could end it
        warnings.warn(
            f"{CONTROL} did not end; once its processes are gone: echo quit | {PIPE}={place} {program}",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _exits_on_signals() -> Iterator[None]:
    """Signals that would kill this process end it in order, so that the service is not left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    ours = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)


def _call(command: list[str], ours: dict[str, str], said: str = "") -> tuple[int, str]:
    """Exit code and what it said.  A file takes that: a daemon that keeps a pipe open would be waited for."""
    with tempfile.TemporaryFile("w+") as told:
        try:
            done = subprocess.run(
                command,
                input=said,
                env={**os.environ, **ours},
                stdout=told,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"no answer after {PATIENCE:.0f} seconds"
        told.seek(0)
        return done.returncode, told.read().strip()
