"""Six kinds of attention on handwritten digits: clean, corrupted, and digits never seen.

Every model has the same size and schedule: a third of it as kernel attention (softmax: as itself), the rest
with draws.  Predictions average ten draws.  Uncertainty for out-of-distribution detection is the entropy.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from gpattention.checks import check_choice, check_count
from gpattention.evaluation import EvaluationSettings, evaluate_run
from gpattention.files import read_json
from gpattention.reports import write_report
from gpattention.runs import Column, Group, Recipe, Results, difference, read_run, recipe_from_dict
from gpattention.studies.scheduler import Died, report, side_by_side
from gpattention.training import TrainingFailedError, TrainingStep, train_recipe

MODELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "kernel": {},
    "sgpa": {"num_inducing": 16},
    "direct": {},
    "cgp": {},
    "scgp": {"num_inducing": 16},
}
# of one CPU core, in seconds: an epoch with draws, and the evaluation; only their ratios matter
COSTS = {
    "softmax": (0.3, 1), "kernel": (0.3, 1), "sgpa": (1.3, 23), "direct": (1.1, 11), "cgp": (1.2, 13),
    "scgp": (1.3, 16),
}  # fmt: skip
KERNEL_COST = 0.35  # an epoch of phase 1
REPORT_COST = 8.0
CORRUPTIONS = ("gaussian_noise", "gaussian_blur", "contrast", "brightness")
SEVERITIES = (2, 5)
TITLE = "Kinds of attention on handwritten digits"
DRAWS = 10
BETWEEN = 0.1  # seconds between two messages about progress
SHARES = {"clean": (0.0, 0.1), "corrupted": (0.1, 0.5), "ood": (0.6, 0.4)}  # start and part of an evaluation
QUICK = {"models": ("softmax", "cgp"), "kernel_epochs": 8, "epochs": 12}  # under a minute on two cores
STOPPED = "what is trained so far is kept"
SUITES = ("clean", "corrupted", "ood", "selective", "oversmoothing")
COLUMNS = (
    *(Column("clean", "test", metric) for metric in ("accuracy", "nll", "ece")),
    *(
        Column("corrupted", "corrupted/mean", metric, head=f"corr. {short}")
        for metric, short in (("accuracy", "acc."), ("nll", "NLL"), ("ece", "ECE"))
    ),
    Column("ood", "ood/near", "auroc", "entropy", head="near"),
    Column("ood", "ood/*[!r]", "auroc", "entropy", head="far"),  # all but near
)


# what a verdict says, each of one figure
CLAIMS = (
    (COLUMNS[4], "On corrupted digits {model} has the lowest NLL ({figures})"),
    (
        COLUMNS[6],
        "digits never seen in training are recognised best by the entropy of {model} (AUROC {figures})",
    ),
)


@dataclass(frozen=True)
class DemoResult:
    """All models of the demo.

    Attributes:
        results: their evaluations, by model.
        folder: folder of the runs.
        report: the page that compares them.
    """

    results: Results
    folder: Path
    report: Path

    @property
    def verdict(self) -> str:
        """Two sentences: which model is best on inputs unlike those of the training, and what is chance."""
        models = list(dict.fromkeys(self.results.frame["recipe"]))
        clauses, clear = [], []
        for column, clause in CLAIMS:
            figures = {m: f for m in models if (f := column.find(self.results, m, "model")) is not None}
            best = column.shown.best([figure.mean for figure in figures.values()])
            first = next(model for model, figure in figures.items() if figure.mean == best)
            rest = [model for model in figures if model != first]
            shown = [figures[first].text()]
            if rest:  # softmax where it can be, else the first of the others
                rival = "softmax" if "softmax" in rest else rest[0]
                shown.append(f"{rival} {figures[rival].text()}")
                clear.append(difference(figures[first], figures[rival]).clear)
            clauses.append(clause.format(model=first, figures=", ".join(shown)))
        return f"{'; '.join(clauses)}. {self._chance(clear)}"

    def _chance(self, clear: Sequence[bool]) -> str:
        wanted = {"suite": "clean", "set": "test", "metric": "accuracy", "predictor": "model"}
        accuracies = [figure for _, figure in self.results.figures(**wanted)]
        if accuracies[0].count == 1:
            count, p = accuracies[0].items, fmean(figure.mean for figure in accuracies)
            # of two proportions of as many items: an upper bound, as both models saw the same ones
            chance = 1.96 * math.sqrt(2 * p * (1 - p) / int(count.replace(",", "")))
            return (
                "One seed cannot say how much of this is chance: with only "
                f"{count} test images, accuracies that differ by up to {chance:.3f} may do so by chance."
            )
        words = ["the difference"] if len(clear) == 1 else ["the first difference", "the second"]
        clauses = [f"{word} is {'' if yes else 'not '}clear" for word, yes in zip(words, clear, strict=False)]
        compared = f", {' and '.join(clauses)} (Student's t at 95 %)" if clauses else ""
        return f"Over {accuracies[0].count} seeds (± is the standard error){compared}."


def demo_recipe(model: str, *, kernel_epochs: int = 10, epochs: int = 20, seed: int = 0) -> Recipe:
    """The recipe of one of the demo's models.

    Args:
        model: a kind of attention among `MODELS`.
        kernel_epochs: epochs of phase 1.
        epochs: epochs of phase 2, with draws.
        seed: seed of data split and training.

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
    seeds: int = 1,
    workers: int = 1,
    resume: bool = False,
    progress: Callable[[str, str, float, float], object] = lambda *_: None,
) -> DemoResult:
    """Train and evaluate the models; what an earlier demo left in `folder` is replaced unless `resume`.

    Args:
        folder: for runs and report.
        models: kinds of attention among `MODELS`.
        kernel_epochs: epochs of phase 1.
        epochs: epochs of phase 2, with draws.
        seed: seed of data split and training.
        seeds: how many, from `seed` on.
        workers: models trained at once, each on one thread: matrices this small gain nothing from more.
        resume: keep what an earlier demo of the same settings finished, and go on with the rest.
        progress: called with a run (at last "report"), what it is at ("done" at its end), how much of its
            work is done, and how much there is, in units that cost about the same.

    Returns:
        The evaluations of all models, and the page that compares them.

    Raises:
        CheckpointError: with `resume`, the folder holds a demo of other settings.
        ValueError: a model is not of the demo's.
        FileExistsError: the folder holds a run that is not the demo's.
        TrainingFailedError: a process died.
        TrainingStoppedError: SIGTERM or Ctrl-C came.
    """
    for model in models:
        check_choice("models", model, MODELS)
    workers, folder = check_count("workers", workers), Path(folder)
    numbers = range(seed, seed + check_count("seeds", seeds))
    of = {model: [model if seeds == 1 else f"{model}-seed{number}" for number in numbers] for model in models}
    jobs = [
        _Job(
            demo_recipe(model, kernel_epochs=kernel_epochs, epochs=epochs, seed=number), folder / name, resume
        )
        for model in models
        for name, number in zip(of[model], numbers, strict=True)
    ]
    folders = [job.folder for job in jobs]
    if workers > 1:  # the long ones first, so that none is left alone at the end
        jobs.sort(key=lambda job: -job.cost)
        for setting in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
            # glibc then keeps memory: a tenth of the time was giving it back
            os.environ.setdefault(setting, str(2**30))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for name, cost in [*((job.folder.name, job.cost) for job in jobs), ("report", REPORT_COST)]:
            progress(name, "", 0.0, cost)
        done = side_by_side(
            _attempt, jobs, workers, when_stopped=STOPPED,
            on_message=lambda job, message: progress(job.folder.name, message[0], message[1], job.cost),
        )  # fmt: skip
        for job, answer, _ in done:
            if isinstance(answer, Died):
                raise TrainingFailedError(f"{job.recipe.name}: {answer}")
            if isinstance(answer, Exception):
                raise answer
            progress(job.folder.name, "done", job.cost, job.cost)
    finally:
        torch.set_num_threads(threads)
    progress("report", "writing", 0.0, REPORT_COST)
    page = write_report(folders, folder / "report.html", title=TITLE)
    progress("report", "done", REPORT_COST, REPORT_COST)
    groups = [Group(model, tuple(read_run(folder / name) for name in names)) for model, names in of.items()]
    return DemoResult(Results.of(groups), folder, page)


