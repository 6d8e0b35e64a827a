"""Time and memory of one attention module over the length of the sequence, with fitted powers.

One module with its projections, 4 heads of width 32, 16 inducing inputs, independent draws and the dtc or
marginal regulariser, forward and backward, in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpattention.gp.fused.switch import Mode, fused_mode
from gpattention.studies.bench.fits import crossing, faster_from, fit_power
from gpattention.studies.bench.length_case import (
    OPTIONS,
    LengthCase,
    LengthFigures,
    measure_apart,
    measure_length,
)
from gpattention.studies.bench.paper_model import ALLOWED_GAP, PAPERS, gap_to_ours
from gpattention.studies.bench.timing import Progress, check_counts
from gpattention.studies.bench.variants import check_kinds

MODELS = (*OPTIONS, "paper-cgp", "paper-scgp")


def _doubling(low: int, high: int, factor: int = 2) -> tuple[int, ...]:
    found = [low]
    while found[-1] * factor <= high:
        found.append(found[-1] * factor)
    return tuple(found)


# by device: model, batch, lengths
SERIES: dict[str, tuple[tuple[str, int, tuple[int, ...]], ...]] = {
    "cuda": (
        ("scgp", 1, _doubling(16_384, 1_048_576)),
        ("scgp", 4, _doubling(1024, 65_536)),
        ("softmax", 4, _doubling(1024, 65_536)),
        ("cgp", 4, _doubling(256, 4096)),
        ("paper-scgp", 4, _doubling(64, 8192)),
        ("paper-cgp", 4, _doubling(64, 8192)),
    ),
    "cpu": (
        ("scgp", 1, _doubling(1024, 65_536)),
        ("scgp", 4, _doubling(1024, 8192)),
        ("softmax", 4, _doubling(1024, 8192)),
        ("cgp", 4, _doubling(256, 1024)),
        ("paper-scgp", 4, _doubling(64, 256)),
        ("paper-cgp", 4, _doubling(64, 256)),
    ),
}


@dataclass(frozen=True)
class LengthFit:
    """How one model grows at one batch size, y ~ tokens^exponent."""

    model: str
    batch: int
    what: str  # "time", "captured time" or "memory"
    exponent: float
    factor: float  # seconds or MiB at one token
    low: int  # fitted from this length
    high: int  # to this one


@dataclass(frozen=True)
class LengthResult:
    """All lengths of all models, with what they were measured with."""

    rows: tuple[LengthFigures, ...]
    fits: tuple[LengthFit, ...]
    crossings: dict[str, dict[str, float | None]]  # of scgp's time with softmax's at batch 4
    repeats: int
    seed: int
    device: str  # its type
    mode: str  # of the fused kernels
    gaps: dict[str, float]

    @property
    def baselines_hold(self) -> bool:
        """Whether each baseline computes what it claims."""
        return all(gap < ALLOWED_GAP for gap in self.gaps.values())


def bench_lengths(
    models: Sequence[str] | None = None,
    *,
    repeats: int = 5,
    seed: int = 0,
    longest: int | None = None,
    device: torch.device | str = "cpu",
    fused: Mode | None = None,
    progress: Progress | None = None,
) -> LengthResult:
    """Every length of every model; one that runs out of memory ends its series.

    Args:
        models: of `MODELS`; all if not given.
        repeats: timed calls after two to warm up.
        seed: of weights and tokens.
        longest: leave longer sequences out.
        device: where to compute; on a CPU each case has a process of its own, whose memory is measured.
        fused: the mode of fused kernels; the one in force if not given.
        progress: told the cases done, and in all.
    """
    chosen = MODELS if models is None else tuple(models)
    check_kinds(chosen, MODELS)
    check_counts(repeats=repeats, longest=1 if longest is None else longest)
    place = torch.device(device)
    mode: Mode = fused_mode() if fused is None else fused
    measure = measure_length if place.type == "cuda" else measure_apart
    series = [(m, b, [n for n in ns if longest is None or n <= longest])
              for m, b, ns in SERIES["cuda" if place.type == "cuda" else "cpu"] if m in chosen]  # fmt: skip
    rows: list[LengthFigures] = []
    total, done = sum(len(lengths) for _, _, lengths in series), 0
    for model, batch, lengths in series:
        for index, tokens in enumerate(lengths):
            rows.append(measure(LengthCase(model, batch, tokens, repeats, seed, str(place), mode)))
            failed = rows[-1].failure is not None
            done += len(lengths) - index if failed else 1
            if progress is not None:
                progress(done, total)
            if failed:
                break
    gaps = {name: gap_to_ours(name) for name in chosen if name in PAPERS}
    found = tuple(rows)
    return LengthResult(
        found, fits_of(found), crossings_of(found), repeats, seed, place.type, mode, gaps
    )  # fmt: skip


def fits_of(rows: Sequence[LengthFigures]) -> tuple[LengthFit, ...]:
    """A power of each series of at least two lengths, over all its lengths."""
    found = []
    for model, batch in dict.fromkeys((row.model, row.batch) for row in rows):
        own = [row for row in rows if (row.model, row.batch) == (model, batch)]
        for what, points in _points(own).items():
            law = fit_power(points)
            if law is not None:
                ends = int(law.low), int(law.high)
                found.append(LengthFit(model, batch, what, law.exponent, law.factor, *ends))
    return tuple(found)


def crossings_of(rows: Sequence[LengthFigures]) -> dict[str, dict[str, float | None]]:
    """From which length on scgp is faster than softmax, measured and between measurements."""
    ours = _points([row for row in rows if (row.model, row.batch) == ("scgp", 4)])
    theirs = _points([row for row in rows if (row.model, row.batch) == ("softmax", 4)])
    return {
        what: {
            "faster_from": faster_from(ours[what], theirs[what]),
            "crossing": crossing(ours[what], theirs[what]),
        }
        for what in ("time", "captured time")
        if ours[what] and theirs[what]
    }


def _points(rows: Sequence[LengthFigures]) -> dict[str, list[tuple[float, float]]]:
    """By what was measured; memory is that of the case alone."""
    read: dict[str, Callable[[LengthFigures], float | None]] = {
        "time": lambda row: row.seconds,
        "captured time": lambda row: row.captured_seconds,
        "memory": lambda row: row.own_mib,
    }
    return {
        what: [(float(row.tokens), value) for row in rows if (value := of(row)) is not None and value > 0]
        for what, of in read.items()
    }
