"""`gpattention`: parse, run, and report mistakes in one line.

Exit codes: 0 done, 1 the run failed, 2 wrong use (unknown names, missing files, bad values), 130 interrupted.
A command returns its own code, or None for 0.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from types import FrameType
from typing import Any

import typer
from typer._completion_classes import completion_init
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from gpattention.cli.console import say
from gpattention.cli.options import F, Stopped, command

# in the order of the help text: command -> its module here, and what it does
COMMANDS = {
    "demo": ("demo", "train, evaluate and compare on bundled digits"),
    "train": ("train", "train a recipe"),
    "sweep": ("train", "train a grid of values and choose on validation data"),
    "status": ("status", "show how far runs are"),
    "evaluate": ("evaluate", "evaluate finished runs"),
    "predict": ("predict", "predict images or sentences with a trained run"),
    "tokens": ("tokens", "show what a language model knows of every token"),
    "report": ("report", "write one HTML page that compares runs"),
    "paper": ("report", "the paper's tables with ours beside them"),
    "reproduce": ("report", "train and evaluate all runs of a plan"),
    "adopt": ("adopt", "measure what adoption is worth to a trained model"),
    "data": ("data", "list, get, check and corrupt datasets"),
    "models": ("models", "list kinds of attention, or share a trained model"),
    "bench": ("bench", "time training, prediction and lengths on this machine"),
    "completion": ("models", "print a script for your shell's completion"),
}
# typer ships its own click, and BadParameter's base is every mistake of use: unknown options, missing values
UsageError: Any = typer.BadParameter.__base__
# by default SIGTERM, and the end of a terminal, end Python without a word, with nothing put in order first;
# Ctrl-C does not say that it did
SIGNALS: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,  # ignored under nohup, and left so
    signal.SIGINT: signal.default_int_handler,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: arguments of the command line; those of this process if not given.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # mostly thought of last: it may stand anywhere
    try:
        with _signals_interrupt():
            code = command_line().main(
                [each for each in given if each != "--debug"], prog_name="gpattention", standalone_mode=False
            )
            sys.stdout.flush()  # a reader that has gone is noticed here, not at exit
        return int(code or 0)
    except Stopped as stop:
        say(f"gpattention: {stop}", error=True)
        if "LOCAL_RANK" not in os.environ:  # what started several processes is another command
            say(f"  {stop.command(given)}", error=True)
        return 130
    except BrokenPipeError:  # `head`, perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UsageError as mistake:
        path = mistake.ctx.command_path if mistake.ctx is not None else "gpattention"
        if type(mistake).__name__ == "NoArgsIsHelpError":  # the message is the help itself
            print(mistake.format_message())
        else:
            say(f"{path}: {_mistake(mistake)} {path} --help", error=True)
        return 2
    except Exception as error:
        code = _exit_code(error)
        if debug or code is None:
            raise
        say(f"gpattention: {error}", error=True)
        return code


def _mistake(mistake: Any) -> str:
    """Typer's message, with similar names in our words, up to where help is."""
    near = getattr(mistake, "possibilities", None)
    if near:
        return f"{mistake.message}. Did you mean {near[0]!r}? See"
    message = mistake.format_message().rstrip(".")
    return f"{message} See" if message.endswith("?") else f"{message}; see"


