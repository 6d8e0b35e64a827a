"""The command line as a whole: help, examples, exit codes, mistakes, signals, pipes, completion."""

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpattention.cli import main
from gpattention.cli.main import COMMANDS
from gpattention.cli.options import GOES_ON
from gpattention.gp import NotPositiveDefiniteError
from gpattention.training import TrainingFailedError, TrainingStoppedError
from tests.cli.conftest import Run
from tests.cli.parsing import commands, parsed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command-line.md").read_text()
DIGITS = ROOT / "recipes" / "digits-cgp.toml"
TREE = {command.path: command for command in commands()}


def examples(text: str) -> list[str]:
    """Lines that call us, without what is said about them."""
    lines = [line.strip().removeprefix("$ ") for line in text.splitlines()]
    calls = [
        line for line in lines if re.match(r"gpattention [a-z]+", line) and ": " not in line.split("  ")[0]
    ]
    return [re.split(r"\s{2,}| > |  # ", line)[0] for line in calls if "COMMAND" not in line]


EXAMPLES = sorted({example for command in TREE.values() for example in examples(command.examples)})
SHOWN = examples("\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)))


@pytest.mark.parametrize("example", sorted({*EXAMPLES, *SHOWN}))
def test_examples_parse(example: str) -> None:
    words = shlex.split(example)[1:]
    assert parsed(words).command_path.split()[:2] == ["gpattention", words[0]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_a_section(command: str) -> None:
    assert [e for e in EXAMPLES if e.split()[1] == command] != []
    assert [e for e in SHOWN if e.split()[1] == command] != []
    assert f"\n## {command}\n" in PAGE


def test_the_page_names_functions_that_exist() -> None:
    table = re.findall(r"^\| \[`\w+`\].*\| (.*) \|$", PAGE, re.MULTILINE)
    named = re.findall(r"`(gpattention\.[\w.]+)`", "\n".join(table))
    assert len(named) >= len(COMMANDS) - 1
    for name in named:
        module, _, function = name.rpartition(".")
        __import__(module)
        assert callable(getattr(sys.modules[module], function)), name


@pytest.mark.parametrize("path", TREE)
def test_help_has_every_option_and_examples(path: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = run(*path.split()[1:], "--help").out
    assert "examples:" in text
    assert all(option.flags[0] in text for option in TREE[path].options)


def test_alone_it_shows_three_ways(run: Run) -> None:
    shown = run().out
    assert [word for word in ("attach(model)", "EncoderLayer(", "demo --quick") if word not in shown] == []
    assert all(parsed(shlex.split(line)[1:]) for line in examples(shown))
    assert all((ROOT / page).is_file() for page in re.findall(r"docs/\S+", shown))


def test_help_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from gpattention.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'pandas', 'matplotlib', 'jinja2'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 5  # on a machine that does other things too


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0), (ValueError("wrong"), 2), (FileNotFoundError("wrong"), 2), (PermissionError("wrong"), 2),
        (ImportError("wrong"), 2), (ConnectionError("wrong"), 1), (TrainingFailedError("wrong"), 1),
        (NotPositiveDefiniteError("wrong"), 1), (TrainingStoppedError("wrong"), 130),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)  # fmt: skip
def test_exit_codes(
    error: BaseException | None, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed() -> tuple[str, ...]:
        if error is not None:
            raise error
        return ()

    monkeypatch.setattr("gpattention.cli.models.list_attention", listed)
    message = "" if error is None else f"gpattention: {str(error) or 'interrupted'}\n"
    assert run("models", code=code).err == message
    if code in (1, 2):
        for arguments in (["--debug", "models"], ["models", "--debug"]):
            with pytest.raises(type(error), match="wrong"):  # type: ignore[arg-type]
                main(arguments)


MISTAKES = [
    ("trian", "Did you mean 'train'? See gpattention --help"),
    ("train DIGITS --sett a=1", "Did you mean '--set'? See"),
    (f"train {DIGITS}x", f"no recipe {DIGITS}x; did you mean {DIGITS}"),
    ("reproduce recipes/plans/digts.toml", "no plan recipes/plans/digts.toml"),
    ("train DIGITS --set model.attention=cpg", "did you mean 'cgp'"),
    ("sweep a --jobs many", "--jobs"),
    ("train", "expected a recipe, or --resume with --run FOLDER"),
    ("train nowhere.toml", "no recipe nowhere.toml"),
    ("train DIGITS --set optimizer.batchsize=3", "did you mean 'batch_size'"),
    ("demo --models nothing", "got 'nothing'"),
    ("sweep DIGITS --over model.attention", "of the form section.key=value,value"),
    ("sweep DIGITS --seeds 0", "seeds to be a whole number >= 1"),
    ("status .", "expected runs in ., found none"),
    ("status RUN --watch 0", "--watch to be a number of seconds > 0, got 0.0"),
    ("evaluate .", "expected a run in"),
    ("evaluate RUN --suite dirty", "suites to be among clean"),
    ("evaluate RUN --device gameboy", "device to be auto"),
    ("predict nowhere x.png", "expected a run in nowhere"),
    ("predict RUN nothing.png", "got 'nothing.png'"),
    ("predict RUN digit.png --temperature fitted", "no fitted temperature"),
    ("predict RUN --file nothing.txt", "no file nothing.txt"),
    ("report . -o x.html", "expected a run in or below"),
    ("report RUN -o .", "expected output (-o) to be a file, got the folder ."),
    ("paper table6 .", "table6"),
    ("paper table2 .", "expected runs in ., got none"),
    ("paper all . -o x.md", "expected -o to be a folder for all tables, got x.md"),
    ("data check", "expected --data FOLDER, or GPATTENTION_DATA, to say where the datasets lie, got neither"),
    ("data corrupt cifar10 --data . --types rain", "expected types among noise, blur"),
    ("data corrupt cifar10 --data . --severities x", "expected --severities to be whole numbers"),
    ("completion tcsh", "'bash', 'zsh', 'fish'"),
    ("bench step --kinds nothing", "expected kinds to be one of softmax, kernel"),
    ("bench step --batch 0", "expected batch to be a whole number >= 1, got 0"),
    ("bench plot nowhere", "no measured lengths in nowhere"),
    ("adopt cola --data . --encoder package:no_such/model", "pip install no-such"),
    ("adopt cola --seeds a", "--seeds to be whole numbers"),
    ("adopt cola --data . --kinds gp", "kinds to be one of direct"),
    ("adopt cola --against magic", "--against to be one of plain"),
    ("adopt cola --further-epochs 0", "further_epochs to be a whole number >= 1, got 0"),
    ("adopt images nowhere", "no folder nowhere"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes_take_one_line(
    words: str, message: str, run: Run, trained: Path, tmp_path: Path, digit: Path, monkeypatch
) -> None:
    monkeypatch.delenv("GPATTENTION_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    digit.rename("digit.png")
    known = {"RUN": trained, "DIGITS": DIGITS}
    err = run(*(known.get(word, word) for word in words.split()), code=2).err
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("gpattention: ") or re.search(r"(; s|\? S)ee gpattention.* --help\n$", err)
    assert os.listdir() == ["digit.png"]  # nothing was written


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "."], ["predict", ".", "x.png"], ["demo"], ["bench", "step"],
        ["data", "corrupt", "cifar10"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_seeds_have_a_range(arguments: list[str], run: Run) -> None:
    for seed in ("99999999999999999999", "-8796093022209", "1.5"):
        err = run(*arguments, f"--seed={seed}", code=2).err
        assert f"expected a whole number from -8796093022208 to 8796093022208, got '{seed}'" in err
    assert parsed([*arguments, "--seed=-8796093022208"]).params["seed"] == -(2**43)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(
    ("words", "listens", "kept"),
    [
        (["models"], "models.list_attention", ""),
        (["evaluate", "."], "evaluate.runs_below", f"; {GOES_ON}\n  gpattention evaluate ."),
    ],
)
def test_signals_end_every_command_in_order(
    number: signal.Signals, words: list[str], listens: str, kept: str, run: Run, monkeypatch
) -> None:
    handlers = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    outside = {each: signal.signal(each, handler) for each, handler in handlers.items()}  # perhaps ignored
    monkeypatch.setattr(f"gpattention.cli.{listens}", lambda *_: signal.raise_signal(number))
    try:
        err = run(*words, code=130).err
        after = {each: signal.getsignal(each) for each in handlers}
    finally:
        for each, handler in outside.items():
            signal.signal(each, handler)
    assert after == handlers
    assert err == f"gpattention: stopped by {number.name}{kept}\n"


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


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    program = "import sys; from gpattention.cli import main; sys.exit(main(['data', 'list', '--json']))"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert isinstance(child.stdout, io.BufferedReader)
    child.stdout.close()  # as `head` does
    _, shown = child.communicate(timeout=60)
    assert shown == b""
    assert child.returncode == 1


BASH = """
source "$0"; COMP_WORDS=(gpattention "$@"); COMP_CWORD=$#
function=$(complete -p gpattention | sed 's/.*-F //; s/ .*//'); $function gpattention
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_of_the_shell(shell: str, run: Run) -> None:
    script = run("completion", shell).out
    assert "_GPATTENTION_COMPLETE" in script
    found = shutil.which(shell)
    if found is not None:
        subprocess.run([found, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], set(COMMANDS)),
        (["data", ""], {"list", "get", "check", "corrupt"}),
        (["data", "get", "--k"], {"--keep"}),
        (["sweep", "file.toml", "--se"], {"--set", "--seeds"}),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_bash_offers(words: list[str], expected: set[str], run: Run, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(run("completion", "bash").out)
    program = tmp_path / "gpattention"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpattention "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", BASH, str(tmp_path / "script"), *words], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True,
    )  # fmt: skip
    assert {line for line in done.stdout.splitlines() if line} == expected
