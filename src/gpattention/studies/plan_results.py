"""The results of a plan in one folder to commit: tables, the choice, records, and how all was made.

Run folders are large and are not committed.  Results are therefore made of records alone, without weights:
from run folders where these are evaluated, else from the archive of an earlier call.  So they can be made
again, and completed with further runs, when the run folders are gone; the same records give the same bytes.
"""

import io
import json
import lzma
import re
import shutil
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpattention import reports
from gpattention.checks import check_name
from gpattention.data import unpack as unpack_archive
from gpattention.data.corruptions import SEVERITIES
from gpattention.evaluation import predictor_order
from gpattention.files import StrPath, make_folder, read_object, remove_leftovers, visible
from gpattention.metrics import metric_of
from gpattention.runs import Recipe, compared, difference, difference_from, read_run
from gpattention.runs.recipe import flat
from gpattention.runs.records import recorded_settings
from gpattention.runs.results import HOW_CLEAR, Column, Difference, Group, OverSeeds, Results, RunData
from gpattention.runs.tables import Bold, Markup, csv_text, markdown, markdown_table
from gpattention.studies import model_card, write_file
from gpattention.studies.model_card import CLASSIFIED, SCORE, date_of, in_words, page, shown_path
from gpattention.studies.paper import FIGURES, TABLES, paper_table
from gpattention.studies.paper_tables import to_csv, to_markdown
from gpattention.studies.plans import CHOSEN, Candidate, Goal, Plan
from gpattention.studies.verdicts import LEVEL, OverItems, holm, paired_bootstrap
from gpattention.training.folder import TAKEN

ARCHIVE = "records.tar.xz"
# positions in a text are not aligned to four bytes, as xz takes them to be: 6 % smaller without
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME, "pb": 0}]
EXPECTED = "RUN/recipe.json, RUN/metrics.csv, RUN/events.jsonl or RUN/evaluation/SUITE.json"
LARGEST_ARCHIVE, MOST_FILES = 1 << 30, 100_000  # bytes and files that an archive may hold
_NAME = re.compile(r"[^/\\]+-seed-?\d+/(recipe\.json|metrics\.csv|events\.jsonl|evaluation/[^/\\]+\.json)")
DETECTED = ("auroc", "fpr95")
SETTINGS = ("samples", "limit", "seed", "predictors", "types", "severities")
SUMMARY_FIELDS = (
    "model", "predictor", "suite", "set", "metric", "score", "mean", "standard_error", "runs", "seeds",
    "items",
)  # fmt: skip
RANKED, ACCURACY = Column("clean", "validation", "nll"), Column("clean", "validation", "accuracy")
ROUNDING = 1e-9  # equal figures of several seeds need not have equal means
RANKING = {  # by the plan's criterion: what is ranked by, and the accuracy beside it
    "clean": (RANKED, ACCURACY),
    "shifts": (
        Column("criterion", "validation/criterion", "nll"),
        Column("criterion", "validation/clean", "accuracy"),
    ),
}
# where a rival is held against the choice: the hardest of these
PLACES = (("corrupted", "corrupted/mean"), ("clean", "ood/out-of-domain"), ("clean", "test"))
THREADED = ("accuracy", "mcc", "nll", "ece", "auroc")  # what the page of threads shows
MADE_AGAIN = "report.html"  # at will: not worth a place in a repository


def write_results(
    plan: Plan,
    runs: StrPath,
    out: StrPath,
    *,
    plan_file: StrPath | None = None,
    on_archived: Callable[[tuple[str, ...]], object] | None = None,
) -> list[Path]:
    """Write tables, the choice, the paper's tables, the report, and a README that says how.

    The records of the runs are packed beside them, into `records.tar.xz`.  A later call takes from
    that file the runs that are not evaluated in `runs`, and keeps in it those that it is not asked for.

    Args:
        plan: whose runs, or some of them (`Plan.only`).
        runs: the folder of the plan's runs; nothing is written there, and with records it need not be there.
        out: the folder to write; what else is there is left alone, and README.md does not list it.
        plan_file: the plan's own file, for the commands in the README.
        on_archived: called with the runs that are taken from the records of an earlier call, if any.

    Returns:
        The files that were written, README.md last.

    Raises:
        FileNotFoundError: there is neither such a folder of runs nor an archive.
        ValueError: no run is evaluated, or the archive is damaged.
    """
    runs, out = Path(runs), Path(out)
    with tempfile.TemporaryDirectory(prefix="gpattention-records-") as place:
        archived = gather(plan, runs, out / ARCHIVE, Path(place))
        if archived and on_archived is not None:
            on_archived(archived)
        try:  # of the records alone, so that results do not depend on where these came from
            results = read_results(plan, Path(place))
        except (
            KeyError,
            TypeError,
            ValueError,
        ) as error:  # whose message must not name a folder that is gone
            where = out / ARCHIVE if (out / ARCHIVE).is_file() else runs
            raise ValueError(str(error).replace(place, str(where))) from None
        contents = {ARCHIVE: packed(Path(place)), **_contents(results)}
    commands = _commands(results, runs, out, Path(plan_file) if plan_file else None)
    contents["README.md"] = readme(results, commands, list(contents)).encode()
    remove_leftovers(make_folder(out))
    return [
        write_file(out / check_name("the name of a file of results", name), content)
        for name, content in contents.items()
    ]


