"""What the variance is worth: detectors of strange images, and temperatures that know shift, run by run.

    python benchmarks/worth.py look RUN ... --data ~/data -o results/worth    one RUN.json each
    python benchmarks/worth.py tables results/worth                           README.md there

Densities, weights and temperatures are fitted to validation images and to synthetic shifts of them, none of
which is a corruption.  Test images, corrupted ones and those of other kinds are only scored; with `--leads`
they are not read at all.  Every model gets the same: a softmax model has its variances by `attach`.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import gpattention
from gpattention.data import data_root
from gpattention.data.shifts import SEVERITIES, shift, shifts_of
from gpattention.evaluation import (
    AdaptiveTemperature,
    ItemSet,
    Strangeness,
    build_predictor,
    fit_temperature,
    predict_items,
    run_sets,
    temperature_profile,
)
from gpattention.evaluation.corrupted import frost_pictures, made_as_needed
from gpattention.files import write_atomically
from gpattention.metrics import accuracy, auroc, ece, nll
from gpattention.models import Signals
from gpattention.numerics import choose_device
from gpattention.runs import OverSeeds, difference, open_run

STRONG = ("gaussian_noise", "fog", "contrast")  # at severity 5, against clean images
PARTS = {  # what a score adds up, in equal parts
    "entropy": ("entropy",),
    "energy": ("energy",),
    "features: Mahalanobis": ("mahalanobis",),
    "features: Mahalanobis++": ("mahalanobis_normed",),
    "features: relative Mahalanobis++": ("relative_mahalanobis_normed",),
    "features: KNN": ("knn",),
    "variance": ("variance_density",),
    "attention entropy": ("attention_density",),
    "entropy + features": ("entropy", "mahalanobis"),
    "entropy + variance": ("entropy", "variance_density"),
    "entropy + features + variance": ("entropy", "mahalanobis", "variance_density"),
    "entropy + features + attention": ("entropy", "mahalanobis", "attention_density"),
    "all four": ("entropy", "mahalanobis", "variance_density", "attention_density"),
}
CHOSEN = "chosen under shifts"
TEMPERATURES = {  # what an adaptive temperature may see
    "of the logits": ("entropy", "max_softmax", "gen"),
    "of the variance": ("variance_density",),
    "of the attention entropy": ("attention_density",),
    "of the features": ("mahalanobis", "mahalanobis_normed", "knn"),
    "of logits, features and variance": (
        "entropy",
        "max_softmax",
        "gen",
        "mahalanobis",
        "mahalanobis_normed",
        "knn",
        "variance_density",
    ),
    "of all (`+adaptive_temperature`)": None,
}
METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {"accuracy": accuracy, "nll": nll, "ece": ece}


@dataclass(frozen=True, eq=False)
class Seen:
    """What a model says about a set."""

    draws: Tensor  # [S, B, C]
    signals: Signals
    labels: Tensor | None  # [B]

    def __getitem__(self, items: Tensor) -> "Seen":
        labels = None if self.labels is None else self.labels[items]
        return Seen(self.draws[:, items], self.signals[items], labels)


class Looker:
    """One run's model: signals of a pass without draws, and draws."""

    def __init__(self, folder: str, given: argparse.Namespace) -> None:
        self.run, self.samples = open_run(folder), given.samples
        self.device = choose_device(given.device)
        self.model: Any = self.run.model.eval().to(self.device)
        self.sets = run_sets(self.run, given.data)
        self.predictor = build_predictor("model", self.model, given.samples, None)
        # softmax and kernel attention have no variance of their own
        self.signals = (self.model if self.model.draws else gpattention.attach(self.model)).signals

    def __call__(self, items: ItemSet) -> Seen:
        """All of a set."""
        raw = predict_items(
            self.predictor.predictor, items, samples=self.predictor.samples, seed=0, device=self.device
        )
        parts = [self.signals(inputs).to("cpu") for _, inputs in items.chunks(2000, self.device)]
        return Seen(raw.logits.cpu(), Signals.cat(parts), items.labels)

    def shifted(self, items: ItemSet) -> dict[str, Seen]:
        """Under every shift, all severities in one set."""
        images, found = items.stored, {}
        assert isinstance(images, Tensor)
        assert items.labels is not None
        for name in shifts_of(images.shape[1]):
            stored = torch.cat([shift(images, name, severity) for severity in SEVERITIES])
            labels = items.labels.repeat(len(SEVERITIES))
            found[name] = self(ItemSet(f"shifted/{name}", stored, labels, items.prepare))
        return found


