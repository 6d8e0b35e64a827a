"""Words and numbers of a page."""

import math
from typing import Any

OTHER_WEIGHTS = "computed with other weights than the run has now: evaluate it again"  # a suite's note


def heading(text: str) -> str:
    """With a capital at its beginning, other letters as they are."""
    return text[:1].upper() + text[1:]


def listed(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def number(value: Any) -> float | None:
    """A finite number, or None: files hold null and NaN where there was nothing to measure."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