def _contents(results: "PlanResults") -> dict[str, bytes]:
    """Files of results but the archive and the README, by name."""
    ranking = rank(results)
    texts = {
        "summary.md": summary_markdown(results),
        "summary.csv": summary_csv(results),
        "choice.md": choice_markdown(results, ranking),
    }
    if results.again:
        texts["threads.md"] = threads_markdown(results)
    configs = {}
    for model in results.models:
        rows = [(run.seed, row) for run in model.runs for row in run.rows]
        if rows:  # shared models have none
            columns = list(dict.fromkeys(key for _, row in rows for key in row))
            lines = ([seed, *(row.get(key) for key in columns)] for seed, row in rows)
            texts[f"training-{model.name}.csv"] = csv_text(["seed", *columns], lines)
        recipe = model.runs[0].parsed.to_dict()
        del recipe["seed"]
        configs[model.name] = {"seeds": [run.seed for run in model.runs], "recipe": recipe}
    texts["configs.json"] = json.dumps(configs, indent=1) + "\n"
    for table in (paper_table(name, results.models) for name in (*TABLES, *FIGURES)):
        if any(cell.ours is not None for row in table.rows for cell in row.cells):
            texts |= {f"{table.spec.name}.md": to_markdown(table), f"{table.spec.name}.csv": to_csv(table)}
    own = [run for model in results.models for run in model.runs]
    shown = [replace(run, folder=f"runs/{results.plan.name}/{run.name}") for run in own]
    title = f"{results.plan.name}: {len(results.models)} models"
    without = () if results.texts else ("gallery",)  # records have no images
    texts["report.html"] = reports.build_report(shown, title, without=without)
    return {name: text.encode(errors="replace") for name, text in texts.items()}


def _commands(results: "PlanResults", runs: Path, out: Path, plan_file: Path | None) -> list[str]:
    """The commands that make the same results."""
    plan = results.plan
    named = f"recipes/plans/{plan.name}.toml" if plan_file is None else shown_path(plan_file)
    devices = [event.get("device", "") for run in results.runs for event in _events(run, "phase")]
    where = " --device cuda" if any(str(device).startswith("cuda") for device in devices) else ""
    place = shown_path(runs)
    folder = "" if place == f"runs/{plan.name}" else f" --runs {place}"
    start = " ".join([f"gpattention reproduce {named}{folder}", *plan.part])
    ends = (f"train{where}", f"evaluate{where}", f"results -o {shown_path(out)}")
    return [f"{start} --stage {end}" for end in ends]


# The runs of a plan, and the table of their results


@dataclass(frozen=True, eq=False)
class PlanResults:
    """Everything that a plan's folder holds so far."""

    plan: Plan
    models: tuple[Group, ...]  # with at least one evaluated run, in the plan's order
    missing: tuple[str, ...]  # runs of the plan that are not trained or not evaluated
    failed: tuple[RunData, ...] = ()  # runs whose training broke off: a result too, without figures
    planned: Mapping[str, Recipe] = field(default_factory=dict)  # by run, what the plan says of it now
    again: tuple[Group, ...] = ()  # models that were trained once more, with other numbers of threads

    @property
    def groups(self) -> tuple[Group, ...]:
        """The models, and those that are some of them again."""
        return (*self.models, *self.again)

    @cached_property
    def table(self) -> Results:
        """The table of results of all groups, by their names in the plan."""
        return Results.of(self.groups)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Every model with every way to predict: in the plan's order, single models before ensembles."""
        found = [
            Candidate(model.name, predictor)
            for model in self.models
            for predictor in sorted(self.table.predictors(model.name), key=predictor_order)
        ]
        return sorted(found, key=lambda each: each.is_ensemble)  # sorting keeps the order of equals

    @property
    def runs(self) -> list[RunData]:
        """The runs of all groups."""
        return [run for model in self.groups for run in model.runs]

    @property
    def texts(self) -> bool:
        """Whether the models read text."""
        return self.models[0].runs[0].texts

    def find(self, candidate: Candidate, column: Column) -> OverSeeds | None:
        """A number of a candidate."""
        return column.find(self.table, candidate.model, candidate.predictor)

    def singles(self, column: Column) -> dict[Candidate, OverSeeds]:
        """The numbers of a column that may be compared with each other: ensembles are not."""
        found = ((each, self.find(each, column)) for each in self.candidates if not each.is_ensemble)
        return {candidate: figure for candidate, figure in found if figure is not None}


