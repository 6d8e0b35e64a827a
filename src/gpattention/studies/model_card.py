"""A run's model as a folder to share: its files, what prediction needs beside them, and a card; and back."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import dropwhile, product
from pathlib import Path
from typing import Any

from gpattention.attention import attention_class
from gpattention.evaluation import FITTED
from gpattention.files import StrPath, parse_json
from gpattention.metrics import metric_of
from gpattention.models import AttentionConfig
from gpattention.runs import append_event, open_run, open_trained, read_events, read_run, read_runs
from gpattention.runs.folder import CARD_RECIPE
from gpattention.runs.inputs import FILE, FOLDER, WORDS
from gpattention.runs.recipe import recipe_toml
from gpattention.runs.records import OTHER_WEIGHTS, recorded_settings
from gpattention.runs.results import Group, Plain, Results, RunData, group
from gpattention.runs.tables import (
    latex,
    markdown,
    markdown_cell,
    markdown_code,
    markdown_line,
    markdown_table,
)
from gpattention.studies import write_file
from gpattention.training.folder import PARTS, SHARED, write_run_recipe

LARGEST = 3_000_000  # bytes of weights and config: what a repository bears
MODEL_FILES = ("config.json", "model.safetensors")
SHARED_FILES = (*MODEL_FILES, f"{FOLDER}/{FILE}", CARD_RECIPE)
CARD_PREDICTORS = ("model", *(f"model+{fitted}" for fitted in FITTED), "mean")
CLASSIFIED = ("accuracy", "nll", "ece", "mce", "batch_ece", "batch_mce", "aurc")  # metrics of a table
SCORE = "entropy"  # of other items


def write_model_card(run: StrPath, out: StrPath, *, name: str | None = None) -> list[Path]:
    """Copy a run's model and write its card; `from_pretrained` and `load_preprocessing` take the folder.

    Args:
        run: a run with a model; the card has its evaluation, and that of runs beside it that differ by
            their seed alone.
        out: the folder to write.
        name: name of the model; that of the recipe if not given.

    Returns:
        The files that were written.

    Raises:
        FileNotFoundError: the run has no model.
        ValueError: the model is too large or cannot be loaded, or the evaluation is of other weights.
    """
    folder, out = Path(run), Path(out)
    places = {name: folder / "model" / name for name in MODEL_FILES}
    places[f"{FOLDER}/{FILE}"] = folder / FOLDER / FILE
    for place in (folder / "recipe.json", *places.values()):
        if not place.is_file():
            raise FileNotFoundError(f"expected a run with a model in {folder}, got no {place}")
    if (folder / FOLDER / WORDS).is_file():  # of texts
        places[f"{FOLDER}/{WORDS}"] = folder / FOLDER / WORDS
    contents = {name: place.read_bytes() for name, place in places.items()}
    size = sum(len(contents[file]) for file in MODEL_FILES)
    if size > LARGEST:
        most = f"at most {LARGEST / 1e6:.1f} MB"
        raise ValueError(f"expected a model of {most}, got {size / 1e6:.1f} MB in {folder / 'model'}")
    open_run(folder)  # weights that cannot be loaded are not shared
    this = read_run(folder)
    # this run and those beside it that differ by their seed alone and were evaluated, by rising seed
    here = folder.resolve()
    beside = [
        each for each in read_runs([here.parent]) if each.suites and Path(each.folder).resolve() != here
    ]
    (of,) = (each for each in group([this, *beside]) if this in each.runs)
    by_seed = {each.seed: each for each in reversed((this, *(each for each in of.runs if each is not this)))}
    alike = tuple(sorted(by_seed.values(), key=lambda each: each.seed or 0))
    seeds = Group(name or this.parsed.name, alike)
    for each in seeds.runs:
        stale = [suite for suite, result in each.suites.items() if OTHER_WEIGHTS in result.notes]
        if stale:
            where = f"{each.folder}/evaluation ({', '.join(stale)})"
            wanted = f"expected figures of the weights in {each.folder}/model"
            raise ValueError(f"{wanted}, got those of other weights in {where}: evaluate the run again")
    contents["recipe.toml"] = recipe_toml(this.parsed, f"what {seeds.name} was trained with").encode()
    contents["README.md"] = card_markdown(this, seeds, out, contents).encode()
    return [write_file(out / file, content) for file, content in contents.items()]


def write_shared_run(model: StrPath, out: StrPath) -> list[Path]:
    """Copy a shared model into a new run's folder, which `evaluate_run`, `report` and `adopt` take.

    What its training wrote down is not shared: there is no `metrics.csv`, nothing to resume, and one event
    says so.

    Args:
        model: a folder that `write_model_card` made.
        out: the run's folder; it must not hold a run.

    Returns:
        The files that were written.

    Raises:
        FileNotFoundError: a file of the shared model is missing.
        FileExistsError: the folder holds a run, or a part of one.
    """
    folder, out = Path(model), Path(out)
    for name in SHARED_FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"expected a model shared by `models card` in {folder}, got no {name}")
    recipe = open_trained(folder).recipe  # and with it that weights and configuration can be read
    wanted = f"expected a folder without a run for the shared model, got {out}, which has"
    if (out / "recipe.json").exists():
        raise FileExistsError(f"{wanted} one")
    places = {out / "model" / name: folder / name for name in MODEL_FILES}
    places |= {out / FOLDER / name: folder / FOLDER / name for name in (FILE, WORDS)}
    copied = {place: source.read_bytes() for place, source in places.items() if source.is_file()}
    # nothing may be in the way but what an earlier call that was killed has copied
    other = [place for place, content in copied.items() if place.exists() and place.read_bytes() != content]
    other += [out / name for name in PARTS if name not in ("model", "events.jsonl") and (out / name).exists()]
    other += [out / "events.jsonl"] if any(event.get("event") != SHARED for event in read_events(out)) else []
    if other:
        raise FileExistsError(f"{wanted} no recipe.json but holds {other[0].relative_to(out)}")
    for place, content in copied.items():
        write_file(place, content)
    if not read_events(out):
        append_event(out, SHARED)
    return [*copied, out / "events.jsonl", write_run_recipe(out, recipe)]  # last: now it is a run


# How a run was made, in words


def is_shared(run: RunData) -> bool:
    """Whether it is a model that was trained elsewhere."""
    return any(event.get("event") == SHARED for event in run.events)


def wall_seconds(events: Sequence[Plain]) -> float:
    """From each start of the training process to its last event, stops between them left out.

    Where the clock was set back between two events, nobody knows how long it took: it counts as nothing.
    """
    total, events = 0.0, tuple(event for event in events if "time" in event)
    kinds = [event.get("event") for event in events]
    for i in range(1, len(events)):
        # a process that resumes sets up its phases first, and then says so
        starts = kinds[i] == "phase" and kinds[i - 1] != "phase"
        if not (starts and next(dropwhile("phase".__eq__, kinds[i:]), None) == "resumed"):
            total += max(0.0, events[i]["time"] - events[i - 1]["time"])
    return total


def date_of(seconds: float) -> str:
    """UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def in_words(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def shown_path(path: Path) -> str:
    """The path from the current folder, so that no page shows where that is."""
    absolute, here = path.resolve(), Path.cwd()
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else Path(path.name)).as_posix()


