"""`gpattention train` and `gpattention sweep`."""

import math
import os
import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from gpattention.checks import check_choice
from gpattention.cli.console import Bar, say, shortened, table
from gpattention.cli.main import App
from gpattention.cli.options import Changes, Data, Device, Engine, ShareGpu, goes_on, working
from gpattention.numerics import choose_device
from gpattention.runs import Recipe, change_recipe, chosen_row, load_recipe, read_recipe
from gpattention.studies.sweep import Criterion, SweepResult, SweepRow, parse_over, run_sweep
from gpattention.training import PRECISIONS, TrainingStep, launch, train_recipe
from gpattention.training.engine import is_leading

app = App()


@app.command("train")
def train(
    recipe: Annotated[str | None, typer.Argument()] = None,
    run: str | None = None,
    resume: bool = False,
    first_phase: str | None = None,
    changes: Changes = None,
    device: Device = "auto",
    data: Data = None,
    devices: int = 1,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help=f"of the computation: {', '.join(PRECISIONS)}")
    ] = "32-true",
    no_graphs: bool = False,
    tensorboard: bool = False,
) -> None:
    """Train a recipe.

    Options:
        recipe: a TOML file, see recipes/; with --resume and --run that of the run if not given.
        run (FOLDER): run folder (default: runs/NAME).
        resume: go on from the last checkpoint.
        first_phase (RUN): take phase 1 from this run, which must have had the same.
        devices (N): processes, one GPU each if there are.
        no_graphs: do not capture the step as a CUDA graph.
        tensorboard: write TensorBoard logs into the run.

    Examples:
      gpattention train recipes/digits-cgp.toml
      gpattention train recipes/digits-cgp.toml --set phases.epochs=30 --set model.attention=scgp --run runs/a
      gpattention train recipes/digits-cgp.toml --resume        go on where a run was stopped or killed
      gpattention train --resume --run runs/mine                the same, with the recipe that is in the run
      gpattention train recipes/digits-scgp.toml --first-phase runs/digits-cgp   from the same kernel model
      gpattention train recipes/cifar10-cgpt.toml --device cuda --data ~/data --tensorboard
      gpattention train recipes/cifar10-cgpt.toml --devices 4   data parallel in 4 processes, the same batches
      torchrun --nnodes 2 ... -m gpattention train recipes/cifar10-cgpt.toml       several machines
    """
    plan = _recipe(recipe, run, resume, changes or [])
    folder = Path(run) if run else Path("runs") / plan.name
    if devices < 1:
        raise ValueError(f"expected --devices >= 1, got {devices}")
    check_choice("--precision", precision, PRECISIONS)
    # --resume refuses a folder in which nothing has begun
    again = goes_on("", add=lambda: "--resume" if (folder / "recipe.json").is_file() else "")
    several = devices > 1 or os.environ.get("WORLD_SIZE", "1") != "1"
    if several and first_phase is not None:
        raise ValueError("expected --first-phase with one process: let it take the phase over, then --resume")
    if devices > 1 and "WORLD_SIZE" not in os.environ:
        if plan.optimizer.batch_size % devices:
            multiple = f"expected optimizer.batch_size to be a multiple of the {devices} processes"
            raise ValueError(f"{multiple}, got {plan.optimizer.batch_size}")
        with again:
            launch(["-m", "gpattention", *sys.argv[1:]], devices, folder)
        return
    leads = is_leading()
    with again, closing(Bar(plan.name)) as bar:

        def validated(row: Any) -> None:
            bar.log(
                f"epoch {row['epoch']}/{plan.epochs} {row['phase']:<6} loss {row['train_loss']:.3f}  "
                f"on validation: accuracy {row['validation_accuracy']:.3f}  NLL {row['validation_nll']:.3f}"
            )

        result = train_recipe(
            plan, folder, root=data, resume=resume, first_phase=first_phase, device=choose_device(device),
            precision=precision, graphs=not no_graphs, tensorboard=tensorboard,
            progress=(lambda p: bar(p.step, p.total, _note(p))) if leads and bar.terminal else None,
            on_validation=validated if leads else None,
            preparing=Bar("embeddings", "sentences") if leads else None,
        )  # fmt: skip
    if leads:
        kept = chosen_row(plan, result.rows)  # those of the last epoch may be of other weights
        numbers = f"accuracy {kept['validation_accuracy']:.4f}, NLL {kept['validation_nll']:.4f}"
        print(f"on validation items: {numbers} (epoch {kept['epoch']}, whose weights are kept)")
        say(f"on test items: gpattention evaluate {shlex.quote(str(result.folder))}")
        say(f"run: {result.folder}")


