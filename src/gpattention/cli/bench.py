"""`gpattention bench`."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpattention.cli.arguments import add_device, new_command
from gpattention.cli.bar import CountBar
from gpattention.cli.table import table
from gpattention.experiments.bench_posteriors import NAMES, PosteriorTimes, bench_posteriors
from gpattention.experiments.benching import (
    ALLOWED_GAP,
    VARIANTS,
    BenchResult,
    bench_predictions,
    bench_steps,
    check_kinds,
    environment,
)
from gpattention.models.storage import write_atomically
from gpattention.training import choose_device

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = f"""\
examples:
  gpattention bench                                  the same as bench step
  gpattention bench step --kinds softmax,cgp,scgp --batch 50 --repeats 5
  gpattention bench predict --samples 20 --device cuda
  gpattention bench cpu --json bench.json            posteriors, then steps, on the CPU

step     a training step: forward, loss with draws and regulariser, backward, Adam
predict  a prediction of one batch, with draws where the kind draws
cpu      the posteriors alone, at three lengths, then step

Ratios are those of one run: to softmax, and to kernel attention as the paper's code computes it.
kinds: {", ".join(VARIANTS)}
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of benchmarks."""
    bench = new_command(commands, "bench", "time training steps and predictions on this machine", EXAMPLES)
    bench.add_argument(
        "what", nargs="?", choices=("step", "predict", "cpu"), default="step", help="default: %(default)s"
    )
    bench.add_argument("--kinds", help="comma-separated (default: all)")
    bench.add_argument("--batch", type=int, default=100, help="images at once (default: %(default)s)")
    bench.add_argument("--repeats", type=int, default=3, help="medians of how many (default: %(default)s)")
    bench.add_argument("--samples", type=int, default=10, help="draws of a prediction (default: %(default)s)")
    bench.add_argument("--json", metavar="FILE", help="write all numbers to this file too")
    add_device(bench)
    bench.set_defaults(run_command=run)


def run(given: argparse.Namespace) -> int:
    """Measure, print, write; 1 if the baseline is not the attention that it claims to be."""
    kinds = tuple(VARIANTS) if given.kinds is None else tuple(given.kinds.split(","))
    check_kinds(kinds)
    device = torch.device("cpu") if given.what == "cpu" else choose_device(given.device)
    document: dict[str, Any] = {"environment": environment(device)}
    print(_facts(document["environment"]))
    if given.what == "cpu":
        times = _with_bar("posteriors", lambda bar: bench_posteriors(repeats=given.repeats, progress=bar))
        print(f"\n{posteriors_table(times)}")
        document["posteriors"] = [asdict(each) for each in times]
    sizes = {"batch": given.batch, "repeats": given.repeats, "device": device}
    if given.what == "predict":
        result = _with_bar(
            "predictions",
            lambda bar: bench_predictions(kinds, samples=given.samples, progress=bar, **sizes),
        )
    else:
        result = _with_bar("steps", lambda bar: bench_steps(kinds, progress=bar, **sizes))
    print(f"\n{bench_table(result)}")
    document[result.what] = asdict(result)
    if given.json is not None:
        path = Path(given.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())
        print(f"\nnumbers: {path}")
    return 0 if result.gap < ALLOWED_GAP else 1


def bench_table(result: BenchResult) -> str:
    """One line for each kind."""
    unit = "ms/step" if result.what == "step" else "ms"
    rows = [
        (row.name, f"{1000 * row.seconds:.1f}", f"{row.to_softmax:.1f}x", f"{row.to_paper:.1f}x")
        for row in result.rows
    ]
    heads = ("model", unit, "time to softmax's", "faster than the paper's kernel")
    drawn = f", {result.samples} draws" if result.what == "predict" else ""
    return (
        f"{table(heads, rows, right=range(1, 4))}\n\n"
        f"batch {result.batch}{drawn}, median of {result.repeats}; the paper's kernel attention and ours "
        f"differ by {result.gap:.1e} (at most {ALLOWED_GAP:.0e} is right)"
    )


def posteriors_table(times: tuple[PosteriorTimes, ...]) -> str:
    """Ratios to softmax attention, by length."""
    rows = [
        (str(each.tokens), *(f"{each.seconds[name] / each.seconds['softmax']:.1f}x" for name in NAMES))
        for each in times
    ]
    return table(("tokens", *NAMES), rows, right=range(len(NAMES) + 1)) + (
        "\n\nmean and variance, forward and backward; times as multiples of softmax attention's"
    )


def _facts(facts: Mapping[str, str]) -> str:
    return (
        f"gpattention {facts['gpattention']}, torch {facts['torch']}, {facts['device']}, "
        f"{facts['threads']} threads"
    )


def _with_bar(name: str, measure: Callable[[CountBar], Any]) -> Any:
    bar = CountBar(name)
    try:
        return measure(bar)
    finally:
        bar.end()
