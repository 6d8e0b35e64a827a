"""Pages that several tests look at; made once."""

from typing import Any

import pytest

from gpattention.reports import build_report
from tests.reports.reading import Element, read
from tests.reports.synthetic import synthetic_run


@pytest.fixture(scope="session")
def page() -> str:
    """Two models with everything, one of them with two seeds."""
    few: dict[str, Any] = {"predictors": ("model", "model+temperature"), "scores": ("entropy", "gp_variance")}
    return build_report(
        [synthetic_run(kind, seed, **few) for kind, seed in (("softmax", 0), ("scgp", 0), ("scgp", 1))]
    )


@pytest.fixture(scope="session")
def tree(page: str) -> Element:
    return read(page)
