"""`gpattention models`."""

import argparse
from typing import TYPE_CHECKING

from gpattention.attention import attention_class, list_attention
from gpattention.cli.arguments import new_command

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands


def add_parser(commands: "Commands") -> None:
    """No arguments."""
    models = new_command(
        commands, "models", "list kinds of attention", "examples:\n  gpattention models\n"
    )  # fmt: skip
    models.set_defaults(run_command=run)


def run(given: argparse.Namespace) -> None:
    """Kinds of attention and what they can do."""
    print(f"{'kind':<12}{'draws':<7}{'cross':<7}{'causal':<8}{'rows':<6}regularisers")
    for kind in list_attention():
        cls = attention_class(kind)
        flags = (cls.draws, cls.crosses, cls.causal_form, cls.normalizes)
        cells = [("yes" if flag else "no") for flag in flags]
        print(f"{kind:<12}{cells[0]:<7}{cells[1]:<7}{cells[2]:<8}{cells[3]:<6}{', '.join(cls.regularizers)}")
