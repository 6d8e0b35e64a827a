"""The demo's result as a table for a terminal."""

from gpattention.experiments.demo import CORRUPTIONS, DRAWS, SEVERITIES, DemoResult, DemoRow

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