@dataclass(frozen=True)
class _Job:
    """One model to train and evaluate."""

    recipe: Recipe
    folder: Path
    resume: bool

    @property
    def cost(self) -> float:
        return self.trained(self.recipe.epochs) + COSTS[self.recipe.model.attention][1]

    def trained(self, epochs: float) -> float:
        """The cost of the first epochs."""
        first = min(epochs, self.recipe.phases.kernel_epochs)
        return KERNEL_COST * first + COSTS[self.recipe.model.attention][0] * (epochs - first)


def _attempt(job: _Job, _: int) -> Exception | None:  # None: it is done
    """Train and evaluate; an error is an answer, and is raised in the first process."""
    try:
        _train_and_evaluate(job)
    except Exception as error:  # of any kind
        return error
    return None


def _train_and_evaluate(job: _Job) -> None:
    recipe, begun = job.recipe, (job.folder / "recipe.json").is_file()
    if begun:
        try:
            name = read_json(job.folder / "recipe.json", nonfinite=True)["name"]
        except (ValueError, KeyError, TypeError):
            name = None
        if name != recipe.name:  # no earlier demo left it: it is somebody's work
            what = f"a run that is not the demo's ({name!r})"
            raise FileExistsError(f"{job.folder} holds {what}: choose another folder")
    if begun and not job.resume:
        shutil.rmtree(job.folder)
    reported = time.monotonic()

    def say(what: str, done: float) -> None:
        nonlocal reported
        if time.monotonic() - reported > BETWEEN:
            reported = time.monotonic()
            report((what, done))

    def trained(at: TrainingStep) -> None:
        first = at.phase == "kernel" and recipe.model.attention != "softmax"
        what = f"{'kernel attention' if first else 'training'}, epoch {at.epoch + 1} of {recipe.epochs}"
        say(what, job.trained(at.step / at.total * recipe.epochs))

    train_recipe(recipe, job.folder, resume=begun and job.resume, progress=trained)
    before, cost = job.trained(recipe.epochs), COSTS[recipe.model.attention][1]

    def evaluated(suite: str, done: int, total: int) -> None:
        if suite in SHARES:
            start, share = SHARES[suite]
            say(f"evaluation, {suite}", before + cost * (start + share * done / total))

    settings = EvaluationSettings(
        suites=SUITES, device="cpu", samples=DRAWS, predictors=("model",), corruptions=CORRUPTIONS,
        severities=SEVERITIES,
    )  # fmt: skip
    evaluate_run(job.folder, settings, progress=evaluated)
