"""The one switch between fused Triton kernels and plain torch operations, and why it stands as it does.

"auto" takes the kernels for float32 on a CUDA device where Triton is installed, at the sizes at which they
were measured against float64 on a GPU; everything else runs the plain operations, which are the reference.
"on" also takes them up to the sizes that one program holds.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeGuard, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from gpattention.concurrency import is_handled

Module = TypeVar("Module", bound=nn.Module)

Mode = Literal["auto", "on", "off"]
_MODES: tuple[Mode, ...] = get_args(Mode)
# largest sequence and head: what was measured on a GPU, and what one program can hold
SHOWN_TOKENS, MOST_TOKENS = 128, 128
SHOWN_CHANNELS, MOST_CHANNELS = 64, 64
SHOWN_INDUCING, MOST_INDUCING = 32, 64

_mode: ContextVar[Mode | None] = ContextVar("gpattention_fused_kernels", default=None)


@contextmanager
def fused_kernels(mode: Mode) -> Iterator[None]:
    """Choose for a block whether fused kernels run: "auto" (where they can), "on" or "off".

    "on" raises `RuntimeError` with the reason where they cannot.  It takes larger matrices than "auto",
    which stays with the sizes measured on a GPU, and it runs on the CPU under Triton's interpreter
    (`TRITON_INTERPRET=1`), which is slow and meant for tests.  Outside any block the environment variable
    `GPATTENTION_FUSED` decides, "auto" when unset.  `why_not_fused` tells what a call would do.

    Args:
        mode: "auto", "on" or "off".

    Returns:
        A context manager.

    Raises:
        ValueError: the mode is another.

    >>> with fused_kernels("off"):
    ...     reference = model(images)
    """
    if mode not in _MODES:
        raise ValueError(f"expected mode to be one of {', '.join(_MODES)}, got {mode!r}")
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def fused_mode() -> Mode:
    """The mode in force here.

    Returns:
        That of the innermost `fused_kernels` block, or of the environment.

    Raises:
        ValueError: the environment variable names no mode.
    """
    chosen = _mode.get()
    if chosen is not None:
        return chosen
    found = os.environ.get("GPATTENTION_FUSED", "auto")
    for mode in _MODES:
        if found == mode:
            return mode
    raise ValueError(f"expected GPATTENTION_FUSED to be one of {', '.join(_MODES)}, got {found!r}")


def why_not_fused(x: Tensor, *, tokens: int = 1, channels: int = 1, inducing: int = 1) -> str | None:
    """Why plain operations run on tensors like x, if they do.

    Args:
        x: a tensor of the call.
        tokens: its longest sequence; sparse attention, whose kernels take any length, names none.
        channels: its widest head.
        inducing: its larger number of inducing inputs.

    Returns:
        None where fused kernels run, else the reason.

    Raises:
        RuntimeError: fused kernels are switched on but cannot run here.
    """
    return why_not_fused_on(x.device, x.dtype, tokens=tokens, channels=channels, inducing=inducing)


def why_not_fused_on(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int = 1,
    channels: int = 1,
    inducing: int = 1,
    measured: bool = True,
) -> str | None:
    """`why_not_fused` where there is no tensor yet, or for a kernel that was not measured on a GPU.

    Args:
        device: of the call.
        dtype: of the call.
        tokens: its longest sequence.
        channels: its widest head.
        inducing: its larger number of inducing inputs.
        measured: False for a kernel that "auto" leaves alone.

    Returns:
        None where fused kernels run, else the reason.

    Raises:
        RuntimeError: fused kernels are switched on but cannot run here.
    """
    mode = fused_mode()
    reason = _obstacle(device.type, dtype, mode) or _excess(mode, tokens, channels, inducing)
    if mode == "on" and reason is not None and reason != TRANSFORMED:
        raise RuntimeError(f"fused kernels are switched on but cannot run here: {reason}")
    if reason is None and mode == "auto" and not measured:
        return "the kernel was not measured on a GPU ('on' takes it)"
    return reason


TRANSFORMED = "the call is transformed by torch.func"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _obstacle(device: str, dtype: torch.dtype, mode: Mode) -> str | None:
    """A compiler asks once, and keeps the answer as long as what it made."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # also where the compiler sees the transform
        return TRANSFORMED
    if mode == "off":
        return "switched off"
    if torch.compiler.is_exporting() and _mode.get() != "on":
        return "the call is exported (a block of 'on' keeps the kernels)"
    if dtype != torch.float32:
        return f"they compute in float32, not {str(dtype).removeprefix('torch.')}"
    if not (device == "cuda" or (mode == "on" and os.environ.get("TRITON_INTERPRET") == "1")):
        return f"the tensors are on {device}"
    return None if _has_triton() else "Triton is not installed (pip install 'gpattention[triton]')"


def _excess(mode: Mode, tokens: int, channels: int, inducing: int) -> str | None:
    """Which size is too large; a compiler may not know it yet, and compares."""
    sizes = (
        ("tokens", tokens, SHOWN_TOKENS, MOST_TOKENS),
        ("channels", channels, SHOWN_CHANNELS, MOST_CHANNELS),
        ("inducing inputs", inducing, SHOWN_INDUCING, MOST_INDUCING),
    )
    for name, size, shown, most in sizes:
        if size > most:
            return f"{size} {name} are more than the {most} that fit on chip"
        if size > shown and mode != "on":
            return f"{size} {name} are more than the {shown} measured on a GPU ('on' takes up to {most})"
    return None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def is_watched(*modules: nn.Module) -> bool:
    """Whether a call of these modules has to be a call: somebody hooked on to it, or handles it.

    Args:
        *modules: whose calls a fused path would skip.

    Returns:
        True where a hook or handler would miss its call.
    """
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks or is_handled(*modules):
        return True
    for m in modules:  # every step asks for every block: `any` takes twice as long
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
    return False


def with_parts(module: nn.Module) -> list[nn.Module]:
    """A module and all within it, as `module.modules()` in a fraction of its time, which every step takes.

    Args:
        module: the outermost.

    Returns:
        Each once.
    """
    found, seen = [module], {id(module)}
    for m in found:
        for part in m._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                found.append(part)
    return found


def is_plain(module: nn.Module, kind: type[Module]) -> TypeGuard[Module]:
    """Whether a module is of that very class, with nothing that watches or changes its calls.

    Args:
        module: in question.
        kind: the class.

    Returns:
        True where a fused path may do what the module does.
    """
    return type(module) is kind and not is_watched(module)
