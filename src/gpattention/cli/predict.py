"""`gpattention predict`."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpattention.cli.arguments import add_data, add_device, new_command, seed_number
from gpattention.cli.bar import CountBar
from gpattention.cli.table import shortened, table
from gpattention.experiments.predicting import (
    InputPrediction,
    fitted_temperature,
    predict_inputs,
    read_sentences,
    sentences_of,
)
from gpattention.experiments.runs import open_trained
from gpattention.training import choose_device

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

WIDEST = 60  # characters of an input in the table

EXAMPLES = """\
examples:
  gpattention predict runs/cifar10-cgpt photo.png holiday/        images and folders of images
  gpattention predict runs/cola-cgpt "The cat sat on the mat."    sentences
  gpattention predict runs/cola-cgpt --file sentences.txt         one sentence a line; - reads standard input
  gpattention predict runs/digits-cgp digit.png --json            one JSON document, with all probabilities
  gpattention predict runs/digits-cgp digit.png --samples 100 --temperature fitted
  gpattention predict results/models/cifar10-cgpt-rows photo.png  a folder that models card made

entropy is the whole uncertainty, in nats; mutual information is the part on which draws disagree: high for
inputs unlike those of the training.
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of predictions."""
    predict = new_command(commands, "predict", "predict images or sentences with a trained run", EXAMPLES)
    predict.add_argument("run", metavar="RUN", help="folder of a run, or of a model that was shared")
    predict.add_argument("inputs", nargs="*", metavar="INPUT", help="image, folder of images, or sentence")
    predict.add_argument("--file", metavar="FILE", help="text file with one sentence a line, or -")
    predict.add_argument(
        "--samples", type=int, default=10, help="draws of each input; 0: the mean (default: %(default)s)"
    )
    predict.add_argument("--seed", type=seed_number, default=0, help="of the draws (default: %(default)s)")
    predict.add_argument(
        "--temperature", type=_temperature, default=1.0, metavar="T",
        help="divide logits by T; fitted: by that of the run's evaluation (default: 1)",
    )  # fmt: skip
    predict.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    add_device(predict)
    add_data(predict)
    predict.set_defaults(run_command=run)


def run(given: argparse.Namespace) -> None:
    """A table, or JSON, with one entry for each input."""
    inputs = [*given.inputs, *_from_file(given.file)]
    opened = open_trained(given.run)
    fitted = given.temperature == "fitted"
    temperature = fitted_temperature(opened.folder, samples=given.samples) if fitted else given.temperature
    bar = CountBar("predicting", "inputs")
    try:
        predictions = predict_inputs(
            opened,
            inputs,
            samples=given.samples,
            seed=given.seed,
            temperature=temperature,
            root=given.data,
            device=choose_device(given.device),
            progress=bar if sys.stderr.isatty() else None,
        )
    finally:
        bar.end()
    draws = given.samples if opened.model.draws else 0
    if given.json:
        print(
            json.dumps(
                {
                    "run": str(given.run),
                    "model": opened.recipe.model.attention,
                    "data": opened.recipe.data.name,
                    "draws": draws,
                    "seed": given.seed,
                    "temperature": temperature,
                    "predictions": [asdict(prediction) for prediction in predictions],
                },
                indent=2,
            )
        )
    else:
        print(predictions_table(predictions))


def predictions_table(predictions: list[InputPrediction]) -> str:
    """One line for each input; fewer than two draws cannot disagree, which is not to say that they agree."""
    rows = [
        (
            shortened(p.input, WIDEST),
            p.label,
            f"{p.confidence:.3f}",
            f"{p.entropy:.3f}",
            "-" if p.mutual_information is None else f"{p.mutual_information:.3f}",
        )
        for p in predictions
    ]
    return table(("input", "label", "confidence", "entropy", "mutual information"), rows, right=range(2, 5))


def _from_file(file: str | None) -> list[str]:
    if file is None:
        return []
    return sentences_of(sys.stdin.read()) if file == "-" else read_sentences(Path(file))


def _temperature(text: str) -> float | Literal["fitted"]:
    try:
        return "fitted" if text == "fitted" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or the word fitted, got {text!r}") from None
