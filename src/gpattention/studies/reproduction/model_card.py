"""A run's model as a folder to share: its files, what prediction needs beside them, and a card; and back."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpattention.attention import attention_class
from gpattention.data.places import StrPath
from gpattention.experiments.inputs.preprocessing import FILE, FOLDER, WORDS
from gpattention.experiments.recipe_file import recipe_toml
from gpattention.experiments.reporting import read_run, read_runs
from gpattention.experiments.runs import CARD_RECIPE, open_run, open_trained
from gpattention.metrics import metric_of
from gpattention.models import AttentionConfig
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import parse_json
from gpattention.reports.words import OTHER_WEIGHTS
from gpattention.runs import Group, Results, RunData, group
from gpattention.runs.results import recorded_settings
from gpattention.runs.tables import markdown, markdown_code, markdown_line, markdown_table
from gpattention.studies.reproduction.results.account import date_of, in_words, shown_path, wall_seconds
from gpattention.studies.reproduction.results.reading import is_shared
from gpattention.studies.reproduction.results.summary import CLASSIFIED, SCORE
from gpattention.training import Recipe
from gpattention.training.folder import PARTS, SHARED, write_run_recipe
from gpattention.training.records import append_event, read_events

LARGEST = 3_000_000  # bytes of weights and config: what a repository bears
MODEL_FILES = ("config.json", "model.safetensors")


def write_model_card(run: StrPath, out: StrPath, *, name: str | None = None) -> list[Path]:
    """Copy a run's model and write its card; `from_pretrained` and `load_preprocessing` take the folder.

    Args:
        run: a run with a model; what it was evaluated on is told, and so are runs beside it that differ by
            their seed alone.
        out: the folder to write.
        name: of the model; that of the recipe if not given.
    """
    folder, out = Path(run), Path(out)
    contents = _contents(folder)
    size = sum(len(contents[file]) for file in MODEL_FILES)
    if size > LARGEST:
        most = f"at most {LARGEST / 1e6:.1f} MB"
        raise ValueError(f"expected a model of {most}, got {size / 1e6:.1f} MB in {folder / 'model'}")
    open_run(folder)  # weights that cannot be loaded are not shared
    this = read_run(folder)
    seeds = Group(name or this.parsed.name, _siblings(this))
    for told in seeds.runs:
        _check_figures(told)
    contents["recipe.toml"] = recipe_toml(this.parsed, f"what {seeds.name} was trained with").encode()
    contents["README.md"] = card_markdown(this, seeds, out, contents).encode()
    for file, content in contents.items():
        make_folder((out / file).parent)
        write_atomically(out / file, content)
    return [out / file for file in contents]


def _contents(folder: Path) -> dict[str, bytes]:
    """The files to copy, by their place in the new folder."""
    places = {name: folder / "model" / name for name in MODEL_FILES}
    places[f"{FOLDER}/{FILE}"] = folder / FOLDER / FILE
    for place in (folder / "recipe.json", *places.values()):
        if not place.is_file():
            raise FileNotFoundError(f"expected a run with a model in {folder}, got no {place}")
    if (folder / FOLDER / WORDS).is_file():
        places[f"{FOLDER}/{WORDS}"] = folder / FOLDER / WORDS
    return {name: place.read_bytes() for name, place in places.items()}


def _check_figures(run: RunData) -> None:
    stale = [suite for suite, result in run.suites.items() if OTHER_WEIGHTS in result.notes]
    if stale:
        raise ValueError(
            f"expected figures of the weights in {run.folder}/model, got those of other weights in "
            f"{run.folder}/evaluation ({', '.join(stale)}): evaluate the run again"
        )


def _siblings(run: RunData) -> tuple[RunData, ...]:
    """This run and those beside it that differ by their seed alone and were evaluated, by rising seed."""
    here = Path(run.folder).resolve()
    beside = (each for each in read_runs([here.parent]) if Path(each.folder).resolve() != here)
    others = [each for each in beside if each.suites]
    (of,) = (each for each in group([run, *others]) if run in each.runs)
    found = {each.seed: each for each in reversed((run, *(each for each in of.runs if each is not run)))}
    return tuple(sorted(found.values(), key=lambda each: each.seed or 0))


SHARED_FILES = (*MODEL_FILES, f"{FOLDER}/{FILE}", CARD_RECIPE)


def write_shared_run(model: StrPath, out: StrPath) -> list[Path]:
    """Copy a shared model into a new run's folder, which `evaluate_run`, `report` and `adopt` take.

    What its training wrote down is not shared: there is no `metrics.csv`, nothing to resume, and one event
    says so.

    Args:
        model: a folder that `write_model_card` made.
        out: the run's folder; it must not hold a run.
    """
    folder, out = Path(model), Path(out)
    missing = next((name for name in SHARED_FILES if not (folder / name).is_file()), None)
    if missing is not None:
        raise FileNotFoundError(
            f"expected a model shared by `models card` in {folder}, got no {missing} there"
        )
    recipe = open_trained(folder).recipe  # and with it that weights and configuration can be read
    if (out / "recipe.json").exists():
        raise FileExistsError(
            f"expected a folder without a run for the shared model, got {out}, which has one"
        )
    places = {out / "model" / name: folder / name for name in MODEL_FILES}
    places |= {out / FOLDER / name: folder / FOLDER / name for name in (FILE, WORDS)}
    # only models of texts have words
    copied = {place: source.read_bytes() for place, source in places.items() if source.is_file()}
    _check_free(out, copied)
    for place, content in copied.items():
        make_folder(place.parent)
        write_atomically(place, content)
    if not read_events(out):
        append_event(out, SHARED)
    return [*copied, out / "events.jsonl", write_run_recipe(out, recipe)]  # last: now it is a run


def _check_free(out: Path, copied: Mapping[Path, bytes]) -> None:
    """Nothing in the way but what an earlier call that was killed has copied."""
    other = [place for place, content in copied.items() if place.exists() and place.read_bytes() != content]
    other += [out / name for name in PARTS if name not in ("model", "events.jsonl") and (out / name).exists()]
    other += [out / "events.jsonl"] if any(event.get("event") != SHARED for event in read_events(out)) else []
    if other:
        raise FileExistsError(
            f"expected a folder without a run for the shared model, got {out}, which has no recipe.json but "
            f"holds {other[0].relative_to(out)}"
        )


CARD_PREDICTORS = ("model", "model+temperature", "mean")
IMAGES = """\
images = torch.zeros({count}, {channels}, {height}, {width}, dtype=torch.uint8)  # yours, or image files
inputs = preprocessing.images(images)
"""
TEXTS = """\
inputs = preprocessing.sentences(["The cat sat on the mat."])  # yours
"""
CODE = """\
import torch

