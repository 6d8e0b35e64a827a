"""From datasets, images and sentences to a model's inputs, in training and without the data afterwards."""

from gpattention.experiments.inputs.contextual import Contextual, open_contextual
from gpattention.experiments.inputs.images import image_training_data
from gpattention.experiments.inputs.preparation import Prepared, prepare, save_preprocessing
from gpattention.experiments.inputs.preprocessing import Preprocessing, load_preprocessing
from gpattention.experiments.inputs.texts import TextEncoder, sentence_words, text_training_data

__all__ = [
    "Contextual",
    "Prepared",
    "Preprocessing",
    "TextEncoder",
    "image_training_data",
    "load_preprocessing",
    "open_contextual",
    "prepare",
    "save_preprocessing",
    "sentence_words",
    "text_training_data",
]
