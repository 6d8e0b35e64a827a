"""From evaluated runs to a folder to commit: tables, the choice, figures, and how all was made."""

from gpattention.studies.reproduction.results.archive import ARCHIVE
from gpattention.studies.reproduction.results.writing import write_results

__all__ = ["ARCHIVE", "write_results"]
