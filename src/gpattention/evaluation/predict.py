"""Predictions of image files or sentences by a trained run: labels, and how certain they are."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpattention.attention import attention_class
from gpattention.data import image_files
from gpattention.files import StrPath, decoded
from gpattention.models import Prediction
from gpattention.runs import Run, load_preprocessing, open_trained, read_suites
from gpattention.runs.records import digest_of_weights, recorded_weights

AT_ONCE = 256  # inputs that are decoded and predicted together


@dataclass(frozen=True)
class InputPrediction:
    """The prediction of one input; entropies are in nats.

    Attributes:
        input: the file, or the sentence.
        label: the most probable class.
        confidence: its probability.
        entropy: of the probabilities, the total uncertainty.
        mutual_information: how much the draws disagree; None if there are less than two.
        probabilities: of every class.
    """

    input: str
    label: str
    confidence: float
    entropy: float
    mutual_information: float | None
    probabilities: dict[str, float]


def predict_inputs(
    run: Run | StrPath, inputs: Sequence[StrPath], *, samples: int = 10, seed: int = 0,
    temperature: float = 1.0, root: StrPath | None = None, device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> list[InputPrediction]:  # fmt: skip
    """Predict image files and folders of them, or sentences, depending on what the run was trained on.

    Args:
        run: the folder of a run or of a shared model (`gpattention models card`), or an opened run.
        inputs: paths for a run on images, sentences for a run on texts.
        samples: draws of every input; 0 is the mean prediction.
        seed: of the draws; input i has the noise of (seed, i).
        temperature: the divisor of the logits; see `fitted_temperature`.
        root: folder with the files of a frozen embedding, if not the one in the recipe.
        device: where to compute.
        progress: called with the number of inputs done and of all inputs.

    Returns:
        One prediction for each input, the files of folders in the order of their paths.

    Raises:
        ValueError: there is no input, a file for a run on texts, or a temperature that is not positive.
        FileNotFoundError: there is no such run, file or folder.
    """
    run = run if isinstance(run, Run) else open_trained(run)
    if not 0 < temperature < math.inf:
        raise ValueError(f"expected temperature > 0, got {temperature}")
    preprocessing = run.preprocessing if root is None else load_preprocessing(run.folder, root)
    images = preprocessing.kind == "images"
    items = _expanded(inputs) if images else _sentences(inputs)
    if not items:
        raise ValueError("expected at least one input, got none")
    model = run.model.to(device)
    found: list[InputPrediction] = []
    for start in range(0, len(items), AT_ONCE):
        part = items[start : start + AT_ONCE]
        encoded: Tensor | dict[str, Tensor]
        encoded = preprocessing.images(part) if images else preprocessing.sentences(part)
        prediction = model.predict(encoded, samples=samples, seed=seed, first_item=start)
        if temperature != 1:
            prediction = Prediction.from_logits(prediction.logits / temperature, drawn=prediction.drawn)
        found += _describe(part, prediction, preprocessing.classes)
        if progress is not None:
            progress(len(found), len(items))
    return found


def read_sentences(file: StrPath) -> list[str]:
    """Read a text file with one sentence in each line.

    Args:
        file: may be a pipe, such as <(...) in a shell.

    Returns:
        The lines that are not empty, without the space around them.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(file)
    if path.is_dir() or not path.exists():
        raise FileNotFoundError(f"no file {path}")
    return sentences_of(decoded(path.read_bytes(), path))


def sentences_of(text: str) -> list[str]:
    """The lines of a text that are not empty, without the space around them.

    Args:
        text: one sentence in each line.

    Returns:
        The sentences.
    """
    return [line.strip() for line in text.split("\n") if line.strip()]


def fitted_temperature(folder: StrPath, *, samples: int = 10) -> float:
    """The temperature that an evaluation has fitted to the model's own prediction of the validation split.

    It must belong to the weights that the run has now, which training after an evaluation replaces.

    Args:
        folder: of an evaluated run.
        samples: 0 for the temperature of the mean prediction, which differs for models that draw.  An
            evaluation without samples has only that one.

    Returns:
        The divisor of the logits.

    Raises:
        ValueError: there are only temperatures for other weights.
        FileNotFoundError: there is no temperature.
    """
    place, weights = Path(folder) / "evaluation", digest_of_weights(folder)
    others = []
    for name, suite in read_suites(Path(folder)).items():
        draws = attention_class(suite.attention).draws  # a model that does not is its own mean
        predictor = "mean" if draws and suite.samples > 0 and samples == 0 else "model"
        own = (record for record in suite.records if record.predictor == f"{predictor}+temperature")
        temperature = next((r.detail["temperature"] for r in own if "temperature" in r.detail), None)
        if temperature is None or (draws and suite.samples == 0 < samples):
            continue
        if weights is not None and recorded_weights(suite) == weights:
            return float(temperature)
        others.append(name)
    if others:
        raise ValueError(
            f"expected a temperature fitted to the weights in {Path(folder) / 'model'}, got that of other "
            f"weights in {place} ({', '.join(others)}): evaluate the run again"
        )
    raise FileNotFoundError(f"no fitted temperature in {place}: evaluate the run first")


def _expanded(inputs: Sequence[StrPath]) -> list[str]:
    """Files, with those of folders in the order of their paths."""
    files: list[str] = []
    for each in map(Path, inputs):
        if not each.exists():
            raise FileNotFoundError(f"expected an image file or a folder of them, got {str(each)!r}")
        below = image_files(each) if each.is_dir() else [each]
        if not below:
            raise FileNotFoundError(f"expected image files in {each}, got none")
        files += map(str, below)
    return files


def _sentences(inputs: Sequence[StrPath]) -> list[str]:
    for each in map(str, inputs):
        if len(each) < 256 and "\n" not in each and Path(each).is_file():
            raise ValueError(f"expected a sentence, as the run is on texts, got the file {each}: see --file")
    return [str(each) for each in inputs]


def _describe(items: Sequence[str], prediction: Prediction, classes: Sequence[str]) -> list[InputPrediction]:
    several = prediction.drawn and prediction.samples > 1
    disagreement = prediction.mutual_information.tolist() if several else [None] * len(items)
    return [
        InputPrediction(
            input=item, label=classes[int(prediction.label[i])], confidence=float(prediction.confidence[i]),
            entropy=float(prediction.entropy[i]), mutual_information=disagreement[i],
            probabilities=dict(zip(classes, prediction.probs[i].tolist(), strict=True)),
        )
        for i, item in enumerate(items)
    ]  # fmt: skip
