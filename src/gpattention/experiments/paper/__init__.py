"""The paper's tables and figures with our figures beside them."""

from gpattention.experiments.paper.checks import ClaimResult
from gpattention.experiments.paper.spec import FIGURES, TABLES, Note, PublishedValue, published_values
from gpattention.experiments.paper.table import PaperCell, PaperRow, PaperTable, paper_table
from gpattention.experiments.paper.writing import (
    ENDINGS,
    FORMATS,
    paper_figure,
    rendered,
    to_csv,
    to_latex,
    to_markdown,
    write_table,
)

__all__ = [
    "ENDINGS",
    "FIGURES",
    "FORMATS",
    "TABLES",
    "ClaimResult",
    "Note",
    "PaperCell",
    "PaperRow",
    "PaperTable",
    "PublishedValue",
    "paper_figure",
    "paper_table",
    "published_values",
    "rendered",
    "to_csv",
    "to_latex",
    "to_markdown",
    "write_table",
]
