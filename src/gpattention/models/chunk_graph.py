"""A chunk of a prediction as a captured CUDA graph: one launch in place of hundreds."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gpattention.models.rows import Inputs

T = TypeVar("T")


def why_not_captured(model: Any, device: torch.device) -> str | None:
    """Why replays would not do what calls do; None where they would."""
    if device.type != "cuda":
        return f"it computes on {device}, and only CUDA has graphs"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on, which keeps its own copies of weights"
    if torch.cuda.is_current_stream_capturing():
        return "the current stream is being captured already"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has forward hooks, which a replay does not call"
    return None


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
