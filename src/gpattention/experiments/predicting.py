"""Raw images or sentences through a trained run: labels, and how sure the model is of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from gpattention.attention import attention_class
from gpattention.data.folders import image_files
from gpattention.data.places import StrPath
from gpattention.evaluation.records import SuiteResult, read_suites
from gpattention.experiments.inputs.preprocessing import load_preprocessing
from gpattention.experiments.judging.weights import digest_of_weights, recorded_weights
from gpattention.experiments.runs import Run, open_trained
from gpattention.models import Prediction
from gpattention.reading import decoded

T = TypeVar("T")

AT_ONCE = 256  # inputs that are decoded and predicted together


@dataclass(frozen=True)
class InputPrediction:
    """What the model says about one input; entropies in nats."""

    input: str  # the file, or the sentence
    label: str
    confidence: float  # the label's probability
    entropy: float  # of the probabilities: the whole uncertainty
    mutual_information: float | None  # how much the draws disagree; None without two draws
    probabilities: dict[str, float]  # of every class


def predict_inputs(
    run: Run | StrPath,
    inputs: Sequence[StrPath],
    *,
    samples: int = 10,
    seed: int = 0,
    temperature: float = 1.0,
    root: StrPath | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> list[InputPrediction]:
    """Predict image files, folders of them, or sentences, whichever the run was trained on.

    Args:
        run: a run's folder, a shared model's (`gpattention models card`), or one that was opened.
        inputs: paths for a run on images, sentences for a run on texts.
        samples: draws of every input; 0 is the mean prediction.
        seed: of the draws; input i has the noise of (seed, i).
        temperature: what logits are divided by; see `fitted_temperature`.
        root: where the files of a frozen embedding are, if not where the recipe says.
        device: where to compute.
        progress: told the inputs done, and in all.
    """
    run = run if isinstance(run, Run) else open_trained(run)
    if not 0 < temperature < math.inf:
        raise ValueError(f"expected temperature > 0, got {temperature}")
    preprocessing = run.preprocessing if root is None else load_preprocessing(run.folder, root)
    images = preprocessing.kind == "images"
    items = [str(item) for item in (_expanded(inputs) if images else _sentences(inputs))]
    model = run.model.to(device)
    found: list[InputPrediction] = []
    for start in range(0, len(items), AT_ONCE):
        part = items[start : start + AT_ONCE]
        encoded: Tensor | dict[str, Tensor]
        encoded = preprocessing.images(part) if images else preprocessing.sentences(part)
        prediction = model.predict(encoded, samples=samples, seed=seed, first_item=start)
        if temperature != 1:
            prediction = Prediction.from_logits(prediction.logits / temperature, drawn=prediction.drawn)
        found += _told(part, prediction, preprocessing.classes)
        if progress is not None:
            progress(len(found), len(items))
    return found


def read_sentences(file: StrPath) -> list[str]:
    """The lines of a text file that are not empty, without the space around them."""
    path = Path(file)
    if path.is_dir() or not path.exists():  # a pipe, as a shell's <(...) is, will do
        raise FileNotFoundError(f"no file {path}")
    return sentences_of(decoded(path.read_bytes(), path))


def sentences_of(text: str) -> list[str]:
    """One sentence a line."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def fitted_temperature(folder: StrPath, *, samples: int = 10) -> float:
    """The temperature that an evaluation fitted to the model's own prediction on the validation split.

    Without samples it is that of the mean prediction, which is another one for models that draw; an
    evaluation without samples has that alone.  It must be of the weights that the run has now: training that
    goes on after an evaluation replaces them.
    """
    place, weights = Path(folder) / "evaluation", digest_of_weights(folder)
    others = []
    for name, suite in read_suites(Path(folder)).items():
        if attention_class(suite.attention).draws:
            drawn = _own_temperature(suite, "model") if suite.samples > 0 else None
            mean = _own_temperature(suite, "mean" if suite.samples > 0 else "model")
            temperature = drawn if samples > 0 else mean
        else:  # one that does not draw is its own mean
            temperature = _own_temperature(suite, "model")
        if temperature is None:
            continue
        if weights is not None and recorded_weights(suite) == weights:
            return temperature
        others.append(name)
    if others:
        raise ValueError(
            f"expected a temperature fitted to the weights in {Path(folder) / 'model'}, got that of other "
            f"weights in {place} ({', '.join(others)}): evaluate the run again"
        )
    raise FileNotFoundError(f"no fitted temperature in {place}: evaluate the run first")


def _own_temperature(suite: SuiteResult, predictor: str) -> float | None:
    for record in suite.records:
        if record.predictor == f"{predictor}+temperature" and "temperature" in record.detail:
            return float(record.detail["temperature"])
    return None


def _expanded(inputs: Sequence[StrPath]) -> list[Path]:
    """Files, and those of folders in the order of their paths."""
    files: list[Path] = []
    for each in map(Path, inputs):
        if not each.exists():
            raise FileNotFoundError(f"expected an image file or a folder of them, got {str(each)!r}")
        below = image_files(each) if each.is_dir() else [each]
        if not below:
            raise FileNotFoundError(f"expected image files in {each}, got none")
        files += below
    return _some(files)


def _sentences(inputs: Sequence[StrPath]) -> list[str]:
    for each in map(str, inputs):
        if len(each) < 256 and "\n" not in each and Path(each).is_file():
            raise ValueError(f"expected a sentence, as the run is on texts, got the file {each}: see --file")
    return _some([str(each) for each in inputs])


def _some(items: list[T]) -> list[T]:
    if not items:
        raise ValueError("expected at least one input, got none")
    return items


def _told(items: Sequence[str], prediction: Prediction, classes: Sequence[str]) -> list[InputPrediction]:
    several = prediction.drawn and prediction.samples > 1
    disagreement = prediction.mutual_information.tolist() if several else [None] * len(items)
    return [
        InputPrediction(
            input=item,
            label=classes[int(prediction.label[i])],
            confidence=float(prediction.confidence[i]),
            entropy=float(prediction.entropy[i]),
            mutual_information=disagreement[i],
            probabilities=dict(zip(classes, prediction.probs[i].tolist(), strict=True)),
        )
        for i, item in enumerate(items)
    ]
