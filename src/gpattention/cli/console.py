"""What a command writes: lines, tables, and progress with the time left.

Names come from folders and files of anybody: what they would do to a terminal is shown instead of done.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpattention.files import visible

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def say(line: str = "", *, error: bool = False) -> None:
    """Write one line, at once."""
    print(visible(line), file=sys.stderr if error else sys.stdout, flush=True)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), bold: bool = False
) -> str:
    """Aligned columns two spaces apart; those in `right` (numbers) end together, others begin together.

    Cells that are `Bold` are so with `bold`, else they have a star.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gpattention.runs.tables import Bold  # takes a second to import

    def cell(text: str) -> Text:
        shown = visible(text)
        if not isinstance(text, Bold):
            return Text(shown)
        return Text(shown, style="bold") if bold else Text(f"*{shown}")

    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="none")
    for i, head in enumerate(heads):
        made.add_column(cell(head), justify="right" if i in right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*map(cell, row))
    # as wide as it needs: a table in a file is not cut to the width of some terminal
    console = Console(width=10_000, force_terminal=bold, color_system="standard" if bold else None)
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def shortened(text: str, width: int) -> str:
    """The text on one line; its middle left out where it is longer than `width`."""
    text = visible(" ".join(text.split()))
    if len(text) <= width:
        return text
    kept = width - 3
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def duration(seconds: float) -> str:
    """45 s, 3 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class _Progress:
    """Progress on standard error; in a terminal rich draws it, from the first call on."""

    def __init__(self, name: str) -> None:
        self._name, self.terminal = visible(name), sys.stderr.isatty()
        self._shown: tuple[Progress, TaskID] | None = None

    def _begin(self, columns: Sequence[Any], task: dict[str, Any], **look: Any) -> "tuple[Progress, TaskID]":
        from rich.console import Console
        from rich.progress import Progress

        progress = Progress(*columns, console=Console(stderr=True), **look)
        progress.start()
        self._shown = progress, progress.add_task(self._name, **task)
        return self._shown

    def close(self) -> None:
        """Leave what is shown where it is, so that a message can follow; a second call does nothing."""
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None


class Bar(_Progress):
    """Progress of one piece of work on standard error.

    In a terminal a bar with the time left; elsewhere, as in a log, one line when it is done.  Call it with
    how much is done, how much there is (if known) and a note that follows the numbers.

    Args:
        name: name of the work.
        unit: what is counted.
        scale: how many counts are one unit, e.g. bytes of a MiB.
    """

    def __init__(self, name: str, unit: str = "", *, scale: float = 1.0) -> None:
        super().__init__(name)
        self._unit, self._scale, self._start = unit, scale, time.monotonic()

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """Show how far the work is."""
        last = total is not None and done >= total
        if self.terminal:
            progress, task = self._shown or self._draw(done)
            amount = f"{self._number(done)}/{self._amount(total)}" if total else self._amount(done)
            progress.update(task, completed=done, total=total, note=visible(note), amount=amount)
            if last:
                self.close()
        elif last:
            say(f"{self._name} {self._amount(done)} in {time.monotonic() - self._start:.1f} s", error=True)

    def log(self, line: str) -> None:
        """Write a line where no bar is shown."""
        if not self.terminal:
            say(f"{self._name} {line}  {duration(time.monotonic() - self._start)}", error=True)

    def _draw(self, done: int) -> "tuple[Progress, TaskID]":
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        columns = [
            TextColumn("{task.description}", markup=False), BarColumn(24),
            TextColumn("{task.fields[amount]}", markup=False), TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False),
        ]  # fmt: skip
        # what an earlier part of a resumed run did says nothing about the speed of this one
        return self._begin(columns, {"completed": done, "amount": "", "note": ""})

    def _number(self, count: int) -> str:
        return f"{count / self._scale:.{0 if count % self._scale == 0 else 1}f}"

    def _amount(self, count: int) -> str:
        return f"{self._number(count)} {self._unit}".rstrip()


class Bars:
    """A bar for each thing that is done, one after the other; `new` makes the bar of a thing."""

    def __init__(self, new: Callable[[str], Bar] = Bar) -> None:
        self._new = new
        self._what = ""
        self._bar: Bar | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far one thing is."""
        if what != self._what or self._bar is None:
            self.close()
            self._what, self._bar = what, self._new(what)
        self._bar(done, total)

    def close(self) -> None:
        """Leave the last one where it is."""
        if self._bar is not None:
            self._bar.close()


class Overall(_Progress):
    """Progress of several pieces of work at once, and the time left for all of it, on standard error.

    In a terminal a bar for the whole with a line for each piece under way; elsewhere, as in a log, a line
    whenever a piece comes to something else.

    Args:
        name: name of the whole.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._starts: dict[str, float] = {}
        self._amounts: dict[str, tuple[float, float]] = {}  # done, and how much there is
        self._at: dict[str, str] = {}
        self._lines: dict[str, TaskID] = {}

    def __call__(self, piece: str, what: str, done: float, total: float) -> None:
        """Show what a piece is at ("done" at its end), and how much of its work is done."""
        self._amounts[piece] = done, total
        seconds = time.monotonic() - self._starts.setdefault(piece, time.monotonic()) if what else 0.0
        if self.terminal:
            self._show(piece, what, seconds)
        elif (stage := what.partition(",")[0]) != self._at.get(piece, ""):
            self._at[piece] = stage
            say(f"  {piece}: {stage}{f' after {duration(seconds)}' if seconds > 1 else ''}", error=True)

    def _show(self, piece: str, what: str, seconds: float) -> None:
        progress, whole = self._shown or self._draw()
        done, total = (sum(each) for each in zip(*self._amounts.values(), strict=True))
        share = f"{done / total:.0%}" if done else "starting"
        progress.update(whole, completed=done, total=total, note=share)
        if what == "done":
            if piece in self._lines:
                progress.remove_task(self._lines.pop(piece))
            line = f"  {visible(piece):<10} {duration(seconds)}"
            progress.console.print(line, markup=False, highlight=False)
        elif what:
            if piece not in self._lines:
                self._lines[piece] = progress.add_task(f"  {visible(piece)}", note="")
            amount, most = self._amounts[piece]
            progress.update(self._lines[piece], completed=amount, total=most, note=visible(what))

    def _draw(self) -> "tuple[Progress, TaskID]":
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn

        columns = [
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(24),
            TimeRemainingColumn(compact=True), TextColumn("{task.fields[note]}", markup=False),
        ]  # fmt: skip
        return self._begin(columns, {"note": "starting"}, speed_estimate_period=120, transient=True)
