"""The evaluation of one run: predictions once, every suite from them, results in the run's folder.

What is finished with the same settings is read, not computed again; what was stopped goes on at the set
where it stopped.
"""

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gpattention
from gpattention.checks import check_count
from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES
from gpattention.data.places import StrPath
from gpattention.evaluation.named_predictors import DEFAULT_PREDICTORS, LAST_LAYERS, PREDICTOR_NAMES
from gpattention.evaluation.records import SuiteResult, read_suite, write_suite
from gpattention.evaluation.suites import (
    SUITES,
    EfficiencyPlan,
    Findings,
    efficiency_findings,
    gallery,
    health_table,
    oversmoothing_findings,
)
from gpattention.experiments.judging.earlier import with_earlier
from gpattention.experiments.judging.judges import JUDGES
from gpattention.experiments.judging.run_sets import RunSets, run_sets
from gpattention.experiments.judging.session import Progress, Session, Steps
from gpattention.experiments.judging.weights import open_with_digest
from gpattention.experiments.runs import Run
from gpattention.metrics.checks import check_choice
from gpattention.models.storage import remove_leftovers
from gpattention.training import choose_device


@dataclass(frozen=True)
class Settings:
    """How runs are evaluated."""

    suites: tuple[str, ...] = tuple(SUITES)
    root: StrPath | None = None
    device: torch.device | str = "auto"
    samples: int = 10
    seed: int = 0
    predictors: tuple[str, ...] = DEFAULT_PREDICTORS
    batch_size: int | None = None
    limit: int | None = None
    types: tuple[str, ...] | None = None  # corruptions; None for all
    severities: tuple[int, ...] | None = None
    shift_temperature: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", check_count("samples", self.samples, least=0))
        for corruption in self.types or ():
            check_choice("corruption", corruption, tuple(CORRUPTIONS))
        for severity in self.severities or ():
            if severity not in SEVERITIES:
                raise ValueError(f"expected severities among {SEVERITIES}, got {severity!r}")
        for suite in self.suites:
            check_choice("suite", suite, tuple(SUITES))
        for predictor in self.predictors:
            check_choice("predictor", predictor, PREDICTOR_NAMES)
        for name in ("suites", "predictors"):
            if not getattr(self, name):
                raise ValueError(f"expected at least one of {name}, got none")
        for name in ("batch_size", "limit"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_count(name, getattr(self, name)))

    @staticmethod
    def of(
        suites: Sequence[str] = ("all",), predictors: Sequence[str] = DEFAULT_PREDICTORS, **more: Any
    ) -> "Settings":
        """With "all" for every suite, each named once."""
        chosen = tuple(SUITES) if "all" in suites else tuple(dict.fromkeys(suites))
        more |= {key: tuple(more[key]) for key in ("types", "severities") if more.get(key) is not None}
        return Settings(chosen, predictors=tuple(dict.fromkeys(predictors)), **more)


