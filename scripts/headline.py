"""What docs/reproduction.md says of the headline comparison beyond its tables: paired differences, pictures.

    python scripts/headline.py text        # prints differences, draws docs/images/text-nll.png
    python scripts/headline.py images      # prints differences

Reads the records in `results` alone; the predictors of `chosen` are those of the folder's `choice.md`.
"""

import argparse
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpattention.reports.drawing import picture
from gpattention.reports.figures import bars_figure
from gpattention.runs import OverSeeds, Results, difference, read_results

ROOT = Path(__file__).parent.parent
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
        results = read_results(sorted(Path(place).iterdir()))
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
        (ROOT / "docs" / "images" / "text-nll.png").write_bytes(drawn)


if __name__ == "__main__":
    main()
