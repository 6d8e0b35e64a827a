"""Time and memory of one attention module over the length of the sequence, with fitted powers.

One module with its projections, 4 heads of width 32, 16 inducing inputs, independent draws and the dtc or
marginal regulariser, forward and backward, in float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from gpattention import gp
from gpattention.attention import Attention, build_attention
from gpattention.checks import check_count
from gpattention.ops import Mode, fused_mode
from gpattention.studies.bench import (
    PUBLISHED,
    Measurement,
    Progress,
    check_kinds,
    fresh_memory,
    in_proc,
    time_in_turns,
)
from gpattention.studies.bench_paper import PAPERS, gaps_to_ours, paper_attention
from gpattention.studies.scheduler import Died, side_by_side

HEADS, HEAD_WIDTH = 4, 32
WARM_UP = 2  # calls before those that count
OPTIONS: dict[str, dict[str, Any]] = PUBLISHED["modules"]
MODELS = (*OPTIONS, "paper-cgp", "paper-scgp")
Series = Mapping[tuple[str, int], Sequence[int]]  # lengths of a model at a batch size, rising
SERIES: dict[str, Series] = {
    device: {
        (model, int(batch)): [low << i for i in range((high // low).bit_length())]
        for (model, batch), (low, high) in ((name.split(), ends) for name, ends in series.items())
    }
    for device, series in PUBLISHED["series"].items()
}
# what grows with the length, by its key in a row; memory is that of the case alone
GROWING = {"time": "seconds", "captured time": "captured_seconds", "memory": "own_mib"}
Points = Sequence[tuple[float, float]]  # size and what it took


@dataclass(frozen=True)
class LengthCase:
    """What to measure: a model of `MODELS` at one batch size and length."""

    model: str
    batch: int
    tokens: int
    repeats: int = 5
    seed: int = 0
    device: str = "cpu"
    fused: Mode = "auto"

    def row(self, **found: Any) -> dict[str, Any]:
        """What was found, None where it was not: seconds as plain calls (median), the same as a captured
        graph; the peak of memory (of a GPU's allocator, or resident memory of the whole process) and that
        without what was there before the module was built; and why there is none of it.
        """
        empty = dict.fromkeys(("seconds", "captured_seconds", "peak_mib", "own_mib", "failure"))
        return {"model": self.model, "batch": self.batch, "tokens": self.tokens, **empty, **found}


def bench_lengths(
    models: Sequence[str] | None = None,
    *,
    repeats: int = 5,
    seed: int = 0,
    longest: int | None = None,
    series: Series | None = None,
    device: torch.device | str = "cpu",
    fused: Mode | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure every length of every model; one that runs out of memory ends its series.

    Args:
        models: models of `MODELS`; all if not given.
        repeats: timed calls after two to warm up.
        seed: seed of weights and tokens.
        longest: leave longer sequences out.
        series: lengths by model and batch size; those of `SERIES` if not given.
        device: where to compute; on a CPU each case has a process of its own, whose memory is measured.
        fused: the mode of fused kernels; the one in force if not given.
        progress: called with the cases done, and in all.

    Returns:
        One row for each case (`LengthCase.row`); the facts hold `fits` and `crossings`.

    Raises:
        ValueError: an unknown model, or a count below 1.
    """
    chosen = check_kinds(MODELS if models is None else models, MODELS)
    check_count("repeats", repeats)
    most = math.inf if longest is None else check_count("longest", longest)
    place, mode = torch.device(device), fused_mode() if fused is None else fused
    cuda = place.type == "cuda"
    every = SERIES["cuda" if cuda else "cpu"] if series is None else series
    wanted = {key: [n for n in lengths if n <= most] for key, lengths in every.items() if key[0] in chosen}
    rows, done, total = list[dict[str, Any]](), 0, sum(map(len, wanted.values()))
    for (model, batch), lengths in wanted.items():
        for index, tokens in enumerate(lengths):
            case = LengthCase(model, batch, tokens, repeats, seed, str(place), mode)
            rows.append(measure_length(case) if cuda else measure_apart(case))
            failed = rows[-1]["failure"] is not None
            done += len(lengths) - index if failed else 1
            if progress is not None:
                progress(done, total)
            if failed:
                break
    return summarised(rows, gaps_to_ours(chosen), repeats=repeats, seed=seed, device=place.type, mode=mode)


def summarised(rows: Sequence[dict[str, Any]], gaps: dict[str, float], **facts: Any) -> Measurement:
    """Rows with a power fitted to each series, and where scgp overtakes softmax at batch 4."""
    fits = []
    series = dict.fromkeys((row["model"], row["batch"]) for row in rows)
    for (model, batch), what in product(series, GROWING):
        points = points_of(rows, model, batch, what)
        if (law := fit_power(points)) is not None:
            sizes = [int(x) for x, _ in points]
            found = {"exponent": law[0], "factor": law[1], "low": min(sizes), "high": max(sizes)}
            fits.append({"model": model, "batch": batch, "what": what, **found})
    crossings = {}
    for what in ("time", "captured time"):
        ours, theirs = (points_of(rows, model, 4, what) for model in ("scgp", "softmax"))
        if ours and theirs:
            crossings[what] = overtaking(ours, theirs)
    return Measurement(tuple(rows), {"fits": fits, "crossings": crossings, **facts}, gaps)


def points_of(rows: Sequence[dict[str, Any]], model: str, batch: int, what: str) -> Points:
    """The measured points of one series: length and cost."""
    own = [row for row in rows if (row["model"], row["batch"]) == (model, batch) and row[GROWING[what]]]
    return [(float(row["tokens"]), float(row[GROWING[what]])) for row in own]


def fit_power(points: Points) -> tuple[float, float] | None:
    """Exponent and factor of y = factor * x^exponent, by least squares of logarithms; None of one size."""
    if len({x for x, _ in points}) < 2:
        return None
    sizes, values = np.log(np.array(points)).T
    exponent, constant = np.polyfit(sizes, values, 1)
    return float(exponent), math.exp(constant)


def overtaking(ours: Points, theirs: Points) -> dict[str, float | None]:
    """The smallest common size from which ours takes less at every larger one (`faster_from`), and where the
    lines between measured points cross before it, in logarithms (`crossing`); None where there is none.
    """
    own, other = dict(ours), dict(theirs)
    gaps = [(x, math.log(own[x] / other[x])) for x in sorted(own.keys() & other.keys())]
    start = 1 + max((i for i, (_, gap) in enumerate(gaps) if gap >= 0), default=-1)
    if start == len(gaps):
        return {"faster_from": None, "crossing": None}
    high, below = gaps[start]
    if start == 0:
        return {"faster_from": high, "crossing": None}
    low, above = gaps[start - 1]
    return {"faster_from": high, "crossing": low * (high / low) ** (above / (above - below))}


def measure_apart(case: LengthCase) -> dict[str, Any]:
    """Measure in a fresh process, which the system may end if memory runs out."""
    ((_, found, _),) = side_by_side(measure_length, [case], 1, fresh=True)
    return case.row(failure=f"{found} (out of memory?)") if isinstance(found, Died) else found


def measure_length(case: LengthCase, _: int = 0) -> dict[str, Any]:
    """Measure in this process; its number does not matter."""
    device = torch.device(case.device)
    try:
        with gp.fused_kernels(case.fused), gp.deferred_checks():
            found = _measured(case, device)
    except (torch.OutOfMemoryError, MemoryError):
        found = {"failure": "out of memory"}
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        found = {"failure": "out of memory" if "allocate memory" in message else message}
    fresh_memory(device)
    return case.row(**found)


def module_of(name: str, seed: int = 0) -> Attention:
    """A module with its projections, 4 heads of width 32."""
    torch.manual_seed(seed)
    if name in PAPERS:
        return paper_attention(name, HEADS * HEAD_WIDTH, HEADS)
    return build_attention(name, embed_dim=HEADS * HEAD_WIDTH, num_heads=HEADS, **OPTIONS[name])


def _measured(case: LengthCase, device: torch.device) -> dict[str, Any]:
    fresh_memory(device)
    before, call = _memory(device, peak=False), _call(case, device)
    warm_up = WARM_UP if case.repeats > 1 else 1
    found: dict[str, Any] = {}
    found["seconds"] = time_in_turns({"": call}, case.repeats, device, warm_up=warm_up)[""]
    peak = _memory(device, peak=True)
    if device.type == "cuda":
        found["captured_seconds"] = _captured_seconds(call, case, device)
    if peak is not None and before is not None:
        found |= {"peak_mib": peak / 2**20, "own_mib": (peak - before) / 2**20}
    return found


def _call(case: LengthCase, device: torch.device) -> Callable[[], None]:
    module = module_of(case.model, case.seed).to(device)
    g = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.batch, case.tokens, HEADS * HEAD_WIDTH, generator=g).to(device).requires_grad_()
    drawn = {"draw": "independent", "need": ("output", "regularizer")}
    options: dict[str, Any] = drawn if module.draws else {}

    def call() -> None:
        x.grad = None
        module.zero_grad()
        found = module(x, **options)
        loss = found.output.square().mean()
        if found.regularizer is not None:
            loss = loss + 0.01 * found.regularizer
        loss.backward()

    return call


def _captured_seconds(call: Callable[[], None], case: LengthCase, device: torch.device) -> float | None:
    """Seconds as one captured graph, as in training; None where it cannot be captured."""
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
        return time_in_turns({"": graph.replay}, case.repeats, device)[""]
    except RuntimeError:  # out of memory too: the graph has memory of its own
        return None


def _memory(device: torch.device, *, peak: bool) -> int | None:
    """Bytes held now, or at most so far; on a CPU the resident memory of the process, if this is Linux."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated)(device)
    # not getrusage: that counts the parent's memory in
    size = in_proc("self/status", "VmHWM" if peak else "VmRSS")
    return None if size is None else 1024 * int(size.split()[0])
