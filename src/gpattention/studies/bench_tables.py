"""Measurements as tables and files: which columns, which targets beside them, what stands below.

A folder gets NAME.json with everything, NAME.md, one CSV for each table, and figures.  JSON is what was
measured; the figures are drawn from it, at once or later on a machine with matplotlib.
"""

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gpattention
from gpattention.files import read_json
from gpattention.reports.drawing import drawn, name_axes, new_figure, picture
from gpattention.reports.style import styles_for
from gpattention.runs.tables import csv_text, markdown, markdown_line, markdown_table
from gpattention.studies import write_file
from gpattention.studies.bench import ASSUMED, PUBLISHED, SECONDS_PER_LAUNCH, Measurement, in_proc
from gpattention.studies.bench_lengths import fit_power
from gpattention.studies.bench_paper import ALLOWED_GAP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tables

REFERENCE: str = PUBLISHED["reference"]
COLUMNS = {name: tuple(map(tuple, of)) for name, of in PUBLISHED["columns"].items()}
TARGET_BATCH, TARGET_TOKENS = 100, 64
Quantity = tuple[str, str, str, str]  # key in CSV and JSON, head, form of `format` (none of a text), suffix


@dataclass(frozen=True)
class BenchTable:
    """A table with a title, and notes that stand below.

    Attributes:
        title: above it.
        columns: key in CSV and JSON, head, form of `format` (empty for a text), suffix.
        rows: by column key.
        notes: sentences without their full stops.
    """

    title: str
    columns: tuple[Quantity, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()

    @property
    def filled(self) -> tuple[Quantity, ...]:
        """Columns in which some row has a value."""
        return tuple(c for c in self.columns if any(row.get(c[0]) is not None for row in self.rows))

    @property
    def text(self) -> tuple[list[str], list[list[str]], list[int]]:
        """Heads, the cells of every row, and which columns are numbers."""

        def cell(value: Any, form: str, suffix: str) -> str:
            return "-" if value is None else f"{value:{form}}{suffix}" if form else str(value)

        filled = self.filled
        cells = [[cell(row.get(key), form, suffix) for key, _, form, suffix in filled] for row in self.rows]
        numbers = [i for i, (_, _, form, _) in enumerate(filled) if form]
        return [head for _, head, _, _ in filled], cells, numbers


def step_table(result: Measurement) -> BenchTable:
    """Training steps: one row for each model, targets beside those of an H200."""
    facts, cuda = result.facts, result.facts["device"] == "cuda"
    aimed = cuda and (facts["batch"], facts["tokens"]) == (TARGET_BATCH, TARGET_TOKENS)
    rows, targets = [], PUBLISHED["step"] if aimed else {}
    for row in result.rows:
        goals = targets.get(row["name"], {})
        shown = {**row, "ms": _ms(row["seconds"]), **goals}
        shown["fused"] = None if row["fused"] is None else ", ".join(row["fused"]) or "none"
        if not cuda:  # there is no choice to be explained
            shown |= {"engine": None, "reason": row["reason"] if row["seconds"] is None else None}
        rows.append(shown)
    name, ms, *others = COLUMNS["step"]
    columns = (name, ms if cuda else (*ms[:2], ".1f", ""), *others)
    notes = [
        f"batch {facts['batch']}, {facts['tokens']} tokens, median of {facts['repeats']} turns of "
        f"{facts['at_once']} steps, seed {facts['seed']}, fused kernels {facts['mode']!r}",
        *_gap_notes(result),
        *([REFERENCE] if aimed else []),
    ]
    return BenchTable("Training step, the paper's CIFAR-10 model", columns, tuple(rows), tuple(notes))


def floor_table(floors: Sequence[Mapping[str, Any]], result: Measurement | None = None) -> BenchTable:
    """What a step cannot go below, beside what was measured on a GPU."""
    measured = {row["name"]: row for row in result.rows} if result is not None else {}
    rows = []
    for floor in floors:
        row, (flop_ms, byte_ms, launch_ms) = measured.get(floor["name"], {}), map(_ms, floor["shares"])
        seconds, launches = row.get("seconds"), row.get("launches")
        rows.append({
            "name": floor["name"], "gflop": floor["flops"] / 1e9, "flop_ms": flop_ms,
            "mib": floor["bytes_moved"] / 2**20, "byte_ms": byte_ms, "fewest_launches": floor["launches"],
            "launch_ms": launch_ms, "floor_ms": _ms(floor["seconds"]), "launches": launches,
            "launches_ms": launches and 1000 * launches * SECONDS_PER_LAUNCH, "ms": _ms(seconds),
            "to_floor": seconds and seconds / floor["seconds"],
        })  # fmt: skip
    notes = (f"computed, not measured; assumed of the machine ({ASSUMED})",)
    return BenchTable("Floor of a training step", COLUMNS["floor"], tuple(rows), notes)


def profile_table(result: Measurement) -> BenchTable:
    """Where a step's time goes, kernel by kernel, for every model of ours."""
    rows = []
    for row in result.rows:
        if row["seconds"] is None or not row["kernels"] or row["name"].startswith("paper"):
            continue
        between = row["seconds"] - sum(kernel["seconds"] for kernel in row["kernels"])
        rest = {"name": "between kernels", "launches": None, "seconds": max(between, 0.0)}
        for kernel in (*row["kernels"], rest):
            share = 100 * kernel["seconds"] / row["seconds"]
            numbers = {"launches": kernel["launches"], "ms": _ms(kernel["seconds"]), "share": share}
            rows.append({"name": row["name"], "kernel": kernel["name"], **numbers})
    notes = (
        "by torch.profiler, a mean of three steps after the timed ones; kernels of other libraries by family",
    )
    return BenchTable("Where a training step's time goes", COLUMNS["profile"], tuple(rows), notes)


def length_tables(result: Measurement) -> tuple[BenchTable, BenchTable]:
    """All lengths, then the fitted powers."""
    facts, rows, scgp = result.facts, [], PUBLISHED["scgp"]
    for row in result.rows:
        key = f"{facts['device']} {row['model']} {row['batch']} {row['tokens']}"
        times = {"ms": _ms(row["seconds"]), "captured_ms": _ms(row["captured_seconds"])}
        rows.append({**row, **times, **PUBLISHED["length"].get(key, {})})
    notes = [
        "one module with its projections, 4 heads of width 32, 16 inducing inputs, forward and backward; "
        f"median of {facts['repeats']}, seed {facts['seed']}, fused kernels {facts['mode']!r}",
        *_gap_notes(result),
        *([REFERENCE] if any("reference_ms" in row for row in rows) else []),
    ]
    cuda, crossed = facts["device"] == "cuda", []
    for what, found in facts["crossings"].items():
        start, cross = found["faster_from"], found["crossing"]
        measured = "at no measured length" if start is None else f"from {start:,.0f} tokens on"
        between = "" if cross is None else f", the lines cross at {cross:,.0f}"
        aim = f"; target: from {scgp['faster_from']:,}" if cuda else ""
        crossed.append(f"{what}: scgp is faster than softmax {measured}{between} (batch 4{aim})")
    aims = {("scgp", 1): {"target": scgp["largest_exponent"]}} if cuda else {}
    fits = [{**fit, **aims.get((fit["model"], fit["batch"]), {})} for fit in facts["fits"]]
    return (
        BenchTable("Length", COLUMNS["length"], tuple(rows), tuple(notes)),
        BenchTable("Fitted powers of the number of tokens", COLUMNS["fit"], tuple(fits), tuple(crossed)),
    )


def predict_table(result: Measurement) -> BenchTable:
    """Predictions: one row for each model."""
    facts = result.facts
    aimed = (facts["device"], facts["images"], facts["samples"]) == ("cuda", 10_000, 10)
    goals = PUBLISHED["predict"] if aimed else {}
    rows = tuple({**row, "target": goals.get(row["name"])} for row in result.rows)
    at_once = "its own choice" if facts["batch_size"] is None else facts["batch_size"]
    notes = (
        f"{facts['images']:,} images on the device, {facts['samples']} samples, rows at once: {at_once}; "
        f"median of {facts['repeats']}, seed {facts['seed']}, fused kernels {facts['mode']!r}",
        *_gap_notes(result),
    )
    return BenchTable("Posterior samples by model.predict", COLUMNS["predict"], rows, notes)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _gap_notes(result: Measurement) -> list[str]:
    gaps = ", ".join(f"{name} {gap:.0e}" for name, gap in result.gaps.items())
    note = f"the paper's ways differ from our mathematics by {gaps} (relative, in float64; at most "
    return [f"{note}{ALLOWED_GAP:.0e} is right)"] if gaps else []


# What measured times depend on: the machine, the versions, the day, the commit

SOURCE = Path(__file__).parents[2]


def environment(device: torch.device) -> dict[str, str]:
    """Facts about this machine.

    Args:
        device: where measurements are made.

    Returns:
        Plain words, ready for JSON; what is not known is left out.
    """
    cuda, memory = device.type == "cuda", 1024 * int((in_proc("meminfo", "MemTotal") or "0").split()[0])
    found = {
        "gpattention": gpattention.__version__,
        # of the source, where it lies in a repository of its own; `+` where files were changed since
        "commit": _output("git", "-C", str(SOURCE), "describe", "--always", "--exclude=*", "--dirty=+")
        if any((place / ".git").exists() for place in (SOURCE, SOURCE.parent))
        else None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": in_proc("cpuinfo", "model name") or platform.machine(),
        "memory": f"{memory / 2**30:.0f} GiB" if memory else None,
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "threads": str(torch.get_num_threads()),
        "float32": torch.get_float32_matmul_precision(),
    }
    if cuda:
        found["device"], found["cuda"] = torch.cuda.get_device_name(device), torch.version.cuda
        found["memory"] = f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {name: value for name, value in found.items() if value}


def in_words(facts: Mapping[str, str]) -> str:
    """The facts that a reader needs, on one line."""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "driver") if name in facts)
    commit = f" ({facts['commit']})" if "commit" in facts else ""
    where = f"{facts['device']}, {facts['threads']} threads, {facts['date']}"
    return f"gpattention {facts['gpattention']}{commit}, {versions}, {where}"


