"""The one switch between fused Triton kernels and plain torch operations, and why it stands as it does.

"auto" takes the kernels for float32 on a CUDA device where Triton is installed and the sizes are within
what one program holds on chip; everything else runs the plain operations, which are the reference.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

Mode = Literal["auto", "on", "off"]
_MODES: tuple[Mode, ...] = get_args(Mode)
MOST_TOKENS = 128
MOST_CHANNELS = 64

_mode: ContextVar[Mode | None] = ContextVar("gpattention_fused_kernels", default=None)


@contextmanager
def fused_kernels(mode: Mode) -> Iterator[None]:
    """Choose for a block whether fused kernels run: "auto" (where they can), "on" or "off".

    "on" raises `RuntimeError` with the reason where they cannot; it also runs them on the CPU under
    Triton's interpreter (`TRITON_INTERPRET=1`), which is slow and meant for tests.  Outside any block the
    environment variable `GPATTENTION_FUSED` decides, "auto" when unset.  `why_not_fused` tells what a
    call would do.

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


def fused_mode() -> Mode:
    """The mode in force here."""
    chosen = _mode.get()
    if chosen is not None:
        return chosen
    found = os.environ.get("GPATTENTION_FUSED", "auto")
    for mode in _MODES:
        if found == mode:
            return mode
    raise ValueError(f"expected GPATTENTION_FUSED to be one of {', '.join(_MODES)}, got {found!r}")


def why_not_fused(x: Tensor, *, tokens: int = 1, channels: int = 1) -> str | None:
    """None where fused kernels run on tensors like x, else the reason why plain operations do.

    `tokens` is the longest sequence and `channels` the widest head of the call.
    """
    if torch.compiler.is_compiling():
        return "the call is being compiled"
    mode = fused_mode()
    reason = "switched off" if mode == "off" else _obstacle(x, tokens, channels, interpreted=mode == "on")
    if mode == "on" and reason is not None:
        raise RuntimeError(f"fused kernels are switched on but cannot run here: {reason}")
    return reason


def _obstacle(x: Tensor, tokens: int, channels: int, *, interpreted: bool) -> str | None:
    if x.dtype != torch.float32:
        return f"they compute in float32, not {str(x.dtype).removeprefix('torch.')}"
    if not (x.is_cuda or (interpreted and os.environ.get("TRITON_INTERPRET") == "1")):
        return f"the tensors are on {x.device.type}"
    if not _has_triton():
        return "Triton is not installed (pip install gpattention[triton])"
    if tokens > MOST_TOKENS:
        return f"{tokens} tokens are more than the {MOST_TOKENS} that fit on chip"
    if channels > MOST_CHANNELS:
        return f"{channels} channels are more than the {MOST_CHANNELS} that fit on chip"
    return None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