def tempered(draws: Tensor, temperature: Tensor | float) -> Tensor:
    """Probabilities.  [B, C]"""
    t = torch.as_tensor(temperature, dtype=torch.float64)
    return (draws.double() / (t[:, None] if t.ndim else t)).softmax(-1).mean(0)


def judge(seen: Seen, temperature: Tensor | float) -> dict[str, float]:
    """Accuracy, NLL and pooled ECE."""
    assert seen.labels is not None
    probs = tempered(seen.draws, temperature)
    return {name: float(metric(probs, seen.labels)) for name, metric in METRICS.items()}


def best(seen: Seen) -> float:
    """The temperature that these very items are best with: nobody can know it."""
    assert seen.labels is not None
    return temperature_profile(seen.draws, seen.labels).optimum


def look(folder: str, given: argparse.Namespace) -> dict[str, Any]:
    """Everything about one run."""
    looker = Looker(folder, given)
    sets = looker.sets
    validation = sets.validation.first(given.validation)
    kept = len(validation) * 4 // 5  # nothing is fitted to the others
    fitting = validation.first(kept)
    left_out = validation.select(torch.arange(kept, len(validation)))
    _, weighing, _ = Strangeness.split(len(fitting))  # nothing that calibrates may be shifted
    clean, shifted = looker(fitting), looker.shifted(fitting.select(weighing[: given.shifted]))
    untouched = looker(left_out)
    assert clean.labels is not None
    scores = {
        name: Strangeness.fit(clean.signals, clean.labels, parts)
        for name, parts in PARTS.items()
        if clean.signals.attention_entropy is not None or "attention_density" not in parts
    }
    under = {name: seen.signals for name, seen in shifted.items()}
    scores[CHOSEN] = Strangeness.fit(clean.signals, clean.labels, shifted=under)
    parts_of = zip(scores[CHOSEN].scores.parts, scores[CHOSEN].weights.tolist(), strict=True)

    everything = torch.cat([clean.draws, *(seen.draws for seen in shifted.values())], 1)
    labels = torch.cat([clean.labels, *(s.labels for s in shifted.values() if s.labels is not None)])
    temperatures: dict[str, Callable[[Seen], Tensor | float]] = {
        "none": lambda _: 1.0,
        "one, clean images (`+temperature`)": _constant(fit_temperature(clean.draws, clean.labels)),
        "one, under shifts (`+shift_temperature`)": _constant(
            fit_temperature(everything[:, len(clean.labels) :], labels[len(clean.labels) :])
        ),
        "one, clean and shifted": _constant(fit_temperature(everything, labels)),
    }
    groups = {name: (s.draws, s.signals, s.labels) for name, s in shifted.items() if s.labels is not None}
    chosen: dict[str, Any] = {}
    for name, parts in TEMPERATURES.items():
        if clean.signals.attention_entropy is None and parts == ("attention_density",):
            continue  # sparse attention has none
        found = AdaptiveTemperature.fit(clean.draws, clean.signals, clean.labels, shifted=groups, parts=parts)
        temperatures[name] = lambda seen, found=found: found.temperature(seen.draws, seen.signals)
        numbers = zip(found.scores.parts, found.coefficients[1:].tolist(), strict=True)
        chosen[name] = {"parts": dict(numbers), "left out": fmean(found.judged.values())}

    result: dict[str, Any] = {
        "run": looker.run.folder.name, "recipe": looker.run.recipe.name, "seed": looker.run.recipe.seed,
        "machine": machine(looker.device), "date": datetime.now(UTC).date().isoformat(),
        "samples": looker.predictor.samples, "weights": dict(parts_of), "chosen": chosen,
        "shifts left out, AUROC": scores[CHOSEN].judged,
        "separates": {  # validation images against their shifts, by scores that no shift had a part in
            name: {k: auroc(s.score(untouched.signals), s.score(v)) for k, v in under.items()}
            for name, s in scores.items()
        },
        "false alarms, validation": alarms(scores, untouched.signals),
        "validation": {name: judge(untouched, t(untouched)) for name, t in temperatures.items()},
    }  # fmt: skip
    if given.leads:
        return result

    test = looker(sets.test.first(given.test))
    result["false alarms, test"] = alarms(scores, test.signals)
    result["clean"] = {name: judge(test, t(test)) for name, t in temperatures.items()}
    detected: dict[str, dict[str, float]] = {name: {} for name in scores}
    flagged: dict[str, float] = {}

    def detect(name: str, signals: Signals, inside: Signals) -> None:
        for score, s in scores.items():
            detected[score][name] = auroc(s.score(inside), s.score(signals))
        flagged[name] = float(scores[CHOSEN].flag(signals, 0.05).double().mean())

    for items in sets.load_outside()[0]:
        detect(items.name, looker(items.spread(given.outside)).signals, test.signals)
    some = sets.test.first(given.items)
    assert isinstance(some.stored, Tensor)
    source = made_as_needed(some.stored.to(looker.device), frost=frost_pictures(data_root(given.data)))
    inside = test.signals[torch.arange(min(given.items, len(test.signals)))]
    by_set: dict[str, list[dict[str, float]]] = {name: [] for name in (*temperatures, "oracle")}
    for corruption in source.types:
        for severity in source.severities:
            seen = looker(ItemSet(corruption, source.images(corruption, severity), some.labels, some.prepare))
            for name, temperature in {**temperatures, "oracle": best}.items():
                by_set[name].append(judge(seen, temperature(seen)))
            if corruption in STRONG and severity == 5:
                detect(f"corrupted/{corruption}/5", seen.signals, inside)
    result["corrupted"] = {
        name: {metric: fmean(each[metric] for each in found) for metric in METRICS}
        for name, found in by_set.items()
    }
    result |= {"auroc": detected, "flagged at 5 %": flagged, "notes": list(source.notes)}
    return result


