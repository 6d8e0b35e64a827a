"""Launches that skip most of Triton's Python, which takes longer than most kernels here run.

For every launch Triton binds arguments by name, writes the options down as text, compares each global
constant with what it was, and calls hooks that nobody set.  Here a launch like one before goes to the
compiled kernel at once.  Alike are launches on the same device with the same constants, whose arguments
Triton itself would specialise alike: types, pointers and numbers divisible by 16, numbers that are 1.  The
first of each kind, and all launches where somebody listens to Triton's hooks, are Triton's own; so are all
of them under a version of Triton that this was not tried with.

`kernels_of` is the one door to kernels, and `counter_for` to the counter of their failures.  Somebody may
stand in for both: kernels that do nothing, for tensors without values, or those of a launch tape, which
notes what is launched (`ops.tapes`).
"""

import ctypes
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gpattention.numerics import failure_counter, failures_are_counted

# mypy: disable-error-code="import-not-found,import-untyped"
TRIED = ("3.6.",)  # versions of Triton
_REST = ((1, 1), (1,), ())  # of grids with one, two and three axes


class StandIn(Protocol):
    """What answers for kernels and the counter of failures."""

    def kernels(self, op: str) -> Any:
        """Of an op, as attributes."""
        ...

    def counter(self, device: torch.device) -> tuple[Tensor | None, int]:
        """The counter, and whether a kernel adds its own."""
        ...


stand_in: ContextVar[StandIn | None] = ContextVar("gpattention_kernels", default=None)


def kernels_of(op: str) -> Any:
    """The Triton kernels of an op, imported when they are first launched: Triton is an optional package."""
    instead = stand_in.get()
    return imported_kernels(op) if instead is None else instead.kernels(op)


def counter_for(device: torch.device) -> tuple[Tensor | None, int]:
    """The counter of failures that a kernel is given, and whether it adds its own."""
    instead = stand_in.get()
    if instead is not None:
        return instead.counter(device)
    return failure_counter(device), int(failures_are_counted())


@cache
def imported_kernels(op: str) -> Any:
    """The kernels themselves, whoever stands in."""
    return quickly_launched(import_module(f"gpattention.ops.{op}.kernels"))


class Absent:
    """Kernels that do nothing: for tensors that have a shape and no values."""

    def kernels(self, op: str) -> "Absent":
        """Itself."""
        return self

    def counter(self, device: torch.device) -> tuple[None, int]:
        """None."""
        return None, 0

    def __getattr__(self, name: str) -> "Absent":
        return self

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


class Ready(NamedTuple):
    """A launch with all that it needs but where its tensors are.

    It is `call(*grid, stream(device), *first, *args, *last)`, of which a stream of None is left out; `args`
    are those of the kernel, with addresses in place of tensors.
    """

    call: Callable[..., None]
    grid: tuple[int, ...]
    stream: Callable[[int], int] | None
    device: int
    first: tuple[Any, ...]
    last: tuple[Any, ...]


class UnknownLaunchError(Exception):
    """A kernel that has not been compiled, or that is Triton's own to launch."""


def ready_to_launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> Ready:
    """A launch that needs nothing but addresses any more.

    Raises:
        UnknownLaunchError: no launch like it went before.
    """
    if isinstance(kernel, QuickKernel):
        return kernel.ready(grid, args, constants)
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(kernel, InterpretedFunction):
        raise UnknownLaunchError
    return Ready(partial(_interpret, kernel[grid], args, constants), (), None, 0, (), ())


def _interpret(kernel: Any, like: tuple[Any, ...], constants: dict[str, Any], *args: Any) -> None:
    """An interpreted kernel, which wants tensors, at addresses of tensors like these."""
    kernel(*map(_tensors_at, args, like), **constants)


def _tensors_at(x: Any, like: Any) -> Any:
    if isinstance(like, tuple):
        return tuple(map(_tensors_at, x, like))
    if not isinstance(like, Tensor) or not like.numel():
        return like
    return torch.frombuffer((ctypes.c_byte * like.element_size()).from_address(x), dtype=like.dtype)


def is_listened_to() -> bool:
    """Whether Triton's hooks have listeners, as profilers are."""
    runtime = _knobs()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def hooks_of(kernel: Any) -> list[Any]:
    """The list of those who want to be called before a kernel."""
    found: list[Any] = getattr(kernel, "_kernel", kernel).pre_run_hooks
    return found


def quickly_launched(kernels: ModuleType) -> Any:
    """The kernels of a module, by name, launched quickly where that can be done; else the module.

    Args:
        kernels: a module of Triton kernels.

    Returns:
        What has the kernels as attributes.
    """
    import triton
    from triton.runtime.jit import JITFunction

    found = {name: value for name, value in vars(kernels).items() if isinstance(value, JITFunction)}
    if not found or not triton.__version__.startswith(TRIED) or torch.version.hip is not None:
        return kernels  # interpreted kernels are no such functions
    return SimpleNamespace(**{name: QuickKernel(kernel) for name, kernel in found.items()})


class QuickKernel:
    """A kernel whose launches like one before go past Triton: `kernel[grid](*arguments, **constants)`.

    Args:
        kernel: a function decorated with `triton.jit`, whose constants come last.
    """

    def __init__(self, kernel: Any) -> None:
        from triton._C.libtriton import native_specialize_impl
        from triton.backends.compiler import BaseBackend
        from triton.runtime import driver

        self._kernel, self._driver = kernel, driver
        self._specialized: Callable[..., Any] = partial(native_specialize_impl, BaseBackend)
        self._known: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        device = torch._C._cuda_getDevice()  # what is launched on is initialised
        key = self._kind_of(device, args, constants)
        known = self._known.get(key)
        if known is None or is_listened_to() or self._kernel.pre_run_hooks:
            self._launch_by_triton(grid, args, constants, key)
            return
        run, stream, first, last = known
        run(*grid, *_REST[len(grid) - 1], stream(device), *first, *args, *last)

    def ready(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Ready:
        """A launch like one before, for arguments that are specialised alike.

        Raises:
            UnknownLaunchError: there was none.
        """
        device = torch._C._cuda_getDevice()
        known = self._known.get(self._kind_of(device, args, constants))
        if known is None:
            raise UnknownLaunchError
        run, stream, first, last = known
        return Ready(run, (*grid, *_REST[len(grid) - 1]), stream, device, first, last)

    def _kind_of(self, device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """Alike in it are launches of one compiled kernel with the same constants."""
        values = tuple(constants.values())
        # 1, 1.0 and True are equal, and other constants
        return (
            self._specialized(args, False, True, True),
            device,
            tuple(constants),
            values,
            (*map(type, values),),
        )

    def _launch_by_triton(
        self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], key: Any
    ) -> None:
        """And note what the next launch like this one needs."""
        made = self._kernel[grid](*args, **constants)
        if made is None:  # a hook of Triton's kept it from being compiled
            return
        stream = self._driver.active.get_current_stream
        last = tuple(constants[name] for name in self._kernel.arg_names[len(args) :])
        run, options = _without_scratch(made.run)
        first = (made.function, *options, made.packed_metadata, None, None, None)
        self._known[key] = run, stream, first, last


def _without_scratch(run: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What Triton's launcher calls for a kernel without scratch memory, and what it passes on beside."""
    launch = getattr(run, "launch", None)
    if launch is None or run.global_scratch_size or run.profile_scratch_size:
        return run, ()
    return launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
