"""`gpattention report`."""

import argparse
from typing import TYPE_CHECKING

from gpattention.cli.arguments import new_command
from gpattention.cli.table import say
from gpattention.experiments.reporting import write_report

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention report runs/digits-cgp -o report.html
  gpattention report runs/softmax runs/cgp -o report.html --title "Softmax and CGP"
  gpattention report runs -o report.html                    every run in or below a folder

Runs that differ in nothing but their seed are shown as one model, with mean and standard deviation.
What was not evaluated yet is said in its place, with the command that does it.
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of a report."""
    report = new_command(commands, "report", "write one HTML page that compares runs", EXAMPLES)
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder that holds runs")
    report.add_argument("-o", "--output", default="report.html", help="the page (default: %(default)s)")
    report.add_argument("--title", help="of the page (default: made of the data)")
    report.set_defaults(run_command=run)


def run(given: argparse.Namespace) -> None:
    """Runs into a page."""
    path = write_report(given.runs, given.output, title=given.title)
    say(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