def _constant(value: float) -> Callable[[Seen], float]:
    return lambda _: value


def alarms(scores: Mapping[str, Strangeness], signals: Signals) -> dict[str, dict[str, float]]:
    """Shares of items that are flagged at some rates."""
    return {
        name: {
            f"{rate:g}": float(s.flag(signals, rate).double().mean())
            for rate in (0.01, 0.05)
            if rate * (len(s.calibration) + 1) >= 1  # fewer items cannot show it
        }
        for name, s in scores.items()
    }


def machine(device: torch.device) -> str:
    """Where it was computed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, gpattention {gpattention.__version__}"


# Tables


def tables(folder: Path) -> str:
    """Markdown of all runs in a folder: means over seeds, ± the standard error."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    whole, leads = [r for r in runs if "auroc" in r], [r for r in runs if "auroc" not in r]
    machines, dates, names = (sorted({r[key] for r in runs}) for key in ("machine", "date", "run"))
    text = [
        "# What the variance is worth",
        "",
        "Made by `benchmarks/worth.py look` and `benchmarks/worth.py tables` of the runs below; "
        "[Strangeness](../../docs/strangeness.md) says what the scores are. Means over seeds, ± the standard "
        "error.",
        "",
        f"{', '.join(machines)}; {', '.join(dates)}; {', '.join(names)}.",
    ]
    if whole:
        text += detection(whole) + temperature(whole)
    return "\n".join(text + (validation_only([*leads, *whole]) if leads else [])) + "\n"


def validation_only(runs: list[dict[str, Any]]) -> list[str]:
    """How well scores tell shifted validation images from others, and what the variance adds."""
    groups = grouped(runs)

    def separation(run: dict[str, Any], score: str) -> float:
        return 100 * fmean(run["separates"][score].values())

    def cells(score: str) -> list[str]:
        return [
            shown([separation(run, score) for run in found], 1, 1)
            if all(score in run["separates"] for run in found)
            else ""
            for found in groups.values()
        ]

    text = ["", "## Validation images and their shifts alone", ""]
    text += ["AUROC in hundredths of shifted against left-out validation images, mean over the shifts.", ""]
    columns = [f"{name} ({len(found)} seeds)" for name, found in groups.items()]
    text += table("score", columns, {name: cells(name) for name in runs[0]["separates"]})
    gains = []
    for found in groups.values():
        pairs = ("entropy + features + variance", "entropy + features")
        sides = [{run["seed"]: separation(run, score) for run in found} for score in pairs]
        gap = difference(OverSeeds(sides[0]), OverSeeds(sides[1]))
        spread = "" if len(found) == 1 else f" ± {gap.error or 0:.1f}"
        gains.append(f"{gap.mean:+.1f}{spread}{', clear' if gap.clear else ''}")
    text += ["", *table("what the variance adds to entropy + features", columns, {"seed by seed": gains})]
    rows = {
        f"{metric}, temperature {name}": [
            shown([run["validation"][name][metric] for run in found], 1, 3) for found in groups.values()
        ]
        for metric in ("accuracy", "nll")
        for name in ("none", "one, clean images (`+temperature`)")
    }
    return [*text, "", *table("left-out validation images, with draws", columns, rows)]


