"""What the paper prints: every number of its tables, as data."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

TABLES = ("table1", "table2", "table3", "table4", "table5")
FIGURES = ("fig2", "fig3", "fig4")


@dataclass(frozen=True)
class PublishedValue:
    """One printed number, in the unit and with the digits of the paper."""

    table: str
    group: str  # the block of lines that it stands in
    row: str  # its line, as the paper names it
    column: str
    metric: str  # of the library's records
    value: float
    sd: float | None
    digits: int  # printed after the point
    printed: str  # with the standard deviation
    bold: bool
    place: str

    @property
    def rounding(self) -> float:
        """The largest error of printing."""
        return 0.5 * 10.0**-self.digits


def read_data(name: str) -> str:
    """A data file of this package, as text."""
    return (files("gpattention.experiments.paper") / "data" / name).read_text(encoding="utf-8")


def published_values(name: str) -> tuple[PublishedValue, ...]:
    """All numbers of a table in the order of the paper; of a figure none are printed."""
    if name in FIGURES:
        return ()
    if name not in TABLES:
        raise ValueError(f"expected name to be one of {', '.join((*TABLES, *FIGURES))}, got {name!r}")
    return tuple(_value(line) for line in csv.DictReader(io.StringIO(read_data(f"{name}.csv"))))


def _value(line: Mapping[str, str]) -> PublishedValue:
    return PublishedValue(
        table=line["table"],
        group=line["group"],
        row=line["row"],
        column=line["column"],
        metric=line["metric"],
        value=float(line["value"]),
        sd=float(line["sd"]) if line["sd"] else None,
        digits=len(line["value"].partition(".")[2]),
        printed=f"{line['value']} ± {line['sd']}" if line["sd"] else line["value"],
        bold=line["bold"] == "yes",
        place=line["place"],
    )