from gpattention.experiments import load_preprocessing
from gpattention.models import Prediction, {kind}

folder = {folder}
model = {kind}.from_pretrained(folder)
preprocessing = load_preprocessing(folder)
{inputs}prediction = model.predict(inputs, samples={samples}, seed=0)
print(preprocessing.classes[int(prediction.label[0])], float(prediction.confidence[0]))
"""
DRAWN = """\
print(float(prediction.mutual_information[0]))  # how much the draws disagree, in nats
"""
TEMPERED = """\
calibrated = Prediction.from_logits(prediction.logits / {temperature!r})  # fitted on validation items
"""
USE = """\
For research on uncertainty: to compare with, {seen}to
continue from. Not for decisions about people or things: it is a small model of a small data set.

- It answers with one of its classes, whatever it is shown; {scores} of the
  prediction tell{s} items of other kinds from its own only to the degree measured above.
- Its probabilities are calibrated on items like those of its training; under corruption and out of domain
  they are less so, by how much the table says, with a temperature fitted on clean items or without.
- Read calibration errors beside accuracy and NLL: a model that says the same of every item has a low one.
"""


def card_markdown(run: RunData, seeds: Group, out: Path, contents: Mapping[str, bytes]) -> str:
    """The whole card."""
    config = parse_json(contents["config.json"], "config.json")
    preprocessing = parse_json(contents[f"{FOLDER}/{FILE}"], f"{FOLDER}/{FILE}")
    size = len(contents["model.safetensors"])
    parts = [
        f"# {markdown(seeds.name)}\n",
        _what(run.parsed, config, preprocessing, size),
        f"## Load it and predict\n\n```python\n{_code(run, config, preprocessing, out)}```\n",
        _inputs(preprocessing),
        f"## Training\n\n{_training(run)}",
        f"## Measures\n\n{_measures(run, seeds)}",
        f"## Intended use and limits\n\n{_use(run.parsed)}",
    ]
    return "\n".join(parts)


def fitted(run: RunData) -> float | None:
    """The temperature of the model's own prediction; None where none was fitted."""
    for suite in run.suites.values():
        for record in suite.records:
            if record.predictor == "model+temperature" and "temperature" in record.detail:
                return float(record.detail["temperature"])
    return None


