"""Whole experiments, each one call: data, training, evaluation and what to show."""

from gpattention.experiments.contextual import Contextual, open_contextual
from gpattention.experiments.demo import DemoResult, run_demo
from gpattention.experiments.evaluating import Summary, evaluate_run, evaluate_runs, summarise
from gpattention.experiments.images import image_training_data
from gpattention.experiments.preparation import Prepared, prepare, save_preprocessing
from gpattention.experiments.preprocessing import Preprocessing, load_preprocessing
from gpattention.experiments.runs import Run, find_runs, open_run, train_recipe
from gpattention.experiments.texts import TextEncoder, sentence_words, text_training_data

__all__ = [
    "Contextual",
    "DemoResult",
    "Prepared",
    "Preprocessing",
    "Run",
    "Summary",
    "TextEncoder",
    "evaluate_run",
    "evaluate_runs",
    "find_runs",
    "image_training_data",
    "load_preprocessing",
    "open_contextual",
    "open_run",
    "prepare",
    "run_demo",
    "save_preprocessing",
    "sentence_words",
    "summarise",
    "text_training_data",
    "train_recipe",
]