def read_results(plan: Plan, runs: Path) -> PlanResults:
    """Read the evaluated runs of a plan in a folder, those that broke off, and what is missing."""
    found = find_runs_of(plan, runs)
    models: dict[str, list[RunData]] = {}
    for training in plan.trainings:
        if training.folder in found and found[training.folder].suites:
            models.setdefault(training.model, []).append(found[training.folder])
    again = {training.model for training in plan.trainings if training.again}
    groups = [Group(name, tuple(of_model)) for name, of_model in models.items()]
    if not set(models) - again:
        how = "gpattention reproduce PLAN --stage evaluate makes them"
        raise ValueError(f"expected evaluated runs of {plan.name} in {runs}, got none: {how}")
    return PlanResults(
        plan,
        models=tuple(group for group in groups if group.name not in again),
        again=tuple(group for group in groups if group.name in again),
        missing=tuple(t.folder for t in plan.trainings if t.folder not in found),
        failed=tuple(run for run in found.values() if not run.suites),
        planned={found[t.folder].name: t.recipe for t in plan.trainings if t.folder in found},
    )


def find_runs_of(plan: Plan, runs: Path) -> dict[str, RunData]:
    """Runs of a plan that are evaluated or broke off, by the folders that the plan names."""
    if not runs.is_dir():
        raise FileNotFoundError(f"no folder {runs}")
    found = {}
    for name in (training.folder for training in plan.trainings):
        run = read_run(runs / name) if (runs / name / "recipe.json").is_file() else None
        if run is not None and (run.suites or run.failure):
            _ = run.parsed  # a recipe that cannot be read is an error before any work
            found[name] = run
    return found


def _events(run: RunData, kind: str) -> list[Mapping[str, Any]]:
    return [event for event in run.events if event.get("event") == kind]


# The archive of records


def gather(plan: Plan, runs: Path, archive: Path, place: Path) -> tuple[str, ...]:
    """Write the records of runs into a new folder: of the plan's runs, and what an archive has besides.

    Args:
        plan: whose runs, or some of them; those of the archive that are not asked for are kept.
        runs: their folder; it need not be there if there is an archive.
        archive: archive of an earlier call, for runs that are not evaluated in `runs`; it need not be there.
        place: an empty folder to write to.

    Returns:
        The plan's runs that came from the archive.
    """
    if archive.is_file():
        unpack(archive, place)
    # without an archive, a folder that is not there is a mistake and an error
    found = find_runs_of(plan, runs) if runs.is_dir() or not archive.is_file() else {}
    for name, run in found.items():
        _write_records(run, place / name, archive)
    asked = [training.folder for training in plan.trainings]
    return tuple(name for name in asked if name not in found and (place / name).is_dir())


