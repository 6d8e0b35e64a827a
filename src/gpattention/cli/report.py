"""`gpattention report`, `gpattention paper` and `gpattention reproduce`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from gpattention.checks import check_choice
from gpattention.cli.console import say, shortened
from gpattention.cli.main import App
from gpattention.cli.options import GOES_ON, Data, Device, Engine, Out, ShareGpu, Stopped, goes_on, working
from gpattention.reports import write_report
from gpattention.studies.paper import FIGURES, TABLES, paper_table
from gpattention.studies.paper_tables import ENDINGS, FORMATS, write_table
from gpattention.studies.plan_results import ARCHIVE, write_results
from gpattention.studies.plans import STOPPED, How, Outcome, evaluate_plan, is_finished, load_plan, train_plan

app = App()


@app.command("report")
def report(
    runs: list[str],
    output: Annotated[str, typer.Option("--output", "-o")] = "report.html",
    title: str | None = None,
) -> None:
    """Write one HTML page that compares runs.

    Options:
        runs (RUN): a run folder, or a folder that holds runs.
        output (FILE): the page.
        title: title of the page (default: made of the data).

    Examples:
      gpattention report runs/digits-cgp -o report.html
      gpattention report runs/softmax runs/cgp -o report.html --title "Softmax and CGP"
      gpattention report runs -o report.html                    every run in or below a folder

    Runs that differ in nothing but their seed are shown as one model, with mean and standard error.
    What was not evaluated yet is said in its place, with the command that does it.
    """
    path = write_report(runs, output, title=title)
    say(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command("paper")
def paper(
    name: str,
    runs: str,
    form: Annotated[Literal["markdown", "csv", "latex", "all"], typer.Option("--format")] = "markdown",
    out: Annotated[str | None, Out] = None,
) -> None:
    """The paper's tables with ours beside them.

    Options:
        name (NAME): table1 ... fig4, or all.
        runs (RUNS): where evaluated runs are, at any depth.
        form: format of the text.
        out (OUT): a folder, or a file whose ending is the format: .md .csv .tex, of figures also .png .svg.

    tables and figures:
      table1  CoLA                         fig2  cost of training
      table2  CIFAR-10-C                   fig3  oversmoothing on CIFAR-10
      table3  detection of other images    fig4  oversmoothing on CIFAR-100
      table4  CIFAR-10-C, two alphas
      table5  CIFAR-100-C                  all   every one of them

    Examples:
      gpattention paper table2 runs                            print it as Markdown
      gpattention paper table3 runs --format latex -o table3.tex
      gpattention paper fig2 runs -o fig2.svg                  the plot
      gpattention paper all runs --format all -o paper         every table and figure in every format

    Runs are known by the names of their recipes: cifar10-cgpt is the paper's CGPT on CIFAR-10.
    """
    check_choice("NAME", name, (*TABLES, *FIGURES, "all"))
    names = (*TABLES, *FIGURES) if name == "all" else (name,)
    if len(names) > 1 and out is not None and Path(out).suffix in ENDINGS:
        raise ValueError(f"expected -o to be a folder for all tables, got {out}")
    forms = tuple(FORMATS) if form == "all" else (form,)
    tables = [paper_table(each, runs) for each in names]
    if out is None:
        print("\n".join(FORMATS[form](table) for table in tables for form in forms), end="")
        return
    for table in tables:
        files = write_table(table, out, forms)
        say(f"{table.spec.place}: {table.share}")
        for file in files:
            say(f"  {file}")


@app.command("reproduce")
@goes_on()
def reproduce(
    plan_file: str,
    runs: str | None = None,
    stage: Literal["train", "evaluate", "results", "all"] = "all",
    out: Annotated[str | None, Out] = None,
    jobs: int = 1,
    models: tuple[str, ...] | None = None,
    seeds: tuple[int, ...] | None = None,
    minutes: float | None = None,
    engine: Engine = "local",
    share_gpu: ShareGpu = False,
    device: Device = "auto",
    data: Data = None,
) -> int:
    """Train and evaluate all runs of a plan; 1 if one failed, 130 if some are not finished.

    Options:
        plan_file (PLAN): a TOML file, see recipes/plans/.
        runs (FOLDER): where runs go (default: runs/PLAN).
        stage: what to do.
        out (FOLDER): where results go (default: none are written).
        jobs: processes at once.
        models: comma-separated names of the plan (default: all).
        seeds: comma-separated (default: all).
        minutes: save and stop after that time.

    Examples:
      gpattention reproduce recipes/plans/digits.toml                   train and evaluate every run of a plan
      gpattention reproduce recipes/plans/cifar10-60.toml --jobs 8 --share-gpu --data ~/data
      gpattention reproduce recipes/plans/cifar10-60.toml --jobs 16 --engine ray       on a cluster's nodes
      gpattention reproduce recipes/plans/cifar10-60.toml --minutes 25         save and stop after 25 minutes
      gpattention reproduce recipes/plans/cifar10-60.toml --stage evaluate --models cifar10-cgpt --seeds 0,1

    A second call goes on where the first one stopped. Runs are in runs/PLAN/MODEL-seedN, their logs in
    runs/PLAN/logs. Runs that start from the same kernel attention train it once. Tables, figures, the choice
    on validation items and the report come after, from the run folders alone:
      gpattention reproduce recipes/plans/cifar10-60.toml --stage results -o results/cifar10-60
    The same call packs the records of the runs, without weights, into records.tar.xz beside them. A later
    call takes from it what the run folders do not have: it rebuilds results without these, or adds
    further runs.
    """
    if stage == "results" and out is None:
        raise ValueError("expected -o FOLDER with --stage results, got none")
    plan = load_plan(plan_file).only(list(models or ()), seeds or ())
    folder = Path("runs") / plan.name if runs is None else Path(runs)
    codes: list[int] = []

    def ended(outcome: Outcome) -> None:
        codes.append(outcome.code)
        how = {0: "done", STOPPED: "stopped"}.get(outcome.code, f"failed ({outcome.code})")
        say(f"{outcome.name}: {how} after {outcome.seconds:.0f} s: {shortened(outcome.message, 150)}")

    def archived(names: tuple[str, ...]) -> None:
        many = f"{len(names)} of {len(plan.trainings)} runs are not evaluated in {folder}"
        say(f"results: {many} and come from {Path(str(out)) / ARCHIVE}: {', '.join(names)}")

    left: list[str] = []
    if stage != "results":
        asked = working(engine, [folder], jobs=jobs, device=device, data=data, share_gpu=share_gpu)
        with asked as (at, on, root):
            how: How = {"at_once": jobs, "minutes": minutes, "device": on, "root": root, "engine": at}
            how["on_done"] = ended
            if stage in ("train", "all"):
                say(f"{plan.name}: {len(plan.trainings)} runs, {jobs} at a time, in {folder}")
                train_plan(plan, folder, **how)
            left = [t.folder for t in plan.trainings if not is_finished(folder / t.folder)]
            if left:
                say(f"not finished: {', '.join(left)}")
            if stage in ("evaluate", "all") and STOPPED not in codes:
                evaluate_plan(plan, folder, **how)
    if stage in ("results", "all") and out is not None and STOPPED not in codes:
        files = write_results(plan, folder, out, plan_file=plan_file, on_archived=archived)
        say(f"results: {len(files)} files in {out}, {files[-1].name} says how they were made")
    if any(code not in (0, STOPPED) for code in codes):
        return 1
    if STOPPED in codes or (left and stage != "evaluate"):  # which does not train what is left
        raise Stopped(f"stopped; {GOES_ON}")
    return STOPPED if left else 0
