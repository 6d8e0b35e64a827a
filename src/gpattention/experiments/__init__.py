"""Whole experiments, each one call: data, training, evaluation and what to show."""

from gpattention.experiments.demo import DemoResult, run_demo
from gpattention.experiments.images import image_training_data, train_images

__all__ = ["DemoResult", "image_training_data", "run_demo", "train_images"]
