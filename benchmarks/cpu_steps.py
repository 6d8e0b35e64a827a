"""Training steps of short sequences on a CPU: this code beside an older one, in one run.

    git worktree add /tmp/before 7962ced
    python benchmarks/cpu_steps.py --before /tmp/before --json results/bench/cpu-steps.json
    python benchmarks/cpu_steps.py --threads 1                  this code alone

A step is that of `gpattention bench step --device cpu --tokens N`.  Each code has a process of its own, which
makes a step of every kind when it is its turn, so that whatever else the machine does slows all of them.  The
table has each kind beside softmax attention of the same code, by wall time and by the processor time of all
threads, which other work on the machine moves less.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "direct": ("direct", {"normalize": "none", "regularizer": "marginal"}),
    "direct-default": ("direct", {}),
    "cgp": ("cgp", {"normalize": "none", "regularizer": "marginal"}),
    "cgp-default": ("cgp", {}),
    "scgp-16": ("scgp", {"normalize": "none", "regularizer": "dtc", "num_inducing": 16}),
    "scgp-default": ("scgp", {}),
}


def serve(tokens: int, batch: int, threads: int) -> None:
    """For every line read, a step of each kind: their wall and processor seconds as one line of JSON."""
    import torch

    from gpattention.models import VisionConfig
    from gpattention.studies import bench

    torch.set_num_threads(threads)
    bench.VARIANTS |= {name: bench.Variant(*kind) for name, kind in KINDS.items()}
    shape, device = VisionConfig(image_size=(4, 4 * tokens)), torch.device("cpu")
    steps = {name: bench._stepper(name, shape, batch, 0, device, captured=False) for name in KINDS}
    for step in steps.values():
        step()
    print(torch.__version__, flush=True)
    for _ in sys.stdin:
        found = {}
        for name, step in steps.items():
            wall, own = time.perf_counter(), time.process_time()
            step()
            found[name] = (time.perf_counter() - wall, time.process_time() - own)
        print(json.dumps(found), flush=True)


class Code:
    """A process that makes steps of one code."""

    def __init__(self, source: Path, tokens: int, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--serve", str(tokens), "--batch", str(options.batch)]
        self._process = subprocess.Popen(
            [*command, "--threads", str(options.threads)],
            env={**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": str(options.threads)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.torch = self._process.stdout.readline().strip()

    def turn(self) -> dict[str, tuple[float, float]]:
        """A step of each kind."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        found: dict[str, tuple[float, float]] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        """Wait for the process, which ends with its input."""
        self._process.communicate()


def measure(tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each code and kind."""
    here = Path(__file__).resolve().parents[1]
    sources = ([] if options.before is None else [("before", options.before)]) + [("now", here)]
    codes = {name: Code(source, tokens, options) for name, source in sources}
    turns: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in codes}
    for _ in range(options.repeats):
        for name, code in codes.items():
            turns[name].append(code.turn())
    rows = []
    for name, code in codes.items():
        code.end()
        for kind in KINDS:
            row: dict[str, Any] = {"tokens": tokens, "code": name, "kind": kind}
            for i, clock in enumerate(("wall", "cpu")):
                row[f"{clock}_ms"] = 1e3 * statistics.median(turn[kind][i] for turn in turns[name])
                ratios = [turn[kind][i] / turn["softmax"][i] for turn in turns[name]]
                row[f"{clock}_to_softmax"] = statistics.median(ratios)
            rows.append(row)
    return rows


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a checkout of the older code")
    parser.add_argument("--tokens", type=lambda text: [int(x) for x in text.split(",")], default=[17, 64])
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.batch, options.threads)
        return
    rows = [row for tokens in options.tokens for row in measure(tokens, options)]
    print("times softmax")
    print(f"{'tokens, kind':20} {'code':8} {'wall':>6} {'cpu':>6}")
    for row in sorted(rows, key=lambda row: row["tokens"]):
        name = f"{row['tokens']} {row['kind']}"
        print(f"{name:20} {row['code']:8} {row['wall_to_softmax']:6.2f} {row['cpu_to_softmax']:6.2f}")
    if options.json is not None:
        facts: dict[str, Any] = {"batch": options.batch, "threads": options.threads}
        facts |= {
            "repeats": options.repeats,
            "seed": 0,
            "machine": platform.processor() or platform.machine(),
        }
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        options.json.write_text(f'{{"facts": {json.dumps(facts)}, "rows": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    main()
