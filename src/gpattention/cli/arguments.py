"""Arguments that several commands share."""

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

from gpattention.experiments.sharing import shared_gpu
from gpattention.training.seeds import LARGEST_SEED, check_seed

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

GOES_ON = "what is finished is kept, and the same command goes on"  # of commands that were stopped
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


def add_sharing(parser: argparse.ArgumentParser) -> None:
    """`--share-gpu`, for every command that runs processes side by side."""
    parser.add_argument(
        "--share-gpu", action="store_true",
        help="let processes compute on one GPU at the same time, by NVIDIA's MPS; else they take turns",
    )  # fmt: skip


def sharing(given: argparse.Namespace, device: object) -> AbstractContextManager[None]:
    """What `--share-gpu` asks for, around the work."""
    if not given.share_gpu:
        return nullcontext()
    if not str(device).startswith("cuda"):
        raise ValueError(f"expected a CUDA device with --share-gpu, got {device}")
    return shared_gpu()


def seed_number(text: str) -> int:
    """Of a `--seed`."""
    try:
        seed = int(text)
        check_seed("a seed", seed)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {-LARGEST_SEED} to {LARGEST_SEED}, got {text!r}"
        ) from None
    return seed


def numbers(text: str, option: str) -> tuple[int, ...]:
    """`0,1,2` of an option."""
    found = []
    for each in text.split(","):
        try:
            found.append(int(each))
        except ValueError:
            raise ValueError(f"expected {option} to be whole numbers, got {each!r}") from None
    return tuple(found)