def _what(recipe: Recipe, config: Mapping[str, Any], preprocessing: Mapping[str, Any], size: int) -> str:
    kind = recipe.model.attention
    told = (inspect.getdoc(attention_class(kind)) or "").split("\n")[0]
    options = ", ".join(f"{key} = {value}" for key, value in recipe.model.options.items())
    shape = config["config"]
    inner = ", ".join(f"{key} {shape[key]}" for key in ("depth", "width", "heads", "patch") if key in shape)
    count = len(preprocessing["classes"])
    what = "images" if preprocessing["kind"] == "images" else "sentences"
    return (
        f"A transformer that sorts {what} into {count} classes, trained on {markdown(recipe.data.name)} with "
        f"seed {recipe.seed}: {inner}, {size / 1e6:.2f} MB of weights in float32. Its attention is `{kind}`"
        f"{f' ({markdown(options)})' if options else ''}: {told}\n"
    )


def _use(recipe: Recipe) -> str:
    if _draws(recipe):
        seen = "to see what draws of Gaussian process attention say, "
        return USE.format(seen=seen, scores="the entropy and the mutual information", s="")
    return USE.format(seen="", scores="the entropy", s="s")


def _draws(recipe: Recipe) -> bool:
    return attention_class(recipe.model.attention).draws


def _code(run: RunData, config: Mapping[str, Any], preprocessing: Mapping[str, Any], out: Path) -> str:
    inputs = TEXTS
    if preprocessing["kind"] == "images":
        height, width = preprocessing["size"]
        channels = preprocessing["channels"]
        inputs = IMAGES.format(count=2, channels=channels, height=height, width=width)
    draws = _draws(run.parsed)
    code = CODE.format(
        kind=config["model"],
        folder=json.dumps(shown_path(out), ensure_ascii=False),
        inputs=inputs,
        samples=10 if draws else 0,
    )
    code += DRAWN if draws else ""
    temperature = fitted(run)
    if temperature is not None:
        return code + TEMPERED.format(temperature=round(temperature, 4))
    code = code.replace("import Prediction, ", "import ")
    return code


def _inputs(preprocessing: Mapping[str, Any]) -> str:
    classes = markdown(", ".join(preprocessing["classes"]))
    if preprocessing["kind"] == "texts":
        contextual = preprocessing["contextual"]
        frozen = contextual.get("kind", "none")
        beside = "" if frozen in ("none", "learned") else (
            f", with the frozen vectors {markdown_code(contextual.get('path'))} ({markdown(frozen)}), whose "
            "files must be there"
        )  # fmt: skip
        return (
            f"Inputs are sentences of at most {preprocessing['length']} words{beside}. Classes: {classes}.\n"
        )
    height, width = preprocessing["size"]
    mean, std = (", ".join(f"{x:.4f}" for x in preprocessing["normalisation"][k]) for k in ("mean", "std"))
    return (
        f"Inputs are images of {height} x {width} pixels and {preprocessing['channels']} channels in [0, 1] "
        f"(8-bit ones are divided by 255), less the mean ({mean}) and over the standard deviation ({std}) of "
        f"the training part. `preprocessing/` holds this; other sizes are resized. Classes: {classes}.\n"
    )


