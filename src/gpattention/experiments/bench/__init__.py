"""Benchmarks: training steps, lengths, predictions and floors, against softmax and the paper's own way.

Everything is measured in one run and told beside softmax attention and a straight transcription of the
paper's algorithm of the same run: absolute times mean little between machines.
"""

from gpattention.experiments.bench.floors import step_floors
from gpattention.experiments.bench.lengths import bench_lengths
from gpattention.experiments.bench.machine import environment
from gpattention.experiments.bench.posteriors import bench_posteriors
from gpattention.experiments.bench.predictions import bench_predictions
from gpattention.experiments.bench.steps import bench_steps

__all__ = [
    "bench_lengths",
    "bench_posteriors",
    "bench_predictions",
    "bench_steps",
    "environment",
    "step_floors",
]
