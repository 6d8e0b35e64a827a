"""SIGTERM and SIGINT ask a run to save and stop; a second one stops it at once."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """While open, remembers the signal that asked to stop."""

    def __init__(self) -> None:
        self.asked: str | None = None
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
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
