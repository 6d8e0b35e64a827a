"""Benchmarks: training steps, lengths, predictions and floors, against softmax and the paper's own way.

Everything is measured in one run and told beside softmax attention and a straight transcription of the
paper's algorithm of the same run: absolute times mean little between machines.
"""

from gpattention.studies.bench.floors import step_floors
from gpattention.studies.bench.lengths import bench_lengths
from gpattention.studies.bench.machine import environment
from gpattention.studies.bench.posteriors import bench_posteriors
from gpattention.studies.bench.predictions import bench_predictions
from gpattention.studies.bench.steps import bench_steps

__all__ = [
    "bench_lengths",
    "bench_posteriors",
    "bench_predictions",
    "bench_steps",
    "environment",
    "step_floors",
]
