"""Progress bars for a terminal; elsewhere, in a log perhaps, a line for each piece of work that is done."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpattention.runs.tables import visible
from gpattention.training import Progress

WIDTH = 24
PAUSE = 0.1  # seconds between two drawings


class Line:
    """One line of standard error that is drawn anew, at most ten times a second."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.start = time.monotonic()
        self._shown = -PAUSE
        self._open = False

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def due(self) -> bool:
        """Whether it is time to draw again."""
        return self.terminal and time.monotonic() - self._shown >= PAUSE

    def draw(self, text: str, *, last: bool = False) -> None:
        """Replace what stands there; a line longer than the terminal would leave traces, so it is cut."""
        columns = shutil.get_terminal_size().columns
        sys.stderr.write("\r\x1b[K" + visible(text)[: columns - 1] + ("\n" if last else ""))
        sys.stderr.flush()
        self._shown, self._open = time.monotonic(), not last

    def end(self) -> None:
        """Leave a bar that broke off where it is, so that a message can follow."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False

    def say(self, text: str) -> None:
        """A line that stays."""
        sys.stderr.write(f"{visible(text)}\n")
        sys.stderr.flush()


class Bar:
    """The bar of a training run: call it with every step's `Progress`, and `validated` with every row."""

    def __init__(self, name: str, epochs: int) -> None:
        self._name, self._epochs = name, epochs
        self._line = Line()
        self._before: int | None = None  # steps that an earlier part of a resumed run made

    def __call__(self, p: Progress) -> None:
        """Redraw."""
        if self._before is None:
            self._before = p.step - 1
        last = p.step == p.total
        if self._line.terminal and (last or self._line.due):
            self._line.draw(self._text(p), last=last)

    def validated(self, row: Mapping[str, Any]) -> None:
        """A line in a log; in a terminal the bar tells it."""
        if not self._line.terminal:
            self._line.say(
                f"{self._name} epoch {row['epoch']}/{self._epochs} {row['phase']:<6} "
                f"loss {row['train_loss']:.3f}  accuracy {row['validation_accuracy']:.3f}  "
                f"NLL {row['validation_nll']:.3f}  {duration(self._line.spent)}"
            )

    def _text(self, p: Progress) -> str:
        left = self._line.spent / (p.step - (self._before or 0)) * (p.total - p.step)
        accuracy = "" if p.accuracy is None else f"  accuracy {p.accuracy:.3f}"
        penalty = "" if p.regularizer is None else f"  alpha {p.alpha:.3f} x {p.regularizer:.3f}"
        return (
            f"{self._name} {drawn(p.step, p.total)} {p.step}/{p.total} {p.phase:<6} loss {p.loss:.3f}"
            f"{accuracy}{penalty}  {p.examples_per_second:.0f}/s  {duration(left)} left"
        )


class CountBar:
    """The bar of anything that counts: call it with how much is done, and how much there is, if known."""

    def __init__(self, name: str, unit: str = "", *, scale: float = 1.0) -> None:
        self._name, self._unit, self._scale = name, unit, scale
        self._line = Line()
        self._first: int | None = None  # what was there at the first call

    def __call__(self, done: int, total: int | None = None) -> None:
        """Redraw."""
        if self._first is None:
            self._first = done
        last = total is not None and done >= total
        if not self._line.terminal:
            if last:
                self._line.say(f"{self._name} {self._amount(done)} in {self._line.spent:.1f} s")
        elif last or self._line.due:
            self._line.draw(self._text(done, total), last=last)

    def end(self) -> None:
        """When the work broke off, or nobody knew where it would end."""
        self._line.end()

    def _text(self, done: int, total: int | None) -> str:
        if total is None:
            return f"{self._name} {self._amount(done)}"
        new = done - (self._first or 0)
        left = (
            f"  {duration(self._line.spent / new * (total - done))} left" if new > 0 and done < total else ""
        )
        return f"{self._name} {drawn(done, total)} {self._number(done)}/{self._amount(total)}{left}"

    def _amount(self, count: int) -> str:
        return f"{self._number(count)} {self._unit}".rstrip()

    def _number(self, count: int) -> str:
        whole = count % self._scale == 0
        return f"{count / self._scale:.0f}" if whole else f"{count / self._scale:.1f}"


class Bars:
    """A bar for each thing that is done, one after the other; `new` makes the bar of a thing."""

    def __init__(self, new: Callable[[str], CountBar] = CountBar) -> None:
        self._new = new
        self._what = ""
        self._bar: CountBar | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Redraw."""
        if what != self._what or self._bar is None:
            self.end()
            self._what, self._bar = what, self._new(what)
        self._bar(done, total)

    def end(self) -> None:
        """Leave the last one where it is."""
        if self._bar is not None:
            self._bar.end()


def drawn(done: int, total: int) -> str:
    """[######......]"""
    filled = round(WIDTH * min(done / max(total, 1), 1.0))
    return "[" + "#" * filled + "." * (WIDTH - filled) + "]"


def duration(seconds: float) -> str:
    """45 s, 3 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
