"""Measurements as tables: which columns, which targets beside them, what stands below."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpattention.studies.bench import targets
from gpattention.studies.bench.floors import ASSUMED, SECONDS_PER_LAUNCH, Floor
from gpattention.studies.bench.lengths import LengthFit, LengthResult
from gpattention.studies.bench.paper_model import ALLOWED_GAP
from gpattention.studies.bench.posteriors import NAMES, PosteriorTimes
from gpattention.studies.bench.predictions import PredictResult
from gpattention.studies.bench.steps import StepResult
from gpattention.studies.bench.tables import BenchTable, Quantity

H200_BATCH = 100  # of the targets' steps


def step_table(result: StepResult) -> BenchTable:
    """One row for each model."""
    cuda = result.device == "cuda"
    aimed = cuda and result.batch == H200_BATCH
    rows: list[dict[str, Any]] = []
    for row in result.rows:
        plain = asdict(row)
        plain["ms"] = None if row.seconds is None else 1000 * row.seconds
        plain["fused"] = None if row.fused is None else ", ".join(row.fused) or "none"
        if aimed and row.name in targets.STEPS:
            plain |= {f"target_{key}": value for key, value in asdict(targets.STEPS[row.name]).items()}
        if not cuda:  # there is no choice to be told
            plain["engine"] = None
            plain["reason"] = row.reason if row.seconds is None else None
        rows.append(plain)
    columns = (
        Quantity("name", "model"),
        Quantity("ms", "ms/step", ".2f" if cuda else ".1f"),
        Quantity("target_ms", "target", ".1f"),
        Quantity("target_reference_ms", "reference ms", ".1f"),
        Quantity("to_softmax", "to softmax's", ".2f", "x"),
        Quantity("to_paper", "faster than the paper's way", ".1f", "x"),
        Quantity("to_paper_kernel", "than the paper's kernel", ".1f", "x"),
        Quantity("peak_mib", "peak MiB", ".0f"),
        Quantity("target_mib", "target", ".0f"),
        Quantity("target_reference_mib", "reference MiB", ".0f"),
        Quantity("launches", "launches", ".0f"),
        Quantity("engine", "engine"),
        Quantity("fused", "fused kernels"),
        Quantity("reason", "why"),
    )
    notes = [
        f"batch {result.batch}, median of {result.repeats} turns of {result.at_once} steps, seed "
        f"{result.seed}, fused kernels {result.mode!r}",
        *_gap_notes(result.gaps),
    ]
    return BenchTable(
        "Training step, the paper's CIFAR-10 model", columns, tuple(rows),
        tuple([*notes, targets.SOURCE] if aimed else notes),
    )  # fmt: skip


def floor_table(floors: Sequence[Floor], result: StepResult | None = None) -> BenchTable:
    """What a step cannot go below, beside what was measured on a GPU."""
    measured = {row.name: row for row in result.rows} if result and result.device == "cuda" else {}
    rows = []
    for floor in floors:
        row = measured.get(floor.name)
        seconds = None if row is None else row.seconds
        launches = None if row is None else row.launches
        rows.append(
            {
                "name": floor.name,
                "gflop": floor.flops / 1e9,
                "flop_ms": 1000 * floor.flop_seconds,
                "mib": floor.bytes_moved / 2**20,
                "byte_ms": 1000 * floor.byte_seconds,
                "fewest_launches": floor.launches,
                "launch_ms": 1000 * floor.launch_seconds,
                "floor_ms": 1000 * floor.seconds,
                "launches": launches,
                "launches_ms": None if launches is None else 1000 * launches * SECONDS_PER_LAUNCH,
                "ms": None if seconds is None else 1000 * seconds,
                "to_floor": None if seconds is None else seconds / floor.seconds,
            }
        )
    columns = (
        Quantity("name", "model"),
        Quantity("gflop", "GFLOP", ".0f"),
        Quantity("flop_ms", "ms", ".2f"),
        Quantity("mib", "MiB moved", ".0f"),
        Quantity("byte_ms", "ms", ".2f"),
        Quantity("fewest_launches", "fewest launches", ".0f"),
        Quantity("launch_ms", "ms", ".2f"),
        Quantity("floor_ms", "floor ms", ".2f"),
        Quantity("launches", "launches made", ".0f"),
        Quantity("launches_ms", "ms", ".2f"),
        Quantity("ms", "measured ms", ".2f"),
        Quantity("to_floor", "to the floor", ".1f", "x"),
    )
    notes = (f"computed, not measured; assumed of the machine ({ASSUMED})",)
    return BenchTable("Floor of a training step", columns, tuple(rows), notes)


def profile_table(result: StepResult) -> BenchTable:
    """Kernel by kernel, for every model of ours."""
    rows = []
    for row in result.rows:
        if row.seconds is None or not row.kernels or row.name.startswith("paper"):
            continue
        parts = [(each.name, each.launches, each.seconds) for each in row.kernels]
        between = row.seconds - sum(seconds for _, _, seconds in parts)
        for name, launches, seconds in [*parts, ("between kernels", None, max(between, 0.0))]:
            rows.append(
                {
                    "name": row.name,
                    "kernel": name,
                    "launches": launches,
                    "ms": 1000 * seconds,
                    "share": 100 * seconds / row.seconds,
                }
            )
    columns = (
        Quantity("name", "model"),
        Quantity("kernel", "kernel"),
        Quantity("launches", "launches", ".0f"),
        Quantity("ms", "ms", ".3f"),
        Quantity("share", "of the step", ".0f", " %"),
    )
    notes = (
        "by torch.profiler, a mean of three steps after the timed ones; kernels of other libraries by family",
    )
    return BenchTable("Where a training step's time goes", columns, tuple(rows), notes)


def length_tables(result: LengthResult) -> tuple[BenchTable, ...]:
    """All lengths, then the fitted powers."""
    rows = []
    for row in result.rows:
        aims = [t for t in targets.LENGTHS if (t.model, t.batch, t.tokens, t.device)
                == (row.model, row.batch, row.tokens, result.device)]  # fmt: skip
        known = targets.LENGTH_REFERENCES.get((row.model, row.tokens)) if row.batch == 4 else None
        reference = known if result.device == "cuda" else None
        rows.append(
            {
                **asdict(row),
                "ms": None if row.seconds is None else 1000 * row.seconds,
                "captured_ms": None if row.captured_seconds is None else 1000 * row.captured_seconds,
                "target_ms": aims[0].ms if aims else None,
                "target_mib": aims[0].mib if aims else None,
                "reference_ms": reference[0] if reference else None,
                "reference_mib": reference[1] if reference else None,
            }
        )
    columns = (
        Quantity("model", "model"),
        Quantity("batch", "batch", "d"),
        Quantity("tokens", "tokens", ",d"),
        Quantity("ms", "ms", ".1f"),
        Quantity("captured_ms", "captured ms", ".1f"),
        Quantity("target_ms", "target", ".0f"),
        Quantity("reference_ms", "reference ms", ".1f"),
        Quantity("peak_mib", "peak MiB", ".0f"),
        Quantity("own_mib", "of the case", ".0f"),
        Quantity("target_mib", "target", ".0f"),
        Quantity("reference_mib", "reference MiB", ".0f"),
        Quantity("failure", "failure"),
    )
    notes = [
        "one module with its projections, 4 heads of width 32, 16 inducing inputs, forward and backward; "
        f"median of {result.repeats}, seed {result.seed}, fused kernels {result.mode!r}",
        *_gap_notes(result.gaps),
    ]
    if any(row["reference_ms"] for row in rows):
        notes.append(targets.SOURCE)
    return BenchTable("Length", columns, tuple(rows), tuple(notes)), _fit_table(result)


def _fit_table(result: LengthResult) -> BenchTable:
    def aimed(fit: LengthFit) -> bool:
        return result.device == "cuda" and (fit.model, fit.batch) == ("scgp", 1)

    rows = tuple(
        {**asdict(fit), "target": targets.LARGEST_EXPONENT if aimed(fit) else None} for fit in result.fits
    )
    columns = (
        Quantity("model", "model"),
        Quantity("batch", "batch", "d"),
        Quantity("what", "of"),
        Quantity("exponent", "exponent", ".3f"),
        Quantity("target", "target", ".2f"),
        Quantity("low", "from", ",d"),
        Quantity("high", "to", ",d"),
    )
    notes = []
    for what, found in result.crossings.items():
        start, cross = found["faster_from"], found["crossing"]
        measured = "at no measured length" if start is None else f"from {start:,.0f} tokens on"
        between = "" if cross is None else f", the lines cross at {cross:,.0f}"
        aim = f"; target: from {targets.FASTER_FROM:,}" if result.device == "cuda" else ""
        notes.append(f"{what}: scgp is faster than softmax {measured}{between} (batch 4{aim})")
    return BenchTable("Fitted powers of the number of tokens", columns, rows, tuple(notes))


def predict_table(result: PredictResult) -> BenchTable:
    """One row for each model."""
    aimed = result.device == "cuda" and (result.images, result.samples) == (10_000, 10)
    rows = tuple(
        {**asdict(row), "target": targets.PREDICT_SECONDS.get(row.name) if aimed else None}
        for row in result.rows
    )
    columns = (
        Quantity("name", "model"),
        Quantity("draws", "draws", "d"),
        Quantity("seconds", "seconds", ".2f"),
        Quantity("target", "target", ".1f"),
        Quantity("to_softmax", "to softmax's one pass", ".1f", "x"),
        Quantity("images_per_second", "images/s", ",.0f"),
        Quantity("failure", "failure"),
    )
    rows_at_once = "its own choice" if result.batch_size is None else str(result.batch_size)
    notes = (
        f"{result.images:,} images on the device, {result.samples} samples, rows at once: {rows_at_once}; "
        f"median of {result.repeats}, seed {result.seed}, fused kernels {result.mode!r}",
        *_gap_notes(result.gaps),
    )
    return BenchTable("Posterior samples by model.predict", columns, rows, notes)


def posterior_table(times: Sequence[PosteriorTimes]) -> BenchTable:
    """Ratios to softmax attention, by length."""
    rows = tuple(
        {"tokens": each.tokens, **{name: each.seconds[name] / each.seconds["softmax"] for name in NAMES}}
        for each in times
    )
    columns = (Quantity("tokens", "tokens", "d"), *(Quantity(name, name, ".1f", "x") for name in NAMES))
    notes = ("mean and variance, forward and backward; times as multiples of softmax attention's",)
    return BenchTable("Posteriors alone", columns, rows, notes)


def _gap_notes(gaps: dict[str, float]) -> list[str]:
    if not gaps:
        return []
    told = ", ".join(f"{name} {gap:.0e}" for name, gap in gaps.items())
    return [
        f"the paper's ways differ from our mathematics by {told} (relative, in float64; at most "
        f"{ALLOWED_GAP:.0e} is right)"
    ]
