"""What was found and what it draws with, as text."""

from gpattention.adopt.settings import Settings
from gpattention.adopt.sites import Found


def describe(model: str, found: Found, settings: Settings, *, attached: bool) -> str:
    """A line per site with what it draws with, and one for everything left alone."""
    head = f"{'attached to' if attached else 'detached from'} {model}: {len(found.sites)} sites"
    fitted = "fitted" if settings.fitted else "not fitted"
    head += f", {sum(settings.drawn(i) for i in range(len(found.sites)))} draw ({fitted})"
    rows = [("site", "kind", "heads", "scale", "noise", "power")]
    for place, site in enumerate(found.sites):
        heads = slice(0, site.heads)
        drawn = settings.drawn(place)
        rows.append(
            (
                site.name or "(the model)",
                f"{site.kind} ({site.family})",
                f"{site.heads} x {site.head_dim}",
                _range(settings.scale[place, heads].tolist()) if drawn else "off",
                _range(settings.noise[place, heads].tolist()) if drawn else "",
                _range(settings.power[place, heads].tolist()) if drawn else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    alone = [f"left alone: {a.name or '(the model)'} ({a.kind}): {a.why}" for a in found.left_alone]
    return "\n".join([head, *lines, *alone])


def _range(numbers: list[float]) -> str:
    least, most = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return least if least == most else f"{least}..{most}"
