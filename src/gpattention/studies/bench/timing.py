"""Times of several pieces of work, measured in turns."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from gpattention.checks import check_count

Progress = Callable[[int, int], object]


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    progress: Progress | None = None,
    *,
    at_once: int = 1,
    warm_up: int = 1,
) -> dict[str, float]:
    """Median seconds of each call; in turns, so that a machine that slows down slows all of them.

    `at_once` calls are made before the device is waited for, as a trainer makes them; `warm_up` turns do not
    count.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    total, done = len(calls) * (repeats + warm_up), 0
    for turn in range(repeats + warm_up):
        for name, call in calls.items():
            wait_for(device)
            start = time.perf_counter()
            for _ in range(at_once):
                call()
            wait_for(device)
            if turn >= warm_up:
                times[name].append((time.perf_counter() - start) / at_once)
            done += 1
            if progress is not None:
                progress(done, total)
    return {name: statistics.median(each) for name, each in times.items()}


def wait_for(device: torch.device) -> None:
    """Until all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_counts(**counts: int) -> None:
    """Numbers of things to measure."""
    for name, value in counts.items():
        check_count(name, value)
