"""The paper's tables and figures with our figures beside them."""

from gpattention.experiments.paper.assembling import paper_table
from gpattention.experiments.paper.claims import ClaimResult
from gpattention.experiments.paper.latex import to_latex
from gpattention.experiments.paper.markdown import to_markdown
from gpattention.experiments.paper.notes import Note
from gpattention.experiments.paper.plotting import paper_figure
from gpattention.experiments.paper.published import FIGURES, TABLES, PublishedValue, published_values
from gpattention.experiments.paper.spreadsheet import to_csv
from gpattention.experiments.paper.table import Measured, PaperCell, PaperRow, PaperTable
from gpattention.experiments.paper.writing import ENDINGS, FORMATS, rendered, write_table

__all__ = [
    "ENDINGS",
    "FIGURES",
    "FORMATS",
    "TABLES",
    "ClaimResult",
    "Measured",
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
