"""What docs/reproduction.md says of the headline comparison beyond its tables: paired differences, pictures.

    python scripts/headline.py text        # prints differences, draws docs/images/text-nll.png
    python scripts/headline.py images      # prints differences, draws docs/images/images-*.png

Reads the records in `results` alone; the predictors of `chosen` are those of the folder's `choice.md`.
"""

import argparse
import json
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpattention.reports.drawing import picture
from gpattention.reports.figures import bars_figure, p_value_figure, reliability_figure, severity_figure
from gpattention.reports.sections.calibration import pooled_bins
from gpattention.runs import OverSeeds, Results, difference, read_results

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "images"
SHOWN = {  # sets whose p-values are drawn, and the words for them
    "test": "test", "ood/textures-subset": "textures", "ood/tinyimagenet32-standin": "TinyImageNet",
    "ood/fog-5": "fog",
}  # fmt: skip
MASKS, DRAWS = "mc_dropout+temperature", "model+temperature"
Place = tuple[str, str]  # suite and set


@dataclass(frozen=True)
class Comparison:
    """One half of the headline comparison.

    Attributes:
        folder: of its results.
        names: of its models, with a place for the kind.
        chosen: the predictor of every kind.
        ours: the chosen kind.
        drawn: kinds whose draws are compared with dropout masks of the same weights.
        places: where, by the words for it; the second is the one of the verdicts.
        detectors: scores that tell the sets of the suite ood from test items.
    """

    folder: str
    names: str
    chosen: Mapping[str, str]
    ours: str
    drawn: tuple[str, ...]
    places: Mapping[str, Place]
    detectors: tuple[str, ...] = ()

    def detection(self, results: Results, kind: str, score: str) -> OverSeeds | None:
        """The mean AUROC over all sets of the suite ood, for every seed; None without this score."""
        rows = results.frame
        rows = rows[(rows["recipe"] == self.names.format(kind)) & (rows["suite"] == "ood")]
        rows = rows[(rows["metric"] == "auroc") & (rows["predictor"] == "model") & (rows["score"] == score)]
        return OverSeeds(rows.groupby("seed")["value"].mean().to_dict()) if len(rows) else None

    def seeds(self, results: Results, kind: str, predictor: str, place: Place, metric: str) -> OverSeeds:
        """The number of every seed."""
        figure = results.find(self.names.format(kind), *place, metric, predictor)
        assert figure is not None, (kind, predictor, place, metric)
        return figure


COMPARISONS = {
    "text": Comparison(
        "imdb", "imdb-{}",
        {
            "kep-svgp": "mc_dropout", "softmax": "mc_dropout+temperature", "sgpa": "mc_dropout+temperature",
            "kernel": "model+adaptive_temperature", "scgpt": "mc_dropout+adaptive_temperature",
        },
        "scgpt", ("scgpt",),
        {"in domain": ("clean", "test"), "out of domain": ("clean", "ood/out-of-domain")},
    ),
    "images": Comparison(
        "cifar10-rivals", "cifar10-{}-rivals",
        dict.fromkeys(("softmax", "scgpt-rows", "direct-rows"), "model+adaptive_temperature"),
        "direct-rows", ("direct-rows", "scgpt-rows"),
        {"clean": ("clean", "test"), "corrupted": ("corrupted", "corrupted/mean")},
        ("entropy", "knn", "variance_density", "strangeness"),
    ),
}  # fmt: skip
METRICS = ("accuracy", "nll", "ece")


def main() -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", choices=COMPARISONS)
    name = parser.parse_args().half
    about = COMPARISONS[name]
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(ROOT / "results" / about.folder / "records.tar.xz") as records:
            records.extractall(place, filter="data")
        folders = sorted(Path(place).iterdir())
        results = read_results(folders)
        curves = {
            suite: [
                json.loads((folder / "evaluation" / f"{suite}.json").read_text())["curves"]
                for folder in folders
                if folder.name.startswith(about.names.format(about.ours) + "-seed")
            ]
            for suite in ("corrupted", "ood")
            if name == "images"
        }
    pairs = {
        f"{about.ours} against {kind}": ((about.ours, about.chosen[about.ours]), (kind, predictor))
        for kind, predictor in about.chosen.items()
        if kind != about.ours
    }
    for kind in about.drawn:
        pairs[f"{kind}, draws against masks, one temperature each"] = (kind, DRAWS), (kind, MASKS)
    for words, (ours, other) in pairs.items():
        for where, place in about.places.items():
            gaps = [
                difference(*(about.seeds(results, *each, place, metric) for each in (ours, other)))
                for metric in METRICS
            ]
            found = (f"{m} {gap.text()}{' clear' * gap.clear}" for m, gap in zip(METRICS, gaps, strict=True))
            print(f"{words}, {where}: {', '.join(found)}")
    for score in about.detectors:
        means = {kind: about.detection(results, kind, score) for kind in about.chosen}
        ours = means.pop(about.ours)
        for kind, other in means.items():
            if ours is not None and other is not None:
                gap = difference(ours, other)
                both = {about.ours: ours, kind: other}
                each = ", ".join(f"{name} {x.mean:.3f} ± {x.error:.3f}" for name, x in both.items())
                print(f"AUROC by {score}: {each}, difference {gap.text()}{' clear' * gap.clear}")
    if name == "text":
        place = about.places["out of domain"]
        values = {
            k: about.seeds(results, k, predictor, place, "nll") for k, predictor in about.chosen.items()
        }
        values[f"{about.ours}, ten draws"] = about.seeds(results, about.ours, DRAWS, place, "nll")
        bars = {kind: list(each.values.values()) for kind, each in values.items()}
        drawn = picture(bars_figure(bars, x="NLL out of domain, nats (lines: 95 %)"), "png")
        (PICTURES / "text-nll.png").write_bytes(drawn)
    else:
        draw_images(about, results, curves)


def draw_images(about: Comparison, results: Results, curves: Mapping[str, list[dict[str, Any]]]) -> None:
    """NLL by severity of all kinds; of the chosen one reliability before and after, and p-values."""
    rows = results.frame[
        (results.frame["metric"] == "nll") & results.frame["suite"].isin(["clean", "corrupted"])
    ]
    rows = rows[rows["severity"].notna() | (rows["set"] == "test")].assign(
        severity=rows["severity"].fillna(0)
    )
    severities = {}
    for kind, predictor in about.chosen.items():
        own = rows[(rows["recipe"] == about.names.format(kind)) & (rows["predictor"] == predictor)]
        means = own.groupby(["seed", "severity"])["value"].mean()
        severities[kind] = [means[seed].to_dict() for seed in means.index.unique("seed")]
    after = about.chosen[about.ours]
    found = {"severity": severity_figure(severities, y="NLL, nats")}
    for when, predictor in (("before", "model"), ("after", after)):
        bins = pooled_bins([each["reliability"][predictor] for each in curves["corrupted"]])
        found[f"reliability-{when}"] = reliability_figure(bins, title=f"{about.ours}: {predictor}")
    p_values = {words: [each["p_values"][name] for each in curves["ood"]] for name, words in SHOWN.items()}
    found["p-values"] = p_value_figure(p_values)
    for name, figure in found.items():
        (PICTURES / f"images-{name}.png").write_bytes(picture(figure, "png"))


if __name__ == "__main__":
    main()
