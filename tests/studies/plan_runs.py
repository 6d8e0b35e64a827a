"""Synthetic runs of a plan: folders as training and evaluation leave them, with figures of our choosing."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpattention.runs.records import Record, SuiteResult, write_suite
from gpattention.studies.plans import Plan, PlannedTraining, load_plan

IMAGES = """
[data]
name = "digits"
[model]
attention = "cgp"
config = { width = 8, heads = 2, depth = 1 }
[phases]
kernel_epochs = 1
epochs = 1
"""
TEXTS = """
[data]
name = "cola"
[model]
type = "text"
attention = "cgp"
config = { width = 8, heads = 2, depth = 1 }
[phases]
epochs = 2
"""
METRICS = ("accuracy", "mcc", "nll", "ece", "mce", "batch_ece", "batch_mce", "aurc")
SETTINGS = {"samples": 4, "limit": 50, "seed": 0, "predictors": ["model", "mc_dropout"]}
PREDICTORS = ("model", "model+temperature", "mc_dropout")
# model, seed, predictor, set, metric (with the score of other items) -> value
Figure = Callable[[str, int, str, str, str], float]


def flat(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
    """Figures that differ between seeds and models, and are otherwise dull."""
    return 0.5 + 0.01 * seed + 0.001 * len(model)


def by_item(model: str, metric: str) -> list[float]:
    """Of an ensemble's items: a common part, and every third item a little more for longer names."""
    return [0.5 + 0.3 * (i % 7) / 7 + 0.01 * len(model) * (i % 3 == 0) for i in range(50)]


def write_plan(
    folder: Path,
    models: Sequence[str] = ("softmax", "gp"),
    *,
    seeds: Sequence[int] = (0, 1, 2),
    more: str = "",
    texts: bool = False,
    data: str = "digits",
) -> Plan:
    """A plan of one recipe under several names; `more` stands above its runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.toml").write_text(TEXTS if texts else IMAGES.replace("digits", data))
    runs = "".join(f'[[runs]]\nrecipe = "base"\nname = "{model}"\n' for model in models)
    (folder / "plan.toml").write_text(f"seeds = {list(seeds)}\n{more}\n{runs}")
    return load_plan(folder / "plan.toml")


def write_runs(
    plan: Plan,
    runs: Path,
    figure: Figure = flat,
    *,
    predictors: Sequence[str] = PREDICTORS,
    ensemble: bool = False,
) -> None:
    """Every run of the plan, trained and evaluated; the ensemble's figures stand in the first seed's."""
    first: dict[str, int] = {}
    for training in plan.trainings:
        leads = first.setdefault(training.model, training.seed) == training.seed
        names = (*predictors, *(("ensemble",) if ensemble and leads else ()))
        write_evaluated(runs / training.folder, training, figure, names, "criterion" in plan.suites)


def write_evaluated(
    folder: Path, training: PlannedTraining, figure: Figure, names: Sequence[str], criterion: bool = False
) -> None:
    """One run."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(training.recipe.to_dict()))
    _write_training(folder, training.seed)
    texts = training.recipe.model.type == "text"

    def values(
        place: str, metric: str, label: str = "", detail: Mapping[str, str] | None = None
    ) -> list[Record]:
        def value(name: str) -> float:
            return figure(training.model, training.seed, name, place, label or metric)

        return [Record(place, name, metric, value(name), detail or {}) for name in names]

    clean = ("validation", "test", *(("ood/out-of-domain",) if texts else ()))
    suites = {"clean": [r for place in clean for metric in METRICS for r in values(place, metric)]}
    if criterion:
        judged = (("validation/criterion", "nll"), ("validation/clean", "accuracy"))
        suites["criterion"] = [r for place, metric in judged for r in values(place, metric)]
    suites["ood"] = [
        record
        for score in ("entropy", "energy")
        for metric in ("auroc", "fpr95")
        for record in values("ood/near", metric, f"{metric} {score}", {"score": score})
    ]
    if not texts:
        places = [
            "corrupted/mean",
            *(f"corrupted/{kind}/{s}" for kind in ("fog", "snow") for s in range(1, 6)),
        ]
        suites["corrupted"] = [r for place in places for metric in METRICS for r in values(place, metric)]
    bins = {"edges": [0.0, 0.5, 1.0], "confidence": [0.4, 0.8], "accuracy": [0.5, 0.7], "count": [20, 30]}
    for suite, records in suites.items():
        curves = {
            "reliability": dict.fromkeys(names, bins) if suite != "ood" else {},
            "gallery": {"most_certain": [{"index": 0, "label": "1", "predicted": "2"}]},
            "items": {name: {record.set: 50 for record in records} for name in names},
            "by_item": {
                name: {"corrupted/mean": {m: by_item(training.model, m) for m in ("accuracy", "nll")}}
                for name in names
                if name.startswith("ensemble") and suite == "corrupted"
            },
        }
        environment = {"device": "a CPU", "torch": "2.13", "settings": json.dumps(SETTINGS)}
        result = SuiteResult(
            suite=suite, run=training.model, data=training.recipe.data.name, seed=training.seed,
            attention="cgp", samples=4, records=tuple(records), curves=curves, environment=environment,
            notes=("reduced: at most 50 items of each set", f"0.{training.seed} % flagged at a rate of 5 %"),
            seconds=30.0,
        )  # fmt: skip
        write_suite(folder, result)


def _write_training(folder: Path, seed: int) -> None:
    events = [
        {"time": 1000.0, "event": "phase", "step": 0, "device": "cuda:0", "engine": "graph"},
        {"time": 1090.0, "event": "stopped", "step": 10},
        {"time": 5000.0, "event": "phase", "step": 0, "device": "cuda:0", "engine": "graph"},
        {"time": 5001.0, "event": "resumed", "step": 10},
        {"time": 5060.0, "event": "finished", "step": 20},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["epoch", "phase", "validation_accuracy", "validation_nll"])
        writer.writerows([[1, "kernel", 0.4 + seed / 100, 1.5], [2, "gp", 0.5, 1.2 - seed / 100]])
