"""Which runs are which rows of the paper, and how they differ from the paper's experiments."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpattention.data.corrupted import CORRUPTIONS, SEVERITIES
from gpattention.runs import Group, name_without_seed
from gpattention.runs.results import flat
from gpattention.studies.paper.spec import Kind, ModelSpec, Note, TableSpec
from gpattention.training import Recipe

# what a shortened copy of a recipe is called; it is the same model, and the notes tell what was shortened
SHORTENED = re.compile(r"-(short|quick|small|reduced|\d+-?epochs?|limit-?\d+)$")
BEGINNINGS: dict[str, Kind] = {"missing: ": "missing", "reduced: ": "reduced"}


@dataclass(frozen=True)
class Matching:
    """Runs of the paper's models by label, and those of ours that the paper does not have."""

    rows: dict[str, Group]
    extras: tuple[Group, ...]

    @property
    def further(self) -> dict[str, Group]:
        """The extras by their labels."""
        return {f"{extra.name} (ours)": extra for extra in self.extras}

    @property
    def groups(self) -> dict[str, Group]:
        """All by their labels."""
        return {**self.rows, **self.further}


def match_runs(spec: TableSpec, groups: list[Group]) -> Matching:
    """By the recipe's name; of several that fit, one that has the table's suites and most runs goes first."""
    here = [_evaluated(each, spec.suites) for each in groups if each.runs[0].data == spec.data]
    rows: dict[str, Group] = {}
    for model in spec.models:
        fitting = [each for each in here if _place(model, each) is not None]
        if fitting:
            rows[model.label] = min(
                fitting,
                key=lambda g: (not has(g, spec.suites), _place(model, g), -len(g.runs), g.name),
            )
    others = (g for g in here if g not in rows.values() and has(g, spec.suites))
    return Matching(rows, tuple(each for each in others if each.name.startswith(spec.extras)))


def has(group: Group, suites: tuple[str, ...]) -> bool:
    """Whether any run has any of these suites."""
    return any(suite in run.suites for run in group.runs for suite in suites)


def _evaluated(group: Group, suites: tuple[str, ...]) -> Group:
    """Only the runs that have any of these suites; all where none has."""
    having = tuple(run for run in group.runs if any(suite in run.suites for suite in suites))
    return Group(group.name, having or group.runs)


def _place(model: ModelSpec, group: Group) -> int | None:
    """The place among the model's recipes, whole ones before shortened ones; None if it is another model."""
    name = _name(group)
    whole = SHORTENED.sub("", name)
    if whole not in model.recipes:
        return None
    return 2 * model.recipes.index(whole) + (whole != name)


def _name(group: Group) -> str:
    """Of the recipe, without what tells it from namesakes."""
    return name_without_seed(group.runs[0].parsed.name)


def caveats(spec: TableSpec, matching: Matching) -> Iterator[Note]:
    """Everything that keeps our figures from being the paper's experiment."""
    for model in spec.models:
        group = matching.rows.get(model.label)
        if group is None:
            named = " or ".join(model.recipes)
            yield Note("missing", f"{model.label}: no run of the recipe {named}")
        elif not has(group, spec.suites):
            how = f"`gpattention evaluate RUN --suite {spec.suites[0]}` makes it"
            yield Note("missing", f"{model.label}: {group.name} has no evaluation for this; {how}")
        else:
            yield from _of_model(spec, model, group)
    for group in matching.extras:
        theirs = sum(spec.training.epochs)
        if theirs and group.runs[0].parsed.epochs != theirs:
            yield Note(
                "reduced", f"{group.runs[0].parsed.epochs} epochs, the paper's models {theirs}", group.name
            )
    for group in (*matching.rows.values(), *matching.extras):
        if has(group, spec.suites):
            yield from _of_group(spec, group)


def _of_model(spec: TableSpec, model: ModelSpec, group: Group) -> Iterator[Note]:
    recipe, name = group.runs[0].parsed, group.name
    if _name(group) != model.recipes[0]:
        yield Note("reduced", f"fills the row {model.label}, as {model.recipes[0]} has no evaluation", name)
    trained = _told_epochs(spec, model, recipe)
    if trained:
        yield Note("reduced", trained, name)
    for key, value in {**spec.training.settings, **model.settings}.items():
        ours = _setting(recipe, key)
        if ours is not None and ours != value:
            yield Note("reduced", f"{key} = {ours}, in the paper {value}", name)
    if model.alpha is not None:
        yield from _told_alpha(model.alpha, group)


