"""Several processes on this machine, started and watched: `torchrun` without its command line."""

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from gpattention.training.checkpoint import list_checkpoints
from gpattention.training.results import TrainingFailedError, TrainingStoppedError

STOPPED = 130  # exit code of a process that was asked to stop and saved its state


def launch(arguments: Sequence[str], processes: int, folder: Path) -> None:
    """Run `python ARGUMENTS` in that many processes, each of which calls `fit` on the run in `folder`.

    When one dies the others are stopped, and `TrainingFailedError` says which and where to go on.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes < 2:
        raise ValueError(f"expected at least 2 processes to launch, got {processes}")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it ourselves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="gpattention",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stop:
        raise TrainingStoppedError(f"stopped by {stop.sigval.name}; {_left(folder)}") from stop
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode == STOPPED:
            raise TrainingStoppedError(f"stopped; {_left(folder)}") from failure
        raise TrainingFailedError(
            f"process {rank} of {processes} {_ended(first.exitcode)}; {_left(folder)}"
        ) from failure


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _left(folder: Path) -> str:
    found = list_checkpoints(folder / "checkpoints")
    return f"resume goes on from {found[-1]}" if found else f"{folder} holds no checkpoint yet"
