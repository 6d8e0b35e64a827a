"""A chunk of a prediction as a captured CUDA graph: one launch in place of hundreds."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gpattention.models.rows import Inputs

T = TypeVar("T")


def may_capture(model: Any, device: torch.device) -> bool:
    """Whether replays would do what calls do.

    Hooks may look at the host's state, and autocast keeps its own copies of weights.
    """
    if device.type != "cuda" or torch.is_autocast_enabled("cuda"):
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class ChunkGraph(Generic[T]):
    """One captured chunk, and the tensors that its replays read."""

    def __init__(
        self, forward: Callable[[Inputs, Tensor, Tensor], T], inputs: Inputs, numbers: Tensor, samples: Tensor
    ) -> None:
        self._read = (_cloned(inputs), numbers, samples)
        self._graph = torch.cuda.CUDAGraph()
        # other threads, say one that pins memory for a loader, may go on
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._told = forward(*self._read)

    def replay(self, inputs: Inputs, numbers: Tensor, samples: Tensor) -> T:
        """A chunk of as many samples and no more items; what it does not fill is computed in vain."""
        own_inputs, own_numbers, own_samples = self._read
        _copy(own_inputs, inputs)
        own_numbers[: len(numbers)].copy_(numbers)
        own_samples.copy_(samples)
        self._graph.replay()
        return self._told


def _cloned(inputs: Inputs) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs.clone()
    return {name: x.clone() for name, x in inputs.items()}


def _copy(own: Inputs, new: Inputs) -> None:
    if isinstance(own, Tensor):
        assert isinstance(new, Tensor)
        own[: len(new)].copy_(new)
        return
    assert not isinstance(new, Tensor)
    for name, x in new.items():
        own[name][: len(x)].copy_(x)
