"""`gpattention`: parse, run, and tell mistakes in one line.

Exit codes: 0 done, 1 the run failed, 2 wrong use (unknown names, missing files, bad values), 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

import gpattention
from gpattention.cli import commands
from gpattention.training import CheckpointError, TrainingFailedError, TrainingStoppedError

EXAMPLES = """\
examples:
  gpattention demo                                   six kinds of attention on handwritten digits
  gpattention models                                 kinds of attention and what they can do
  gpattention train recipes/digits-cgp.toml          train into runs/digits-cgp
  gpattention train recipes/digits-cgp.toml --set phases.epochs=30 --set model.attention=scgp --run runs/mine
  gpattention train recipes/digits-cgp.toml --resume go on where a run was stopped or killed

exit codes: 0 done, 1 the run failed, 2 wrong use, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
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


def _told(error: Exception, code: int, *, debug: bool) -> int:
    if debug:
        raise error
    print(f"gpattention: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="gpattention",
        description="Transformers whose attention is a Gaussian process.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"gpattention {gpattention.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run_command=None)
    commands_parser = parser.add_subparsers(title="commands", metavar="COMMAND")

    demo = commands_parser.add_parser("demo", help="train, evaluate and compare on bundled digits")
    demo.add_argument("--run", default="runs/demo", help="folder for runs and report (default: %(default)s)")
    demo.add_argument("--models", help="comma-separated kinds (default: all six)")
    demo.add_argument("--kernel-epochs", type=int, default=10, help="of phase 1 (default: %(default)s)")
    demo.add_argument("--epochs", type=int, default=20, help="of phase 2, with draws (default: %(default)s)")
    demo.add_argument("--jobs", type=int, default=2, help="models trained at once (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of data split and training (default: %(default)s)")
    demo.set_defaults(run_command=commands.demo)

    train = commands_parser.add_parser("train", help="train a recipe")
    train.add_argument("recipe", help="a TOML file, see recipes/")
    train.add_argument("--run", help="run folder (default: runs/NAME)")
    train.add_argument(
        "--set", action="append", default=[], dest="changes", metavar="KEY=VALUE", help="change a value"
    )
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    train.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default: %(default)s)")
    train.add_argument("--data", help="folder of data sets (default: GPATTENTION_DATA)")
    train.set_defaults(run_command=commands.train)

    models = commands_parser.add_parser("models", help="list kinds of attention")
    models.set_defaults(run_command=commands.models)
    return parser


if __name__ == "__main__":
    sys.exit(main())
