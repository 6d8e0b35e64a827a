"""What docs/reproduction.md says of the comparison on text beyond its tables: a picture, paired differences.

    python scripts/headline_text.py                # prints differences, draws docs/images/text-nll.png

Reads the records of `results/imdb` alone; choices and predictors are those of its `choice.md`.
"""

import argparse
import tarfile
import tempfile
from pathlib import Path

from gpattention.reports.drawing import picture
from gpattention.reports.figures import bars_figure
from gpattention.runs import OverSeeds, Results, difference, read_results

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results" / "imdb" / "records.tar.xz"
CHOSEN = {
    "kep-svgp": "mc_dropout", "softmax": "mc_dropout+temperature", "sgpa": "mc_dropout+temperature",
    "kernel": "model+adaptive_temperature", "scgpt": "mc_dropout+adaptive_temperature",
}  # fmt: skip
OURS, DRAWS, MASKS = "scgpt", "model+temperature", "mc_dropout+temperature"
SETS = {"in domain": "test", "out of domain": "ood/out-of-domain"}
METRICS = ("accuracy", "nll", "ece")


def found(results: Results, kind: str, predictor: str, place: str, metric: str) -> OverSeeds:
    """The number of every seed."""
    figure = results.find(f"imdb-{kind}", "clean", place, metric, predictor)
    assert figure is not None, (kind, predictor, place, metric)
    return figure


def main() -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "docs" / "images" / "text-nll.png")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(RECORDS) as records:
            records.extractall(place, filter="data")
        results = read_results(sorted(Path(place).iterdir()))
    pairs = {
        f"{OURS} against {kind}": ((OURS, CHOSEN[OURS]), (kind, CHOSEN[kind]))
        for kind in CHOSEN
        if kind != OURS
    }
    pairs[f"{OURS}, draws against masks, one temperature each"] = (OURS, DRAWS), (OURS, MASKS)
    for name, (ours, other) in pairs.items():
        for where, place in SETS.items():
            gaps = (
                difference(found(results, *ours, place, metric), found(results, *other, place, metric))
                for metric in METRICS
            )
            words = (f"{m} {gap.text()}{' clear' * gap.clear}" for m, gap in zip(METRICS, gaps, strict=True))
            print(f"{name}, {where}: {', '.join(words)}")
    place = SETS["out of domain"]
    values = {kind: found(results, kind, predictor, place, "nll") for kind, predictor in CHOSEN.items()}
    values[f"{OURS}, ten draws"] = found(results, OURS, DRAWS, place, "nll")
    bars = {name: list(each.values.values()) for name, each in values.items()}
    given.out.write_bytes(picture(bars_figure(bars, x="NLL out of domain, nats (lines: 95 %)"), "png"))


if __name__ == "__main__":
    main()
