"""Arguments that several commands share."""

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

RAW = argparse.RawDescriptionHelpFormatter  # keeps the lines of examples


def new_command(commands: "Commands", name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help ends with examples."""
    return commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=examples,
        formatter_class=RAW,
    )  # fmt: skip


def add_changes(parser: argparse.ArgumentParser) -> None:
    """`--set`, for every command that takes a recipe."""
    parser.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="KEY=VALUE",
        help="change a value of the recipe, as often as needed",
    )  # fmt: skip


def add_data(parser: argparse.ArgumentParser) -> None:
    """`--data`, for every command that reads a dataset."""
    parser.add_argument("--data", metavar="FOLDER", help="folder of datasets (default: GPATTENTION_DATA)")


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`, for every command that computes."""
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, or auto: a GPU where there is one"
    )


def numbers(text: str, option: str) -> tuple[int, ...]:
    """`0,1,2` of an option."""
    found = []
    for each in text.split(","):
        try:
            found.append(int(each))
        except ValueError:
            raise ValueError(f"expected {option} to be whole numbers, got {each!r}") from None
    return tuple(found)
