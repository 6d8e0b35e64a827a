"""Whole experiments, each one call: data, training, evaluation and what to show."""

from gpattention.experiments.demo import DemoResult, run_demo
from gpattention.experiments.inputs import (
    Contextual,
    Prepared,
    Preprocessing,
    TextEncoder,
    image_training_data,
    load_preprocessing,
    open_contextual,
    prepare,
    save_preprocessing,
    sentence_words,
    text_training_data,
)
from gpattention.experiments.judging import evaluate_run, evaluate_runs
from gpattention.experiments.reporting import read_results, read_runs, write_report
from gpattention.experiments.runs import Run, find_runs, open_run, train_recipe

__all__ = [
    "Contextual",
    "DemoResult",
    "Prepared",
    "Preprocessing",
    "Run",
    "TextEncoder",
    "evaluate_run",
    "evaluate_runs",
    "find_runs",
    "image_training_data",
    "load_preprocessing",
    "open_contextual",
    "open_run",
    "prepare",
    "read_results",
    "read_runs",
    "run_demo",
    "save_preprocessing",
    "sentence_words",
    "text_training_data",
    "train_recipe",
    "write_report",
]
