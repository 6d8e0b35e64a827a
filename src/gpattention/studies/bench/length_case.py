"""One attention module at one length: time and memory of forward and backward.

`python -m gpattention.studies.bench.length_case JSON` measures one case in a process of its own and
prints what it found as JSON: on a CPU only a fresh process can tell the memory that a case needs.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gpattention import gp
from gpattention.attention import Attention, build_attention
from gpattention.gp.fused.switch import Mode
from gpattention.studies.bench.paper_model import PAPERS, paper_attention
from gpattention.studies.bench.timing import wait_for

HEADS, HEAD_WIDTH, INDUCING = 4, 32, 16
WARM_UP = 2  # calls before those that count
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "scgp": {"normalize": "none", "num_inducing": INDUCING, "regularizer": "dtc"},
    "cgp": {"normalize": "none", "regularizer": "marginal"},
}


@dataclass(frozen=True)
class LengthCase:
    """What to measure."""

    model: str  # a key of `OPTIONS` or of `PAPERS`
    batch: int
    tokens: int
    repeats: int = 5
    seed: int = 0
    device: str = "cpu"
    fused: Mode = "auto"


@dataclass(frozen=True)
class LengthFigures:
    """What was found; None where the case failed, and why."""

    model: str
    batch: int
    tokens: int
    seconds: float | None = None  # median, as plain calls
    captured_seconds: float | None = None  # the same as a captured graph
    peak_mib: float | None = None  # GPU: of the allocator; CPU: resident memory of the whole process
    own_mib: float | None = None  # without what was there before the module was built
    failure: str | None = None


def measure_length(case: LengthCase) -> LengthFigures:
    """Measure in this process."""
    device = torch.device(case.device)
    try:
        with gp.fused_kernels(case.fused), gp.deferred_checks():
            found = _measured(case, device)
    except (torch.OutOfMemoryError, MemoryError):
        found = {"failure": "out of memory"}
    except RuntimeError as error:
        told = str(error).partition("\n")[0]
        found = {"failure": "out of memory" if "allocate memory" in told else told}
    _clear(device)
    return LengthFigures(case.model, case.batch, case.tokens, **found)


def measure_apart(case: LengthCase) -> LengthFigures:
    """Measure in a fresh process, which the system may end if memory runs out."""
    command = [sys.executable, "-m", "gpattention.studies.bench.length_case", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return LengthFigures(**json.loads(done.stdout.splitlines()[-1]))
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    failure = "ended by the system (out of memory?)" if done.returncode < 0 else lines[-1]
    return LengthFigures(case.model, case.batch, case.tokens, failure=failure)


def module_of(name: str, seed: int = 0) -> Attention:
    """A module with its projections, 4 heads of width 32."""
    torch.manual_seed(seed)
    if name in PAPERS:
        return paper_attention(name, HEADS * HEAD_WIDTH, HEADS)
    return build_attention(name, embed_dim=HEADS * HEAD_WIDTH, num_heads=HEADS, **OPTIONS[name])


def _measured(case: LengthCase, device: torch.device) -> dict[str, Any]:
    _clear(device)
    before = _memory(device, peak=False)
    call = _call(case, device)
    for _ in range(WARM_UP if case.repeats > 1 else 1):
        call()
    seconds = _median_seconds(call, case.repeats, device)
    peak = _memory(device, peak=True)
    captured = _captured_seconds(call, case, device) if device.type == "cuda" else None
    return {
        "seconds": seconds,
        "captured_seconds": captured,
        "peak_mib": None if peak is None else peak / 2**20,
        "own_mib": None if peak is None or before is None else (peak - before) / 2**20,
    }


def _call(case: LengthCase, device: torch.device) -> Callable[[], None]:
    module = module_of(case.model, case.seed).to(device)
    g = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.batch, case.tokens, HEADS * HEAD_WIDTH, generator=g).to(device).requires_grad_()
    asked: Mapping[str, Any] = {}
    if module.draws:
        asked = {"draw": "independent", "need": ("output", "regularizer")}

    def call() -> None:
        x.grad = None
        module.zero_grad()
        told = module(x, **asked)
        loss = told.output.square().mean()
        if told.regularizer is not None:
            loss = loss + 0.01 * told.regularizer
        loss.backward()

    return call


def _median_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    spent = []
    for _ in range(repeats):
        wait_for(device)
        start = time.perf_counter()
        call()
        wait_for(device)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def _captured_seconds(call: Callable[[], None], case: LengthCase, device: torch.device) -> float | None:
    """As one graph, which is how a trainer runs it; None where it cannot be captured."""
    if case.model in PAPERS:  # they read results back
        return None
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    try:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream(device).wait_stream(stream)
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        return _median_seconds(graph.replay, case.repeats, device)
    except RuntimeError:  # out of memory too: the graph has memory of its own
        return None


def _clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _memory(device: torch.device, *, peak: bool) -> int | None:
    """Bytes held now, or at most so far; of a CPU the process' resident memory, where Linux tells it."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated)(device)
    # not getrusage: that counts the parent's memory in
    listed, name = Path("/proc/self/status"), "VmHWM:" if peak else "VmRSS:"
    lines = listed.read_text().splitlines() if listed.is_file() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith(name)]
    return sizes[0] if sizes else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure_length(LengthCase(**json.loads(sys.argv[1]))))) + "\n")
