"""`gpattention demo`."""

import shlex
import sys
from contextlib import closing
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from gpattention.cli.console import Overall, say
from gpattention.cli.evaluate import results_table
from gpattention.cli.main import App
from gpattention.cli.options import goes_on
from gpattention.studies.demo import COLUMNS, CORRUPTIONS, DRAWS, MODELS, QUICK, SEVERITIES, run_demo

app = App()
NOTE = (
    "Test images: handwritten digits 0 to 7; corr.: the same under "
    f"{', '.join(CORRUPTIONS)} at severities {' and '.join(map(str, SEVERITIES))}; near and far: AUROC of "
    "the predictive entropy, for digits 8 and 9, never seen in training, and for noise and patterns. Models "
    f"with a posterior average {DRAWS} draws. "
)


@app.command("demo")
@goes_on(add="--resume")
def demo(
    run: str = "runs/demo",
    quick: bool = False,
    models: tuple[str, ...] | None = None,
    kernel_epochs: int | None = None,
    epochs: int | None = None,
    jobs: int = 2,
    seed: int = 0,
    seeds: int = 1,
    resume: bool = False,
) -> None:
    """Train, evaluate and compare on bundled digits.

    Options:
        run (FOLDER): folder for runs and report.
        quick: softmax and CGP alone, for fewer epochs: under a minute on two cores.
        models: comma-separated kinds (default: all six).
        kernel_epochs: epochs of phase 1 (default: 10).
        epochs: epochs of phase 2, with draws (default: 20).
        jobs: models trained at once.
        seed: seed of data split and training.
        seeds: how many, from --seed on: figures are then means, with their standard error.
        resume: go on with a demo that was stopped.

    Examples:
      gpattention demo --quick
      gpattention demo
      gpattention demo --models softmax,cgp --seeds 3        how much of a difference is chance
    """
    usual: dict[str, Any] = QUICK if quick else {"models": tuple(MODELS), "kernel_epochs": 10, "epochs": 20}
    given = {"models": models, "kernel_epochs": kernel_epochs, "epochs": epochs}
    chosen = usual | {name: value for name, value in given.items() if value is not None}
    kinds = ", ".join(chosen["models"])
    times = f" with {seeds} seeds each" if seeds > 1 else ""
    say(f"training {kinds}{times} on handwritten digits, {jobs} at a time, in {run}")
    with closing(Overall("demo")) as work:
        result = run_demo(run, **chosen, seed=seed, seeds=seeds, workers=jobs, resume=resume, progress=work)
    table = results_table("model", result.results, COLUMNS, bold=sys.stdout.isatty(), fold=True, note="")
    note = NOTE + ("Best in bold." if sys.stdout.isatty() else "Best marked *.")
    width = min(get_terminal_size().columns, 110) if sys.stdout.isatty() else 10_000
    print(f"\n{table}\n{fill(note, width)}\n\n{fill(result.verdict, width)}\n")
    say(f"report: {result.report}  (one file: open it in a browser)")
    nexts = {"gpattention demo": "all six kinds of attention"} if quick else {}
    if seeds == 1:
        folder = shlex.quote(f"{run}-seeds")
        nexts[f"gpattention demo --models softmax,cgp --seeds 3 --run {folder}"] = "how much of it is chance"
    nexts["gpattention"] = "a model of yours: attach to it, or build one"
    print("next:")
    for line, why in nexts.items():
        say(f"  {line}  # {why}")
