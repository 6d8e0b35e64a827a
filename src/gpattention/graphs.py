"""Calls as CUDA graphs: a training step, a batch of predictions, or whatever a user makes again and again.

A step at the sizes of small transformers is hundreds of short kernels, and starting them one by one takes
longer than running them; a replay starts all of them at once.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpattention.numerics import NumericalError, deferred_checks

P = ParamSpec("P")
R = TypeVar("R")

WARM_UP = 3  # eager calls before a capture: libraries and optimisers set themselves up in them


def why_no_graph(device: torch.device) -> str | None:
    """Why nothing can be captured here; None where it can."""
    if device.type != "cuda":
        return f"it computes on {device}, and only CUDA has graphs"
    if torch.cuda.is_current_stream_capturing():
        return "the current stream is being captured already"
    return None


def capture(call: Callable[[], R], *, error_mode: str = "global") -> tuple[torch.cuda.CUDAGraph, R]:
    """A graph of a call, which it does not run, and what a replay fills.

    Raises:
        RuntimeError: something in it waits for the device.
    """
    graph = torch.cuda.CUDAGraph()
    with deferred_checks(), torch.cuda.graph(graph, capture_error_mode=error_mode):
        found = call()
    return graph, found


class Graphed(Generic[P, R]):
    """A function that is replayed as a CUDA graph where it can be; `graphed` makes it.

    Attributes:
        reason: why the last call ran eagerly; None where it was a replay.
    """

    def __init__(self, fn: Callable[P, R], example: tuple[Any, ...]) -> None:
        self._fn: Callable[..., R] = fn
        leaves, self._form = pytree.tree_flatten(example)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        self._expected = [_described(x) for x in leaves]
        devices = {x.device for x in tensors}
        self._device = next((x for x in devices if x.type == "cuda"), torch.device("cpu"))
        self._refusal = None
        if not tensors:
            self._refusal = "its example holds no tensor, whose device would say where it computes"
        elif devices != {self._device} or self._device.type != "cuda":
            names = ", ".join(sorted(map(str, devices)))
            self._refusal = f"its example lies on {names}, and only CUDA has graphs"
        self._calls = 0
        self._settings: tuple[Any, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._read: list[Any] = []
        self._given: Any = None
        self.reason: str | None = self._refusal or self._warming()

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._graph is not None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the function gives for these arguments, in tensors of its own."""
        leaves, form = pytree.tree_flatten(args)
        self.reason = self._why_eager(leaves, form, kwargs)
        if self.reason is None and self._graph is None:
            self._capture(leaves)
        if self.reason is not None or self._graph is None:
            return self._eagerly(args, kwargs)
        for own, new in zip(self._read, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(new)
        self._graph.replay()
        given: R = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), self._given)
        return given

    def _why_eager(self, leaves: list[Any], form: Any, kwargs: dict[str, Any]) -> str | None:
        if self._refusal is not None:
            return self._refusal
        if kwargs:
            return "it was called with keywords, and the example has none"
        found = [_described(x) for x in leaves]
        if form != self._form or found != self._expected:
            wrong = next((f"{new} instead of {old}" for old, new in zip(self._expected, found, strict=False)
                          if old != new), "another form")  # fmt: skip
            return f"its arguments are not like those of the example: {wrong}"
        if self._graph is None and self._calls < WARM_UP:
            return self._warming()
        if self._graph is not None and self._settings != self._current():
            return "gradients, autocast or the mode of the module are not as they were when it was captured"
        return why_no_graph(self._device)

    def _warming(self) -> str:
        return f"the first {WARM_UP} calls run eagerly: libraries and optimisers set themselves up in them"

    def _current(self) -> tuple[Any, ...]:
        """What decides which operations run, beside the arguments."""
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        mode = self._fn.training if isinstance(self._fn, nn.Module) else None
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, mode

    def _eagerly(self, args: Any, kwargs: Any) -> R:
        self._calls += 1
        if self._refusal is not None or self._calls > WARM_UP:
            return self._fn(*args, **kwargs)
        # on a stream of its own, as capture asks: the gradients of the first steps live there
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            found = self._fn(*args, **kwargs)
        current.wait_stream(stream)
        return found

    def _capture(self, leaves: list[Any]) -> None:
        self._read = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self._settings = self._current()
        # a cast weight that autocast remembers from before would be read from memory that is gone
        uncached = (
            torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
            if torch.is_autocast_enabled("cuda")
            else nullcontext()
        )
        args = pytree.tree_unflatten(self._read, self._form)
        try:
            with uncached:
                self._graph, self._given = capture(lambda: self._fn(*args), error_mode="thread_local")
        except (torch.OutOfMemoryError, NumericalError):
            raise
        except RuntimeError as error:
            self._read = []
            self.reason = self._refusal = f"it cannot be captured: {str(error).partition(chr(10))[0]}"


def graphed(fn: Callable[P, R], *example: Any) -> Graphed[P, R]:
    """A function as a CUDA graph: a training step, or a forward pass, without the time to start its kernels.

    The first calls run eagerly, each of them a step like any other; then one is captured, and all that
    follow are replays, for arguments like the example.  Others, and calls on machines without a GPU, run
    eagerly; `.reason` says why.

    What is captured are operations on tensors: numbers that Python computed are those of the capture.  So an
    optimiser has to be `capturable=True`, its learning rate a tensor if it changes, its gradients cleared at
    the start of the step, and nothing in the function may read a value (`loss.item()`): read what it returns.
    Failed factorisations are NaN and counted in a replay; `gpattention.gp.check_health` raises for them.

    Args:
        fn: of tensors, or of lists and mappings of them, and of numbers, which must stay the same.
        *example: arguments like those of the calls.

    Returns:
        The function, with `.captured` and `.reason`.

    >>> step = gpattention.graphed(train_step, images, labels)
    >>> for images, labels in loader:
    ...     loss = step(images, labels)
    """
    return Graphed(fn, example)


def _described(x: Any) -> Any:
    """What a replay needs of an argument to be as it was."""
    return (tuple(x.shape), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x