def _told_epochs(spec: TableSpec, model: ModelSpec, recipe: Recipe) -> str:
    """Nothing where it was trained as long as in the paper."""
    theirs, phases = spec.training.epochs, recipe.phases
    ours = (phases.kernel_epochs, phases.epochs)
    if not theirs or (sum(ours) == sum(theirs) if len(theirs) == 1 or model.unstated else ours == theirs):
        return ""
    trained = f"{ours[0]} + {ours[1]}" if ours[0] else f"{ours[1]}"
    if model.unstated:
        return f"{trained} epochs; the paper's own models {sum(theirs)}, of this one it does not say"
    return f"{trained} epochs, in the paper {' + '.join(map(str, theirs))}"


def _told_alpha(theirs: tuple[float, float], group: Group) -> Iterator[Note]:
    regularizer = group.runs[0].parsed.regularizer
    ours = (regularizer.start, regularizer.end)
    if regularizer.normalised:
        told = f"alpha {_span(*ours)} per token and dimension, in the paper {_span(*theirs)} of another sum"
        yield Note("reduced", told, group.name)
    elif ours != theirs:
        yield Note("reduced", f"alpha {_span(*ours)}, in the paper {_span(*theirs)}", group.name)


def _span(start: float, end: float) -> str:
    return f"{start:g}" if start == end else f"{start:g} to {end:g}"


def _of_group(spec: TableSpec, group: Group) -> Iterator[Note]:
    options = group.runs[0].parsed.data.options
    for option in ("subset", "limit"):
        if options.get(option):
            yield Note("reduced", f"trained with data.options.{option} = {options[option]}", group.name)
    yield from _told_contextual(spec, group)
    yield from _told_seeds(spec, group)
    for run in group.runs:
        for suite in (run.suites[name] for name in spec.suites if name in run.suites):
            if suite.data.endswith("-subset"):
                yield Note("stand-in", f"evaluated on {suite.data}", group.name)
            yield from (_of_suite(note, group.name) for note in suite.notes)
            parts = {r.set for r in suite.records if r.set.startswith("corrupted/") and r.set.count("/") == 2}
            whole = len(CORRUPTIONS) * len(SEVERITIES)
            if suite.suite == "corrupted" and 0 < len(parts) < whole:
                yield Note("reduced", f"{len(parts)} of {whole} corruptions and severities", group.name)


def _of_suite(note: str, recipe: str) -> Note:
    """An evaluation may begin its notes with what they tell of."""
    for start, kind in BEGINNINGS.items():
        if note.startswith(start):
            return Note(kind, note.removeprefix(start), recipe)
    return Note("stand-in", note, recipe)


def _told_contextual(spec: TableSpec, group: Group) -> Iterator[Note]:
    theirs = spec.training.contextual
    if theirs is None:
        return
    given = group.runs[0].parsed.data.options.get("contextual", {})
    kind = given.get("kind", "none") if isinstance(given, Mapping) else str(given)
    if kind in ("none", "learned"):
        yield Note("stand-in", f"learned embeddings alone, in the paper {theirs} beside them", group.name)
    elif kind != theirs:
        source = (
            f" ({Path(str(given['path'])).name})" if isinstance(given, Mapping) and "path" in given else ""
        )
        yield Note("stand-in", f"{kind}{source} stands for {theirs} as contextual embedding", group.name)


def _told_seeds(spec: TableSpec, group: Group) -> Iterator[Note]:
    seeds = [run.seed for run in group.runs]
    if len(set(seeds)) == 1:
        theirs = f"; the paper has {spec.seeds} runs" if spec.seeds else ""
        yield Note("reduced", f"one seed, so no standard error{theirs}", group.name)
    repeated = sorted({str(seed) for seed in seeds if seeds.count(seed) > 1})
    if repeated:
        text = f"several runs of seed {', '.join(repeated)}, which count once, by their mean"
        yield Note("reduced", text, group.name)


def _setting(recipe: Recipe, key: str) -> Any:
    """A value of a recipe by its dotted name; None where it leaves the model's default."""
    return flat(recipe.to_dict()).get(key)
