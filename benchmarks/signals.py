"""What signals cost beside a plain pass of the same host, and how much memory they take.

    python benchmarks/signals.py                       both sizes, 8 x 128 tokens, one CPU thread
    python benchmarks/signals.py --sizes minilm --padded
    python benchmarks/signals.py --device cuda --batch 64

Weights are random; `--spread` brings queries and keys farther apart: beyond 8 length scales distances are
computed in float64 (`gp.kernels`).  Calls take turns, and the least of the times counts: CPU
seconds of the thread, which other programs on the machine do not lengthen, or seconds of the clock on a GPU.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForSequenceClassification

import gpattention
from gpattention.graphs import WARM_UP

SIZES = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
}
LIMITS = {"bert-base": 1.6, "minilm": 2.1}  # of plain passes, with variances
WITHOUT = 1.25  # without
CALLS = ("plain", "without variance", "signals", "per token")


def main() -> None:
    """Measure and print; exit code 1 if a CPU's ratio is above its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--padded", action="store_true", help="a quarter of every other text is padding")
    parser.add_argument("--spread", type=float, default=1.0, help="factor of the weights of queries and keys")
    parser.add_argument("--memory", choices=CALLS, help=argparse.SUPPRESS)  # one call in a process of its own
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    above = False
    for size in given.sizes:
        calls = calls_of(size, given)
        if given.memory:
            print(peak_memory(calls[given.memory], given.device))
            return
        times = least_times(calls, given.repeats, given.device)
        print(f"{size}: {given.batch} x {given.tokens} tokens, {given.device}, torch {torch.__version__}")
        for name, seconds in times.items():
            ratio = seconds / times["plain"]
            limit = {"without variance": WITHOUT, "signals": LIMITS[size]}.get(name)
            told = "" if limit is None else f"  (at most {limit})"
            memory = in_own_process(size, name)
            print(f"  {name:17s} {1e3 * seconds:8.1f} ms  {ratio:5.2f} passes  {memory:7.1f} MiB{told}")
            above |= limit is not None and ratio > limit and given.device == "cpu"
    sys.exit(above)


def calls_of(size: str, given: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Every way to run a batch, by name."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_attention_heads=12, **SIZES[size])).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                weight.mul_(given.spread)
    model.to(given.device)
    real = torch.ones(given.batch, given.tokens, dtype=torch.long)
    if given.padded:
        real[::2, -given.tokens // 4 :] = 0
    ids = torch.randint(5, 30_000, real.shape)
    inputs = {"input_ids": ids.to(given.device), "attention_mask": real.to(given.device)}
    handle = gpattention.attach(model)

    def plain() -> Any:
        with torch.no_grad():
            return model(**inputs)

    return {
        "plain": plain,
        "without variance": lambda: handle.signals(inputs, variance=False),
        "signals": lambda: handle.signals(inputs),
        "per token": lambda: handle.signals(inputs, per_token=True),
    }


def least_times(calls: dict[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    """Seconds of each, the least of all rounds."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            clock = (
                time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
            )
            if device != "cpu":
                torch.cuda.synchronize()
            start = clock()
            call()
            if device != "cpu":
                torch.cuda.synchronize()
            least[name] = min(least[name], clock() - start)
    return least


def graph_times(
    graphs: dict[str, tuple[Any, tuple[Any, ...]]], repeats: int, device: str
) -> dict[str, float]:
    """Seconds of each `gpattention.graphed` function with its arguments that became a graph; says why not."""
    times = {}
    for name, (step, given) in graphs.items():
        try:
            for _ in range(WARM_UP + 1):
                step(*given)
            if step.reason is None:
                times |= least_times({name: partial(step, *given)}, repeats, device)
            else:
                print(f"{name}: no graph, {step.reason}")
        except Exception as error:
            print(f"{name}: no graph, {error}")
    return times


def print_kernels(name: str, call: Callable[[], Any], most: int = 8) -> None:
    """What takes the GPU's time in a call, and how many kernels it starts."""
    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [
        x for x in seen.key_averages() if x.device_type == DeviceType.CUDA and x.self_device_time_total
    ]
    kernels.sort(key=lambda x: -x.self_device_time_total)
    whole, count = sum(x.self_device_time_total for x in kernels), sum(x.count for x in kernels)
    print(f"{name}: {whole / 1e3:.2f} ms on the GPU in {count} kernels and copies")
    for x in kernels[:most]:
        print(f"  {x.self_device_time_total / 1e3:8.2f} ms {x.count:5d}  {x.key[:80]}")


def peak_memory(call: Callable[[], Any], device: str) -> float:
    """MiB beyond what was there before the call."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts anew
    before = resident("VmRSS:")
    call()
    return resident("VmHWM:") - before


def resident(name: str) -> float:
    """MiB of resident memory, now or at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10


def in_own_process(size: str, name: str) -> float:
    """The peak of one call, which no other call has raised before."""
    command = [sys.executable, *sys.argv, "--sizes", size, "--memory", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
