"""`gpattention predict`."""

import sys
from contextlib import closing
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from gpattention.cli.console import Bar, shortened, table
from gpattention.cli.main import App
from gpattention.cli.options import Data, Device, Json
from gpattention.evaluation import (
    InputPrediction,
    fitted_temperature,
    predict_inputs,
    read_sentences,
    sentences_of,
)
from gpattention.numerics import choose_device
from gpattention.runs import open_trained

app = App()
WIDEST = 60  # characters of an input in the table


@app.command("predict")
def predict(
    run: str,
    inputs: Annotated[list[str] | None, typer.Argument()] = None,
    file: str | None = None,
    samples: int = 10,
    seed: int = 0,
    temperature: str = "1",
    json: Json = False,
    device: Device = "auto",
    data: Data = None,
) -> None:
    """Predict images or sentences with a trained run.

    Options:
        run (RUN): folder of a run, or of a model that was shared.
        inputs (INPUT): image, folder of images, or sentence.
        file (FILE): text file with one sentence a line, or -.
        samples: draws of each input; 0: the mean.
        seed: seed of the draws.
        temperature (T): divide logits by T; fitted: by that of the run's evaluation.

    Examples:
      gpattention predict runs/cifar10-cgpt photo.png holiday/        images and folders of images
      gpattention predict runs/cola-cgpt "The cat sat on the mat."    sentences
      gpattention predict runs/cola-cgpt --file sentences.txt         one sentence a line; -: standard input
      gpattention predict runs/digits-cgp digit.png --json            a JSON document, with all probabilities
      gpattention predict runs/digits-cgp digit.png --samples 100 --temperature fitted
      gpattention predict results/models/cifar10-direct-rows photo.png  a folder that models card made

    entropy is the whole uncertainty, in nats; mutual information is the part on which draws disagree: high
    for inputs unlike those of the training.
    """
    scale = _temperature(temperature)
    asked = [*(inputs or ()), *_from_file(file)]
    opened = open_trained(run)
    divisor = fitted_temperature(opened.folder, samples=samples) if scale is None else scale
    with closing(Bar("predicting", "inputs")) as bar:
        predictions = predict_inputs(
            opened, asked, samples=samples, seed=seed, temperature=divisor, root=data,
            device=choose_device(device), progress=bar if bar.terminal else None,
        )  # fmt: skip
    if not json:
        print(predictions_table(predictions))
        return
    document = {
        "run": run, "model": opened.recipe.model.attention, "data": opened.recipe.data.name,
        "draws": samples if opened.model.draws else 0, "seed": seed, "temperature": divisor,
        "predictions": [asdict(prediction) for prediction in predictions],
    }  # fmt: skip
    print(dumps(document, indent=2))


def predictions_table(predictions: list[InputPrediction]) -> str:
    """One line for each input; fewer than two draws cannot disagree, which is not to say that they agree."""
    rows = []
    for p in predictions:
        numbers = (p.confidence, p.entropy, p.mutual_information)
        texts = ("-" if each is None else f"{each:.3f}" for each in numbers)
        rows.append([shortened(p.input, WIDEST), p.label, *texts])
    return table(("input", "label", "confidence", "entropy", "mutual information"), rows, right=range(2, 5))


def _from_file(file: str | None) -> list[str]:
    if file is None:
        return []
    return sentences_of(sys.stdin.read()) if file == "-" else read_sentences(Path(file))


def _temperature(text: str) -> float | None:
    """A number; None is the fitted one."""
    try:
        return None if text == "fitted" else float(text)
    except ValueError:
        raise ValueError(f"expected --temperature to be a number or the word fitted, got {text!r}") from None
