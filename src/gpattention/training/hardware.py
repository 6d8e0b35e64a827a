"""Where a run computes: Lightning Fabric drives devices, precision and processes.

One process needs nothing.  Several are started by `torchrun`, by SLURM, or by `gpattention train
--devices N`; each then calls `fit` with the same arguments, and Fabric finds its place among them.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from gpattention.training.devices import choose_device
from gpattention.training.single import SingleProcess

DDP = {False: "ddp", True: "ddp_find_unused_parameters_true"}
PLAIN_PRECISIONS = ("32-true", "tf32", "64-true")  # no autocast
PRECISIONS = (*PLAIN_PRECISIONS, "bf16-mixed")


@dataclass(frozen=True)
class Hardware:
    """What a run may use.  Nothing of it is part of the recipe: it changes the time, not the result."""

    device: torch.device | str = "auto"  # cpu, cuda, cuda:1, or auto
    precision: str = "32-true"  # tf32: float32, with products of linear maps in TF32 where a GPU has it
    strategy: Any = "auto"  # one of Fabric's, for several processes; DDP is the one that is tested
    graphs: bool = True  # capture the whole step as a CUDA graph where that is possible

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"expected precision to be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )


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
    if world == 1:
        devices: Any = 1 if device.index is None else [device.index]
        fabric = fabric_class(accelerator=accelerator, devices=devices, precision=precision)
    else:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
        fabric = fabric_class(
            accelerator=accelerator,
            devices=local,
            num_nodes=max(world // local, 1),
            strategy=(DDP[find_unused] if hardware.strategy == "auto" else hardware.strategy),
            precision=precision,
        )
    fabric.launch()
    return fabric


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
