"""A user's own training loop on a GPU: eager, compiled and as a CUDA graph, beside a plain ViT of torch.

    python benchmarks/eager.py                          the paper's CIFAR-10 model, batch 100, within minutes
    python benchmarks/eager.py --kinds cgp --ways eager,compiled --seconds 200
    python benchmarks/eager.py --jobs 9 --json results/eager/eager.json      compiled side by side beforehand
    python benchmarks/eager.py --depth 1 --batch 2 --device cpu --kinds softmax     whether it runs at all

A step is forward, loss with draws and regulariser, backward and Adam.  The models of one way are timed in
turns, medians of five, and gone before those of the next are made.  What is alive while they are timed is
kept from the garbage collector, which would walk through nine models where a user has one.  A way that
fails is a row with its error.  Launches and host time are per block: how many kernels a step starts, and
how long Python takes to start them where nothing waits for the device.  "captured" is a graph made by hand,
"graphed" one by `gpattention.graphed`.  The file of numbers is written as they come.  With `--jobs` a
process for each model compiles all that it needs first, so many at a time, into caches on disk that the
measurement reads; first calls of eager and compiled steps are then those of these processes.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpattention import gp, graphed
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer

EXACT = {"normalize": "none", "regularizer": "marginal"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "kernel": ("kernel", {"normalize": "none"}),
    "direct": ("direct", EXACT),
    "cgp": ("cgp", EXACT),
    "scgp-16": ("scgp", {"normalize": "none", "regularizer": "dtc", "num_inducing": 16}),
    "scgp-32": ("scgp", {"normalize": "none", "regularizer": "dtc", "num_inducing": 32}),
    "sgpa-32": ("sgpa", {"num_inducing": 32}),
    "cgp-rows": ("cgp", {"regularizer": "kl"}),
}
PLAIN = "plain"
WAYS = ("eager", "captured", "graphed", "compiled")
TURNS, AT_ONCE = 5, 10
Step = Callable[[], Tensor]


class PlainViT(nn.Module):
    """What most people would write: `nn.TransformerEncoder` over patches."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, patch = config.width, 4
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn((32 // patch) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, config.heads, width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, len(config.layers), enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, 32, 32] -> [B, 10]"""
        tokens = self.embed(images).flatten(2).mT + self.positions
        return self.head(self.norm(self.encoder(tokens)).mean(1))


class Case:
    """A model with its optimiser, and one step of its loop."""

    def __init__(self, name: str, shape: dict[str, Any], batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.name, self.device, self.depth = name, device, shape["depth"]
        if name == PLAIN:
            self.model: nn.Module = PlainViT(VisionConfig(**shape))
        else:
            kind, options = KINDS[name]
            self.model = VisionTransformer(VisionConfig(attention=AttentionConfig(kind, options), **shape))
        self.model.to(device).train()
        self.images = torch.randn(batch, 3, 32, 32, device=device)
        self.labels = torch.arange(batch, device=device) % 10
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-6, fused=cuda, capturable=cuda)

    def loss_of(self, model: Callable[..., Any]) -> Tensor:
        """Cross-entropy, and a hundredth of the regulariser."""
        if self.name == PLAIN:
            return cross_entropy(model(self.images), self.labels)
        draw = "independent" if getattr(self.model, "draws", False) else "none"
        output = model(self.images, draw=draw, need=("logits", "regularizer"))
        return cross_entropy(output.logits, self.labels) + 0.01 * output.regularizer

    def step(self, model: Callable[..., Any] | None = None) -> Tensor:
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(self.model if model is None else model)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def eager(self) -> Step:
        """The step as it is written."""
        return self.step

    def captured(self) -> Step:
        """The step as a CUDA graph, made by hand."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), gp.deferred_checks():
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), gp.deferred_checks():
            self.loss = self.step()

        def replay() -> Tensor:
            graph.replay()
            return self.loss  # of the case itself, whose weights and images the graph writes to and reads

        return replay

    def graphed(self) -> Step:
        """The step by `gpattention.graphed`, whose arguments are copied in and its loss out."""

        def update(images: Tensor, labels: Tensor) -> Tensor:
            self.images, self.labels = images, labels
            return self.step()

        example = self.images, self.labels
        step = graphed(update, *example)
        for _ in range(4):
            step(*example)
        if not step.captured:
            raise RuntimeError(step.reason)
        return lambda: step(*example)

    def compiled(self) -> Step:
        """The model compiled whole."""
        fast = torch.compile(self.model, fullgraph=True)
        return lambda: self.step(fast)


def wait(device: torch.device) -> None:
    """Until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_time(step: Step, device: torch.device) -> float:
    """Seconds until all of a step is asked of the device, which may still be at it."""
    times = []
    for _ in range(TURNS):
        wait(device)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    wait(device)
    return statistics.median(times)


def launches(step: Step, device: torch.device) -> int | None:
    """Kernels and copies that a step starts."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def compile_beforehand(arguments: argparse.Namespace) -> dict[tuple[str, str], float]:
    """Seconds of the first step of each model, eager and compiled, by processes that fill the caches."""

    def first_calls(name: str, file: Path) -> list[dict[str, Any]]:
        options = ["--device", arguments.device, "--batch", str(arguments.batch), "--only", name]
        options += ["--depth", str(arguments.depth)] if arguments.depth else []
        command = [sys.executable, __file__, *options, "--json", str(file)]
        few = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}  # there are many of them
        found = subprocess.run(command, env={**os.environ, **few}, capture_output=True)
        print(f"{name}: {'compiled' if found.returncode == 0 else found.stderr.decode()[-300:]}", flush=True)
        return json.loads(file.read_text()) if found.returncode == 0 else []

    names = [PLAIN, *arguments.kinds]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        files = [Path(folder) / f"{name}.json" for name in names]
        rows = [row for found in pool.map(first_calls, names, files) for row in found]
    return {(row["model"], row["way"]): row["first_s"] for row in rows if "first_s" in row}


def measure(arguments: argparse.Namespace, save: Callable[[list[dict[str, Any]]], None]) -> None:
    """Rows of all ways of all models, also of those that failed, saved whenever there is one more."""
    device, begun = torch.device(arguments.device), arguments.begun
    shape = {"depth": arguments.depth} if arguments.depth else {"depth": 5}
    rows: list[dict[str, Any]] = []

    def attempt(name: str, way: str) -> tuple[dict[str, Any], Step | None]:
        row: dict[str, Any] = {"model": name, "way": way}
        step = None
        spent = time.perf_counter() - begun
        if spent > arguments.seconds:
            return row | {"error": f"left out after {spent:.0f} s"}, None
        try:
            case = Case(name, shape, arguments.batch, device)
            start = time.perf_counter()
            made: Step = getattr(case, way)()
            made()
            wait(device)
            row["first_s"] = time.perf_counter() - start
            if arguments.only is None:
                for _ in range(2):
                    made()
                gc.collect()
                gc.freeze()
                row["host_ms_per_block"] = host_time(made, device) * 1e3 / case.depth
                found = launches(made, device)
                row["launches_per_block"] = None if found is None else found / case.depth
                step = made
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            row["trace"] = traceback.format_exc()[-4000:]
        print(f"{time.perf_counter() - begun:6.0f} s  {name} {way}: {row.get('error', 'ready')}", flush=True)
        return row, step

    names = [PLAIN, *arguments.kinds] if arguments.only is None else [arguments.only]
    for way in arguments.ways:
        if way in ("captured", "graphed") and (device.type != "cuda" or arguments.only is not None):
            continue
        timed: list[tuple[dict[str, Any], Step, list[float]]] = []
        for name in names:
            row, step = attempt(name, way)
            rows.append(row)
            save(rows)
            if step is not None:
                timed.append((row, step, []))
        gc.collect()
        gc.freeze()
        for _ in range(TURNS):
            for row, step, times in timed:
                wait(device)
                start = time.perf_counter()
                for _ in range(AT_ONCE):
                    step()
                wait(device)
                times.append((time.perf_counter() - start) / AT_ONCE)
                row["ms"] = statistics.median(times) * 1e3
        save(rows)
        timed.clear()
        step = None
        gc.unfreeze()
        gc.collect()


def show(rows: list[dict[str, Any]]) -> None:
    """A short table; "of plain" is beside the plain model the same way."""
    plain = {row["way"]: row.get("ms") for row in rows if row["model"] == PLAIN}
    print(f"{'model':10} {'way':9} {'ms':>8} {'of plain':>9} {'launches':>9} {'host ms':>8} {'first s':>8}")
    for row in rows:
        if "error" in row:
            print(f"{row['model']:10} {row['way']:9} {row['error'][:90]}")
            continue
        base = plain.get(row["way"])
        numbers = [row["ms"], row["ms"] / base if base else None, row["launches_per_block"]]
        numbers += [row["host_ms_per_block"], row["first_s"]]
        shown = ["-" if x is None else f"{x:.2f}" for x in numbers]
        print("{:10} {:9} {:>8} {:>9} {:>9} {:>8} {:>8}".format(row["model"], row["way"], *shown))
    print("launches and host ms are per block; first s is the first call, with what it compiles")


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--seconds", type=float, default=400, help="after which nothing new is begun")
    parser.add_argument("--json", type=Path, help="all numbers, and the traces of what failed")
    parser.add_argument("--jobs", type=int, help="processes that compile before the measurement")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one model's first calls
    arguments = parser.parse_args()
    arguments.begun = time.perf_counter()
    if arguments.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    first = compile_beforehand(arguments) if arguments.jobs else {}
    last: list[dict[str, Any]] = []

    def save(rows: list[dict[str, Any]]) -> None:
        last[:] = rows
        for row in rows:
            if "first_s" in row:
                row["first_s"] = first.get((row["model"], row["way"]), row["first_s"])
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=1))

    measure(arguments, save)
    if arguments.only is None:
        show(last)


if __name__ == "__main__":
    main()
