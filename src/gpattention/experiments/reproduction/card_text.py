"""The text of a model card: what it is, how to load it, how it was trained, what it is worth and not."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpattention.attention import attention_class
from gpattention.experiments.inputs.preprocessing import FILE, FOLDER
from gpattention.experiments.judging.weights import recorded_settings
from gpattention.experiments.reproduction.results.account import date_of, in_words, shown_path, wall_seconds
from gpattention.experiments.reproduction.results.columns import CLASSIFIED, SCORE, Column, heading_of
from gpattention.experiments.reproduction.results.markdown import table, words
from gpattention.experiments.reproduction.results.reading import EvaluatedModel, EvaluatedRun
from gpattention.models import AttentionConfig
from gpattention.reading import parse_json
from gpattention.reports.escaping import markdown, markdown_code, markdown_line
from gpattention.training import Recipe

PREDICTORS = ("model", "model+temperature", "mean")
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


def card_markdown(run: EvaluatedRun, seeds: EvaluatedModel, out: Path, contents: Mapping[str, bytes]) -> str:
    """The whole card."""
    config = parse_json(contents["config.json"], "config.json")
    preprocessing = parse_json(contents[f"{FOLDER}/{FILE}"], f"{FOLDER}/{FILE}")
    size = len(contents["model.safetensors"])
    parts = [
        f"# {markdown(seeds.name)}\n",
        _what(run.recipe, config, preprocessing, size),
        f"## Load it and predict\n\n```python\n{_code(run, config, preprocessing, out)}```\n",
        _inputs(preprocessing),
        f"## Training\n\n{_training(run)}",
        f"## Measures\n\n{_measures(run, seeds)}",
        f"## Intended use and limits\n\n{_use(run.recipe)}",
    ]
    return "\n".join(parts)


def fitted(run: EvaluatedRun) -> float | None:
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


def _code(run: EvaluatedRun, config: Mapping[str, Any], preprocessing: Mapping[str, Any], out: Path) -> str:
    inputs = TEXTS
    if preprocessing["kind"] == "images":
        height, width = preprocessing["size"]
        channels = preprocessing["channels"]
        inputs = IMAGES.format(count=2, channels=channels, height=height, width=width)
    draws = _draws(run.recipe)
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


def _training(run: EvaluatedRun) -> str:
    recipe = run.recipe
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
    if run.shared:
        rows.append(["state", "a shared model, trained elsewhere"])
    elif run.events:
        phase = next((event for event in run.events if event.get("event") == "phase"), {})
        rows.append(["when", f"{date_of(run.events[0]['time'])} UTC, {in_words(wall_seconds(run.events))}"])
        rows.append(["where", f"{phase.get('device')}, steps {phase.get('engine')}"])
    if not (ended or run.shared):
        rows.append(["state", "not trained to its end"])
    return (
        words(["What", "How"], rows) + "\n`recipe.toml` has every value: `gpattention train recipe.toml`.\n"
    )


def _measures(run: EvaluatedRun, seeds: EvaluatedModel) -> str:
    if not run.suites:
        return "The run was not evaluated.\n"
    this = EvaluatedModel(seeds.name, (run,))
    parts = [f"This model (seed {run.seed}):\n", _table(this)]
    if len(seeds.runs) > 1:
        named = ", ".join(str(each.seed) for each in seeds.runs)
        parts += [f"Mean and standard error of the seeds {named}:\n", _table(seeds)]
    if outside := list(_outside(this, seeds)):
        headings = ["Items of other kinds", "This model", *(["All seeds"] if len(seeds.runs) > 1 else [])]
        parts += [f"AUROC against test items, by the {SCORE} of the prediction:\n", words(headings, outside)]
    parts.append("".join(f"- {markdown_line(line)}\n" for line in _notes(run)))
    return "\n".join(parts)


def _table(model: EvaluatedModel) -> str:
    metrics = ("mcc", *CLASSIFIED) if model.runs[0].recipe.model.type == "text" else CLASSIFIED
    rows = []
    for suite, place in _places(model):
        for predictor in PREDICTORS:
            columns = [Column(heading_of(metric), suite, place, metric) for metric in metrics]
            found = [model.estimate(predictor, suite, place, column.metric) for column in columns]
            if any(found):
                cells = [
                    "" if each is None else each.text(column.digits, column.scale)
                    for each, column in zip(found, columns, strict=True)
                ]
                rows.append([place, predictor, model.items(predictor, suite, place), *cells])
    return table(["Set", "Predictor", "Items", *(heading_of(metric) for metric in metrics)], rows, left=2)


def _places(model: EvaluatedModel) -> list[tuple[str, str]]:
    labelled = [("clean", place) for place in model.places("clean")]
    return [*labelled, *(("corrupted", p) for p in model.places("corrupted") if p == "corrupted/mean")]


def _outside(this: EvaluatedModel, seeds: EvaluatedModel) -> Iterator[Sequence[str]]:
    for place in this.places("ood"):
        several = [this, *([seeds] if len(seeds.runs) > 1 else [])]
        found = [each.estimate("model", "ood", place, "auroc", SCORE) for each in several]
        if all(found):
            yield [place.removeprefix("ood/"), *(each.text(2, 100) for each in found if each is not None)]


def _notes(run: EvaluatedRun) -> list[str]:
    """Where and how it was judged, and what the evaluations say of the figures above."""
    judged = [run.suites[name] for name in ("clean", "corrupted", "ood") if name in run.suites]
    samples = {recorded_settings(suite).get("samples", suite.samples) for suite in judged}
    where = dict.fromkeys(
        f"{suite.environment['device']}, torch {suite.environment.get('torch')}"
        for suite in judged
        if "device" in suite.environment
    )
    notes = [note for suite in judged for note in suite.notes if " is missing: " not in note]
    told = [f"draws of a prediction: {', '.join(map(str, sorted(samples)))}"] if _draws(run.recipe) else []
    told += [f"judged on: {'; '.join(where)}"] if where else []
    return [*told, *dict.fromkeys(notes)]