def _output(*command: str) -> str | None:
    """The first line that a program prints; None where it is missing, fails, hangs or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


# Files

PICTURES = ("png", "svg")
# what is drawn over length: key of a row, name of the axis, factor to its unit
DRAWN = {"time": ("seconds", "milliseconds", 1000.0), "memory": ("own_mib", "MiB", 1.0)}


def to_markdown(tables: Sequence[BenchTable], facts: str, command: str | None = None) -> str:
    """Tables as one page.

    Args:
        tables: one after the other.
        facts: what stands on top.
        command: that made them.

    Returns:
        Markdown.
    """
    parts = [f"{facts}\n"] + ([f"Made by `{command}`.\n"] if command else [])
    for table in tables:
        heads, cells, numbers = table.text
        text = markdown_table(heads, cells, right=numbers)
        parts += [f"## {markdown(table.title)}\n", text, *(f"{markdown_line(n)}.\n" for n in table.notes)]
    return "\n".join(parts)


def to_csv(table: BenchTable) -> str:
    """A table as CSV, one line for each row, nothing rounded; empty columns are left out."""
    keys = [key for key, _, _, _ in table.filled]
    return csv_text(keys, ([row.get(key) for key in keys] for row in table.rows))


def write_json(document: Mapping[str, Any], file: str | Path) -> Path:
    """Write all numbers of a run to a file, which is returned."""
    return write_file(Path(file), (json.dumps(document, indent=2) + "\n").encode())


def write_folder(
    folder: str | Path,
    name: str,
    document: Mapping[str, Any],
    tables: Mapping[str, BenchTable],
    command: str | None = None,
) -> tuple[Path, ...]:
    """Write NAME.json, NAME.md, a CSV for each table and, where there is matplotlib, figures.

    Args:
        folder: where to.
        name: how files begin.
        document: all numbers, with the `environment`.
        tables: by the name of their CSV file.
        command: that made them.

    Returns:
        The files.
    """
    place = Path(folder)
    texts = {f"{name}.md": to_markdown(list(tables.values()), in_words(document["environment"]), command)}
    texts |= {f"{each}.csv": to_csv(table) for each, table in tables.items()}
    written = [write_json(document, place / f"{name}.json")]
    written += [write_file(place / file, text.encode()) for file, text in texts.items()]
    return tuple(written if find_spec("matplotlib") is None else [*written, *draw(place, name, document)])


def draw_folder(folder: str | Path) -> tuple[Path, ...]:
    """Draw the figures of all results in a folder from their JSON.

    Args:
        folder: where `write_folder` wrote.

    Returns:
        The pictures.

    Raises:
        ValueError: no lengths were measured there.
    """
    place, written = Path(folder), list[Path]()
    for file in sorted(place.glob("*.json")):
        document = read_json(file, nonfinite=True)
        if isinstance(document, dict) and "environment" in document:
            written += draw(place, file.stem, document)
    if not written:
        raise ValueError(f"no measured lengths in {place}: gpattention bench length --out {place}")
    return tuple(written)


def draw(folder: Path, name: str, document: Mapping[str, Any]) -> list[Path]:
    """Time and memory over length, where lengths were measured."""
    rows: Sequence[Mapping[str, Any]] = document.get("length", {}).get("rows", ())
    written = []
    for what, (key, _, _) in DRAWN.items():
        if any(row.get(key) for row in rows):
            figure = length_figure(rows, what)
            files = {form: folder / f"{name}-{what}.{form}" for form in PICTURES}
            written += [write_file(file, picture(figure, form)) for form, file in files.items()]
    return written


@drawn
def length_figure(rows: Sequence[Mapping[str, Any]], what: str) -> "Figure":
    """Measured points, and a line for each model and batch size that has at least two of them."""
    key, unit, factor = DRAWN[what]
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        captured = row.get("captured_seconds") if key == "seconds" else None  # which no launching hides
        found = captured or row.get(key)
        if found:
            label = f"{row['model']}, batch {row['batch']}"
            series.setdefault(label, []).append((float(row["tokens"]), factor * found))
    laws = {label: fit_power(points) for label, points in series.items()}
    named = {label: f"{label}: {law[0]:.2f}" if law else label for label, law in laws.items()}
    styles = styles_for(list(named.values()))
    figure, axes = new_figure(f"{what.capitalize()} over length, fitted exponents", styles, height=320)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for label, points in series.items():
        style, law = styles[named[label]], laws[label]
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=style.colour, marker=style.marker, linestyle="none", markersize=6)
        if law is not None:
            ends = min(xs), max(xs)
            fitted = [law[1] * x ** law[0] for x in ends]
            axes.plot(ends, fitted, color=style.colour, linestyle=style.dash, linewidth=1.6)
    sizes = sorted({x for points in series.values() for x, _ in points})
    shown = sizes[:: max(1, -(-len(sizes) // 6))]
    axes.set_xticks(shown, labels=[_short(x) for x in shown])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")  # the labels' own form would need math text
    name_axes(axes, "tokens", unit)
    return figure


def _short(x: float) -> str:
    """64, 1k, 1M."""
    size, letter = next(((s, letter) for s, letter in ((2**20, "M"), (2**10, "k")) if x >= s), (1, ""))
    return f"{x / size:g}{letter}"