def grouped(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By recipe, seeds in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda r: r["seed"]):
        found.setdefault(run["recipe"], []).append(run)
    return found


def shown(values: Iterable[float], scale: float, digits: int) -> str:
    """Mean ± standard error, or one number as it is."""
    numbers = [scale * value for value in values]
    over = OverSeeds.of(numbers)
    return f"{over.mean:.{digits}f}" + (f" ± {over.error:.{digits}f}" if len(numbers) > 1 else "")


def table(head: str, columns: list[str], rows: Mapping[str, list[str]]) -> list[str]:
    """Lines of Markdown."""
    lines = ["| " + " | ".join([head, *columns]) + " |", "|" + "---|" * (1 + len(columns))]
    return [*lines, *("| " + " | ".join([name, *cells]) + " |" for name, cells in rows.items())]


def detection(runs: list[dict[str, Any]]) -> list[str]:
    """AUROC by score: means over all sets, then set by set."""
    groups = grouped(runs)
    sets = list(runs[0]["auroc"]["entropy"])
    text = [
        "",
        "## Detection",
        "",
        f"AUROC in hundredths against test images, mean over {len(sets)} sets: {', '.join(sets)}.",
        "",
    ]

    def cells(score: str, names: list[str]) -> list[str]:
        return [
            shown((fmean(r["auroc"][score][n] for n in names) for r in found), 100, 1)
            if all(score in r["auroc"] for r in found) else ""
            for found in groups.values()
        ]  # fmt: skip

    scores = list(dict.fromkeys(s for r in runs for s in r["auroc"]))
    text += table("score", list(groups), {score: cells(score, sets) for score in scores})
    text += ["", "Set by set:"]
    for name in sets:
        text += ["", *table(name, list(groups), {score: cells(score, [name]) for score in scores})]
    text += ["", f'False alarms at 5 %, and items flagged at 5 % by the score "{CHOSEN}", in per cent:', ""]
    rows = {
        "validation images that nothing was fitted to": [
            shown((r["false alarms, validation"][CHOSEN]["0.05"] for r in f), 100, 1) for f in groups.values()
        ],
        "test images": [
            shown((r["false alarms, test"][CHOSEN]["0.05"] for r in f), 100, 1) for f in groups.values()
        ],
    }
    for name in sets:
        rows[name] = [shown((r["flagged at 5 %"][name] for r in f), 100, 1) for f in groups.values()]
    return text + table("set", list(groups), rows)


def temperature(runs: list[dict[str, Any]]) -> list[str]:
    """Accuracy, NLL and ECE by temperature."""
    groups = grouped(runs)
    text = ["", "## Temperature"]
    for part, title in (("corrupted", "CIFAR-10-C, mean over 95 sets"), ("clean", "clean test images")):
        names = list(dict.fromkeys(n for r in runs for n in r[part]))
        rows = {
            name: [
                " / ".join(
                    [shown((r[part][name]["accuracy"] for r in found), 100, 1),
                     *(shown((r[part][name][m] for r in found), 1, 3) for m in ("nll", "ece"))]
                ) if all(name in r[part] for r in found) else ""
                for found in groups.values()
            ]
            for name in names
        }  # fmt: skip
        text += ["", f"{title}: accuracy / NLL / pooled ECE.", "", *table("temperature", list(groups), rows)]
    return text


def main() -> None:
    """Look at runs, or write tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["look", "tables"])
    parser.add_argument("folders", nargs="+", help="runs, or the folder of their JSON files")
    parser.add_argument("--data", help="folder of the data sets (default: GPATTENTION_DATA)")
    parser.add_argument("--validation", type=int, help="images (default: all)")
    parser.add_argument(
        "--shifted", type=int, default=250, help="images, each under every shift and severity"
    )
    parser.add_argument("--items", type=int, default=1000, help="of every corrupted set")
    parser.add_argument("--test", type=int, default=5000, help="test images")
    parser.add_argument("--outside", type=int, default=2000, help="of every set of another kind")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--leads", action="store_true", help="validation images and shifts alone")
    parser.add_argument("-o", "--out", type=Path, default=Path("results/worth"))
    given = parser.parse_args()
    if given.task == "tables":
        folder = Path(given.folders[0])
        write_atomically(folder / "README.md", tables(folder).encode())
        print(folder / "README.md")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    for folder in given.folders:
        found = look(folder, given)
        file = given.out / f"{found['run']}.json"
        write_atomically(file, json.dumps(found, indent=1).encode())
        print(file, flush=True)


if __name__ == "__main__":
    main()
