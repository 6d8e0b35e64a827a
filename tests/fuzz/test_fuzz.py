"""A short part of `make fuzz`, the same cases every time; and that the fuzz would notice."""

import functools
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpattention import gp
from tests.fuzz import commands, maths
from tests.fuzz.__main__ import check_of
from tests.fuzz.tally import WRONG, Tally, in_child, listing, run_cases, scratch

forks = pytest.mark.skipif(sys.platform != "linux", reason="children are forked, and limited as by Linux")


# area -> parts, and cases of each
SHORT = {
    "maths": (3, 200), "modules": (1, 150), "commands": (2, 8), "kills": (1, 4), "threads": (2, 5),
    "files": (2, 12),
}  # fmt: skip


@pytest.mark.parametrize(("area", "part"), [(a, i) for a, (parts, _) in SHORT.items() for i in range(parts)])
def test_area(area: str, part: int) -> None:
    if area in ("commands", "kills", "files") and sys.platform != "linux":
        pytest.skip("children are forked, and limited as by Linux")
    count = SHORT[area][1]
    tally = run_cases(area, check_of(area), range(part * count, (part + 1) * count))
    assert tally.counts["cases"] == count
    assert tally.faults == [], "\n".join(f"{kind}: {what}" for kind, what in tally.faults[:5])


class TestThatItNotices:
    """Each with a fault that is planted."""

    def test_a_wrong_variance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = gp.cgp_posterior

        def wrong(*tensors: torch.Tensor, **options: object) -> object:
            found = right(*tensors, **options)  # type: ignore[arg-type]
            variance = found.variance * (1 + 1e-6)
            return SimpleNamespace(mean=found.mean, variance=variance, covariance=found.covariance)

        function = maths.FUNCTIONS["cgp"]
        planted = {"cgp": maths.Function(wrong, function.oracle, function.takes)}
        monkeypatch.setattr(maths, "FUNCTIONS", planted)
        assert run_cases("maths", maths.check, range(20)).counts[WRONG] > 0

    @forks
    def test_children_that_take_too_much(self) -> None:
        assert in_child(functools.partial(time.sleep, 60), seconds=0.2).kind == "too slow"
        hungry = in_child(lambda: len(bytearray(1 << 30)), memory=1 << 28)
        assert hungry.error == "MemoryError: "
        assert not hungry.refused
        assert in_child(lambda: 3).value == 3
        assert in_child(lambda: sys.exit(2)).value == 2

    @forks
    def test_files_outside_and_control_characters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def evil(words: list[str]) -> int:
            Path("../../evil").write_text("x")
            sys.stdout.write("a\x1b[2J\n")
            return 7

        monkeypatch.setattr(commands, "main", evil)
        tally = Tally("commands")
        with scratch() as inner:
            (inner / "home").mkdir()
            (inner / "recipe.toml").write_text("")
            before = listing(inner.parents[2], but=inner)
            outcome = in_child(functools.partial(commands.run_command, ["status"], inner))
            commands.judge(["status"], outcome, inner, tally)
            assert set(listing(inner.parents[2], but=inner)) - set(before) == {str(inner.parents[1] / "evil")}
        assert tally.counts[WRONG] == 2
        assert "exit code 7" in tally.faults[0][1]
        assert "raw control characters on stdout" in tally.faults[1][1]
