"""`gpattention completion`."""

import argparse
from typing import TYPE_CHECKING

from gpattention.cli.arguments import new_command
from gpattention.cli.command_tree import command_tree
from gpattention.cli.completion_scripts import SCRIPTS

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  mkdir -p ~/.local/share/bash-completion/completions
  gpattention completion bash > ~/.local/share/bash-completion/completions/gpattention

  mkdir -p ~/.zfunc                  and in ~/.zshrc, before compinit: fpath+=~/.zfunc
  gpattention completion zsh > ~/.zfunc/_gpattention

  gpattention completion fish > ~/.config/fish/completions/gpattention.fish

Make the file again after an update. To try it in a bash that is open: eval "$(gpattention completion bash)"
"""


def add_parser(commands: "Commands") -> None:
    """The shell."""
    completion = new_command(commands, "completion", "print a script for your shell's completion", EXAMPLES)
    completion.add_argument("shell", choices=tuple(SCRIPTS))
    completion.set_defaults(run_command=run)


def run(given: argparse.Namespace) -> None:
    """The script of that shell, for the commands that there are."""
    from gpattention.cli.main import build_parser  # which imports this module

    print(SCRIPTS[given.shell](command_tree(build_parser())), end="")
