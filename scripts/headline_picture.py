"""The picture of the comparison on text: each kind's predictor that validation reviews chose, with its seeds.

    python scripts/headline_picture.py -o docs/images/text-nll.png

Reads the records of `results/imdb` alone; choices and predictors are those of its `choice.md`.
"""

import argparse
import tarfile
import tempfile
from pathlib import Path

from gpattention.reports.drawing import picture
from gpattention.reports.figures import bars_figure
from gpattention.runs import read_results

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results" / "imdb" / "records.tar.xz"
CHOSEN = {
    "kep-svgp": "mc_dropout", "softmax": "mc_dropout+temperature", "sgpa": "mc_dropout+temperature",
    "kernel": "model+adaptive_temperature", "scgpt": "mc_dropout+adaptive_temperature",
}  # fmt: skip
SET, AFTERWARDS = "ood/out-of-domain", "scgpt, ten draws"


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "docs" / "images" / "text-nll.png")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(RECORDS) as records:
            records.extractall(place, filter="data")
        frame = read_results(sorted(Path(place).iterdir())).frame

    def seeds(kind: str, predictor: str) -> list[float]:
        wanted = frame[(frame.recipe == f"imdb-{kind}") & (frame.predictor == predictor)]
        return list(wanted[(wanted.set == SET) & (wanted.metric == "nll")].sort_values("seed").value)

    values = {kind: seeds(kind, predictor) for kind, predictor in CHOSEN.items()}
    values[AFTERWARDS] = seeds("scgpt", "model+temperature")
    figure = bars_figure(values, x="NLL out of domain, nats (lines: 95 %)")
    given.out.write_bytes(picture(figure, "png"))


if __name__ == "__main__":
    main()
