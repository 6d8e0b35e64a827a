"""`gpattention reproduce`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpattention.cli.arguments import (
    GOES_ON,
    add_data,
    add_device,
    add_sharing,
    new_command,
    numbers,
    sharing,
)
from gpattention.cli.table import say, shortened
from gpattention.studies.reproduction import Outcome, Plan, evaluate_plan, load_plan, train_plan
from gpattention.studies.reproduction.results import ARCHIVE, write_results
from gpattention.studies.reproduction.working import STOPPED, is_finished
from gpattention.training import choose_device

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention reproduce recipes/plans/digits.toml                          train and judge every run of a plan
  gpattention reproduce recipes/plans/cifar10-60.toml --jobs 8 --share-gpu --data ~/data
  gpattention reproduce recipes/plans/cifar10-60.toml --minutes 25         save and stop after 25 minutes
  gpattention reproduce recipes/plans/cifar10-60.toml --stage evaluate --models cifar10-cgpt --seeds 0,1

A second call goes on where the first one stopped. Runs are in runs/PLAN/MODEL-seedN, their logs in
runs/PLAN/logs. Runs that start from the same kernel attention train it once. Tables, figures, the choice on
validation items and the report come after, from the run folders alone:
  gpattention reproduce recipes/plans/cifar10-60.toml --stage results -o results/cifar10-60
The same call packs the records of the runs, without weights, into records.tar.xz beside them. A later call
takes from it what the run folders do not have: it rebuilds results without these, or adds further runs.
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of a reproduction."""
    reproduce = new_command(commands, "reproduce", "train and judge all runs of a plan", EXAMPLES)
    reproduce.add_argument("plan", help="a TOML file, see recipes/plans/")
    reproduce.add_argument("--runs", metavar="FOLDER", help="where runs go (default: runs/PLAN)")
    reproduce.add_argument(
        "--stage", choices=("train", "evaluate", "results", "all"), default="all", help="default: %(default)s"
    )
    reproduce.add_argument(
        "-o", "--out", metavar="FOLDER", help="where results go (default: none are written)"
    )
    reproduce.add_argument("--jobs", type=int, default=1, help="processes at once (default: %(default)s)")
    reproduce.add_argument("--models", help="comma-separated names of the plan (default: all)")
    reproduce.add_argument("--seeds", help="comma-separated (default: all)")
    reproduce.add_argument("--minutes", type=float, help="save and stop after that time")
    add_sharing(reproduce)
    add_device(reproduce)
    add_data(reproduce)
    reproduce.set_defaults(run_command=run, when_stopped=GOES_ON)


def run(given: argparse.Namespace) -> int:
    """A line for each process as it ends; 1 if one failed, 130 if some are not finished."""
    if given.stage == "results" and given.out is None:
        raise ValueError("expected -o FOLDER with --stage results, got none")
    plan = load_plan(given.plan)
    seeds = () if given.seeds is None else numbers(given.seeds, "--seeds")
    plan = plan.only([] if given.models is None else given.models.split(","), seeds)
    runs = Path("runs") / plan.name if given.runs is None else Path(given.runs)
    options = {
        "at_once": given.jobs, "minutes": given.minutes, "device": str(choose_device(given.device)),
        "root": given.data,
    }  # fmt: skip
    codes: list[int] = []

    def tell(outcome: Outcome) -> None:
        codes.append(outcome.code)
        how = {0: "done", STOPPED: "stopped"}.get(outcome.code, f"failed ({outcome.code})")
        say(f"{outcome.name}: {how} after {outcome.seconds:.0f} s: {shortened(outcome.said, 150)}")

    if given.stage == "results":
        return _results(given, plan, runs)
    with sharing(given, options["device"]):
        if given.stage in ("train", "all"):
            say(f"{plan.name}: {len(plan.trainings)} runs, {given.jobs} at a time, in {runs}")
            train_plan(plan, runs, on_done=tell, **options)
        left = [t.folder for t in plan.trainings if not is_finished(runs / t.folder)]
        if left:
            say(f"not finished: {', '.join(left)}")
        if given.stage in ("evaluate", "all") and STOPPED not in codes:
            evaluate_plan(plan, runs, on_done=tell, **options)
    if given.stage == "all" and given.out is not None and STOPPED not in codes:
        _results(given, plan, runs)
    if any(code not in (0, STOPPED) for code in codes):
        return 1
    return STOPPED if left or STOPPED in codes else 0


def _results(given: argparse.Namespace, plan: Plan, runs: Path) -> int:
    def tell(archived: tuple[str, ...]) -> None:
        told = f"{len(archived)} of {len(plan.trainings)} runs are not evaluated in {runs}"
        say(f"results: {told} and come from {Path(given.out) / ARCHIVE}: {', '.join(archived)}")

    files = write_results(plan, runs, given.out, plan_file=given.plan, on_archived=tell)
    say(f"results: {len(files)} files in {given.out}, {files[-1].name} tells how they were made")
    return 0
