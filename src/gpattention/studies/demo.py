"""Six kinds of attention on handwritten digits: clean, corrupted, and digits never seen.

Every model has the same size and schedule: a third of it as kernel attention (softmax: as itself), the rest
with draws.  Predictions average ten draws.  Uncertainty for out-of-distribution detection is the entropy.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpattention.checks import check_choice, check_count
from gpattention.evaluation import EvaluationSettings, evaluate_run
from gpattention.files import read_json
from gpattention.metrics import metric_of
from gpattention.reports import write_report
from gpattention.runs import Column, Group, Recipe, Results, read_run, recipe_from_dict
from gpattention.studies.scheduler import Died, side_by_side
from gpattention.training import TrainingFailedError, train_recipe

MODELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "kernel": {},
    "sgpa": {"num_inducing": 16},
    "direct": {},
    "cgp": {},
    "scgp": {"num_inducing": 16},
}
CORRUPTIONS = ("gaussian_noise", "gaussian_blur", "contrast", "brightness")
SEVERITIES = (2, 5)
TITLE = "Kinds of attention on handwritten digits"
DRAWS = 10
STARTS_ANEW = "the next demo starts anew"
SUITES = ("clean", "corrupted", "ood", "selective", "oversmoothing")
COLUMNS = (
    *(Column("clean", "test", metric) for metric in ("accuracy", "nll", "ece")),
    *(
        Column("corrupted", "corrupted/mean", metric, head=f"corr. {metric_of(metric).label}")
        for metric in ("accuracy", "nll", "ece")
    ),
    Column("ood", "ood/near", "auroc", "entropy", head="near AUROC"),
    Column("ood", "ood/*[!r]", "auroc", "entropy", head="far AUROC"),  # all but near
)


@dataclass(frozen=True)
class DemoResult:
    """All models of the demo.

    Attributes:
        results: their evaluations, by model.
        folder: of the runs.
        report: the page that compares them.
    """

    results: Results
    folder: Path
    report: Path


def demo_recipe(model: str, *, kernel_epochs: int = 10, epochs: int = 20, seed: int = 0) -> Recipe:
    """The recipe of one of the demo's models.

    Args:
        model: a kind of attention among `MODELS`.
        kernel_epochs: of phase 1.
        epochs: of phase 2, with draws.
        seed: of data split and training.

    Returns:
        The recipe.
    """
    config = {"width": 64, "heads": 4, "depth": 3}
    plain = {
        "name": f"demo-{model}",
        "seed": seed,
        "data": {"name": "digits"},
        "model": {"attention": model, "options": MODELS[model], "config": config},
        "optimizer": {"batch_size": 50, "learning_rate": 2e-3},
        "phases": {"kernel_epochs": kernel_epochs, "epochs": epochs},
        "checkpoint": {"every": 5, "keep": 1},
    }
    return recipe_from_dict(plain)


def run_demo(
    folder: str | Path,
    *,
    models: tuple[str, ...] = tuple(MODELS),
    kernel_epochs: int = 10,
    epochs: int = 20,
    seed: int = 0,
    workers: int = 1,
    on_done: Callable[[str, float], object] | None = None,
) -> DemoResult:
    """Train and evaluate the models; what an earlier demo left in `folder` is replaced.

    Args:
        folder: for runs and report.
        models: kinds of attention among `MODELS`.
        kernel_epochs: of phase 1.
        epochs: of phase 2, with draws.
        seed: of data split and training.
        workers: models trained at once, each on one thread: matrices this small gain nothing from more.
        on_done: called with each model when it is done, and the seconds of its training.

    Returns:
        The evaluations of all models, and the page that compares them.

    Raises:
        ValueError: a model is not of the demo's.
        FileExistsError: the folder holds a run that is not the demo's.
        TrainingFailedError: a process died.
        TrainingStoppedError: SIGTERM or Ctrl-C came.
    """
    for model in models:
        check_choice("models", model, MODELS)
    workers, folder = check_count("workers", workers), Path(folder)
    given = {"kernel_epochs": kernel_epochs, "epochs": epochs, "seed": seed}
    jobs = [(demo_recipe(model, **given), folder / model) for model in models]
    if workers > 1:  # the long ones first, so that none is left alone at the end
        jobs.sort(key=lambda job: -list(MODELS).index(job[0].model.attention))
        for setting in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            # glibc then keeps memory: a tenth of the time was giving it back
            os.environ.setdefault(setting, str(2**30))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for (recipe, _), answer, _ in side_by_side(_attempt, jobs, workers, when_stopped=STARTS_ANEW):
            if isinstance(answer, Died):
                raise TrainingFailedError(f"{recipe.name}: {answer}")
            if isinstance(answer, Exception):
                raise answer
            if on_done is not None:
                on_done(recipe.model.attention, answer)
    finally:
        torch.set_num_threads(threads)
    runs = [folder / model for model in models]
    report = write_report(runs, folder / "report.html", title=TITLE)
    results = Results.of([Group(run.name, (read_run(run),)) for run in runs])
    return DemoResult(results, folder, report)


def _attempt(job: tuple[Recipe, Path], _: int) -> float | Exception:
    """The seconds of a training; an error is an answer too, and is raised in the first process."""
    try:
        return _train_and_evaluate(*job)
    except Exception as error:  # of any kind
        return error


def _train_and_evaluate(recipe: Recipe, folder: Path) -> float:
    if (folder / "recipe.json").is_file():
        _check_demo(folder, recipe.name)
        shutil.rmtree(folder)
    start = time.perf_counter()
    train_recipe(recipe, folder)
    seconds = time.perf_counter() - start
    settings = EvaluationSettings(
        suites=SUITES, device="cpu", samples=DRAWS, predictors=("model",), corruptions=CORRUPTIONS,
        severities=SEVERITIES,
    )  # fmt: skip
    evaluate_run(folder, settings)
    return seconds


def _check_demo(folder: Path, name: str) -> None:
    """Refuse to replace a run that no earlier demo left: it is somebody's work."""
    try:
        found = read_json(folder / "recipe.json", nonfinite=True)["name"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != name:
        what = f"a run that is not the demo's ({found!r})"
        raise FileExistsError(f"{folder} holds {what}: choose another folder")
