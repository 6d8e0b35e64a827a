"""A module's table of refusals: what is called, and the field and the value that its error names."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Row = tuple[Callable[..., Any], str, str]  # the call, and patterns of the field and, later on, the value


def refusals(rows: Sequence[Row], error: type[Exception] = ValueError) -> Callable[..., None]:
    """A test of every row; a call with a parameter that has no default is given an empty folder."""

    @pytest.mark.parametrize(("call", "field", "value"), rows, ids=[f"{f}: {v}"[:40] for _, f, v in rows])
    def test(call: Callable[..., Any], field: str, value: str, tmp_path: Path) -> None:
        needed = [p for p in inspect.signature(call).parameters.values() if p.default is p.empty]
        with pytest.raises(error, match=rf"(?s){field}.*{value}"):
            call(*[tmp_path] * len(needed))

    return test