def command_line() -> TyperGroup:
    """The whole command line; a command's module is imported when it is asked for."""
    app = App(cls=Commands, no_args_is_help=False, invoke_without_command=True)
    app.callback()(_top)
    completion_init()
    return get_group(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from gpattention import __version__

        print(f"gpattention {__version__}")
        raise typer.Exit


def _top(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", help="show the version", callback=_show_version, is_eager=True
    ),
    debug: bool = typer.Option(False, "--debug", help="show the traceback of an error"),
) -> None:
    """Transformers whose attention is a Gaussian process.

    Examples:
      gpattention demo --quick                               two kinds of attention on handwritten digits
      gpattention train recipes/digits-cgp.toml              train into runs/digits-cgp
      gpattention evaluate runs/digits-cgp                   accuracy, calibration, corruptions, other images
      gpattention report runs -o report.html                 one page that compares runs
      gpattention predict runs/digits-cgp digit.png          a label, and how sure the model is of it
      gpattention sweep recipes/digits-cgp.toml --over regularizer.end=0.001,0.01 --seeds 3
      gpattention data get cifar10 --data ~/data             then: export GPATTENTION_DATA=~/data
      gpattention bench step                                 times against softmax on this machine

    `gpattention COMMAND --help` has more examples of each.

    exit codes: 0 done, 1 the run failed, 2 wrong use, 130 interrupted
    """
    if ctx.invoked_subcommand is None:
        print((files("gpattention.cli") / "welcome.txt").read_text(encoding="utf-8"), end="")


class _WithExamples:
    """Help that ends with examples, whose lines stay as they are; an interruption ends with exit code 130.

    The first paragraph of a docstring is the help, its `Options:` are what these have as theirs, and
    the rest, the examples, comes after them.
    """

    epilog: str | None

    def __init__(self, *, help: str | None = None, epilog: str | None = None, **options: Any) -> None:
        summary, _, rest = (help or "").partition("\n\n")
        examples = re.sub(r"^Options:\n(?: .*\n)*\n", "", rest).replace("Examples:\n", "examples:\n")
        parts = [examples.rstrip(), epilog]
        options |= {"help": summary, "epilog": "\n".join(filter(None, parts))}
        super().__init__(**options)

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except KeyboardInterrupt as stop:
            say(f"gpattention: {str(stop) or 'interrupted'}", error=True)
            raise typer.Exit(130) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, then the examples."""
        examples, self.epilog = self.epilog, None
        super().format_help(ctx, formatter)  # type: ignore[misc]
        self.epilog = examples
        if examples:
            print(examples.rstrip())


class Command(_WithExamples, TyperCommand):
    """One command; what it returns is the exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        raise typer.Exit(super().invoke(ctx) or 0)


class Group(_WithExamples, TyperGroup):
    """Commands below a command."""


class App(typer.Typer):
    """Commands, each a function: its signature is the interface, its docstring the help with the examples."""

    def __init__(self, **options: Any) -> None:
        common = {"cls": Group, "no_args_is_help": True, "add_completion": False, "rich_markup_mode": "rich"}
        super().__init__(**{**common, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """Add a function as a command."""
        add = super().command(name, **{"cls": Command, **options})
        return lambda function: add(command(function))


class Commands(Group):
    """All commands, imported late: `gpattention --help` needs none of them, and no torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listing = False
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment] # what "did you mean" knows

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One command; its name and summary alone while help lists them."""
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        if self._listing:
            return TyperCommand(cmd_name, help=summary)
        with _loading():
            return get_group(import_module(f"gpattention.cli.{module}").app).commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


@contextmanager
def _loading() -> Iterator[None]:
    """Show a spinner in a terminal while a command and PyTorch are imported, which may take seconds."""
    if not sys.stderr.isatty() or "_GPATTENTION_COMPLETE" in os.environ:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("loading PyTorch"):
        yield


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that we raise on purpose; None of all others."""
    from gpattention.numerics import NumericalError
    from gpattention.training import CheckpointError, TrainingFailedError, TrainingStoppedError

    if isinstance(error, TrainingStoppedError):
        return 130
    if isinstance(error, (TrainingFailedError, NumericalError, ConnectionError)):
        return 1
    return 2 if isinstance(error, (ValueError, OSError, ImportError, CheckpointError)) else None


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM raise `KeyboardInterrupt` as Ctrl-C does; handlers of other code stay.

    Training listens to both itself and saves its state first.
    """
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number, default in SIGNALS.items() if signal.getsignal(number) == default]
    for number in ours:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, SIGNALS[number])


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


if __name__ == "__main__":
    sys.exit(main())
