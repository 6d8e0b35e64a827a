"""Plans: many runs from one file, which names recipes, changes and seeds; everything else follows.

>>> from gpattention.studies.plans import evaluate_plan, load_plan, train_plan
>>> from gpattention.studies.plan_results import write_results
>>> plan = load_plan("recipes/plans/cifar10-60.toml")
>>> train_plan(plan, "runs/cifar10-60", at_once=8, device="cuda")
>>> evaluate_plan(plan, "runs/cifar10-60", device="cuda")
>>> write_results(plan, "runs/cifar10-60", "results/cifar10-60")

The work is done by processes of `gpattention`, each with its own log.  It can be stopped and started again:
finished runs are left alone, others go on where they were.
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from gpattention.checks import check_choice, check_count, check_keys, check_name
from gpattention.evaluation import FITTED, PREDICTOR_NAMES
from gpattention.evaluation.suites import SUITES
from gpattention.files import StrPath, make_folder, nearest_path, read_toml
from gpattention.metrics import METRICS
from gpattention.runs import Recipe, load_recipe, read_events, with_seed, write_recipe
from gpattention.runs.folder import CARD_RECIPE
from gpattention.studies.model_card import write_shared_run
from gpattention.studies.scheduler import Died, Engine, Lost, side_by_side
from gpattention.training import first_phase, needs_warm_start
from gpattention.training.folder import FIRST_PHASE, SHARED, list_checkpoints

AGGREGATIONS = ("pooled", "batch-mean")
CRITERIA = ("clean", "shifts")  # what is chosen by: NLL of validation items, or what the suite criterion says
CHOSEN = "chosen"  # a rival's predictor: its best one, by the plan's criterion
OWN_BEST = "own best"  # what a goal may be beside
BATCHED = ("ece", "mce")  # measures that the paper averages over batches; the others are the same both ways
SETS = {"clean": "test", "corrupted": "corrupted/mean"}  # what a suite's goal is about unless it says so
STOPPED = 130  # exit code of a command that saved its state and stopped
_KEYS = {
    "name", "seeds", "changes", "train", "suites", "evaluate", "runs", "goals", "rivals", "choose", "threads",
    "criterion",
}  # fmt: skip
_RUN_KEYS = {"recipe", "name", "changes", "seeds", "evaluate"}
_SHARED_KEYS = {"shared", "name", "evaluate"}


@dataclass(frozen=True)
class Goal:
    """A figure that the chosen model is to beat."""

    name: str
    suite: str
    measure: str  # accuracy, nll, ece, ...
    value: float
    source: str  # whose figure it is
    better: str  # higher or lower
    aggregation: str = "pooled"
    set: str = ""  # of the suite; with a star the mean over all that fit
    score: str = ""  # of the suite ood
    predictor: str = ""  # of the chosen model; the chosen one if empty
    beside: str = ""  # "own best": `value` is added to the best figure of the chosen model's predictors

    @property
    def metric(self) -> str:
        """The name of the metric in records."""
        batched = self.aggregation == "batch-mean" and self.measure in BATCHED
        return f"batch_{self.measure}" if batched else self.measure

    @property
    def larger(self) -> bool:
        """Whether larger is better."""
        return self.better == "higher"


@dataclass(frozen=True)
class Candidate:
    """A model of a plan with one way to predict, written MODEL:PREDICTOR."""

    model: str
    predictor: str

    @staticmethod
    def parse(text: Any) -> "Candidate":
        """Read MODEL:PREDICTOR."""
        model, colon, predictor = str(text).rpartition(":")
        if not (model and colon and predictor):
            raise ValueError(f"expected MODEL:PREDICTOR, got {text!r}")
        return Candidate(model, predictor)

    def __str__(self) -> str:
        return f"{self.model}:{self.predictor}"

    @property
    def is_ensemble(self) -> bool:
        """Whether it takes several runs to predict."""
        return self.predictor.partition("+")[0] == "ensemble"


@dataclass(frozen=True)
class PlannedTraining:
    """One run of a plan."""

    model: str  # the name that its seeds share
    seed: int
    recipe: Recipe
    evaluate: tuple[str, ...] = ()  # arguments of `gpattention evaluate` for this model, after the plan's
    shared: Path | None = None  # a shared model's folder: nothing is trained then
    threads: int | None = None  # of the CPU; torch decides where none are given
    again: str = ""  # the model that this one is once more, with other threads

    @property
    def folder(self) -> str:
        """Name of its folder among the plan's runs."""
        return f"{self.model}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """A plan file, its recipes read and checked."""

    name: str
    trainings: tuple[PlannedTraining, ...]
    suites: tuple[str, ...]  # how runs are evaluated
    evaluate: tuple[str, ...]  # further arguments of `gpattention evaluate`
    train: tuple[str, ...] = ()  # and of `gpattention train`
    goals: tuple[Goal, ...] = ()  # figures that the chosen model is to beat
    rivals: tuple[Candidate, ...] = ()  # what it is to beat of our own; their models are not chosen
    choose: tuple[str, ...] = ()  # predictors that may be chosen; all where none is named
    criterion: str = "clean"  # what is chosen by
    part: tuple[str, ...] = ()  # arguments of `gpattention reproduce` that name this part of it

    @property
    def models(self) -> tuple[str, ...]:
        """Names in the order of the file, each once."""
        return tuple(dict.fromkeys(training.model for training in self.trainings))

    def only(self, models: Sequence[str] = (), seeds: Sequence[int] = ()) -> "Plan":
        """A part of the plan.

        Args:
            models: which models; all where none is named.
            seeds: which seeds; all where none is named.

        Returns:
            The plan with the runs of these models and seeds.

        Raises:
            ValueError: the plan has no such model or seed.
        """
        chosen, part = self.trainings, list[str]()
        for name, wanted in (("model", models), ("seed", seeds)):
            known = dict.fromkeys(getattr(training, name) for training in self.trainings)
            for each in wanted:
                check_choice(f"{name}s of the plan", str(each), [*map(str, known)])
            if wanted:
                chosen = tuple(training for training in chosen if getattr(training, name) in wanted)
                part += [f"--{name}s", ",".join(map(str, wanted))]
        return replace(self, trainings=chosen, part=tuple(part))

    def sources(self) -> dict[str, str]:
        """Folders of runs whose first phase another run trains too, and that run's folder."""
        first: dict[str, str] = {}
        found: dict[str, str] = {}
        for training in self.trainings:
            recipe = training.recipe
            if training.shared is None and recipe.phases.kernel_epochs >= 1 and needs_warm_start(recipe):
                key = json.dumps([first_phase(recipe), training.threads], sort_keys=True)
                found[training.folder] = first.setdefault(key, training.folder)
        return {folder: source for folder, source in found.items() if source != folder}


