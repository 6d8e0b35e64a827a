"""Bars: one line that is drawn anew in a terminal, a line for what is done elsewhere."""

import io
import re
from types import SimpleNamespace

import pytest

from gpattention.cli.bar import WIDTH, Bar, CountBar, Line, drawn, duration
from gpattention.cli.table import shortened, table
from gpattention.training import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 200 columns with a clock that moves a second at every look."""
    shown, clock = Terminal(), iter(range(1, 100_000))
    monkeypatch.setattr("gpattention.cli.bar.sys", SimpleNamespace(stderr=shown))
    monkeypatch.setattr("gpattention.cli.bar.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setenv("COLUMNS", "200")
    return shown


def step(number: int, total: int) -> Progress:
    return Progress(number, total, 0, "gp", 0.5, 0.9, 0.01, 1.25, 1000.0)


def test_training_in_a_terminal(terminal: Terminal) -> None:
    bar = Bar("run", 1)
    for number in range(1, 5):
        bar(step(number, 4))
    text = terminal.getvalue()
    assert text.count("\r\x1b[K") == 4
    assert text.endswith("left\n")
    assert "alpha 0.010 x 1.250" in text
    assert "accuracy 0.900" in text
    assert f"[{'#' * WIDTH}] 4/4" in text


def test_a_resumed_run_estimates_from_its_own_steps(terminal: Terminal) -> None:
    bar = Bar("run", 1)
    for number in range(901, 951):
        bar(step(number, 1000))
    last = terminal.getvalue().split("\r")[-1]
    (minutes,) = re.findall(r"(\d+) min left", last)
    # three looks at the clock for a step, fifty steps to go; counted from step 0 it would be 8 seconds
    assert abs(60 * int(minutes) - 3 * 50) <= 60


def row(epoch: int) -> dict[str, object]:
    return {
        "epoch": epoch, "phase": "gp", "train_loss": 0.5, "validation_accuracy": 0.9, "validation_nll": 0.25,
    }  # fmt: skip


def test_training_elsewhere_is_a_line_for_each_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("gpattention.cli.bar.sys", SimpleNamespace(stderr=shown))
    bar = Bar("run", 2)
    for number in range(1, 5):
        bar(step(number, 4))
        if number % 2 == 0:
            bar.validated(row(number // 2))
    assert shown.getvalue() == "".join(
        f"run epoch {epoch}/2 gp     loss 0.500  accuracy 0.900  NLL 0.250  0 s\n" for epoch in (1, 2)
    )


def test_a_terminal_has_the_bar_alone(terminal: Terminal) -> None:
    Bar("run", 2).validated(row(1))
    assert terminal.getvalue() == ""


def test_counts_in_a_terminal(terminal: Terminal) -> None:
    bar = CountBar("file", "MiB", scale=1 << 20)
    bar(1 << 20, 4 << 20)
    bar(2 << 20, 4 << 20)
    assert "file [############............] 2/4 MiB" in terminal.getvalue()
    assert terminal.getvalue().endswith("left")
    bar(4 << 20, 4 << 20)
    assert terminal.getvalue().endswith("4/4 MiB\n")
    bar.end()
    assert terminal.getvalue().endswith("4/4 MiB\n")
    part = CountBar("part", "MiB", scale=1 << 20)
    part(3 << 19, 4 << 20)
    assert "part [#########...............] 1.5/4 MiB" in terminal.getvalue()


def test_counts_without_an_end(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = CountBar("file", "images")
    bar(7)
    bar.end()
    assert terminal.getvalue().endswith("file 7 images\n")
    quiet = io.StringIO()
    monkeypatch.setattr("gpattention.cli.bar.sys", SimpleNamespace(stderr=quiet))
    other = CountBar("file")
    other(7)
    other.end()
    assert quiet.getvalue() == ""
    other(7, 7)
    assert quiet.getvalue().startswith("file 7 in ")


def test_lines_fit_the_terminal_and_wait(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    line = Line()
    line.draw("x" * 50)
    assert terminal.getvalue() == "\r\x1b[K" + "x" * 19
    assert line.due
    monkeypatch.setattr("gpattention.cli.bar.PAUSE", 10.0)
    assert not line.due


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (5340, "89 min"), (5400, "1 h 30 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_bars_are_full_at_the_end_and_never_longer() -> None:
    assert drawn(0, 5).count("#") == 0
    assert drawn(5, 5) == drawn(7, 5) == f"[{'#' * WIDTH}]"
    assert drawn(0, 0).count("#") == 0


def test_tables_align() -> None:
    lines = table(("name", "n"), [("a", "1"), ("bcdefg", "234")], right=[1]).splitlines()
    assert lines == ["name      n", "a         1", "bcdefg  234"]


def test_long_texts_lose_their_middle() -> None:
    assert shortened("short\n text", 20) == "short text"
    cut = shortened("0123456789" * 3, 11)
    assert cut == "0123...6789"
    assert len(shortened("0123456789" * 3, 12)) == 12