def _note(p: TrainingStep) -> str:
    """What stands beside the bar of a training."""
    accuracy = "" if p.accuracy is None else f"  validation accuracy {p.accuracy:.3f}"
    penalty = "" if p.regularizer is None else f"  alpha {p.alpha:.3f} x {p.regularizer:.3f}"
    return f"{p.phase:<6} loss {p.loss:.3f}{accuracy}{penalty}  {p.examples_per_second:.0f}/s"


def _recipe(file: str | None, run: str | None, resume: bool, changes: list[str]) -> Recipe:
    """The recipe of a file, or of the run that is to go on."""
    if file is not None:
        return load_recipe(file, changes)
    if not (resume and run):
        raise typer.BadParameter(
            "expected a recipe, or --resume with --run FOLDER to go on with the run in it"
        )
    begun = read_recipe(run)
    return change_recipe(begun, changes) if changes else begun


@app.command("sweep")
@goes_on(add="--resume")
def sweep(
    recipe: str,
    over: list[str] | None = None,
    seeds: int = 1,
    jobs: int = 1,
    run: str | None = None,
    choose: Criterion = "accuracy",
    resume: bool = False,
    engine: Engine = "local",
    share_gpu: ShareGpu = False,
    changes: Changes = None,
    device: Device = "auto",
    data: Data = None,
) -> int:
    """Train a grid of values and choose on validation data.

    Options:
        recipe: a TOML file, see recipes/.
        over (KEY=V1,V2): values of the recipe to try; all combinations if given several times.
        seeds: runs of each setting.
        jobs: runs trained at once.
        run (FOLDER): folder of the sweep (default: runs/sweep-NAME).
        choose: measure of validation items that the setting is chosen by, as a mean over seeds.
        resume: keep finished runs, go on with the others.

    Examples:
      gpattention sweep recipes/digits-cgp.toml --over regularizer.end=0.001,0.01,0.1 --seeds 3 --jobs 2
      gpattention sweep recipes/digits-cgp.toml --over model.attention=cgp,scgp --over optimizer.clip=1,10
      gpattention sweep recipes/digits-cgp.toml --seeds 5 --set phases.epochs=20       seeds alone
      gpattention sweep recipes/digits-cgp.toml --seeds 5 --jobs 16 --engine ray       on a cluster's nodes
      gpattention sweep recipes/digits-cgp.toml --over regularizer.end=0.001,0.01 --choose nll --resume

    The choice is made on the validation split; the test split is not looked at. Then train what was chosen:
      gpattention train runs/sweep-digits-cgp/chosen.toml
    """
    grid = parse_over(over or [])
    total = seeds * math.prod(len(values) for values in grid.values())
    done: list[SweepRow] = []

    def report(row: SweepRow) -> None:
        done.append(row)
        say(f"{len(done)}/{total}  {_outcome(row)}")

    print(f"{total} runs, {jobs} at a time")
    place = Path("runs") if run is None else Path(run)
    with working(engine, [place], jobs=jobs, device=device, data=data, share_gpu=share_gpu) as (at, on, root):
        result = run_sweep(
            recipe, grid, seeds=seeds, jobs=jobs, folder=run, choose=choose, resume=resume,
            changes=changes or [], root=root, device=on, on_done=report, engine=at,
        )  # fmt: skip
    print("\n" + sweep_table(result) + "\n")
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
        ("*" if setting is result.chosen else "", *setting.settings.values(), *setting.numbers)
        for setting in result.settings
    ]
    heads = ("", *keys, "val. accuracy", "val. NLL", "runs")
    error = "; ± is the standard error over seeds" if any(s.runs > 1 for s in result.settings) else ""
    shown = table(heads, rows, right=range(len(keys) + 1, len(keys) + 4))
    return f"{shown}\n\n* chosen by {result.how_chosen}{error}"


def _outcome(row: SweepRow) -> str:
    settings = " ".join(f"{key}={value}" for key, value in row.settings.items())
    name = f"{settings} seed {row.recipe.seed}".strip()
    if row.error:
        return f"{name}: failed, {shortened(row.error, 200)}"
    return f"{name}: accuracy {row.accuracy:.4f}, NLL {row.nll:.4f} on validation"
