"""The command line as a whole: examples that parse, a page that tells of every command, exit codes, pipes."""

import argparse
import io
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpattention.cli import main
from gpattention.cli.command_tree import command_tree
from gpattention.cli.main import COMMANDS, build_parser
from gpattention.gp import NotPositiveDefiniteError
from gpattention.training import TrainingFailedError, TrainingStoppedError

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
NAMES = [command.__name__.rpartition(".")[2] for command in COMMANDS]


def epilogs(parser: argparse.ArgumentParser) -> list[str]:
    found = [parser.epilog or ""]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found += epilogs(below)
    return found


def examples(text: str) -> list[str]:
    """Lines that call us, without what is said about them."""
    lines = [line.strip().removeprefix("$ ") for line in text.splitlines()]
    calls = [
        line for line in lines if re.match(r"gpattention [a-z]+", line) and ": " not in line.split("  ")[0]
    ]
    return [re.split(r"\s{2,}| > |  # ", line)[0] for line in calls if "COMMAND" not in line]


EXAMPLES = sorted({example for text in epilogs(build_parser()) for example in examples(text)})
SHOWN = examples("\n".join(re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)))


@pytest.mark.parametrize("example", sorted({*EXAMPLES, *SHOWN}))
def test_examples_parse(example: str) -> None:
    words = shlex.split(example)[1:]
    given = build_parser().parse_args(words)
    assert given.run_command.__module__ == f"gpattention.cli.{words[0]}"


@pytest.mark.parametrize("command", NAMES)
def test_every_command_has_examples_and_a_section(command: str) -> None:
    assert [e for e in EXAMPLES if e.split()[1] == command] != []
    assert [e for e in SHOWN if e.split()[1] == command] != []
    assert f"\n## {command}\n" in PAGE.read_text()


def test_the_page_names_functions_that_exist() -> None:
    table = re.findall(r"^\| \[`\w+`\].*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    named = re.findall(r"`(gpattention\.[\w.]+)`", "\n".join(table))
    assert len(named) >= len(NAMES) - 1
    for name in named:
        module, _, function = name.rpartition(".")
        __import__(module)
        assert callable(getattr(sys.modules[module], function)), name


def test_help_of_every_command_fits_its_own_description(capsys: pytest.CaptureFixture[str]) -> None:
    for command in command_tree(build_parser()):
        with pytest.raises(SystemExit) as stop:
            main([*command.path.split()[1:], "--help"])
        assert stop.value.code == 0
        told = capsys.readouterr().out
        assert "examples:" in told
        assert all(option.flags[-1] in told for option in command.options)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ValueError("wrong"), 2),
        (FileNotFoundError("wrong"), 2),
        (PermissionError("wrong"), 2),
        (ImportError("wrong"), 2),
        (ConnectionError("wrong"), 1),
        (TrainingFailedError("wrong"), 1),
        (NotPositiveDefiniteError("wrong"), 1),
        (TrainingStoppedError("wrong"), 130),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_exit_codes(
    error: BaseException | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def listed() -> tuple[str, ...]:
        if error is not None:
            raise error
        return ()

    monkeypatch.setattr("gpattention.cli.models.list_attention", listed)
    assert main(["models"]) == code
    told = capsys.readouterr().err
    assert told.count("\n") == (error is not None)
    if code in (1, 2):
        for arguments in (["--debug", "models"], ["models", "--debug"]):
            with pytest.raises(type(error), match="wrong"):  # type: ignore[arg-type]
                main(arguments)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("arguments", "listens", "kept"),
    [
        (["models"], "models.list_attention", ""),
        (
            ["evaluate", "."],
            "evaluate.find_runs",
            "; what is finished is kept, and the same command goes on ",
        ),
    ],
)
def test_signals_end_every_command_in_order(
    number: signal.Signals,
    arguments: list[str],
    listens: str,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    outside = {each: signal.signal(each, handler) for each, handler in handlers.items()}  # perhaps ignored
    monkeypatch.setattr(f"gpattention.cli.{listens}", lambda *_: signal.raise_signal(number))
    try:
        assert main(arguments) == 130
        after = {each: signal.getsignal(each) for each in handlers}
    finally:
        for each, handler in outside.items():
            signal.signal(each, handler)
    assert after == handlers
    told = capsys.readouterr().err
    assert told.startswith(f"gpattention: stopped by {number.name}{kept}")
    assert told.count("\n") == 1


def test_an_interrupt_without_a_word_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpattention.cli.models.list_attention", interrupted)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "gpattention: interrupted\n"


def test_signals_that_others_handle_are_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    def listed() -> tuple[str, ...]:
        signal.raise_signal(signal.SIGTERM)
        return ()

    monkeypatch.setattr("gpattention.cli.models.list_attention", listed)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        assert main(["models"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "."], ["predict", ".", "x.png"], ["demo"], ["bench", "step"], ["adopt", "images", "."],
        ["data", "corrupt", "cifar10"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_seeds_have_a_range(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("99999999999999999999", "-8796093022209", "1.5"):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, f"--seed={seed}"])
        assert stop.value.code == 2
        told = capsys.readouterr().err
        assert f"expected a whole number from -8796093022208 to 8796093022208, got '{seed}'" in told
    assert build_parser().parse_args([*arguments, "--seed=-8796093022208"]).seed == -(2**43)


def test_wrong_words_take_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["trian"], ["train"], ["sweep", "a", "--choose", "ece"], ["bench", "--batch", "x"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert re.search(r"see gpattention.* --help\n$", told)


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    program = "import sys; from gpattention.cli import main; sys.exit(main(['data', 'list', '--json']))"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert isinstance(child.stdout, io.BufferedReader)
    child.stdout.close()  # as `head` does
    _, told = child.communicate(timeout=60)
    assert told == b""
    assert child.returncode == 1
