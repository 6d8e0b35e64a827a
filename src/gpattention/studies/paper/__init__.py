"""The paper's tables and figures with our figures beside them."""

from gpattention.studies.paper.checks import ClaimResult
from gpattention.studies.paper.spec import FIGURES, TABLES, Note, PublishedValue, published_values
from gpattention.studies.paper.table import PaperCell, PaperRow, PaperTable, paper_table
from gpattention.studies.paper.writing import (
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
