"""SIGTERM ends a command as Ctrl-C does: in order, with exit code 130 and a line that says so.

Training listens to both itself and saves its state first.
"""

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# by default SIGTERM ends Python without a word, and Ctrl-C does not say that it did
_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Inside, both raise `KeyboardInterrupt`; what somebody else handles or ignores is left to them."""
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) == default]
    for number in ours:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, _DEFAULTS[number])


def told_stop(stop: BaseException, given: argparse.Namespace) -> str:
    """Why a command ended; commands that keep what is finished have said so by `when_stopped`."""
    if not isinstance(stop, KeyboardInterrupt):
        return str(stop)
    kept = getattr(given, "when_stopped", None)
    return (str(stop) or "interrupted") + (f"; {kept}" if kept else "")


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")
