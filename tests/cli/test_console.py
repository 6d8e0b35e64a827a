"""What a command writes: a bar in a terminal, a line for what is done elsewhere, tables."""

import io

import pytest

from gpattention.cli.console import Bar, Bars, Overall, duration, shortened, table
from gpattention.runs.tables import Bold


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    bar = Bar("file", "MiB", scale=1 << 20)
    bar(3 << 19, 4 << 20, note="a [bold]note")
    assert "file" in terminal.getvalue()
    bar(4 << 20, 4 << 20, note="a [bold]note")
    assert "4/4 MiB" in terminal.getvalue()
    assert "a [bold]note" in terminal.getvalue()  # words are no markup
    after = terminal.getvalue()
    bar.close()
    bar.log("a line for logs alone")
    assert terminal.getvalue() == after
    other = Bar("images")
    other(7)
    other.close()
    assert "images" in terminal.getvalue().removeprefix(after)


def test_a_line_elsewhere_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = io.StringIO()
    monkeypatch.setattr("sys.stderr", quiet)
    bar = Bar("file\x1b[2J", "images")
    bar(7)
    bar(3, 7)
    bar.close()
    assert quiet.getvalue() == ""
    bar(7, 7)
    bar.log("epoch 1/2")
    done, line = quiet.getvalue().splitlines()
    assert "\x1b" not in done
    assert "7 images in 0.0 s" in done
    assert line.endswith("epoch 1/2  0 s")


def test_bars_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = io.StringIO()
    monkeypatch.setattr("sys.stderr", quiet)
    bars = Bars()
    bars.close()
    for what in ("one", "two"):
        for done in (1, 2):
            bars(what, done, 2)
    bars.close()
    assert [line.split()[0] for line in quiet.getvalue().splitlines()] == ["one", "two"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (5340, "89 min"), (5400, "1 h 30 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_tables_align() -> None:
    lines = table(("name", "n"), [("a", "1"), ("bcdefg", "234")], right=[1]).splitlines()
    assert lines == ["name      n", "a         1", "bcdefg  234"]
    rows = [("a", Bold("[1]")), ("b\x1b[2J", "2")]
    assert table(("name", "n"), rows).splitlines()[1].split() == ["a", "*[1]"]
    assert "\x1b[1m[1]" in table(("name", "n"), rows, bold=True)
    assert "\x1b[2J" not in table(("name", "n"), rows, bold=True)


def test_long_texts_lose_their_middle() -> None:
    assert shortened("short\n text", 20) == "short text"
    cut = shortened("0123456789" * 3, 11)
    assert cut == "0123...6789"
    assert len(shortened("0123456789" * 3, 12)) == 12


def test_several_pieces_of_work_share_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setenv("TERM", "xterm")
        overall = Overall("all")
        for piece, total in (("a", 10.0), ("[b]", 30.0)):
            overall(piece, "", 0.0, total)
        overall("a", "training, epoch 1", 5.0, 10.0)
        overall("a", "training, epoch 2", 6.0, 10.0)
        overall("[b]", "training, epoch 1", 0.0, 30.0)
        overall("a", "done", 10.0, 10.0)
        overall.close()
        overall.close()
        shown = terminal.getvalue()
        if terminal.isatty():
            assert "starting" in shown
            assert "25%" in shown  # 10 of 40
            assert "training, epoch 1" in shown
            assert "  [b]" in shown  # a name is no markup
        else:
            assert shown == "  a: training\n  [b]: training\n  a: done\n"
