"""A progress bar for a terminal; silent elsewhere but for one line at the end."""

import sys
import time

from gpattention.training import Progress

WIDTH = 24


class Bar:
    """Call it with every step's `Progress`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._shown = 0.0

    def __call__(self, p: Progress) -> None:
        """Redraw, at most ten times a second."""
        now, last = time.monotonic(), p.step == p.total
        if not last and (not self._terminal or now - self._shown < 0.1):
            return
        self._shown = now
        spent = now - self._start
        left = spent / p.step * (p.total - p.step)
        filled = round(WIDTH * p.step / p.total)
        bar = "#" * filled + "." * (WIDTH - filled)
        accuracy = "" if p.accuracy is None else f"  accuracy {p.accuracy:.3f}"
        penalty = "" if p.regularizer is None else f"  alpha {p.alpha:.3f} x {p.regularizer:.3f}"
        line = (
            f"{self._name} [{bar}] {p.step}/{p.total} {p.phase:<6} loss {p.loss:.3f}{accuracy}{penalty}"
            f"  {p.examples_per_second:.0f}/s  {left:.0f} s left"
        )
        if self._terminal:
            sys.stderr.write("\r\x1b[K" + line + ("\n" if last else ""))
        else:
            sys.stderr.write(f"{self._name} {p.total} steps in {spent:.1f} s, loss {p.loss:.3f}\n")
        sys.stderr.flush()
