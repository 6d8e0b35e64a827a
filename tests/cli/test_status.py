"""`gpattention status`: every state of a run, its rate and the time left, from what a run writes down."""

import json
import threading
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpattention.training.folder import LOCK, RunInUseError, exclusive, in_use
from gpattention.training.status import RunStatus, read_statuses
from tests.cli.conftest import Run
from tests.training.toy import toy_recipe

NOW = 1000.0
GP = {"event": "phase", "phase": "gp", "step": 0}


def validated(epoch: int, when: float, *, nll: float = 0.5) -> dict[str, Any]:
    """Ten steps an epoch."""
    return {
        "event": "validated", "time": when, "epoch": epoch, "step": 10 * epoch, "validation_accuracy": 0.75,
        "validation_nll": nll,
    }  # fmt: skip


def write(folder: Path, *events: dict[str, Any], kernel_epochs: int = 0, epochs: int = 20) -> Path:
    recipe = toy_recipe("cgp", phases__kernel_epochs=kernel_epochs, phases__epochs=epochs)
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), default=dict))
    lines = [json.dumps({"time": 0.0, **event}) for event in events]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def status(folder: Path, *, held: bool = False) -> RunStatus:
    """Of a run; `held` while somebody trains it."""
    with exclusive(folder) if held else nullcontext():
        (found,) = read_statuses([folder], now=NOW)
    return found


@pytest.mark.parametrize(
    ("last", "state", "reason"),
    [
        ({"event": "finished", "step": 200}, "finished", None),
        ({"event": "failed", "step": 7, "reason": "the loss is nan"}, "failed", "the loss is nan"),
        ({"event": "stopped", "step": 7, "signal": "SIGTERM"}, "stopped", "SIGTERM"),
        ({"event": "warm start"}, "cut off", None),
    ],
)
def test_what_was_written_last_decides(
    tmp_path: Path, last: dict[str, Any], state: str, reason: str | None
) -> None:
    found = status(write(tmp_path / "run", GP, validated(5, 900.0), last))
    assert (found.state, found.reason, found.epoch, found.epochs) == (state, reason, 5, 20)
    assert found.seconds_left is None  # nobody trains


def test_a_run_that_was_not_begun_waits(tmp_path: Path) -> None:
    found = status(write(tmp_path / "run"))
    assert (found.state, found.phase, found.epoch, found.silent) == ("waiting", None, 0, None)


def test_whoever_holds_the_folder_trains(tmp_path: Path) -> None:
    """Also after a failure that was resumed: what is written last is older than that."""
    folder = write(tmp_path / "run", GP, validated(5, 900.0), validated(10, 950.0))
    found = status(folder, held=True)
    assert (found.state, found.phase, found.silent) == ("training", "gp", 50.0)
    assert found.steps_per_second == pytest.approx(1.0)
    assert found.seconds_left == pytest.approx(50.0)  # 100 steps from the validation on, 50 s ago
    assert not found.at_least
    assert status(folder).state == "cut off"  # the lock is given free with its process


def test_in_a_first_phase_the_time_left_is_a_lower_bound(tmp_path: Path) -> None:
    kernel = {**GP, "phase": "kernel"}
    folder = write(tmp_path / "run", kernel, validated(5, 900.0), validated(10, 1000.0), kernel_epochs=20)
    found = status(folder, held=True)
    assert found.at_least
    assert (found.epochs, found.seconds_left) == (40, pytest.approx(600.0))


@pytest.mark.parametrize(
    "events",
    [
        [GP, validated(5, 900.0)],
        [{**GP, "phase": "kernel"}, validated(5, 800.0), validated(10, 900.0), GP],
        [GP, validated(5, 100.0), GP, {"event": "resumed", "step": 50}, validated(10, 900.0)],
    ],
    ids=["one validation", "another phase", "a pause in between"],
)
def test_no_rate_where_none_was_measured(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    folder = write(tmp_path / "run", *events)
    found = status(folder, held=True)
    assert (found.steps_per_second, found.seconds_left) == (None, None)


@pytest.mark.parametrize("when", [(1900.0, 1800.0), (900.0, 900.0), (5000.0, 6000.0)], ids=str)
def test_a_clock_that_went_back_or_is_ahead(when: tuple[float, float], tmp_path: Path) -> None:
    """Of events in the future and in the wrong order no time is negative, and no rate is made up."""
    folder = write(tmp_path / "run", GP, validated(5, when[0]), validated(10, when[1]))
    found = status(folder, held=True)
    assert found.silent is not None
    assert found.silent >= 0
    if when[1] <= when[0]:
        assert (found.steps_per_second, found.seconds_left) == (None, None)
    else:
        assert found.steps_per_second == pytest.approx(0.05)
        assert found.seconds_left == pytest.approx(2000.0)  # as if the validation were now


def test_runs_that_cannot_be_read_do_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    good = write(tmp_path / "good", GP, validated(20, 900.0), {"event": "finished", "step": 200})
    (good / "evaluation").mkdir()
    (good / "evaluation" / "clean.json").write_text("{}")
    bad = write(tmp_path / "bad")
    (bad / "events.jsonl").write_text("no JSON\n")
    write(tmp_path / "refused", GP)
    (tmp_path / "odd" / "recipe.json").mkdir(parents=True)
    real = Path.read_bytes

    def refusing(path: Path) -> bytes:
        if path.parent.name == "refused":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    out = run("status", tmp_path).out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert rows["good"] == ["finished", "gp", "20/20", "0.750", "0.500", "clean"]
    assert rows["bad"] == ["unknown"]
    assert "3 unknown, 1 finished" in out
    assert f"{bad / 'events.jsonl'}, line 1 is not JSON" in out
    assert f"refused: [Errno 13] Permission denied: '{tmp_path}/refused/recipe.json'" in out
    assert f"odd: expected a run in {tmp_path}/odd, got no recipe.json there" in out


def test_a_first_phase_of_another_run_counts(tmp_path: Path) -> None:
    taken = {"event": "first phase taken", "source": "other", "step": 20}
    assert status(write(tmp_path / "run", taken, GP, kernel_epochs=2)).epoch == 2


def test_json_and_watching_end_where_nothing_trains(tmp_path: Path, run: Run) -> None:
    folder = write(tmp_path / "run", GP, validated(5, 900.0, nll=float("inf")))
    (line,) = run("status", folder, tmp_path, "--json", "--watch", "0.01").out.splitlines()  # named twice
    found = json.loads(line, parse_constant=pytest.fail)
    assert [found[key] for key in ("run", "state", "nll", "folder")] == ["run", "cut off", None, str(folder)]


def test_a_look_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / LOCK).touch()
    looking = (tmp_path / LOCK).open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    ended = threading.Timer(0.1, looking.close)
    ended.start()
    with exclusive(tmp_path):  # waits for the look, which takes no time in earnest
        assert in_use(tmp_path) is True
        monkeypatch.setattr("gpattention.training.folder.PATIENCE", ContextVar("patience", default=0.0))
        with pytest.raises(RunInUseError), exclusive(tmp_path):
            pass
    ended.join()
    assert in_use(tmp_path) is False
