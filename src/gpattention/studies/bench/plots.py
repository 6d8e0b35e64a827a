"""Time and memory over length, on logarithmic axes with the fitted powers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpattention.reports.canvas import drawn, name_axes, new_figure
from gpattention.reports.palette import styles_for
from gpattention.studies.bench.fits import fit_power

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# what is drawn: key of a row, name of the axis, factor to its unit
QUANTITIES = {"time": ("seconds", "milliseconds", 1000.0), "memory": ("own_mib", "MiB", 1.0)}


@drawn
def length_figure(rows: Sequence[Mapping[str, Any]], what: str) -> "Figure":
    """Measured points, and a line for each model and batch size that has at least two of them."""
    key, unit, factor = QUANTITIES[what]
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found = _measured(row, key)
        if found is not None and found > 0:
            label = f"{row['model']}, batch {row['batch']}"
            series.setdefault(label, []).append((float(row["tokens"]), factor * found))
    laws = {label: fit_power(points) for label, points in series.items()}
    named = {
        label: f"{label}: {law.exponent:.2f}" if (law := laws[label]) else label for label in series
    }  # fmt: skip
    styles = styles_for(list(named.values()))
    figure, axes = new_figure(f"{what.capitalize()} over length, fitted exponents", styles, height=320)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for label, points in series.items():
        style = styles[named[label]]
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=style.colour, marker=style.marker, linestyle="none", markersize=6)
        law = laws[label]
        if law is not None:
            ends = (law.low, law.high)
            axes.plot(ends, [law(x) for x in ends], color=style.colour, linestyle=style.dash, linewidth=1.6)
    sizes = sorted({x for points in series.values() for x, _ in points})
    shown = sizes[:: max(1, -(-len(sizes) // 6))]
    axes.set_xticks(shown, labels=[_short(x) for x in shown])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")  # the labels' own form would need math text
    name_axes(axes, "tokens", unit)
    return figure


def _measured(row: Mapping[str, Any], key: str) -> float | None:
    """A row's number; of times the captured one where there is one, which no launching hides."""
    captured = row.get("captured_seconds") if key == "seconds" else None
    found = row.get(key) if captured is None else captured
    return None if found is None else float(found)


def _short(x: float) -> str:
    """64, 1k, 1M."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if x >= size:
            return f"{x / size:g}{letter}"
    return f"{x:g}"
