"""What a temperature fitted under shift is worth: each shift of validation images by a fit to the others.

For every run: NLL and ECE, means over the shifts, with the temperature of clean validation images and with
one fitted to all other shifts.  No test image is read.

    python benchmarks/shift_temperature.py runs/cifar10-60/cifar10-direct-seed0 --data ~/data --items 100
"""

import argparse
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from gpattention.data.shifts import SEVERITIES, shift, shifts_of
from gpattention.evaluation import ItemSet, build_predictor, fit_temperature, predict_items, run_sets
from gpattention.metrics import accuracy, ece, nll
from gpattention.numerics import choose_device
from gpattention.runs.folder import open_run


def logits_of(predictor: object, items: ItemSet, given: argparse.Namespace) -> Tensor:
    """[samples, items, classes]"""
    device = choose_device(given.device)
    found = predict_items(predictor, items, samples=given.samples, seed=0, device=device)  # type: ignore[arg-type]
    return found.logits.cpu()


def look(folder: str, given: argparse.Namespace) -> str:
    """One line of the table."""
    run = open_run(folder)
    device = choose_device(given.device)
    built = build_predictor(given.predictor, run.model.eval().to(device), given.samples, None)  # type: ignore[arg-type]
    clean = run_sets(run, given.data, limit=5 * given.items).validation
    some = clean.first(given.items)
    assert isinstance(some.stored, Tensor)
    assert some.labels is not None
    assert clean.labels is not None
    plain = logits_of(built.predictor, clean, given)
    usual = fit_temperature(plain, clean.labels)
    names = shifts_of(some.stored.shape[1])
    found = {}
    for name in names:
        images = torch.cat([shift(some.stored, name, severity) for severity in SEVERITIES])
        labels = some.labels.repeat(len(SEVERITIES))
        found[name] = (
            logits_of(built.predictor, ItemSet(name, images, labels, some.prepare), given), labels
        )  # fmt: skip
    rows = []
    for name, (logits, labels) in found.items():
        others = [found[other] for other in names if other != name]
        fitted = fit_temperature(
            torch.cat([each for each, _ in others], 1), torch.cat([y for _, y in others])
        )
        probs = [(logits / t).softmax(-1).mean(0) for t in (usual, fitted)]
        rows.append([accuracy(probs[0], labels), *(f(p, labels) for f in (nll, ece) for p in probs), fitted])
    means = [fmean(column) for column in zip(*rows, strict=True)]
    cells = "  ".join(f"{value:8.3f}" for value in (means[0], *means[1:5], usual, means[5]))
    return f"{Path(folder).name:36} {cells}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", help="folder of the data sets (default: GPATTENTION_DATA)")
    parser.add_argument("--items", type=int, default=100, help="validation images, each under every shift")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--predictor", default="model")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    print(f"{'run':36} accuracy  NLL clean T  shift T  ECE clean T  shift T  T clean  T shift")
    for folder in given.runs:
        print(look(folder, given), flush=True)


if __name__ == "__main__":
    main()
