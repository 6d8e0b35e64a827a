"""One GPU for several processes at the same time: NVIDIA's Multi-Process Service around a piece of work.

Without it the kernels of processes on one GPU take turns.  Models of the paper's size leave most of a large
GPU idle, so that runs side by side gain from it.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

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
    with tempfile.TemporaryDirectory(prefix="gpattention-mps-") as place:
        ours = {PIPE: place, LOG: place}
        started = _call([program, "-d"], ours)
        if started.returncode != 0:
            said = (started.stderr or started.stdout).strip() or f"exit code {started.returncode}"
            raise SharingError(f"{program} did not start: {said}")
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            _call([program], ours, "quit\n")


def _call(command: list[str], ours: dict[str, str], said: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **ours}
    try:
        return subprocess.run(
            command,
            input=said,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer after {PATIENCE:.0f} seconds")
