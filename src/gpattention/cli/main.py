"""`gpattention`: parse, run, and tell mistakes in one line.

Exit codes: 0 done, 1 the run failed, 2 wrong use (unknown names, missing files, bad values), 130 interrupted.
A command returns its own code, or None for 0.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import gpattention
from gpattention.cli import (
    adopt,
    bench,
    completion,
    data,
    demo,
    evaluate,
    models,
    paper,
    predict,
    report,
    reproduce,
    status,
    sweep,
    train,
)
from gpattention.cli.arguments import RAW
from gpattention.cli.stopping import interrupted_by_signals, told_stop
from gpattention.cli.table import say
from gpattention.gp import NumericalError
from gpattention.runs.tables import visible
from gpattention.training import CheckpointError, TrainingFailedError, TrainingStoppedError

# in the order of the help text
COMMANDS = (
    demo,
    train,
    sweep,
    status,
    evaluate,
    predict,
    report,
    paper,
    reproduce,
    adopt,
    data,
    models,
    bench,
    completion,
)

EXAMPLES = """\
examples:
  gpattention demo                                       six kinds of attention on handwritten digits
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.run_command is None:
        parser.print_help()
        return 2
    try:
        with interrupted_by_signals():
            code = given.run_command(given)
            sys.stdout.flush()  # a reader that has gone is noticed here, not at exit
    except BrokenPipeError:  # `head`, perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TrainingStoppedError, KeyboardInterrupt) as stop:
        say(f"gpattention: {told_stop(stop, given)}", error=True)
        return 130
    except (TrainingFailedError, NumericalError, ConnectionError) as failure:
        return _told(failure, 1, debug=given.debug)
    except (ValueError, OSError, ImportError, CheckpointError) as mistake:
        return _told(mistake, 2, debug=given.debug)
    return int(code or 0)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="gpattention",
        description="Transformers whose attention is a Gaussian process.",
        epilog=EXAMPLES,
        formatter_class=RAW,
    )
    parser.add_argument("--version", action="version", version=f"gpattention {gpattention.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run_command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    _take_debug_anywhere(parser)
    return parser


class Parser(argparse.ArgumentParser):
    """One that tells a mistake in one line; the commands below it are of this class too."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{visible(f'{self.prog}: {message}; see {self.prog} --help')}\n")


def _take_debug_anywhere(parser: argparse.ArgumentParser) -> None:
    """`--debug` is mostly thought of last: let it stand after the command too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                below.add_argument(
                    "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
                )
                _take_debug_anywhere(below)


def _told(error: Exception, code: int, *, debug: bool) -> int:
    if debug:
        raise error
    say(f"gpattention: {error}", error=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
