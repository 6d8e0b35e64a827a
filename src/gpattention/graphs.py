"""CUDA graphs of calls that are repeated, such as a training step or the prediction of a batch.

A step of a small transformer is hundreds of short kernels, which take longer to start than to run; a replay
starts all of them at once.
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

WARM_UP = 3  # eager calls before a capture, in which libraries and optimisers initialise themselves

_WARMING_UP = f"the first {WARM_UP} calls run eagerly: libraries and optimisers initialise themselves in them"


def why_no_graph(device: torch.device) -> str | None:
    """The reason why no graph can be captured on a device; None if one can."""
    if device.type != "cuda":
        return f"it computes on {device}, and only CUDA has graphs"
    if torch.cuda.is_current_stream_capturing():
        return "the current stream is being captured already"
    return None


def capture(
    call: Callable[[], R], *, error_mode: str = "global", beside: torch.cuda.CUDAGraph | None = None
) -> tuple[torch.cuda.CUDAGraph, R]:
    """Capture a call as a graph without running it; returns the graph and the result that a replay fills.

    `beside` is a graph whose memory it uses too: of what either has written there, nothing is left after a
    replay of the other.

    Raises:
        RuntimeError: the call waits for the device.
    """
    graph = torch.cuda.CUDAGraph()
    pool = None if beside is None else beside.pool()
    with deferred_checks(), torch.cuda.graph(graph, pool=pool, capture_error_mode=error_mode):
        result = call()
    return graph, result


class Graphed(Generic[P, R]):
    """A function that replays a CUDA graph of itself where possible; `graphed` creates it.

    Attributes:
        reason: why the last call ran eagerly; None if it was a replay.
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
        self._inputs: list[Any] = []  # read by the graph
        self._result: Any = None  # written by the graph
        self.reason: str | None = self._refusal or _WARMING_UP

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._graph is not None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function's result for these arguments, in new tensors."""
        leaves, form = pytree.tree_flatten(args)
        self.reason = self._why_eager(leaves, form, kwargs)
        if self.reason is None and self._graph is None:
            self._capture(leaves)
        if self.reason is not None or self._graph is None:
            return self._eagerly(args, kwargs)
        for own, new in zip(self._inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(new)
        self._graph.replay()
        result: R = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), self._result)
        return result

    def _why_eager(self, leaves: list[Any], form: Any, kwargs: dict[str, Any]) -> str | None:
        if self._refusal is not None:
            return self._refusal
        if kwargs:
            return "it was called with keywords, and the example has none"
        found = [_described(x) for x in leaves]
        if form != self._form or found != self._expected:
            wrong = next((f"{new} instead of {old}" for old, new in zip(self._expected, found, strict=False)
                          if old != new), "another structure")  # fmt: skip
            return f"its arguments are not like those of the example: {wrong}"
        if self._graph is None and self._calls < WARM_UP:
            return _WARMING_UP
        if self._graph is not None and self._settings != self._current_settings():
            return "gradients, autocast or the mode of the module have changed since it was captured"
        return why_no_graph(self._device)

    def _current_settings(self) -> tuple[Any, ...]:
        """All that decides which operations run, apart from the arguments."""
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        mode = self._fn.training if isinstance(self._fn, nn.Module) else None
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, mode

    def _eagerly(self, args: Any, kwargs: Any) -> R:
        self._calls += 1
        if self._refusal is not None or self._calls > WARM_UP:
            return self._fn(*args, **kwargs)
        # on a stream of its own, as a capture needs: the gradients of the first steps are allocated there
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = self._fn(*args, **kwargs)
        current.wait_stream(stream)
        return result

    def _capture(self, leaves: list[Any]) -> None:
        self._inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self._settings = self._current_settings()
        # replays would read weights that autocast cast and cached earlier from memory that is freed by then
        uncached = (
            torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
            if torch.is_autocast_enabled("cuda")
            else nullcontext()
        )
        args = pytree.tree_unflatten(self._inputs, self._form)
        try:
            with uncached:
                self._graph, self._result = capture(lambda: self._fn(*args), error_mode="thread_local")
        except (torch.OutOfMemoryError, NumericalError):
            raise
        except RuntimeError as error:
            self._inputs = []
            self.reason = self._refusal = f"it cannot be captured: {str(error).partition(chr(10))[0]}"


def graphed(fn: Callable[P, R], *example: Any) -> Graphed[P, R]:
    """Run a function as a CUDA graph, which saves the time to start its kernels one by one.

    The first calls run eagerly, as ordinary steps; then one is captured, and later calls with arguments
    like the example are replays.  Calls with other arguments, or without a GPU, run eagerly; `.reason` says
    why.

    A graph holds operations on tensors: numbers computed in Python keep the values they had at capture.  So
    an optimiser needs `capturable=True`, a learning rate that changes must be a tensor, the step must begin
    by clearing the gradients, and the function must not read values (`loss.item()`): read its result.
    In a replay, failed factorisations become NaN and are counted; `gpattention.gp.check_health` raises for
    them.

    Args:
        fn: a function of tensors, of lists and mappings of tensors, and of numbers, which must stay the same.
        *example: arguments like those of the calls.

    Returns:
        The function, with the attributes `captured` and `reason`.

    >>> step = gpattention.graphed(train_step, images, labels)
    >>> for images, labels in loader:
    ...     loss = step(images, labels)
    """
    return Graphed(fn, example)


def _described(x: Any) -> Any:
    """The properties of an argument that a replay needs unchanged."""
    return (tuple(x.shape), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x
