"""`gpattention`: parse, run, and tell mistakes in one line.

Exit codes: 0 done, 1 the run failed, 2 wrong use (unknown names, missing files, bad values), 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

import gpattention
from gpattention.cli import demo, models, train
from gpattention.cli.arguments import RAW
from gpattention.training import CheckpointError, TrainingFailedError, TrainingStoppedError

COMMANDS = (demo, train, models)  # in the order of the help text

EXAMPLES = """\
examples:
  gpattention demo                                   six kinds of attention on handwritten digits
  gpattention models                                 kinds of attention and what they can do
  gpattention train recipes/digits-cgp.toml          train into runs/digits-cgp

`gpattention COMMAND --help` has more of each.

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
        given.run_command(given)
    except (TrainingStoppedError, KeyboardInterrupt) as stop:
        print(f"gpattention: {stop or 'interrupted'}", file=sys.stderr)
        return 130
    except TrainingFailedError as failure:
        return _told(failure, 1, debug=given.debug)
    except (ValueError, FileNotFoundError, FileExistsError, CheckpointError) as mistake:
        return _told(mistake, 2, debug=given.debug)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
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
    return parser


def _told(error: Exception, code: int, *, debug: bool) -> int:
    if debug:
        raise error
    print(f"gpattention: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
