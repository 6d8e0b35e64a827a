"""Completion scripts, run in the shells that are here: bash always, zsh and fish where installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpattention.attention import list_attention
from gpattention.cli import main
from gpattention.cli.command_tree import command_tree
from gpattention.cli.main import COMMANDS, build_parser
from gpattention.data import known

TREE = {command.path: command for command in command_tree(build_parser())}
NAMES = {command.__name__.rpartition(".")[2] for command in COMMANDS}
DATASETS = {entry.name for entry in known()}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    (folder / "folder one").mkdir(parents=True)
    (folder / "file.toml").write_text("")
    return folder


def script_of(shell: str, capsys: pytest.CaptureFixture[str], folder: Path) -> Path:
    assert main(["completion", shell]) == 0
    file = folder.parent / f"script.{shell}"
    file.write_text(capsys.readouterr().out)
    return file


def run(shell: str, program: str, folder: Path, *arguments: str) -> set[str]:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} on this machine")
    done = subprocess.run(
        [found, "-c", program, *arguments],
        cwd=folder,
        env=os.environ | {"HOME": str(folder.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return {line for line in done.stdout.splitlines() if line}


def bash(file: Path, folder: Path, *words: str) -> set[str]:
    program = (
        'source "$0"; COMP_WORDS=(gpattention "$@"); COMP_CWORD=$#; _gpattention; '
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    return run("bash", program, folder, str(file), *words)


# zsh's own functions are replaced by ones that print what they would offer
ZSH = """
compdef() { :; }
compset() { :; }
_describe() { print -l -- "${(@P)2}"; }
_files() { print -l -- FILES $*; }
source "$0"
words=(gpattention "$@"); CURRENT=$(( $# + 1 )); _gpattention
"""


def zsh(file: Path, folder: Path, *words: str) -> set[str]:
    offered = run("zsh", ZSH, folder, str(file), *words)
    names = {line.partition(":")[0] for line in offered if line not in ("FILES", "-/")}
    if "FILES" in offered:
        names |= {"folder one"} if "-/" in offered else {"folder one", "file.toml"}
    return {name for name in names if name.startswith(words[-1].rpartition("=")[2])}  # as zsh would


def fish(file: Path, folder: Path, *words: str) -> set[str]:
    line = " ".join(["gpattention", *words])
    offered = run("fish", f"source {file}; complete -C '{line}'", folder)
    return {each.partition("\t")[0].rstrip("/").replace("\\ ", " ") for each in offered}


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], NAMES),
        (["tr"], {"train"}),
        (["data", ""], {"list", "get", "check", "corrupt"}),
        (["data", "get", "cifar"], {name for name in DATASETS if name.startswith("cifar")}),
        (["data", "get", "cola", "tex"], {"textures"}),
        (["data", "check", "dig"], {"digits"}),
        (["data", "get", "--k"], {"--keep"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["bench", ""], {"step", "length", "predict", "cpu", "floor", "plot"}),
        (["demo", "--models", "s"], {kind for kind in list_attention() if kind.startswith("s")}),
        (["sweep", "file.toml", "--choose", ""], {"accuracy", "nll"}),
        (["sweep", "file.toml", "--se"], {"--set", "--seeds"}),
        (["sweep", "--seeds", ""], set()),
        (["train", "--device", "cu"], {"cuda"}),
        (["train", "--data", ""], {"folder one"}),
        (["train", "fi"], {"file.toml"}),
        (["predict", "--file", ""], {"file.toml", "folder one"}),
        (["--de"], {"--debug"}),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_completions(
    shell: str, words: list[str], expected: set[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SHELLS[shell](script_of(shell, capsys, here), here, *words) == expected


def test_bash_offers_every_option_of_every_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script_of("bash", capsys, here)
    assert run("bash", 'bash -n "$0"', here, str(file)) == set()
    for path, command in TREE.items():
        flags = {flag for option in command.options for flag in option.flags}
        assert bash(file, here, *path.split()[1:], "-") == flags


def test_bash_completes_after_an_equals_sign(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script_of("bash", capsys, here)
    assert bash(file, here, "sweep", "--choose", "=") == {"accuracy", "nll"}
    assert bash(file, here, "sweep", "--choose", "=", "n") == {"nll"}


def test_the_tree_knows_what_options_take() -> None:
    train = {option.flags[-1]: option for option in TREE["gpattention train"].options}
    assert train["--resume"].takes == "nothing"
    assert train["--data"].takes == "folders"
    assert train["--run"].takes == "folders"
    assert train["--set"].takes == "anything"
    assert train["--device"].words == ("auto", "cpu", "cuda")
    assert "default: %(default)s" not in str(TREE)
    assert set(TREE) >= {"gpattention", "gpattention data corrupt", "gpattention completion"}


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["completion", "tcsh"])
    assert stop.value.code == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
