"""Ctrl-C: exit code 130, what is kept, and a command that goes on, which then does."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from gpattention.cli import main
from gpattention.cli.options import Stopped
from gpattention.runs.recipe import write_recipe
from tests.cli.conftest import Run
from tests.runs.tiny_runs import digits_recipe, train_digits

SMALL = "--kernel-epochs 1 --epochs 1 --jobs 1 --models kernel,softmax"


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    """SIGINT raises, as in a terminal: shells start what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(
    place: str, when: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], bool]:
    """Send this process a SIGINT once, when `place` is called with such arguments; whether that was so."""
    original, sent = resolve_name(f"gpattention.{place}"), list[str]()

    def called(*given: Any, **more: Any) -> Any:
        result = original(*given, **more)
        if not sent and when(" ".join(map(str, given))):
            sent.append(place)
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(f"gpattention.{place}", called)
    return lambda: bool(sent)


# command, where the signal comes, what is said, what goes on (RECIPE, RUN and PLAN are files of the test)
CASES = [
    ("train RECIPE --set seed=3 --run out", "cli.console.Bar.log", "epoch 1/2",
     "stopped by SIGINT at step 5; resume to go on", "train RECIPE --set seed=3 --run out --resume"),
    ("train --resume --run stopped", "cli.console.Bar.log", "epoch 1/2",
     "stopped by SIGINT at step 5; resume to go on", "train --resume --run stopped"),
    ("sweep RECIPE --over regularizer.end=0.1,0.2 --run out", "cli.train.say", "1/2",
     "stopped by SIGINT; what is finished is kept; to go on:",
     "sweep RECIPE --over regularizer.end=0.1,0.2 --run out --resume"),
    ("evaluate RUN --suite clean,ood --samples 2 --fresh", "cli.console.Bars.__call__", "ood",
     "stopped by SIGINT; what is finished is kept; to go on:", "evaluate RUN --suite clean,ood --samples 2"),
    (f"demo --run out {SMALL}", "cli.console.Overall.__call__", "softmax training",
     "stopped by SIGINT at step 1; what is trained so far is kept", f"demo --run out {SMALL} --resume"),
    ("reproduce PLAN --runs out --device cpu --stage train", "cli.report.say", "first-seed0: done",
     "stopped; what is finished is kept; to go on:", "reproduce PLAN --runs out --device cpu --stage train"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "place", "when", "said", "on"), CASES, ids=[words.split(" --")[0] for words, *_ in CASES]
)
def test_ctrl_c_names_the_command_that_goes_on(
    words: str, place: str, when: str, said: str, on: str, tmp_path: Path, run: Run, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpattention.studies.demo.BETWEEN", 0.0)
    monkeypatch.setattr("gpattention.studies.demo.write_report", lambda *_, **__: Path("report.html"))
    write_recipe(Path("RECIPE"), digits_recipe())
    Path("recipe.toml").write_text(Path("RECIPE").read_text())
    Path("PLAN").write_text('[[runs]]\nrecipe = "recipe"\nname = "first"\n[[runs]]\nrecipe = "recipe"\n')
    if "RUN" in words:
        train_digits(Path("RUN"))
    if "stopped" in words:
        interrupted_at("cli.console.Bar.log", lambda text: "epoch 1/2" in text, monkeypatch)
        run("train", "RECIPE", "--run", "stopped", code=130)
        (Path("stopped") / "checkpoints").rename("lost")  # before its first checkpoint
    sent = interrupted_at(place, lambda text: when in text, monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    err = run(*shlex.split(words), code=130).err
    assert sent()
    assert signal.getsignal(signal.SIGINT) == before
    first, second = err.splitlines()[-2:]
    assert re.sub(r"step \d+", "step N", first) == f"gpattention: {re.sub(r'step [0-9]+', 'step N', said)}"
    assert second == f"  gpattention {on}"
    assert main(shlex.split(second)[1:]) == 0


def test_before_anything_is_written_the_command_goes_on_as_it_is(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(Path("a recipe.toml"), digits_recipe())
    monkeypatch.setattr("gpattention.cli.train.train_recipe", lambda *_, **__: os.kill(os.getpid(), 2))
    err = run("train", "a recipe.toml", code=130).err
    assert err == "gpattention: stopped by SIGINT\n  gpattention train 'a recipe.toml'\n"
    monkeypatch.setenv("LOCAL_RANK", "0")  # of a process that torchrun started: its command is not ours
    assert run("train", "a recipe.toml", code=130).err == "gpattention: stopped by SIGINT\n"


def test_an_option_is_added_once() -> None:
    stopped = Stopped("", add="--resume", drop="--fresh")
    assert stopped.command(["a", "--fresh", "--resume"]) == "gpattention a --resume"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["train RECIPE --run out/one", "demo --run out --models kernel,softmax"])
def test_ctrl_c_in_a_terminal_reaches_every_process(words: str, tmp_path: Path) -> None:
    write_recipe(tmp_path / "RECIPE", digits_recipe(phases={"epochs": 500}))
    program = subprocess.Popen(
        [sys.executable, "-m", "gpattention", *words.split()], cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(tmp_path.glob("out/*/events.jsonl")):
            time.sleep(0.05)
        os.killpg(program.pid, signal.SIGINT)
        _, err = program.communicate(timeout=120)
    finally:
        program.kill()
    assert program.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"  gpattention {words} --resume"
