"""SIGTERM and SIGINT ask a run to save and stop; a second one stops it at once.

Launchers pass a signal on to processes that the terminal has told already: what comes within two seconds is
the same request.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

import torch

SAME_REQUEST = 2.0  # seconds


class StopRequest:
    """While open, remembers the signal that asked to stop."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._when = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for wanted in (signal.SIGTERM, signal.SIGINT):
                self._before[wanted] = signal.signal(wanted, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for wanted, handler in self._before.items():
            signal.signal(wanted, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.asked is not None and time.monotonic() - self._when > SAME_REQUEST:
            raise KeyboardInterrupt
        if self.asked is None:
            self._when = time.monotonic()
        self.asked = self.asked or signal.Signals(number).name


def asked_together(stop: StopRequest, fabric: Any) -> bool:
    """Whether any process was asked to stop; all call it together, or one would wait for ever."""
    if fabric.world_size == 1:
        return stop.asked is not None
    asked = torch.tensor(float(stop.asked is not None), device=fabric.device)
    together = bool(fabric.all_reduce(asked, reduce_op="sum") > 0)
    if together and stop.asked is None:
        stop.asked = "another process"
    return together
