"""A captured CUDA graph on the CPU: a tape of operations that replays write into the same tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records every operation; `replay` runs them again on whatever their inputs hold by then."""

    made: list["Tape"] = []  # noqa: RUF012 emptied by `stand_in`

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        Tape.made.append(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.operations:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


@contextmanager
def capture(tape: Tape, **_: Any) -> Iterator[None]:
    with tape:
        yield


def stand_in(patch: pytest.MonkeyPatch) -> list[Tape]:
    """Replace CUDA's graphs; gives the tapes that will be made."""
    Tape.made = []
    patch.setattr(torch.cuda, "CUDAGraph", Tape)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return Tape.made
