"""The demo's result as a table for a terminal and as a page."""

from html import escape
from pathlib import Path

from gpattention.experiments.demo import CORRUPTIONS, DRAWS, SEVERITIES, DemoResult, DemoRow
from gpattention.models.storage import write_atomically

# heading, field, digits, and whether larger is better
COLUMNS = (
    ("accuracy", "accuracy", 3, True),
    ("NLL", "nll", 3, False),
    ("ECE", "ece", 3, False),
    ("corr. accuracy", "corrupted_accuracy", 3, True),
    ("corr. NLL", "corrupted_nll", 3, False),
    ("corr. ECE", "corrupted_ece", 3, False),
    ("near AUROC", "near_auroc", 3, True),
    ("far AUROC", "far_auroc", 3, True),
)
NOTE = (
    f"Handwritten digits 0 to 7; corrupted: {', '.join(CORRUPTIONS)} at severities "
    f"{' and '.join(map(str, SEVERITIES))}; near: digits 8 and 9, never seen in training; far: noise and "
    "patterns. "
    f"Models with a posterior average {DRAWS} draws; AUROC of the predictive entropy. Best in bold."
)


def best_of(result: DemoResult, field: str, *, larger: bool) -> float:
    """The best value of a column."""
    values = [getattr(row, field) for row in result.rows]
    return max(values) if larger else min(values)


def demo_table(result: DemoResult, *, bold: bool) -> str:
    """Columns aligned; the best of each in bold, or starred where bold cannot be shown."""
    lines = [f"{'model':<9}" + "".join(f"{heading:>16}" for heading, *_ in COLUMNS) + f"{'seconds':>9}"]
    for row in result.rows:
        cells = [_cell(row, result, field, digits, larger, bold) for _, field, digits, larger in COLUMNS]
        lines.append(f"{row.model:<9}" + "".join(cells) + f"{row.seconds:9.0f}")
    return "\n".join([*lines, "", NOTE])


def _cell(row: DemoRow, result: DemoResult, field: str, digits: int, larger: bool, bold: bool) -> str:
    value = getattr(row, field)
    best = value == best_of(result, field, larger=larger)
    text = f"{value:.{digits}f}"
    if best and not bold:
        text = f"*{text}"
    padded = f"{text:>16}"
    return f"\x1b[1m{padded}\x1b[0m" if best and bold else padded


def write_page(result: DemoResult) -> Path:
    """`report.html` in the demo's folder: one file, nothing fetched."""
    heads = "".join(f"<th scope='col'>{escape(heading)}</th>" for heading, *_ in COLUMNS)
    body = "".join(_page_row(row, result) for row in result.rows)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gpattention demo</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884; }}
th:first-child {{ text-align: left; }}
</style></head><body>
<h1>Six kinds of attention on handwritten digits</h1>
<div><table><thead><tr><th scope="col">model</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>
<p>{escape(NOTE)}</p>
</body></html>
"""
    result.folder.mkdir(parents=True, exist_ok=True)
    path = result.folder / "report.html"
    write_atomically(path, page.encode())
    return path


def _page_row(row: DemoRow, result: DemoResult) -> str:
    cells = ""
    for _, field, digits, larger in COLUMNS:
        value = getattr(row, field)
        text = f"{value:.{digits}f}"
        best = value == best_of(result, field, larger=larger)
        cells += f"<td>{f'<b>{text}</b>' if best else text}</td>"
    return f"<tr><th scope='row'>{escape(row.model)}</th>{cells}</tr>"
