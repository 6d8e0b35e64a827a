"""Where and in which arithmetic the GP core runs.

From the distances to the last triangular solve everything is IEEE float32 or float64: autocast is
off, TF32 is off, and half-precision inputs are raised to float32.  A Gram matrix with the 8 or 11
significant bits of bf16 or TF32 is not positive definite at any useful noise.

Backward passes take the arithmetic they are called in.  Those of our own autograd functions are decorated
too; what PyTorch derives from plain operations is the caller's, who leaves autocast before `backward()`.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gpattention.gp.concurrency import Undo, borrowed

P = ParamSpec("P")
R = TypeVar("R")

# Where torch keeps the precision of float32 products; each level without one takes that of a level before.
_LEVELS = (
    ("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("cuda", "matmul"), ("mkldnn", "matmul"),
)  # fmt: skip

_deferred: ContextVar[bool] = ContextVar("gpattention_deferred_checks", default=False)


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Run the block without reading results back from the device; look at health afterwards.

    Inside, a matrix without a Cholesky factor gives NaN and is counted, and inputs are not searched
    for NaN; `check_health()` raises once for everything counted.  On a GPU this keeps eager code from
    waiting for every factorisation.  CUDA-graph capture, `torch.compile` and `torch.func.vmap` always
    behave so.

    >>> with deferred_checks():
    ...     loss = step(batch)
    >>> check_health()
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def is_transformed() -> bool:
    """True inside a transform of `torch.func`: vmap, grad, jacrev, jvp and the others.

    Compilers, which see such transforms for themselves, are asked about apart.
    """
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def wants_plain_operations() -> bool:
    """True where a compiler or a transform of `torch.func` has to see every operation.

    Our own autograd functions have no forward-mode derivative, and most have no second one.
    """
    return torch.compiler.is_compiling() or is_transformed()


def is_mapped() -> bool:
    """True inside `torch.func.vmap`, where a tensor stands for many and has no value to read."""
    if not is_transformed():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def has_values(x: Tensor) -> bool:
    """False for tensors of shape and type alone: on the meta device, or made by `FakeTensorMode`."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def autocast_is_on(device: torch.device) -> bool:
    """Whether autocast changes the operations of a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def checks_are_deferred(*tensors: Tensor) -> bool:
    """True where reading a value, or one of these tensors', is impossible or unwanted."""
    if torch.compiler.is_compiling():
        return True
    if _deferred.get() or is_mapped() or not all(map(has_values, tensors)):
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half-precision inputs, else the inputs' own type."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _raise_precision(level: tuple[str, str]) -> Undo | None:
    """Full float32 products at one level; None where they are, or where it inherits from one before."""
    precision = torch._C._get_fp32_precision_getter(*level)
    # What a level inherits is "ieee" by now, so this is its own: put back as such, it pins nothing
    # that followed another setting before.
    if precision in ("ieee", "none"):
        return None
    torch._C._set_fp32_precision_setter(*level, "ieee")
    return lambda: torch._C._set_fp32_precision_setter(*level, precision)


# Precision is a setting of the process: threads that need it full at once share one change, and where a user
# lowered it, other threads meanwhile compute in full too.
_IEEE: dict[Hashable, Callable[[], Undo | None]] = {
    ("float32 precision", *level): partial(_raise_precision, level) for level in _LEVELS
}


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function's products and solves run with autocast and TF32 off."""

    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # backend settings are compile-time constants there
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return function(*args, **kwargs)
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(borrowed(_IEEE))
            return function(*args, **kwargs)

    return inner
