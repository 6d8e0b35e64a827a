"""`gpattention paper`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gpattention.cli.arguments import new_command
from gpattention.cli.table import say
from gpattention.studies.paper import (
    ENDINGS,
    FIGURES,
    FORMATS,
    TABLES,
    paper_table,
    rendered,
    write_table,
)

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
tables and figures:
  table1  CoLA                         fig2  cost of training
  table2  CIFAR-10-C                   fig3  oversmoothing on CIFAR-10
  table3  detection of other images    fig4  oversmoothing on CIFAR-100
  table4  CIFAR-10-C, two alphas
  table5  CIFAR-100-C                  all   every one of them

examples:
  gpattention paper table2 runs                            print it as Markdown
  gpattention paper table3 runs --format latex -o table3.tex
  gpattention paper fig2 runs -o fig2.svg                  the plot
  gpattention paper all runs --format all -o paper         every table and figure in every format

Runs are known by the names of their recipes: cifar10-cgpt is the paper's CGPT on CIFAR-10.
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of the side-by-side tables."""
    paper = new_command(commands, "paper", "the paper's tables with ours beside them", EXAMPLES)
    paper.add_argument(
        "name", choices=(*TABLES, *FIGURES, "all"), metavar="NAME", help="table1 ... fig4, or all"
    )
    paper.add_argument("runs", metavar="RUNS_FOLDER", help="where evaluated runs are, at any depth")
    paper.add_argument("--format", choices=(*FORMATS, "all"), default="markdown", help="default: %(default)s")
    paper.add_argument(
        "-o", "--out", metavar="OUT",
        help="a folder, or a file whose ending decides the format: .md .csv .tex, of figures also .png .svg",
    )  # fmt: skip
    paper.set_defaults(run_command=run)


def run(given: argparse.Namespace) -> None:
    """Print tables or write them to files."""
    names = (*TABLES, *FIGURES) if given.name == "all" else (given.name,)
    if len(names) > 1 and given.out is not None and Path(given.out).suffix in ENDINGS:
        raise ValueError(f"expected -o to be a folder for all tables, got {given.out}")
    forms = tuple(FORMATS) if given.format == "all" else (given.format,)
    tables = [paper_table(name, given.runs) for name in names]
    if given.out is None:
        print("\n".join(rendered(table, form) for table in tables for form in forms), end="")
        return
    for table in tables:
        files = write_table(table, given.out, forms)
        say(f"{table.place}: {table.share}")
        for file in files:
            say(f"  {file}")
