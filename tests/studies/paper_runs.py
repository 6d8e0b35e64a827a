"""Synthetic run folders: recipes and evaluations as a real run leaves them, with figures of our choosing."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gpattention.runs import OverSeeds, recipe_from_dict
from gpattention.runs.records import Record, SuiteResult, write_suite
from gpattention.studies.paper import Key, PaperCell, PublishedValue, table_spec

CATEGORIES = {"Noise": "noise", "Blur": "blur", "Weather": "weather", "Digital": "digital", "Avg.": "mean"}
SETS = {"CoLA": "test", "CoLA (OOD)": "ood/out-of-domain"}
SCORES = {
    "KLMatching": "kl_matching_predicted", "MaxSoftmax": "max_softmax", "Entropy": "entropy",
    "Energy-Based": "energy",
}  # fmt: skip
METRICS = {
    "Acc": "accuracy", "MCC": "mcc", "NLL": "nll", "MCE": "batch_mce", "ECE": "batch_ece", "AUROC": "auroc",
    "AUPR-IN": "aupr_in", "AUPR-OUT": "aupr_out", "FPR@95": "fpr95_out",
}  # fmt: skip
OOD = ("textures", "lsun-crop", "lsun-resize", "tinyimagenet-crop")
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
ATTENTION = {"cgpt": "cgp", "scgpt": "scgp", "sgpa": "sgpa", "kernel": "kernel", "softmax": "softmax"}
SUITES = {"table1": "clean", "table3": "ood"}  # the others are of corrupted images


def both(cell: PaperCell) -> tuple[PublishedValue, OverSeeds]:
    """The paper's figure of a cell and ours; a test of one that lacks either fails."""
    if cell.paper is None or cell.ours is None:
        pytest.fail(f"expected two figures at {cell.key}, got {cell.paper} and {cell.ours}")
    return cell.paper, cell.ours


def write_run(
    folder: Path,
    name: str,
    records: Iterable[Record],
    *,
    suite: str,
    seed: int = 0,
    notes: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """A run as a folder; its recipe is the paper's but for `changes`."""
    data, _, kind = name.partition("-")
    text = data == "cola"
    one_phase = text or kind.startswith(("kernel", "softmax"))
    plain: dict[str, Any] = {
        "name": name, "seed": seed,
        "data": {"name": data, "options": {"contextual": {"kind": "elmo", "path": "elmo"}} if text else {}},
        "model": {
            "type": "text" if text else "vision",
            "attention": ATTENTION.get(kind.split("-")[0], "cgp"),
            "config": {"depth": 2 if text else 5, "heads": 4},
        },
        "optimizer": {"batch_size": 32 if text else 100},
        "phases": {"kernel_epochs": 0 if one_phase else 200,
                   "epochs": 50 if text else 600 if one_phase else 400},
    }  # fmt: skip
    for section, values in changes.items():
        plain[section] = plain.get(section, {}) | values
    run = folder / f"{name}-{seed}"
    run.mkdir(parents=True, exist_ok=True)
    recipe = recipe_from_dict(plain)
    (run / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    result = SuiteResult(
        suite=suite, run=name, data=data, seed=seed, attention=recipe.model.attention, samples=10,
        records=tuple(records), notes=notes,
    )  # fmt: skip
    write_suite(run, result)
    return run


def records_of(key: Key, value: float) -> list[Record]:
    """The records that give this number, in the paper's unit, in a table."""
    metric = METRICS[key.metric]
    value *= 1.0 if key.metric in ("NLL", "MCE", "ECE") else 0.01
    if key.part in SCORES:  # four sets whose mean is the value
        spread = (-0.02, -0.01, 0.01, 0.02)
        return [
            Record(f"ood/{name}", "model", metric, value + more, {"score": SCORES[key.part]})
            for name, more in zip(OOD, spread, strict=True)
        ]
    place = SETS.get(key.part) or f"corrupted/{CATEGORIES[key.part]}"
    return [Record(place, "model", metric, value)]


def write_table_runs(
    folder: Path,
    table: str,
    figure: Callable[[Key, float, int], float],
    *,
    seeds: tuple[int, ...] = (0,),
    models: tuple[str, ...] | None = None,
    **changes: Any,
) -> None:
    """Runs for every model of a table, or some, with `figure(key, the paper's value, seed)` in each cell."""
    spec = table_spec(table)
    for model in spec.models:
        if models is not None and model["label"] not in models:
            continue
        for seed in seeds:
            records = [
                record
                for key, value in spec.published.items()
                if key.model == model["label"] and key.part != "Average"
                for record in records_of(key, figure(key, value.value, seed))
            ]
            suite = SUITES.get(table, "corrupted")
            write_run(folder, model["recipes"][0], records, suite=suite, seed=seed, **changes)


def layer_records(values: Iterable[float]) -> list[Record]:
    """Similarities after attention, layer by layer; after the block they are halfway to 1."""
    return [
        Record("test", "model", "token_similarity", mean, {"layer": layer, "after": after})
        for layer, value in enumerate(values)
        for after, mean in (("attention", value), ("block", (1 + value) / 2))
    ]


def cost_records(memory: dict[int, float], seconds: float) -> list[Record]:
    """Cost by number of inducing inputs, and against length, which Figure 2 does not show."""
    found = []
    for inducing, mib in memory.items():
        for tokens, factor in ((1024, 10.0), (64, 1.0)):
            detail = {"inducing": inducing, "tokens": tokens}
            found.append(Record("train", "model", "train_peak_mib", mib * factor, detail))
            found.append(Record("train", "model", "train_epoch_seconds", seconds * factor, detail))
    return found