class Evaluation:
    """A run, its data and, once something must be predicted, its session."""

    def __init__(self, folder: StrPath, settings: Settings) -> None:
        self.run: Run
        self.weights: str  # SHA-256 of those in `run`, also when the file has others by now
        self.run, self.weights = open_with_digest(folder)
        remove_leftovers(self.run.folder / "evaluation")
        self.settings = settings if settings.fresh else with_earlier(settings, self.run.folder, self.weights)
        self.sets: RunSets = run_sets(
            self.run,
            settings.root,
            limit=settings.limit,
            types=settings.types,
            severities=settings.severities,
        )
        self.device = choose_device(settings.device)
        self._session: Session | None = None
        self._results: dict[str, SuiteResult] = {}

    @property
    def session(self) -> Session:
        """Made when it is first needed."""
        if self._session is None:
            s = self.settings
            self._session = Session(
                self.run, self.weights, self.sets, s.predictors, samples=s.samples, seed=s.seed,
                device=self.device, batch_size=s.batch_size, fresh=s.fresh,
                shift_temperature=s.shift_temperature,
            )  # fmt: skip
        return self._session

    def suite(self, name: str, progress: Progress | None = None) -> SuiteResult:
        """Read what is finished, else compute and write it."""
        if name not in self._results:
            described = self._described(name)
            found = None if self.settings.fresh else finished(self.run.folder, name, described)
            self._results[name] = self._compute(name, described, progress) if found is None else found
        return self._results[name]

    def _compute(self, name: str, described: str, progress: Progress | None) -> SuiteResult:
        start = time.perf_counter()
        findings = MEASURED.get(name, _judged(name))(self, progress)
        result = self._result(name, findings, time.perf_counter() - start, described)
        write_suite(self.run.folder, result)
        return result

    def _result(self, name: str, findings: Findings, seconds: float, described: str) -> SuiteResult:
        """Findings with everything that a file says beside them."""
        limit = self.settings.limit
        cut = limit is not None and name != "efficiency"
        reduced = [f"reduced: at most {limit} items of each set"] if cut else []
        recipe, epoch = self.run.recipe, self.run.unfinished_epoch
        if epoch is not None:
            reduced.append(f"reduced: training has come to epoch {epoch} of {recipe.epochs}")
        return SuiteResult(
            suite=name,
            run=recipe.name,
            data=self.sets.data,
            seed=recipe.seed,
            attention=recipe.model.attention,
            samples=self.settings.samples,
            records=findings.records,
            curves=findings.curves,
            notes=tuple(dict.fromkeys((*reduced, *findings.notes))),
            environment={**_environment(self.device), "settings": described},
            seconds=seconds,
        )

    def _described(self, suite: str) -> str:
        """Everything that a suite's numbers depend on, as JSON."""
        s = self.settings
        told: dict[str, Any] = {
            "gpattention": gpattention.__version__,
            "model": self.weights,
            "limit": s.limit,
            "samples": s.samples,
        }
        epoch = self.run.unfinished_epoch
        if epoch is not None:  # which a note tells of, also where the weights stay the best
            told["epoch"] = epoch
        if SUITES[suite].predictions:
            told |= {"seed": s.seed, "predictors": list(s.predictors)}
            told |= {"shift_temperature": True} if s.shift_temperature else {}
            told |= {"train": self.sets.train.digest} if {*LAST_LAYERS} & {*s.predictors} else {}
        if suite != "efficiency":
            told |= self.sets.described(suite)
        if suite == "corrupted" and (s.types, s.severities) != (None, None):
            told |= {"types": s.types, "severities": s.severities}
        if suite == "efficiency":
            told["device"] = _environment(self.device)["device"]
        return json.dumps(told, sort_keys=True)


def finished(folder: Path, suite: str, described: str) -> SuiteResult | None:
    """The result in the folder, if there is one that was computed with these settings."""
    path = folder / "evaluation" / f"{suite}.json"
    if not path.exists():
        return None
    found = read_suite(path)
    return found if found.environment.get("settings") == described else None


def _judged(name: str) -> Callable[[Evaluation, Progress | None], Findings]:
    def run(evaluation: Evaluation, progress: Progress | None) -> Findings:
        session = evaluation.session
        found = JUDGES[name](session, progress)
        session.steps = Steps()  # what else is predicted is not for the bar
        return Findings.merge([found, Findings(notes=tuple(session.notes))])

    return run


def _clean(evaluation: Evaluation, progress: Progress | None) -> Findings:
    """With the gallery of the test set, and the health of the layers."""
    session, sets = evaluation.session, evaluation.sets
    found = _judged("clean")(evaluation, progress)
    if "model" not in session.names:
        return found
    predicted = session.predicted("model", sets.test)
    shown = {
        "gallery": gallery(session.model, sets.test, predicted, sets.classes, session.device),
        "health": health_table(session.model, sets.test, session.device),
    }
    return Findings.merge([found, Findings(curves=shown)])


def _oversmoothing(evaluation: Evaluation, progress: Progress | None) -> Findings:
    model = evaluation.run.model.to(evaluation.device)
    return oversmoothing_findings(model, evaluation.sets.test, evaluation.device)


def _efficiency(evaluation: Evaluation, progress: Progress | None) -> Findings:
    recipe = evaluation.run.recipe
    plan = EfficiencyPlan(
        batch=recipe.optimizer.batch_size,
        training_items=len(evaluation.sets.train),
        samples=evaluation.settings.samples,
        draw=recipe.phases.draw,
    )
    told = None if progress is None else lambda done, total: progress("efficiency", done, total)
    return efficiency_findings(evaluation.run.model, plan, evaluation.device, told)


# suites that are not, or not only, what `JUDGES` says of predictions
MEASURED: dict[str, Callable[[Evaluation, Progress | None], Findings]] = {
    "clean": _clean,
    "oversmoothing": _oversmoothing,
    "efficiency": _efficiency,
}


def _environment(device: torch.device) -> dict[str, str]:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}"
    return {
        "gpattention": gpattention.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": where,
        "threads": str(torch.get_num_threads()),
    }
