"""A module's table of refusals: what is called, and what its error says, such as a field and its value."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Row = tuple[Callable[..., Any], *tuple[str, ...]]  # the call, and patterns that its error holds in this order


def refusals(rows: Sequence[Row], error: type[Exception] = ValueError) -> Callable[..., None]:
    """A test of every row; a call with a parameter that has no default is given an empty folder."""
    patterns = [(call, ".*".join(parts)) for call, *parts in rows]

    @pytest.mark.parametrize(("call", "pattern"), patterns, ids=[each[:40] for _, each in patterns])
    def test(call: Callable[..., Any], pattern: str, tmp_path: Path) -> None:
        needed = [p for p in inspect.signature(call).parameters.values() if p.default is p.empty]
        with pytest.raises(error, match=f"(?s){pattern}"):
            call(*[tmp_path] * len(needed))

    return test