# The card


def page(template: str, /, **context: Any) -> str:
    """Fill in a template of `pages/`; what stands in it as text must be escaped, by a filter or before."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("gpattention.studies", "pages")
    pages = Environment(
        loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )  # fmt: skip
    pages.filters |= {f.__name__: f for f in (latex, markdown, markdown_code, markdown_line)}
    pages.filters["cell"] = markdown_cell
    return pages.get_template(template).render(context)


def card_markdown(run: RunData, seeds: Group, out: Path, contents: Mapping[str, bytes]) -> str:
    """The whole card."""
    recipe, kind = run.parsed, attention_class(run.parsed.model.attention)
    records = (record for suite in run.suites.values() for record in suite.records)
    tempered = (r.detail for r in records if r.predictor == "model+temperature")
    config = parse_json(contents["config.json"], "config.json")
    sizes = {key: x for key, x in config["config"].items() if key in ("depth", "width", "heads", "patch")}
    return page(
        "model_card.md",
        name=seeds.name,
        run=run,
        recipe=recipe,
        inputs=parse_json(contents[f"{FOLDER}/{FILE}"], f"{FOLDER}/{FILE}"),
        config=config,
        shape=", ".join(f"{key} {size}" for key, size in sizes.items()),
        options=", ".join(f"{key} = {value}" for key, value in recipe.model.options.items()),
        draws=kind.draws,
        size=len(contents["model.safetensors"]),
        summary=(inspect.getdoc(kind) or "").split("\n")[0],
        folder=json.dumps(shown_path(out), ensure_ascii=False),
        temperature=next((round(float(x["temperature"]), 4) for x in tempered if "temperature" in x), None),
        regularized=AttentionConfig(recipe.model.attention, recipe.model.options).regularizer != "none",
        made=list(_made(run)),
        measures=_measures(run, seeds, draws=kind.draws) if run.suites else "The run was not evaluated.\n",
    )


def _made(run: RunData) -> Iterator[tuple[str, str]]:
    """When and where it was trained, and whether to the end."""
    if is_shared(run):
        yield "state", "a shared model, trained elsewhere"
    elif run.events:
        phase = next((event for event in run.events if event.get("event") == "phase"), {})
        yield "when", f"{date_of(run.events[0]['time'])} UTC, {in_words(wall_seconds(run.events))}"
        yield "where", f"{phase.get('device')}, steps {phase.get('engine')}"
    if not any(event.get("event") in ("finished", SHARED) for event in run.events):
        yield "state", "not trained to its end"


def _measures(run: RunData, seeds: Group, *, draws: bool) -> str:
    named = ", ".join(str(each.seed) for each in seeds.runs)
    tables = {f"This model (seed {run.seed}):\n": Results.of([Group(seeds.name, (run,))])}
    if len(seeds.runs) > 1:
        tables[f"Mean and standard error of the seeds {named}:\n"] = Results.of([seeds])
    parts = [part for title, of in tables.items() for part in (title, _table(seeds.name, of, run.texts))]
    outside = []
    for place in next(iter(tables.values())).sets(suite="ood"):
        found = [of.find(seeds.name, "ood", place, "auroc", score=SCORE) for of in tables.values()]
        if all(found):
            outside.append([place.removeprefix("ood/"), *(each.text(2, 100) for each in found if each)])
    if outside:
        headings = ["Items of other kinds", "This model", "All seeds"][: 1 + len(tables)]
        parts.append(f"AUROC against test items, by the {SCORE} of the prediction:\n")
        parts.append(markdown_table(headings, outside, left=None))
    parts.append("".join(f"- {markdown_line(line)}\n" for line in _notes(run, draws=draws)))
    return "\n".join(parts)


def _table(name: str, results: Results, texts: bool) -> str:
    metrics = [metric_of(metric) for metric in (("mcc", *CLASSIFIED) if texts else CLASSIFIED)]
    sets = [("clean", place) for place in results.sets(suite="clean")]
    sets += [("corrupted", place) for place in results.sets(suite="corrupted") if place == "corrupted/mean"]
    rows = []
    for (suite, place), predictor in product(sets, CARD_PREDICTORS):
        found = [results.find(name, suite, place, metric.name, predictor) for metric in metrics]
        known = next((figure for figure in found if figure is not None), None)
        if known is not None:
            shown = zip(metrics, found, strict=True)
            cells = ("" if x is None else x.text(metric.digits, metric.scale) for metric, x in shown)
            rows.append([place, predictor, known.items, *cells])
    return markdown_table(["Set", "Predictor", "Items", *(m.heading for m in metrics)], rows, left=2)


def _notes(run: RunData, *, draws: bool) -> Iterator[str]:
    """Where and how it was evaluated, and what the evaluations say of the figures above."""
    suites = [run.suites[name] for name in ("clean", "corrupted", "ood") if name in run.suites]
    if draws:
        samples = {recorded_settings(suite).get("samples", suite.samples) for suite in suites}
        yield f"draws of a prediction: {', '.join(map(str, sorted(samples)))}"
    places = [suite.environment for suite in suites if "device" in suite.environment]
    where = dict.fromkeys(f"{place['device']}, torch {place.get('torch')}" for place in places)
    if where:
        yield f"evaluated on: {'; '.join(where)}"
    yield from dict.fromkeys(n for suite in suites for n in suite.notes if " is missing: " not in n)