def load_plan(path: str | Path) -> Plan:
    """Read a plan.

    Args:
        path: a TOML file; its recipes are files beside it, in the folder above, or named by their path.

    Returns:
        The plan, its recipes read.

    Raises:
        FileNotFoundError: there is no such plan, recipe or shared model.
        ValueError: the plan or a recipe is refused.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no plan {path}{nearest_path(path, '.toml', beside=['plans', 'recipes/plans'])}"
        )
    plain = read_toml(path)
    check_keys(str(path), plain, _KEYS)
    if not plain.get("runs"):
        raise ValueError(f"expected [[runs]] in {path}, got none")
    trainings = [each for entry in plain["runs"] for each in _trainings(entry, plain, path)]
    plan = Plan(
        name=check_name(f"name of {path}", plain.get("name", path.stem)),
        trainings=_with_threads(trainings, plain.get("threads", []), path),
        goals=tuple(_goal(entry, f"[[goals]] of {path}") for entry in plain.get("goals", ())),
        rivals=tuple(Candidate.parse(entry) for entry in plain.get("rivals", ())),
        suites=tuple(plain.get("suites", ("clean",))),
        criterion=plain.get("criterion", "clean"),
        **{key: tuple(plain.get(key, ())) for key in ("evaluate", "train", "choose")},
    )
    check_choice(f"{path}: criterion", plan.criterion, CRITERIA)
    if plan.criterion == "shifts" and "criterion" not in plan.suites:
        raise ValueError(f"{path}: expected criterion among suites, as it is chosen by, got {plan.suites}")
    names = [training.folder for training in plan.trainings]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path}: two runs are called {name}; give one of them another name")
        check_name(f"{path}: the file of a run", f"training-{name}.toml")  # the longest around a name
    predictors = [*PREDICTOR_NAMES, *(f"{base}+{fit}" for base in PREDICTOR_NAMES for fit in FITTED)]
    for what, given, allowed in (
        ("suites", plan.suites, SUITES),
        ("rivals", [rival.model for rival in plan.rivals], plan.models),
        ("choose", plan.choose, predictors),
    ):
        for each in given:
            check_choice(f"{path}: {what}", each, allowed)
    return plan


def _goal(entry: Mapping[str, Any], where: str) -> Goal:
    known = {field.name for field in fields(Goal)}
    check_keys(where, entry, known)
    optional = {each.name for each in fields(Goal) if each.default is not MISSING}
    if missing := sorted(known - optional - set(entry)):
        raise ValueError(f"expected {missing[0]} in {where}, got {dict(entry)!r}")
    measure = entry["measure"]
    metrics = {name for name in METRICS if not name.startswith("batch_")}  # batches are an aggregation
    right = "higher" if measure in metrics and METRICS[measure].larger else "lower"
    goal = Goal(**{"set": SETS.get(entry["suite"], ""), **entry, "value": float(entry["value"])})
    allowed = {
        "measure": metrics, "suite": SUITES, "aggregation": AGGREGATIONS, "beside": ("", OWN_BEST),
        "better": (right,),
    }  # fmt: skip
    for key, choices in allowed.items():
        check_choice(f"{where}: {key}", getattr(goal, key), sorted(choices))
    if not goal.set:
        raise ValueError(f"{where}: expected set, as {goal.suite} has several, got none")
    return goal


def _trainings(entry: Mapping[str, Any], plain: Mapping[str, Any], path: Path) -> list[PlannedTraining]:
    evaluate, where = tuple(entry.get("evaluate", ())), f"[[runs]] of {path}"
    if "shared" in entry:  # its recipe and seed are those that it was trained with
        check_keys(f"{where} with a shared model, which is not trained", entry, _SHARED_KEYS)
        places = [path.parent / entry["shared"], Path(entry["shared"])]
        folder = next((place for place in places if (place / CARD_RECIPE).is_file()), None)
        if folder is None:
            raise FileNotFoundError(f"{path}: no shared model {entry['shared']!r}, seen from it or from here")
        recipe = load_recipe(folder / CARD_RECIPE)
        model = check_name(f"name in {where}", entry.get("name", recipe.name))
        return [PlannedTraining(model, recipe.seed, recipe, evaluate, folder)]
    check_keys(where, entry, _RUN_KEYS)
    if "recipe" not in entry:
        raise ValueError(f"{path}: expected recipe or shared in every [[runs]], got {dict(entry)!r}")
    file = f"{entry['recipe']}.toml"
    places = [path.parent / file, path.parent.parent / file, Path(entry["recipe"])]
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        raise FileNotFoundError(f"{path}: no recipe {entry['recipe']!r} beside it or in the folder above")
    recipe = load_recipe(place, [*plain.get("changes", ()), *entry.get("changes", ())])
    model = check_name(f"name in {where}", entry.get("name", recipe.name))
    seeds = entry.get("seeds", plain.get("seeds", [0]))
    return [PlannedTraining(model, s, with_seed(replace(recipe, name=model), s), evaluate) for s in seeds]


def _with_threads(
    trainings: Sequence[PlannedTraining], threads: Any, path: Path
) -> tuple[PlannedTraining, ...]:
    """Every run with the first number of threads, then all again with the next, under other names."""
    if not isinstance(threads, list) or len(set(map(str, threads))) < len(threads):
        raise ValueError(f"{path}: expected threads to be a list of different numbers, got {threads!r}")
    if not threads:
        return tuple(trainings)
    first, *others = (check_count(f"{path}: threads", number) for number in threads)
    found = [replace(training, threads=first) for training in trainings]
    for number in others:
        for training in trainings:
            if training.shared is None:
                name = f"{training.model}-{number}-threads"
                recipe = replace(training.recipe, name=name)
                again = replace(training, model=name, recipe=recipe, threads=number, again=training.model)
                found.append(again)
    return tuple(found)


# The work of a plan


@dataclass(frozen=True)
class Outcome:
    """How one process ended."""

    name: str
    code: int  # 0: done; STOPPED: saved, goes on next time; else failed
    seconds: float
    log: Path

    @property
    def message(self) -> str:
        """The last line of its log that begins at the margin, below which may be how to go on."""
        if not self.log.is_file():
            return ""
        lines = self.log.read_text(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip() and line[0] != " "), "")


@dataclass(frozen=True)
class _Command:
    name: str
    arguments: tuple[str, ...]  # of `gpattention`
    log: Path
    awaits: Path | None = None  # a folder that another run writes a checkpoint into
    threads: int | None = None
    trains: Path | None = None  # a run, which goes on where it has begun


class How(TypedDict, total=False):
    """How the processes of a plan work.

    Attributes:
        at_once: how many processes; 1 if not given.
        minutes: after which those under way save their state and stop.
        device: cpu, cuda, ...; auto if not given.
        root: folder of the datasets.
        on_done: called with each outcome.
        engine: where; on this machine if not given.
    """

    at_once: int
    minutes: float | None
    device: str
    root: StrPath | None
    on_done: Callable[[Outcome], object] | None
    engine: Engine | None


def train_plan(plan: Plan, runs: StrPath, **how: Unpack[How]) -> list[Outcome]:
    """Train every run of a plan that is not finished.

    Runs whose first phases are the same wait for the one that trains it and take it over, or train their own
    where a finished run no longer has it.  Shared models are copied, not trained.

    Args:
        plan: result of `load_plan`, or a part of it.
        runs: the folder of its runs.
        how: at_once, minutes, device, root, on_done, engine; see `How`.

    Returns:
        How the processes ended.
    """
    runs = _place(runs, how)
    make_folder(runs / "recipes")
    sources = plan.sources()
    commands = []
    for training in plan.trainings:
        name, folder = training.folder, runs / training.folder
        if is_finished(folder):
            continue
        if training.shared is not None:
            write_shared_run(training.shared, folder)
            continue
        file = runs / "recipes" / f"{name}.toml"
        write_recipe(file, training.recipe, f"run {name} of the plan {plan.name}")
        arguments = ["train", str(file), "--run", str(folder), *plan.train]
        awaits = None
        if name in sources and not (folder / "recipe.json").is_file():
            source = runs / sources[name]
            # the first phase of a finished run may have been removed, or not brought along
            if list_checkpoints(source / FIRST_PHASE) or not is_finished(source):
                arguments += ["--first-phase", str(source)]
                awaits = source / FIRST_PHASE
        log = runs / "logs" / f"{name}.txt"
        commands.append(_Command(name, tuple(arguments), log, awaits, training.threads, folder))
    return _run_all(commands, how)


def evaluate_plan(plan: Plan, runs: StrPath, **how: Unpack[How]) -> list[Outcome]:
    """Evaluate the finished runs of a plan, the seeds of a model together.

    Args:
        plan: result of `load_plan`, or a part of it.
        runs: the folder of its runs.
        how: at_once (how many models), minutes, device, root, on_done, engine; see `How`.

    Returns:
        How the processes ended.
    """
    runs = _place(runs, how)
    commands = []
    for model in plan.models:
        seeds = [t for t in plan.trainings if t.model == model]
        finished = [str(runs / t.folder) for t in seeds if is_finished(runs / t.folder)]
        if finished:
            settings = (*plan.evaluate, *seeds[0].evaluate)  # of an option given twice the last counts
            arguments = ("evaluate", *finished, "--suite", ",".join(plan.suites), *settings)
            log = runs / "logs" / f"evaluate-{model}.txt"
            commands.append(_Command(model, arguments, log, threads=seeds[0].threads))
    return _run_all(commands, how)


def is_finished(folder: Path) -> bool:
    """Whether a run has trained to its end, here or elsewhere."""
    whole = (folder / "recipe.json").is_file()  # not so where a shared model was half copied
    return whole and any(event["event"] in ("finished", SHARED) for event in read_events(folder))


def _run_all(commands: Sequence[_Command], how: How) -> list[Outcome]:
    def ready(command: _Command) -> bool:
        return command.awaits is None or bool(list_checkpoints(command.awaits))

    root, outcomes = how.get("root"), list[Outcome]()
    more = ["--device", how.get("device", "auto"), *(["--data", str(Path(root).absolute())] if root else [])]
    commands = [replace(command, arguments=(*command.arguments, *more)) for command in commands]
    at_once, minutes, engine = how.get("at_once", 1), how.get("minutes"), how.get("engine")
    for command, answer, seconds in side_by_side(
        run_command, commands, check_count("at_once", at_once), fresh=True, minutes=minutes, ready=ready,
        engine=engine,
    ):  # fmt: skip
        if isinstance(answer, Lost):
            with command.log.open("a") as log:
                log.write(f"{answer}\n")
            answer = 1
        code = answer.code if isinstance(answer, Died) else answer
        if answer is None:
            make_folder(command.log.parent)
            command.log.write_text("the run whose first phase it was to take over did not reach its end\n")
            code = 1
        elif code == -signal.SIGTERM:  # asked to stop before it could listen, it has lost nothing
            code = STOPPED
        outcomes.append(Outcome(command.name, code, seconds, command.log))
        if (on_done := how.get("on_done")) is not None:
            on_done(outcomes[-1])
    return outcomes


def _place(runs: StrPath, how: How) -> Path:
    """The folder of runs; absolute for a cluster, whose nodes have other working directories."""
    return Path(runs) if how.get("engine") is None else Path(runs).absolute()


def run_command(command: _Command, _: int) -> int:
    """Run `gpattention` with some arguments in this process, which is its own; its output goes to its log."""
    make_folder(command.log.parent)
    with command.log.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    sys.argv = ["gpattention", *command.arguments]
    # a run that has begun goes on, also one whose node was lost a moment ago
    if command.trains is not None and (command.trains / "recipe.json").is_file():
        if "--first-phase" in sys.argv:
            place = sys.argv.index("--first-phase")
            del sys.argv[place : place + 2]
        sys.argv.append("--resume")
    try:
        # the command line stands above this package, which cannot import it
        runpy.run_module("gpattention", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
