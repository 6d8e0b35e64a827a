"""Six kinds of attention on handwritten digits: clean, corrupted, and digits never seen.

Every model has the same size and schedule: a third of it as kernel attention (softmax: as itself), the rest
with draws.  Predictions average ten draws.  Uncertainty for out-of-distribution detection is the entropy.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpattention.evaluation.records import SuiteResult
from gpattention.experiments.judging.evaluating import evaluate_run
from gpattention.experiments.reporting import write_report
from gpattention.experiments.runs import chosen_row, train_recipe
from gpattention.experiments.side_by_side import Died, side_by_side
from gpattention.reading import read_json
from gpattention.training import Recipe, TrainingFailedError, TrainingStoppedError, recipe_from_dict

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
FAR = ("noise", "patterns")
DRAWS = 10
STARTS_ANEW = "the next demo starts anew"
SUITES = ("clean", "corrupted", "ood", "selective", "oversmoothing")


@dataclass(frozen=True)
class DemoRow:
    """One model; NLL and ECE over test images, corrupted ones as means over types and severities."""

    model: str
    accuracy: float
    nll: float
    ece: float
    corrupted_accuracy: float
    corrupted_nll: float
    corrupted_ece: float
    near_auroc: float
    far_auroc: float
    floor_share: float | None
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """All models of the demo."""

    rows: tuple[DemoRow, ...]
    folder: Path
    report: Path


def demo_recipe(model: str, *, kernel_epochs: int = 10, epochs: int = 20, seed: int = 0) -> Recipe:
    """The recipe of one of the demo's models."""
    return recipe_from_dict(
        {
            "name": f"demo-{model}",
            "seed": seed,
            "data": {"name": "digits"},
            "model": {
                "attention": model,
                "options": MODELS[model],
                "config": {"width": 64, "heads": 4, "depth": 3},
            },
            "optimizer": {"batch_size": 50, "learning_rate": 2e-3},
            "phases": {"kernel_epochs": kernel_epochs, "epochs": epochs},
            "checkpoint": {"every": 5, "keep": 1},
        }
    )


def run_demo(
    folder: str | Path,
    *,
    models: tuple[str, ...] = tuple(MODELS),
    kernel_epochs: int = 10,
    epochs: int = 20,
    seed: int = 0,
    workers: int = 1,
    on_done: Callable[[DemoRow], object] | None = None,
) -> DemoResult:
    """Train and evaluate the models; what an earlier demo left in `folder` is replaced.

    Each model trains on one thread, `workers` of them at once: matrices this small gain nothing from more.
    """
    unknown = sorted(set(models) - set(MODELS))
    if unknown:
        raise ValueError(f"expected models among {', '.join(MODELS)}, got {', '.join(unknown)}")
    if workers < 1:
        raise ValueError(f"expected workers >= 1, got {workers}")
    folder = Path(folder)
    jobs = [
        (demo_recipe(m, kernel_epochs=kernel_epochs, epochs=epochs, seed=seed), folder / m) for m in models
    ]
    rows = {}
    for row in _run_all(jobs, workers):
        rows[row.model] = row
        if on_done is not None:
            on_done(row)
    report = write_report([folder / m for m in models], folder / "report.html", title=TITLE)
    return DemoResult(tuple(rows[m] for m in models), folder, report)


def _run_all(jobs: list[tuple[Recipe, Path]], workers: int) -> Iterator[DemoRow]:
    if workers == 1:
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            yield from (_train_and_judge(*job) for job in jobs)
        except TrainingStoppedError as stopped:
            raise TrainingStoppedError(f"{str(stopped).partition(';')[0]}; {STARTS_ANEW}") from stopped
        finally:
            torch.set_num_threads(threads)
        return
    # the long ones first, so that none is left alone at the end
    longest = sorted(jobs, key=lambda job: list(MODELS).index(job[0].model.attention), reverse=True)
    for setting in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(
            setting, str(2**30)
        )  # glibc then keeps memory: a tenth of the time was giving it back
    for (recipe, _), answer in side_by_side(_in_process, longest, workers, when_stopped=STARTS_ANEW):
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Died):
            raise TrainingFailedError(f"{recipe.name}: {answer.how}")
        yield answer


def _in_process(job: tuple[Recipe, Path], _: int) -> DemoRow | Exception:
    """In one of several processes: an error is an answer too, and is raised in the first one."""
    try:
        return _train_and_judge(*job)
    except Exception as error:  # of any kind
        return error


def _is_demo(folder: Path, name: str) -> bool:
    """Whether an earlier demo left this run; somebody's work is refused."""
    written = folder / "recipe.json"
    if not written.is_file():
        return False
    try:
        found = read_json(written, nonfinite=True)["name"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != name:
        raise FileExistsError(
            f"{folder} holds a run that is not the demo's ({found!r}): choose another folder"
        )
    return True


def _train_and_judge(recipe: Recipe, folder: Path) -> DemoRow:
    if _is_demo(folder, recipe.name):
        shutil.rmtree(folder)
    start = time.perf_counter()
    result = train_recipe(recipe, folder)
    seconds = time.perf_counter() - start
    found = evaluate_run(
        folder, SUITES, device="cpu", samples=DRAWS, predictors=("model",), types=CORRUPTIONS,
        severities=SEVERITIES,
    )  # fmt: skip
    return _row(recipe.model.attention, found, seconds, chosen_row(recipe, result.rows)["floor_share"])


def _row(model: str, found: dict[str, SuiteResult], seconds: float, share: float | None) -> DemoRow:
    def value(suite: str, items: str, metric: str, **detail: str) -> float:
        told = found[suite].value(items, metric, **detail)
        if told is None:
            raise RuntimeError(f"the {suite} suite has no {metric} of {items}")
        return told

    far = [value("ood", f"ood/{name}", "auroc", score="entropy") for name in FAR]
    return DemoRow(
        model=model,
        accuracy=value("clean", "test", "accuracy"),
        nll=value("clean", "test", "nll"),
        ece=value("clean", "test", "ece"),
        corrupted_accuracy=value("corrupted", "corrupted/mean", "accuracy"),
        corrupted_nll=value("corrupted", "corrupted/mean", "nll"),
        corrupted_ece=value("corrupted", "corrupted/mean", "ece"),
        near_auroc=value("ood", "ood/near", "auroc", score="entropy"),
        far_auroc=sum(far) / len(far),
        floor_share=share,
        seconds=seconds,
    )