def _training(run: RunData) -> str:
    recipe = run.parsed
    phases, optimizer, regularizer = recipe.phases, recipe.optimizer, recipe.regularizer
    first = f"{phases.kernel_epochs} epochs of kernel attention, then " if phases.kernel_epochs else ""
    unit = "per token and dimension" if regularizer.normalised else "summed"
    weight = f"weight {regularizer.start:g} to {regularizer.end:g}, {unit}"
    lacks = AttentionConfig(recipe.model.attention, recipe.model.options).regularizer == "none"
    ended = any(event.get("event") == "finished" for event in run.events)
    rows = [
        ["epochs", f"{first}{phases.epochs} as it is"],
        ["optimiser", f"Adam, batch {optimizer.batch_size}, learning rate {optimizer.learning_rate:g}"],
        ["regulariser", "none" if lacks else weight],
        ["checkpoint", f"{recipe.checkpoint.select}, validated every {recipe.checkpoint.every} epochs"],
        ["seed", str(recipe.seed)],
    ]
    if is_shared(run):
        rows.append(["state", "a shared model, trained elsewhere"])
    elif run.events:
        phase = next((event for event in run.events if event.get("event") == "phase"), {})
        rows.append(["when", f"{date_of(run.events[0]['time'])} UTC, {in_words(wall_seconds(run.events))}"])
        rows.append(["where", f"{phase.get('device')}, steps {phase.get('engine')}"])
    if not (ended or is_shared(run)):
        rows.append(["state", "not trained to its end"])
    page = markdown_table(["What", "How"], rows, left=None)
    return f"{page}\n`recipe.toml` has every value: `gpattention train recipe.toml`.\n"


def _measures(run: RunData, seeds: Group) -> str:
    if not run.suites:
        return "The run was not evaluated.\n"
    this = Group(seeds.name, (run,))
    parts = [f"This model (seed {run.seed}):\n", _table(this)]
    if len(seeds.runs) > 1:
        named = ", ".join(str(each.seed) for each in seeds.runs)
        parts += [f"Mean and standard error of the seeds {named}:\n", _table(seeds)]
    if outside := list(_outside(this, seeds)):
        headings = ["Items of other kinds", "This model", *(["All seeds"] if len(seeds.runs) > 1 else [])]
        parts.append(f"AUROC against test items, by the {SCORE} of the prediction:\n")
        parts.append(markdown_table(headings, outside, left=None))
    parts.append("".join(f"- {markdown_line(line)}\n" for line in _notes(run)))
    return "\n".join(parts)


def _table(model: Group) -> str:
    results = Results.of([model])
    metrics = ("mcc", *CLASSIFIED) if model.runs[0].texts else CLASSIFIED
    sets = [("clean", place) for place in results.sets(suite="clean")]
    sets += [("corrupted", place) for place in results.sets(suite="corrupted") if place == "corrupted/mean"]
    rows = []
    for suite, place in sets:
        for predictor in CARD_PREDICTORS:
            found = [(metric_of(m), results.find(model.name, suite, place, m, predictor)) for m in metrics]
            known = next((figure for _, figure in found if figure is not None), None)
            if known is not None:
                cells = ("" if x is None else x.text(metric.digits, metric.scale) for metric, x in found)
                rows.append([place, predictor, known.items, *cells])
    headings = ["Set", "Predictor", "Items", *(metric_of(metric).heading for metric in metrics)]
    return markdown_table(headings, rows, left=2)


def _outside(this: Group, seeds: Group) -> Iterator[Sequence[str]]:
    several = [(each.name, Results.of([each])) for each in (this, *([seeds] if len(seeds.runs) > 1 else []))]
    for place in several[0][1].sets(suite="ood"):
        found = [results.find(name, "ood", place, "auroc", score=SCORE) for name, results in several]
        if all(found):
            yield [place.removeprefix("ood/"), *(each.text(2, 100) for each in found if each is not None)]


def _notes(run: RunData) -> list[str]:
    """Where and how it was judged, and what the evaluations say of the figures above."""
    judged = [run.suites[name] for name in ("clean", "corrupted", "ood") if name in run.suites]
    samples = {recorded_settings(suite).get("samples", suite.samples) for suite in judged}
    where = dict.fromkeys(
        f"{suite.environment['device']}, torch {suite.environment.get('torch')}"
        for suite in judged
        if "device" in suite.environment
    )
    notes = [note for suite in judged for note in suite.notes if " is missing: " not in note]
    told = [f"draws of a prediction: {', '.join(map(str, sorted(samples)))}"] if _draws(run.parsed) else []
    told += [f"judged on: {'; '.join(where)}"] if where else []
    return [*told, *dict.fromkeys(notes)]