def _write_records(run: RunData, place: Path, archive: Path) -> None:
    """Replace the records of an earlier call, which must not have suites that the run folder lacks."""
    folder, plain = Path(run.folder), {"recipe.json": run.recipe}
    for file in sorted((folder / "evaluation").glob("*.json")):
        plain[f"evaluation/{file.name}"] = suite = read_object(file, nonfinite=True)
        if not run.texts:
            suite.get("curves", {}).pop("gallery", None)  # pixels: they are large, and no figure needs them
    earlier = sorted((place / "evaluation").glob("*.json"))
    if lost := ", ".join(file.stem for file in earlier if f"evaluation/{file.name}" not in plain):
        how = f"evaluate the run by {lost}, or remove the archive"
        raise ValueError(f"{archive} has {lost} of {place.name}, which the run folder has not: {how}")
    shutil.rmtree(place, ignore_errors=True)
    (place / "evaluation").mkdir(parents=True)
    for name, content in plain.items():  # without spaces; numbers are the same, to the last digit
        (place / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")
    for name in ("metrics.csv", "events.jsonl"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, place / name)


def packed(folder: Path) -> bytes:
    """All files in a folder as an archive; the same files give the same bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        found = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        for name, file in sorted(found.items()):
            member = tarfile.TarInfo(name)  # neither owner nor time
            member.size, member.mode = file.stat().st_size, 0o644
            tar.addfile(member, io.BytesIO(file.read_bytes()))
    return lzma.compress(stream.getvalue(), filters=COMPRESSION)


def unpack(archive: Path, folder: Path) -> None:
    """Write the records that an archive holds; `ValueError`, and nothing written, if it is not whole."""

    def check(names: Sequence[str]) -> None:
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise ValueError(f"{archive}: expected {EXPECTED}, got {name!r}")

    unpack_archive(archive, folder, limit=LARGEST_ARCHIVE, files=MOST_FILES, check=check)


# Every model with every way to predict


def summary_markdown(results: PlanResults) -> str:
    """The page of all models: mean and standard error over seeds."""
    tables = [(title, note, *_summary_table(results, columns)) for title, columns, note in _layouts(results)]
    return page("summary.md", name=results.plan.name, tables=tables)


def _layouts(results: PlanResults) -> Iterator[tuple[str, list[Column], str]]:
    """Title, columns and note of the tables that these evaluations can fill."""

    def classified(suite: str, place: str) -> list[Column]:
        metrics = ("mcc", *CLASSIFIED) if results.texts else CLASSIFIED
        return [Column(suite, place, metric, head=metric_of(metric).heading) for metric in metrics]

    def outside(suite: str) -> dict[str, str]:
        return {p: p.removeprefix("ood/") for p in results.table.sets(suite=suite) if p.startswith("ood/")}

    yield f"{'In domain' if results.texts else 'Clean'}: test items", classified("clean", "test"), ""
    for place, name in outside("clean").items() if results.texts else ():
        yield f"Out of domain: {name}", classified("clean", place), ""
    if "corrupted/mean" in results.table.sets(suite="corrupted"):
        note = "Mean over all corruptions at all severities, each type weighing the same."
        yield "Corrupted: test items", classified("corrupted", "corrupted/mean"), note
    columns = [
        Column("ood", place, metric, SCORE, head=f"{name}: {metric_of(metric).heading}")
        for place, name in outside("ood").items()
        for metric in DETECTED
    ]
    if columns:
        note = (
            f"Items are told apart by the {SCORE} of the prediction; FPR95 takes test items as positive. "
            "summary.csv has the other scores."
        )
        yield "Items of other kinds, against test items", columns, note


def threads_markdown(results: PlanResults) -> str:
    """The page of models that were trained again with another number of threads: how far figures move."""
    threads = {each.model: each.threads for each in results.plan.trainings if each.threads}
    first = {each.model: each.again or each.model for each in results.plan.trainings}
    numbers = sorted(set(threads.values()))
    drift, leaders = [], []
    for title, shown, _ in _layouts(results):
        columns, rows = [column for column in shown if column.metric in THREADED], []
        for again, model in ((each.name, first[each.name]) for each in results.again):
            for predictor in sorted(results.table.predictors(model), key=predictor_order):
                found = [_drift(results, again, model, predictor, column) for column in columns]
                if any(found) and not Candidate(model, predictor).is_ensemble:
                    rows.append([model, predictor, str(threads[again]), *found])
        heads = ["Model", "Predictor", "Threads", *(column.head for column in columns)]
        drift.append((title, markdown_table(heads, rows, left=2)))
        for column in columns:
            of = ({name: first[name] for name, n in threads.items() if n == number} for number in numbers)
            leaders.append([title, column.head, *(_leader(results, column, names) for names in of)])
    heads = ["Items", "Measure", *(f"First, {number} threads" for number in numbers)]
    table = markdown_table(heads, leaders, left=None)
    return page("threads.md", name=results.plan.name, drift=drift, leaders=table, how_clear=HOW_CLEAR)


def _drift(results: PlanResults, again: str, model: str, predictor: str, column: Column) -> str:
    """Mean difference seed by seed ± its standard error, and the largest of a seed."""
    one, other = (column.find(results.table, name, predictor) for name in (again, model))
    if one is None or other is None:
        return ""
    gap, (digits, scale) = difference(one, other), (column.shown.digits, column.shown.scale)
    largest = max(abs(one.values[s] - other.values[s]) for s in one.values if s in other.values)
    text = f"{gap.text(digits, scale)} ({largest * scale:.{digits}f})"
    return Bold(text) if gap.clear else text


def _leader(results: PlanResults, column: Column, names: Mapping[str, str]) -> str:
    """The model whose own prediction has the best mean, by the name it is shown with; bold if clearly so."""
    known = ((shown, column.find(results.table, name, "model")) for name, shown in names.items())
    figures = {shown: figure for shown, figure in known if figure is not None}
    order = sorted(figures, key=lambda name: figures[name].mean, reverse=bool(column.shown.larger))
    clear = len(order) > 1 and difference(figures[order[0]], figures[order[1]]).clear
    text = order[0] if order else ""
    return Bold(text) if clear else text


def best_candidate(results: PlanResults, column: Column) -> Candidate | None:
    """Whose figure is clearly the best of the single models; None where nobody's is.

    Compared are those that are evaluated on as many items as most.
    """
    singles = list(results.singles(column).items())
    alike = [singles[i] for i in sorted(compared([figure for _, figure in singles]))]
    if len(alike) < 2:
        return None
    sign = -1 if column.shown.larger else 1
    (best, first), (_, second) = sorted(alike, key=lambda pair: sign * pair[1].mean)[:2]
    gap = difference(first, second)
    return best if gap.clear and sign * gap.mean < 0 and gap.basis in ("paired", "unpaired") else None


def _summary_table(results: PlanResults, columns: Sequence[Column]) -> tuple[bool, str]:
    """Whether single models are evaluated on different items, and the table."""
    best = [best_candidate(results, column) for column in columns]
    seeds = {model.name: len(model.runs) for model in results.models}
    rows = []
    for candidate in results.candidates:
        found = [results.find(candidate, column) for column in columns]
        known = next((figure for figure in found if figure is not None), None)
        if known is None:
            continue
        cells = []
        for column, figure, whose in zip(columns, found, best, strict=True):
            text = "" if figure is None else figure.text(column.shown.digits, column.shown.scale)
            cells.append(Bold(text) if whose == candidate else text)
        count = f"1 of {seeds[candidate.model]}" if candidate.is_ensemble else str(known.count)
        rows.append([candidate.model, candidate.predictor, count, known.items, *cells])
    headings = ["Model", "Predictor", "Seeds", "Items", *(column.head for column in columns)]
    differ = any(len({x.basis for x in results.singles(column).values()}) > 1 for column in columns)
    return differ, markdown_table(headings, rows, left=2)


def summary_csv(results: PlanResults) -> str:
    """One line for each figure, in fractions; severities are means over the types."""
    names, rows = [model.name for model in results.models], []
    for candidate in sorted(results.candidates, key=lambda each: names.index(each.model)):
        for *what, figure in _csv_figures(results.table, candidate):
            error = "" if figure.error is None else f"{figure.error:.3g}"
            seeds, items = " ".join(map(str, figure.values)), figure.items.replace(",", "")
            own = [candidate.model, candidate.predictor, *what]
            rows.append([*own, f"{figure.mean:.6g}", error, figure.count, seeds, items])
    return csv_text(SUMMARY_FIELDS, rows)


def _csv_figures(
    table: Results, candidate: Candidate
) -> Iterator[tuple[str, str, str, str | None, OverSeeds]]:
    """Suite, set, metric, score and figure."""
    severe: dict[str, None] = {}
    for what, figure in table.figures(recipe=candidate.model, predictor=candidate.predictor):
        suite, place, metric = what["suite"], what["set"], what["metric"]
        if suite == "ood":
            shown = metric in DETECTED
        else:  # categories of corruptions are in the paper's tables
            shown = (
                metric in ("mcc", *CLASSIFIED)
                and suite in ("clean", "corrupted", "criterion")
                and place.count("/") < 2
            )
            severe |= {metric: None} if metric in ("mcc", *CLASSIFIED) and suite == "corrupted" else {}
        if shown and (suite != "corrupted" or place == "corrupted/mean"):
            yield suite, place, metric, what.get("score"), figure
    for severity in SEVERITIES:
        for metric in severe:
            column = Column("corrupted", f"corrupted/*/{severity}", metric)
            found = column.find(table, candidate.model, candidate.predictor)
            if found is not None:
                yield "corrupted", f"corrupted/severity/{severity}", metric, None, found


# What is chosen on validation items, and whether it is better


@dataclass(frozen=True)
class Ranked:
    """A candidate and its figures on validation items."""

    candidate: Candidate
    nll: OverSeeds
    accuracy: OverSeeds | None
    rival: bool  # its model is one
    free: bool  # whether it may be chosen
    alike: bool = True  # evaluated on as many items as most, without which nothing is chosen


def rank(results: PlanResults) -> list[Ranked]:
    """Rank everything that was evaluated on validation items by the plan's criterion, mean over seeds.

    Ensembles are not ranked: their members have other splits, so that next to no validation item is new to
    all of them.  Rivals' models, predictors that the plan leaves out, and what was evaluated on more or fewer
    items than most are ranked but not chosen.
    """
    rivals, allowed = {rival.model for rival in results.plan.rivals}, results.plan.choose
    ranked_by, accuracy = RANKING[results.plan.criterion]
    figures = results.singles(ranked_by)
    like_most = compared(list(figures.values()))
    ranking = []
    for place, (candidate, nll) in enumerate(figures.items()):
        rival, alike = candidate.model in rivals, place in like_most
        free = alike and not rival and (not allowed or candidate.predictor in allowed)
        ranking.append(Ranked(candidate, nll, results.find(candidate, accuracy), rival, free, alike))
    return sorted(ranking, key=lambda ranked: ranked.nll.mean)


def chosen_of(ranking: Sequence[Ranked]) -> Ranked | None:
    """The first in the ranking that may be chosen."""
    return next((ranked for ranked in ranking if ranked.free), None)


def goal_figure(results: PlanResults, goal: Goal, one: Candidate) -> OverSeeds | None:
    """The chosen one's figure; of a goal beside its model's best, how far it is from that, seed by seed."""
    column = Column(goal.suite, goal.set, goal.metric, goal.score or None)
    figure = results.find(replace(one, predictor=goal.predictor or one.predictor), column)
    if figure is None or not goal.beside:
        return figure
    others = [found for each, found in results.singles(column).items() if each.model == one.model]
    alike = [found for found in others if figure.values.keys() <= found.values.keys()]
    best = (max if goal.larger else min)(alike, key=lambda found: found.mean)
    return OverSeeds({seed: value - best.values[seed] for seed, value in figure.values.items()}, figure.sets)


def goal_verdict(goal: Goal, figure: OverSeeds | None) -> tuple[Difference | None, str]:
    """The figure less the goal, which is taken as it is printed, and whether it is better."""
    if figure is None:
        return None, "no figure"
    gap = difference_from(figure, goal.value)
    if not (gap.mean > 0 if goal.larger else gap.mean < 0):
        return gap, "missed"
    return gap, "met, clear" if gap.clear else "met"


@dataclass(frozen=True)
class RivalVerdict:
    """The chosen model against one rival.

    NLL and ECE are to be lower and accuracy (of texts MCC) no less.  Where plans choose by shifts, NLL is to
    be lower, by Holm's correction over all rivals of a kind, and neither accuracy nor ECE clearly worse.
    """

    one: Candidate
    rival: Candidate
    gaps: Sequence[Difference | OverItems | None]  # one less the rival: accuracy, NLL, ECE
    items: Sequence[str]  # how many items each was evaluated on
    adjusted: float | None = None  # p-value of the NLL by Holm; None where there is no correction

    @property
    def outcome(self) -> str:
        """Clear if NLL and ECE both are; less accuracy in the mean is not beaten."""
        kept, nll, ece = self.gaps
        if nll is None or ece is None or kept is None:
            return "no figure"
        if self.adjusted is not None:
            if nll.mean >= 0 or _clearly_worse(kept, -1) or _clearly_worse(ece, 1):
                return "not beaten"
            return "beaten, clear" if self.adjusted < 1 - LEVEL else "beaten in the mean"
        if not (nll.mean < 0 and ece.mean < 0 and kept.mean >= -ROUNDING):
            return "not beaten"
        return "beaten, clear" if nll.clear and ece.clear else "beaten in the mean"

    @property
    def basis(self) -> str:
        """How the differences were taken, and where it is not like with like."""
        basis: str = next((gap.basis for gap in self.gaps if gap is not None), "")
        differ = basis and len(set(self.items)) > 1 and all(self.items)
        return f"{basis}; {self.items[0]} items against {self.items[1]}" if differ else basis


def _clearly_worse(gap: Difference | OverItems, sign: int) -> bool:
    """Whether the difference clearly has this sign; without an error, whether it has it at all."""
    return sign * gap.mean > ROUNDING and (gap.error is None or gap.clear)


def rival_columns(results: PlanResults) -> list[Column]:
    """Accuracy, NLL and ECE where it is hardest: under corruption, else out of domain, else on test items."""
    there = (each for each in PLACES if each[1] in results.table.sets(suite=each[0]))
    suite, place = next(there, PLACES[-1])
    return [Column(suite, place, m) for m in ("mcc" if results.texts else "accuracy", "nll", "ece")]


def named_rivals(results: PlanResults) -> list[Candidate]:
    """The rivals that are here, those that are `chosen` with the best predictor of their model."""
    best: dict[str, Candidate] = {}
    if any(rival.predictor == CHOSEN for rival in results.plan.rivals):
        for ranked in (ranked for ranked in rank(results) if ranked.alike):
            best.setdefault(ranked.candidate.model, ranked.candidate)
    here = [rival for rival in results.plan.rivals if rival.model in results.plan.models]
    return [best.get(rival.model, rival) if rival.predictor == CHOSEN else rival for rival in here]


def rival_verdicts(results: PlanResults, one: Candidate) -> list[RivalVerdict]:
    """Every rival here; the ensemble of the chosen model also against those that are ensembles too.

    Where the plan chooses by shifts, single models and ensembles are two families, each with Holm's
    correction, and ensembles are compared over items.
    """
    columns, rivals = rival_columns(results), named_rivals(results)
    strict = results.plan.criterion == "shifts"
    own = [(Candidate(one.model, rival.predictor), rival) for rival in rivals if rival.is_ensemble]
    pairs = [(one, rival) for rival in rivals if not (strict and rival.is_ensemble)]
    pairs += [(each, rival) for each, rival in own if results.find(each, columns[0]) is not None]
    verdicts = []
    for each, rival in pairs:
        figures = [(results.find(each, column), results.find(rival, column)) for column in columns]
        gaps: list[Difference | OverItems | None] = [
            None if mine is None or its is None else difference(mine, its) for mine, its in figures
        ]
        if strict and rival.is_ensemble:
            over_items = (_over_items(results, each, rival, column) for column in columns)
            gaps = [found or gap for found, gap in zip(over_items, gaps, strict=True)]
        items = ["" if figure is None else figure.items for figure in figures[-1]]
        verdicts.append(RivalVerdict(each, rival, gaps, items))
    if not strict:
        return verdicts
    adjusted: dict[str, float] = {}
    for kind in (False, True):
        adjusted |= holm(
            {str(v.rival): v.gaps[1].chance for v in verdicts if v.rival.is_ensemble == kind and v.gaps[1]}
        )
    return [replace(verdict, adjusted=adjusted.get(str(verdict.rival))) for verdict in verdicts]


def _over_items(
    results: PlanResults, one: Candidate, other: Candidate, column: Column
) -> OverItems | None:  # of metrics that are means over items, where records have the items
    found = []
    for each in (one, other):
        runs = [model.runs[0] for model in results.models if model.name == each.model]  # [] where none is yet
        curve = (runs[0].curve(column.suite, "by_item") if runs else None) or {}
        found.append(curve.get(each.predictor, {}).get(column.set, {}).get(column.metric))
    if found[0] is None or found[1] is None or len(found[0]) != len(found[1]):
        return None
    return paired_bootstrap(*found)


def choice_markdown(results: PlanResults, ranking: Sequence[Ranked]) -> str:
    """The page: what is chosen, goals, rivals, ranking."""
    chosen, plan = chosen_of(ranking), results.plan
    if chosen is None:
        return page("choice.md", name=plan.name, chosen=None)
    goals = []
    for goal in plan.goals:
        figure = goal_figure(results, goal, chosen.candidate)
        goals.append((goal, figure, *goal_verdict(goal, figure)))
    rivals = rival_verdicts(results, chosen.candidate)
    own = [verdict.outcome for verdict in rivals if verdict.one == chosen.candidate]
    outcomes = {"Goals met": [outcome for *_, outcome in goals], "Rivals beaten": own}
    following = [ranked for ranked in ranking if ranked.free][1:]
    return page(
        "choice.md",
        name=plan.name,
        ranking=ranking,
        chosen=chosen,
        lead=difference(chosen.nll, following[0].nll) if following else None,
        how_clear=HOW_CLEAR,
        outcomes=outcomes,
        absent=list(dict.fromkeys(rival.model for rival in plan.rivals if rival.model not in plan.models)),
        goals=goals,
        rivals=rivals,
        columns=rival_columns(results),
        metric_of=metric_of,
        strict=plan.criterion == "shifts",
    )


# How the results were made: commands, runs, hardware, dates, times, and everything that was cut


def readme(results: PlanResults, commands: Sequence[str], names: Sequence[str]) -> str:
    """The page that describes the results and how they were made."""
    return page(
        "results.md",
        plan=results.plan,
        models=results.groups,
        failed=results.failed,
        seeds=lambda runs: ", ".join(map(str, sorted({run.seed for run in runs if run.seed is not None}))),
        commands="\n".join(visible(command).replace("```", "` ` `") for command in commands),
        trainings=[_training(run) for run in results.runs],
        evaluations=[row for model in results.groups for row in _evaluations(model)],
        cuts=list(_cuts(results)),
        files=_file_table(names),
    )


def _training(run: RunData) -> list[str]:
    """Run, start, end, wall time, devices, how often it was resumed, and whose first phase it took."""
    if model_card.is_shared(run):
        return [run.name, "", "elsewhere: a shared model", "", "", "", ""]
    devices = []
    for event in _events(run, "phase"):
        precision = event.get("precision", "32-true")  # older runs do not say: they had no choice
        more = "" if precision == "32-true" else f", {precision}"
        devices.append(f"{event.get('device')}, {event.get('engine')}{more}")
    ends, taken = _events(run, "finished"), _events(run, TAKEN)
    stops = len(_events(run, "resumed")) - bool(taken)
    started, resumed = (date_of(run.events[0]["time"]), str(max(0, stops))) if run.events else ("", "")
    ended = date_of(ends[-1]["time"]) if ends else "not finished"
    where, source = ", ".join(dict.fromkeys(devices)), taken[0]["source"] if taken else ""
    return [run.name, started, ended, in_words(model_card.wall_seconds(run.events)), where, resumed, source]


def _evaluations(model: Group) -> Iterator[list[str]]:
    """Rows of evaluations; suites that were computed in the same way and place share a row."""
    grouped: dict[tuple[str, str], dict[str, float]] = {}
    for name, suite in (each for run in model.runs for each in run.suites.items()):
        found, place = recorded_settings(suite), suite.environment
        values = {key: found[key] for key in SETTINGS if found.get(key) is not None}
        texts = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in values.items()}
        settings = ", ".join(f"{key} {text}" for key, text in texts.items())
        named = [f"{key} {place[key]}" for key in ("torch", "python", "gpattention") if key in place]
        where = ", ".join([place["device"], *named] if "device" in place else named)
        seconds = grouped.setdefault((settings, where), {})
        seconds[name] = seconds.get(name, 0.0) + suite.seconds
    for (settings, where), seconds in grouped.items():
        yield [model.name, ", ".join(seconds), settings, in_words(sum(seconds.values())), where]


def _cuts(results: PlanResults) -> Iterator[str]:
    """Every note once, with the models that it is about unless it is about all."""
    owners: dict[str, dict[str, None]] = {}
    for model in results.groups:
        notes = list[str]()
        for run in model.runs:
            notes += [note for suite in run.suites.values() for note in suite.notes]
            recipes = run.parsed, results.planned.get(run.name, run.parsed)
            ours, planned = (flat(recipe.to_dict()) for recipe in recipes)
            for key in sorted({*ours, *planned} - {"name"}):
                if ours.get(key) != planned.get(key):
                    gap = f"{key} = {ours.get(key)}, in the plan {planned.get(key)}"
                    notes.append(f"not the plan's recipe: {gap}")
        for note in _over_runs(notes):
            owners.setdefault(note, {})[model.name] = None
    for note, of in owners.items():
        yield note if len(of) == len(results.groups) else f"{', '.join(of)}: {note}"
    if results.missing:
        yield f"not trained or not evaluated: {', '.join(results.missing)}"
    if not results.texts:
        yield "report.html is without the gallery of items, to keep it small"


_PERCENT = re.compile(r"(\d+(?:\.\d+)?) %")


def _over_runs(notes: Sequence[str]) -> Iterator[str]:
    """Every note once; of those that differ in percentages alone one, with the range of each."""
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for note in notes:
        text, numbers = (_PERCENT.split(note)[first::2] for first in (0, 1))
        found.setdefault(tuple(text), []).append(numbers)
    for (begin, *rest), several in found.items():
        ranges = (sorted(numbers, key=float) for numbers in zip(*several, strict=True))
        words = (" to ".join(dict.fromkeys((each[0], each[-1]))) for each in ranges)
        yield begin + "".join(f"{word} %{text}" for word, text in zip(words, rest, strict=True))


def _file_table(names: Sequence[str]) -> str:
    """Files that are kept, grouped by what they are."""
    text = (files("gpattention.studies") / "pages" / "files.toml").read_text(encoding="utf-8")
    known = tomllib.loads(text)  # what files are, by the pattern of their names
    grouped: dict[str, list[str]] = {about: [] for about in known.values()}
    for name in sorted(name for name in names if name != MADE_AGAIN):
        about = next(about for pattern, about in known.items() if fnmatch(name, pattern))
        grouped[about].append(f"[{markdown(name)}]({quote(name, safe='+=,@')})")
    rows = [[Markup(about), Markup(", ".join(of))] for about, of in grouped.items() if of]
    return markdown_table(["What", "Files"], rows, left=None)
