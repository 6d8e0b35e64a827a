"""Where a run computes: Lightning Fabric drives devices, precision and processes.

One process in plain precision needs none of it, and importing Fabric takes seconds.  Several are started by
`torchrun`, by SLURM, or by `gpattention train --devices N`; each then calls `fit` with the same arguments,
and Fabric finds its place among them.
"""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim
from torch import distributed as dist

from gpattention.checks import check_choice
from gpattention.numerics import choose_device
from gpattention.training.folder import TrainingFailedError, TrainingStoppedError, what_is_left

Module = TypeVar("Module", bound=nn.Module)


class SingleProcess:
    """Fabric's names; a run does not know which of the two it has."""

    world_size = 1
    global_rank = 0

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    def setup(self, module: Module, optimizer: optim.Optimizer) -> tuple[Module, optim.Optimizer]:
        """Move the module; there is nothing to wrap."""
        return module.to(self.device), optimizer

    def to_device(self, module: Module) -> Module:
        """The module on the device."""
        return module.to(self.device)

    def backward(self, loss: Tensor) -> None:
        """No scaling, no communication."""
        loss.backward()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """No-op: one process has nothing to synchronise."""
        return nullcontext()

    def barrier(self) -> None:
        """No-op: one process waits for no other."""


PLAIN_PRECISIONS = ("32-true", "tf32", "64-true")  # no autocast
PRECISIONS = (*PLAIN_PRECISIONS, "bf16-mixed")


@dataclass(frozen=True)
class Hardware:
    """What a run may use.  Nothing of it is part of the recipe: it changes the time, not the result.

    Attributes:
        device: cpu, cuda, cuda:1, or auto.
        precision: one of `PRECISIONS`; tf32 is float32, with linear maps in TF32 where a GPU has it.
        strategy: one of Fabric's, for several processes; DDP is the one that is tested.
        graphs: capture the whole step as a CUDA graph where that is possible.
    """

    device: torch.device | str = "auto"
    precision: str = "32-true"
    strategy: Any = "auto"
    graphs: bool = True

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)


def start_fabric(hardware: Hardware, *, find_unused: bool = True) -> Any:
    """What drives this process: Fabric, which has joined the other processes if there are any.

    One process in plain precision has nothing to drive and gets `SingleProcess`.  `find_unused` is for models
    that leave some parameters out of a step.
    """
    device = choose_device(hardware.device)
    world = _world_size()
    if world == 1 and hardware.precision in PLAIN_PRECISIONS:
        return SingleProcess(device)
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    precision = "32-true" if hardware.precision == "tf32" else hardware.precision
    fabric_class = _fabric_class()
    options: dict[str, Any] = {"devices": 1 if device.index is None else [device.index]}
    if world > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
        ddp = "ddp_find_unused_parameters_true" if find_unused else "ddp"
        strategy = ddp if hardware.strategy == "auto" else hardware.strategy
        options = {"devices": local, "num_nodes": max(world // local, 1), "strategy": strategy}
    fabric = fabric_class(accelerator=accelerator, precision=precision, **options)
    joined_before = dist.is_initialized()
    fabric.launch()
    if dist.is_initialized() and not joined_before:
        # Fabric leaves a gloo group and its threads to the end of the interpreter, where a thread that still
        # has something to do aborts the process.  At exit and not after the run: who trains again in this
        # process goes on with the group, since a second one would meet at the first one's addresses.
        atexit.register(_leave_processes)
    return fabric


def _leave_processes() -> None:
    """Wait for the threads of the process group, and end it."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def matmul_precision(hardware: Hardware) -> Iterator[None]:
    """Products in TF32 if that is asked; posteriors and densities compute in full float32 all the same."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    if hardware.precision == "tf32":
        products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def why_no_graph(hardware: Hardware, fabric: Any) -> str | None:
    """The reason why steps run eagerly; None where they are captured."""
    if fabric.device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if not hardware.graphs:
        return "graphs are switched off"
    if fabric.world_size > 1:
        return "steps of several processes are not captured"
    if hardware.precision == "bf16-mixed":
        return "steps under autocast are not captured"
    return None


def _fabric_class() -> Any:
    for package in ("lightning_fabric", "lightning.fabric"):  # the same code, alone or in the larger package
        try:
            found = import_module(package).Fabric
            logging.getLogger(package).setLevel(logging.WARNING)  # not a banner per process
            return found
        except ImportError:
            continue
    raise ImportError("training needs Lightning Fabric: pip install 'gpattention[train]'")


def is_leading() -> bool:
    """Whether this is the first of the processes that a launcher started, the one that writes."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


def _world_size() -> int:
    """Processes that a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))


STOPPED = 130  # exit code of a process that was asked to stop and saved its state


def launch(arguments: Sequence[str], processes: int, folder: Path) -> None:
    """Run `python ARGUMENTS` in several processes of this machine, each of which calls `fit`.

    Args:
        arguments: of Python.
        processes: how many; when one dies the others are stopped.
        folder: of the run that they train.

    Raises:
        TrainingFailedError: a process died; the message says which, and what is left.
        TrainingStoppedError: they were asked to stop.
        ValueError: fewer than 2 processes are asked for.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes < 2:
        raise ValueError(f"expected at least 2 processes to launch, got {processes}")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it ourselves
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="gpattention", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stop:
        raise TrainingStoppedError(f"stopped by {stop.sigval.name}; {what_is_left(folder)}") from stop
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode == STOPPED:
            raise TrainingStoppedError(f"stopped; {what_is_left(folder)}") from failure
        code = first.exitcode
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        left = what_is_left(folder)
        raise TrainingFailedError(f"process {rank} of {processes} {ended}; {left}") from failure
