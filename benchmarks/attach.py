"""What draws of an attached model cost beside a plain pass, in time and in memory.

    python benchmarks/attach.py                   BERT-base, 8 x 128 tokens, one CPU thread
    python benchmarks/attach.py --size minilm --repeats 5 --write results/draws
    python benchmarks/attach.py --device cuda --repeats 6 --graphed --beside results/draws

Weights are random.  Ten samples are drawn by all twelve layers, by the last three, and by all with the
variances of one mean pass (`benchmarks/moments.py` has one by moments).  Calls take turns, and the least of
the times counts, as in benchmarks/signals.py; memory is the peak above what was there, on a CPU each call in
a process of its own.  `--graphed` adds the draws as CUDA graphs, and `--beside`
the ratios of an earlier record.  Exit code 1 if a CPU's ratio is above its limit.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from signals import SIZES, graph_times, least_times, peak_memory, print_kernels
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import gpattention
from gpattention.hosts import Handle

SAMPLES, DATE = 10, "2026-11-19"
CALLS = (
    "variances", "last three layers", "all layers", "all layers, mean's variances",
    "all layers, nothing shared",
)  # fmt: skip
LIMITS = {"all layers": 14.0, "last three layers": 6.0, "all layers, mean's variances": 11.0}  # plain passes


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="bert-base", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, help="folder of the record")
    parser.add_argument("--beside", type=Path, help="folder of an earlier record, to print beside")
    parser.add_argument("--kernels", action="store_true", help="what takes the GPU's time, before the table")
    parser.add_argument("--graphed", action="store_true", help="draws as CUDA graphs, too")
    parser.add_argument("--calls", nargs="+", choices=CALLS, help="these and a plain pass alone")
    parser.add_argument("--times-alone", action="store_true", help="no look at memory")
    parser.add_argument("--memory", help=argparse.SUPPRESS)  # one call in a process of its own
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    calls = calls_of(given)
    if given.memory:
        calls["plain"]()  # libraries set themselves up
        print(peak_memory(calls[given.memory], given.device))
        return
    if given.calls:
        calls = {name: call for name, call in calls.items() if name in ("plain", *given.calls)}
    before = {} if given.beside is None else recorded(given)
    for name in list(calls) if given.kernels else []:
        print_kernels(name, calls[name])
    times = least_times(calls, given.repeats, given.device)
    if given.graphed:
        times |= graph_times(graphs_of(given), given.repeats, given.device)
    rows, above = [], False
    print(f"{given.size}: {given.batch} x {given.tokens} tokens, {given.device}, torch {torch.__version__}")
    for name, seconds in times.items():
        ratio, limit = seconds / times["plain"], LIMITS.get(name)
        memory = None
        if not given.times_alone and name in calls:
            memory = peak_memory(calls[name], given.device) if given.device != "cpu" else in_own_process(name)
        rows.append({"call": name, "seconds": seconds, "plain_passes": ratio, "peak_mib": memory})
        told = "" if limit is None else f"  (at most {limit:g})"
        told += f"  before: {before[name]:.2f}" if name in before else ""
        peak = f"{memory or float('nan'):7.0f} MiB"
        print(f"  {name:30s} {1e3 * seconds:9.1f} ms  {ratio:6.2f} passes  {peak}{told}")
        above |= limit is not None and ratio > limit and given.device == "cpu"
    if given.write:
        given.write.mkdir(parents=True, exist_ok=True)
        facts = {name: getattr(given, name) for name in ("size", "batch", "tokens", "threads", "device")}
        facts |= {"samples": SAMPLES, "torch": torch.__version__, "machine": platform.machine(), "date": DATE}
        text = json.dumps({**facts, "rows": rows}, indent=2)
        (given.write / record_name(given)).write_text(text + "\n")
    sys.exit(above)


def record_name(given: argparse.Namespace) -> str:
    """The file of a record."""
    return f"{given.size}.json" if given.device == "cpu" else f"{given.size}-{given.device}.json"


def recorded(given: argparse.Namespace) -> dict[str, float]:
    """The ratios of an earlier record."""
    rows = json.loads((given.beside / record_name(given)).read_text())["rows"]
    return {row["call"]: row["plain_passes"] for row in rows}


def in_own_process(name: str) -> float:
    """The peak of one call, which no other call has raised before."""
    command = [sys.executable, *sys.argv, "--memory", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def host_of(given: argparse.Namespace) -> tuple[Any, dict[str, Tensor]]:
    """The model, and a batch."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_attention_heads=12, **SIZES[given.size])).eval()
    model.to(given.device)
    ids = torch.randint(5, 30_000, (given.batch, given.tokens), device=given.device)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def attached(model: Any, last: int | None = None) -> Handle:
    """A handle whose last layers draw, or all."""
    handle = gpattention.attach(model)
    first = 0 if last is None else len(handle.sites) - last
    handle.settings = replace(handle.settings, draws=tuple(i >= first for i in range(len(handle.sites))))
    return handle


def calls_of(given: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Every way to run a batch, by name."""
    model, inputs = host_of(given)
    every, few = attached(model), attached(model, 3)

    def plain() -> Any:
        with torch.no_grad():
            return model(**inputs)

    return {
        "plain": plain,
        "variances": lambda: every.variances(inputs),
        "last three layers": lambda: few.predict(inputs, SAMPLES),
        "all layers": lambda: every.predict(inputs, SAMPLES),
        "all layers, mean's variances": lambda: every.predict(inputs, SAMPLES, variance_from="mean"),
        "all layers, nothing shared": lambda: every.predict(inputs, SAMPLES, share=False),
    }


def graphs_of(given: argparse.Namespace) -> dict[str, Any]:
    """The draws as CUDA graphs."""
    model, inputs = host_of(given)
    ways: dict[str, tuple[int | None, dict[str, Any]]] = {
        "last three layers, graphed": (3, {}),
        "all layers, graphed": (None, {}),
        "all layers, mean's, graphed": (None, {"variance_from": "mean"}),
    }
    return {
        name: graph_of(attached(model, last), inputs, **options) for name, (last, options) in ways.items()
    }


def graph_of(handle: Handle, inputs: dict[str, Tensor], **options: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A prediction as a graph, and what it is called with."""
    device = next(iter(inputs.values())).device
    handle.settings = handle.settings.to(device)  # nothing is moved in a graph

    def logits(*tensors: Tensor) -> Tensor:
        found: Any = handle.predict(dict(zip(inputs, tensors, strict=True)), SAMPLES, **options)
        return found.logits

    given = tuple(inputs.values())
    return gpattention.graphed(logits, *given), given


if __name__ == "__main__":
    main()
