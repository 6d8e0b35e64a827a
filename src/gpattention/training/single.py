"""One process in plain precision: the part of Fabric that a run uses, without Fabric.

Importing Lightning Fabric takes seconds, and there is nothing for it to drive here.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn, optim

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
        """Nobody to agree with."""
        return nullcontext()

    def barrier(self) -> None:
        """Nobody to wait for."""
