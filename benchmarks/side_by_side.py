"""Several trainings on one GPU: do they take turns, or compute at the same time (`--share-gpu`)?

Processes that each train the paper's model for CIFAR-10 (batch 100) for some seconds, one alone and some side
by side: in turns, shared whole by NVIDIA's Multi-Process Service, and shared in parts as `--share-gpu` does.
Printed are all processes' steps a second against those of one process alone.

    python benchmarks/side_by_side.py --kinds kernel cgp scgp-16 --processes 1 4 8 --out results/bench
"""

import argparse
import csv
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from gpattention.studies.bench import prepare_step
from gpattention.studies.scheduler import shared_gpu

WAYS = ("in turns", "whole", "in parts")
AT_ONCE = 10  # steps between two looks at the clock


def steps_a_second(
    kind: str, device: str, seconds: float, ready: Barrier, found: "Queue[float | None]"
) -> None:
    """In a process of its own: train until the time is up."""
    torch.set_num_threads(1)
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    rate = None
    try:
        step = prepare_step(kind, device=device, batch=100 if device.startswith("cuda") else 2)
        ready.wait(timeout=300)  # all begin together
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in range(AT_ONCE):
                step()
            wait()
            steps += AT_ONCE
        rate = steps / (time.perf_counter() - begin)
    finally:
        found.put(rate)  # nobody waits for a process that failed


def together(kind: str, device: str, processes: int, seconds: float) -> float:
    """Steps a second of all of them."""
    context = get_context("spawn")
    ready, found = context.Barrier(processes), context.Queue()
    works = [
        context.Process(target=steps_a_second, args=(kind, device, seconds, ready, found))
        for _ in range(processes)
    ]
    for work in works:
        work.start()
    rates = [found.get() for _ in works]
    for work in works:
        work.join()
    if None in rates:
        raise RuntimeError(f"{kind}: a process of {processes} failed")
    return sum(rates)


def measure(given: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row for each kind, number of processes and way."""
    for kind in given.kinds:
        alone = together(kind, given.device, 1, given.seconds)
        for processes in given.processes:
            for way in WAYS if given.device.startswith("cuda") else WAYS[:1]:
                with (
                    nullcontext() if way == "in turns" else shared_gpu(processes if way == "in parts" else 1)
                ):
                    rate = together(kind, given.device, processes, given.seconds)
                yield {
                    "kind": kind, "processes": processes, "gpu": way,
                    "steps_a_second": f"{rate:.1f}", "to_one_alone": f"{rate / alone:.2f}",
                }  # fmt: skip


def main() -> None:
    """Print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["kernel", "cgp", "scgp-16"])
    parser.add_argument("--processes", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="folder of side-by-side.csv")
    given = parser.parse_args()
    rows = []
    for row in measure(given):
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if given.out is not None:
        with (Path(given.out) / "side-by-side.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
