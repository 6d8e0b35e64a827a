"""Launches that skip most of Triton's Python, which takes longer than most kernels here run.

For every launch Triton binds arguments by name, writes the options down as text, compares each global
constant with what it was, and calls hooks that nobody set.  Here a launch like one before goes to the
compiled kernel at once.  Alike are launches on the same device with the same constants, whose arguments
Triton itself would specialise alike: types, pointers and numbers divisible by 16, numbers that are 1.  The
first of each kind, and all launches where somebody listens to Triton's hooks, are Triton's own; so are all
of them under a version of Triton that this was not tried with.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

# mypy: disable-error-code="import-not-found,import-untyped"
TRIED = ("3.6.",)  # versions of Triton
_REST = ((1, 1), (1,), ())  # of grids with one, two and three axes


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
        from triton import knobs
        from triton._C.libtriton import native_specialize_impl
        from triton.backends.compiler import BaseBackend
        from triton.runtime import driver

        self._kernel, self._driver, self._knobs = kernel, driver, knobs.runtime
        self._specialized: Callable[..., Any] = partial(native_specialize_impl, BaseBackend)
        self._known: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        device = torch._C._cuda_getDevice()  # what is launched on is initialised
        values = tuple(constants.values())
        # 1, 1.0 and True are equal, and other constants
        key = (
            self._specialized(args, False, True, True),
            device,
            tuple(constants),
            values,
            (*map(type, values),),
        )
        known = self._known.get(key)
        if known is None or self._is_watched():
            self._launch_by_triton(grid, args, constants, key)
            return
        run, stream, first, last = known
        run(*grid, *_REST[len(grid) - 1], stream(device), *first, *args, *last)

    def _is_watched(self) -> bool:
        """Whether Triton's hooks have listeners, as profilers are."""
        enter, leave = self._knobs.launch_enter_hook, self._knobs.launch_exit_hook
        return bool(
            getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or self._kernel.pre_run_hooks
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
