"""How our runs differ from the paper's: told from recipes and from what evaluations say of themselves."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpattention.data.corrupted import CORRUPTIONS, SEVERITIES
from gpattention.experiments.paper.evaluated import RunGroup
from gpattention.experiments.paper.matching import Matching
from gpattention.experiments.paper.notes import Kind, Note
from gpattention.experiments.paper.spec import ModelSpec, TableSpec
from gpattention.training import Recipe

BEGINNINGS: dict[str, Kind] = {"missing: ": "missing", "reduced: ": "reduced"}


def caveats(spec: TableSpec, matching: Matching) -> Iterator[Note]:
    """Everything that keeps our figures from being the paper's experiment."""
    for model in spec.models:
        group = matching.rows.get(model.label)
        if group is None:
            named = " or ".join(model.recipes)
            yield Note("missing", f"{model.label}: no run of the recipe {named}")
        elif not group.has(spec.suites):
            how = f"`gpattention evaluate RUN --suite {spec.suites[0]}` makes it"
            yield Note("missing", f"{model.label}: {group.name} has no evaluation for this; {how}")
        else:
            yield from _of_model(spec, model, group)
    for group in matching.extras:
        theirs = sum(spec.training.epochs)
        if theirs and group.recipe.epochs != theirs:
            yield Note("reduced", f"{group.recipe.epochs} epochs, the paper's models {theirs}", group.name)
    for group in (*matching.rows.values(), *matching.extras):
        if group.has(spec.suites):
            yield from _of_group(spec, group)


def _of_model(spec: TableSpec, model: ModelSpec, group: RunGroup) -> Iterator[Note]:
    recipe, name = group.recipe, group.name
    if name != model.recipes[0]:
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


def _told_alpha(theirs: tuple[float, float], group: RunGroup) -> Iterator[Note]:
    regularizer = group.recipe.regularizer
    ours = (regularizer.start, regularizer.end)
    if regularizer.normalised:
        told = f"alpha {_span(*ours)} per token and dimension, in the paper {_span(*theirs)} of another sum"
        yield Note("reduced", told, group.name)
    elif ours != theirs:
        yield Note("reduced", f"alpha {_span(*ours)}, in the paper {_span(*theirs)}", group.name)


def _span(start: float, end: float) -> str:
    return f"{start:g}" if start == end else f"{start:g} to {end:g}"


def _of_group(spec: TableSpec, group: RunGroup) -> Iterator[Note]:
    options = group.recipe.data.options
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


def _told_contextual(spec: TableSpec, group: RunGroup) -> Iterator[Note]:
    theirs = spec.training.contextual
    if theirs is None:
        return
    given = group.recipe.data.options.get("contextual", {})
    kind = given.get("kind", "none") if isinstance(given, Mapping) else str(given)
    if kind in ("none", "learned"):
        yield Note("stand-in", f"learned embeddings alone, in the paper {theirs} beside them", group.name)
    elif kind != theirs:
        source = (
            f" ({Path(str(given['path'])).name})" if isinstance(given, Mapping) and "path" in given else ""
        )
        yield Note("stand-in", f"{kind}{source} stands for {theirs} as contextual embedding", group.name)


def _told_seeds(spec: TableSpec, group: RunGroup) -> Iterator[Note]:
    seeds = group.seeds
    if len(seeds) == 1:
        theirs = f"; the paper has {spec.seeds} runs" if spec.seeds else ""
        yield Note("reduced", f"one run, so no standard deviation{theirs}", group.name)
    repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if repeated:
        text = f"several runs of seed {', '.join(map(str, repeated))}, all counted"
        yield Note("reduced", text, group.name)
    differing = _differing([_flat(run.recipe.to_dict()) for run in group.runs])
    if differing:
        yield Note("reduced", f"runs of one name differ in {', '.join(differing)}", group.name)


def _differing(recipes: list[dict[str, Any]]) -> list[str]:
    """Keys in which recipes differ, but for the seed."""
    keys = sorted({key for recipe in recipes for key in recipe} - {"seed", "name"})
    return [key for key in keys if any(recipe.get(key) != recipes[0].get(key) for recipe in recipes)]


def _flat(plain: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def _setting(recipe: Recipe, key: str) -> Any:
    """A value of a recipe by its dotted name; None where it leaves the model's default."""
    return _flat(recipe.to_dict()).get(key)
