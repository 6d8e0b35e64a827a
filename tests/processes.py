"""Work in several real processes that meet through gloo, and what they sent each other."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch import multiprocessing as mp

COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "send", "recv", "isend",
    "irecv", "barrier", "all_gather_object", "broadcast_object_list",
)  # fmt: skip


def in_processes(work: Callable[[int], Any], count: int, folder: Path, *, meet: bool = True) -> list[Any]:
    """What `work(rank)` returned in each of `count` processes, which have met if `meet`."""
    multiprocessing.set_forkserver_preload(["gpattention.attention"])  # once, not in every process
    mp.start_processes(_one, (work, count, str(folder), meet), nprocs=count, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


@contextmanager
def group_of_one(folder: Path, backend: str = "gloo") -> Iterator[Any]:
    """A process group that holds this process alone."""
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _one(rank: int, work: Callable[[int], Any], count: int, folder: str, meet: bool) -> None:
    torch.set_num_threads(1)
    if not meet:
        torch.save(work(rank), f"{folder}/{rank}.pt")
        return
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    try:
        torch.save(work(rank), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def same_but_rounding(found: Tensor, expected: Tensor, name: str) -> None:
    """Equal up to sums taken in another order, relative to the largest entry."""
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    most = {torch.float64: 1e-10, torch.float32: 5e-6}[expected.dtype]
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    assert error <= most, f"{name}: {error:.1e}"


@contextmanager
def spied() -> Iterator[list[tuple[str, int]]]:
    """Names and payload bytes of all collectives called in the block, whoever calls them."""
    seen: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def spy(name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, sum(x.numel() * x.element_size() for x in args if isinstance(x, Tensor))))
            return originals[name](*args, **kwargs)

        return called

    for name in COLLECTIVES:
        setattr(dist, name, spy(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
