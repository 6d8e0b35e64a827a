"""Several processes on one GPU: the service is started, named to them, and ended; a stand-in plays it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpattention.cli.main import main
from gpattention.experiments import sharing
from gpattention.experiments.sharing import CONTROL, LOG, PIPE, SharingError, shared_gpu
from tests.studies.reproduced import write_plan

SCRIPT = f"""#!{sys.executable}
import os, pathlib, sys
told = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read().strip()
with open({{log!r}}, "a") as log:
    log.write(f"{{{{told}}}} {{{{os.environ['{PIPE}']}}}} {{{{os.environ['{LOG}']}}}}\\n")
{{then}}
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without the service: nothing on the path."""
    monkeypatch.delenv(PIPE, raising=False)
    monkeypatch.delenv(LOG, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sharing, "FURTHER", ())
    return tmp_path


def service(folder: Path, then: str = "") -> Path:
    log = folder / "log"
    program = folder / CONTROL
    program.write_text(SCRIPT.format(log=str(log), then=then))
    program.chmod(0o755)
    return log


def test_it_is_started_named_and_ended(alone: Path) -> None:
    log = service(alone)
    with shared_gpu():
        place = os.environ[PIPE]
        assert os.environ[LOG] == place
        assert Path(place).is_dir()
        assert log.read_text() == f"-d {place} {place}\n"
    assert log.read_text().splitlines()[1:] == [f"quit {place} {place}"]
    assert PIPE not in os.environ
    assert LOG not in os.environ
    assert not Path(place).exists()


def test_it_ends_after_a_failure_too(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG, "mine")
    log = service(alone)
    with pytest.raises(KeyError), shared_gpu():
        raise KeyError("work")
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["-d", "quit"]
    assert os.environ[LOG] == "mine"


def test_one_that_runs_already_is_used_and_left(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = service(alone)
    monkeypatch.setenv(PIPE, "theirs")
    with shared_gpu():
        assert os.environ[PIPE] == "theirs"
    assert not log.exists()


def test_without_the_service(alone: Path) -> None:
    with pytest.raises(SharingError, match=r"expected nvidia-cuda-mps-control .* got none"), shared_gpu():
        pass


@pytest.mark.parametrize(
    ("then", "told"),
    [("sys.exit('no such device')", "did not start: no such device"), ("sys.exit(3)", "exit code 3")],
)
def test_a_service_that_does_not_start(alone: Path, then: str, told: str) -> None:
    service(alone, then)
    with pytest.raises(SharingError, match=told), shared_gpu():
        pass
    assert PIPE not in os.environ


def test_a_service_that_does_not_answer(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service(alone, "import time; time.sleep(60)")
    monkeypatch.setattr(sharing, "PATIENCE", 0.2)
    with pytest.raises(SharingError, match="no answer after"), shared_gpu():
        pass


def test_one_that_does_not_quit_is_ended_by_its_number(alone: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    service(
        alone,
        f"""
if told == "-d":
    pathlib.Path(os.environ["{PIPE}"], "{CONTROL}.pid").write_text("{daemon.pid}")
sys.exit(told == "quit")
""",
    )
    with shared_gpu():
        place = Path(os.environ[PIPE])
    assert daemon.wait(10) == -signal.SIGTERM
    assert not place.exists()


def test_one_that_cannot_be_ended_is_told_of(alone: Path) -> None:
    service(
        alone,
        f"""
pathlib.Path(os.environ["{PIPE}"], "control").touch()
sys.exit(told == "quit")
""",
    )
    with pytest.warns(RuntimeWarning, match=f"did not end; .* echo quit | {PIPE}="), shared_gpu():
        place = Path(os.environ[PIPE])
    assert place.is_dir()  # without it nobody could end the service
    shutil.rmtree(place)


def test_a_daemon_that_keeps_what_it_writes_to_is_not_waited_for(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service(alone, "if told == '-d' and os.fork() == 0:\n    import time; time.sleep(3); os._exit(0)")
    monkeypatch.setattr(sharing, "PATIENCE", 2.0)
    with shared_gpu():
        pass


def test_a_signal_ends_it_too(alone: Path) -> None:
    log = service(alone)
    outside = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    try:
        with pytest.raises(SystemExit) as ended, shared_gpu():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, outside)
    assert ended.value.code == 128 + signal.SIGHUP
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["-d", "quit"]


def test_commands_refuse_it_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path, ("gp",), seeds=[0])
    for command in (["reproduce", str(tmp_path / "plan.toml")], ["sweep", str(tmp_path / "base.toml")]):
        assert main([*command, "--share-gpu", "--device", "cpu"]) == 2
        assert "expected a CUDA device with --share-gpu, got cpu" in capsys.readouterr().err
