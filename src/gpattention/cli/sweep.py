"""`gpattention sweep`."""

import argparse
import math
from typing import TYPE_CHECKING

from gpattention.cli.arguments import (
    add_changes,
    add_data,
    add_device,
    add_sharing,
    new_command,
    sharing,
)
from gpattention.cli.table import say, shortened, table
from gpattention.studies.sweep import (
    CRITERIA,
    SweepResult,
    SweepRow,
    how_chosen,
    numbers,
    parse_over,
    run_sweep,
)
from gpattention.training import choose_device

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention sweep recipes/digits-cgp.toml --over regularizer.end=0.001,0.01,0.1 --seeds 3 --jobs 2
  gpattention sweep recipes/digits-cgp.toml --over model.attention=cgp,scgp --over optimizer.clip=1,10
  gpattention sweep recipes/digits-cgp.toml --seeds 5 --set phases.epochs=20       seeds alone
  gpattention sweep recipes/digits-cgp.toml --over regularizer.end=0.001,0.01 --choose nll --resume

The choice is made on the validation split; the test split is not looked at. Then train with what was chosen:
  gpattention train runs/sweep-digits-cgp/chosen.toml
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of a sweep."""
    sweep = new_command(commands, "sweep", "train a grid of values and choose on validation data", EXAMPLES)
    sweep.add_argument("recipe", help="a TOML file, see recipes/")
    sweep.add_argument(
        "--over", action="append", default=[], metavar="KEY=V1,V2",
        help="values of the recipe to try; all combinations if given several times",
    )  # fmt: skip
    sweep.add_argument("--seeds", type=int, default=1, help="runs of each setting (default: %(default)s)")
    sweep.add_argument("--jobs", type=int, default=1, help="runs trained at once (default: %(default)s)")
    sweep.add_argument("--run", metavar="FOLDER", help="folder of the sweep (default: runs/sweep-NAME)")
    sweep.add_argument(
        "--choose", choices=CRITERIA, default="accuracy", help="by which measure (default: %(default)s)"
    )
    sweep.add_argument("--resume", action="store_true", help="keep finished runs, go on with the others")
    add_sharing(sweep)
    add_changes(sweep)
    add_device(sweep)
    add_data(sweep)
    sweep.set_defaults(run_command=run, when_stopped="finished runs are kept, and --resume goes on")


def run(given: argparse.Namespace) -> int:
    """A line for each run as it is done, then the table; 1 if nothing could be chosen."""
    over = parse_over(given.over)
    total = given.seeds * math.prod(len(values) for values in over.values())
    done: list[SweepRow] = []

    def tell(row: SweepRow) -> None:
        done.append(row)
        say(f"{len(done)}/{total}  {_told(row)}")

    print(f"{total} runs, {given.jobs} at a time")
    device = choose_device(given.device)
    with sharing(given, device):
        result = run_sweep(
            given.recipe,
            over,
            seeds=given.seeds,
            jobs=given.jobs,
            folder=given.run,
            choose=given.choose,
            resume=given.resume,
            changes=given.changes,
            root=given.data,
            device=device,
            on_done=tell,
        )
    print("\n" + sweep_table(result))
    print()
    say(f"tables: {result.folder / 'sweep.md'}, {result.folder / 'sweep.csv'}")
    if result.chosen is None:
        print("nothing was chosen: every setting has a run that failed")
        return 1
    say(f"chosen: {result.folder / 'chosen.toml'}")
    return 0


def sweep_table(result: SweepResult) -> str:
    """One line for each setting, the chosen one marked."""
    keys = list(result.rows[0].settings)
    rows = [
        ("*" if setting is result.chosen else "", *setting.settings.values(), *numbers(setting))
        for setting in result.settings
    ]
    heads = ("", *keys, "accuracy", "NLL", "runs")
    right = range(len(keys) + 1, len(keys) + 4)
    error = "; ± is the standard error over seeds" if any(s.runs > 1 for s in result.settings) else ""
    return f"{table(heads, rows, right=right)}\n\n* chosen by {how_chosen(result)}{error}"


def _told(row: SweepRow) -> str:
    settings = " ".join(f"{key}={value}" for key, value in row.settings.items())
    name = f"{settings} seed {row.seed}".strip()
    if row.error:
        return f"{name}: failed, {shortened(row.error, 200)}"
    return f"{name}: accuracy {row.accuracy:.4f}, NLL {row.nll:.4f} on validation"
