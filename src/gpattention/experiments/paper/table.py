"""A table or figure of the paper with our figures beside its own, as data."""

from dataclasses import dataclass
from math import hypot
from typing import Literal

from gpattention.experiments.paper.claims import ClaimResult
from gpattention.experiments.paper.measures import Measure
from gpattention.experiments.paper.notes import Note
from gpattention.experiments.paper.published import PublishedValue
from gpattention.experiments.paper.spec import Key

Winner = Literal["ours", "paper", "tie"]


@dataclass(frozen=True)
class Measured:
    """Our figure: the mean over runs that differ in their seed, in the paper's unit."""

    mean: float
    sd: float | None  # sample standard deviation; None of one run
    n: int


@dataclass(frozen=True)
class PaperCell:
    """One number of ours and of the paper's; either may be missing."""

    key: Key
    measure: Measure
    digits: int  # after the point
    ours: Measured | None
    paper: PublishedValue | None
    recomputed: float | None = None  # the paper's average from its own parts
    mark: str = ""  # † ‡: the paper's average does not follow from its parts

    @property
    def winner(self) -> Winner | None:
        """Whose figure is better as printed; None unless there are both."""
        return None if self.paper is None else self._against(self.paper.value)

    @property
    def winner_recomputed(self) -> Winner | None:
        """The same against the recomputed average."""
        return None if self.recomputed is None else self._against(self.recomputed)

    @property
    def clear(self) -> bool:
        """Whether ours and the paper's figure differ by more than their standard deviations together."""
        if self.ours is None or self.paper is None or self.ours.sd is None or self.paper.sd is None:
            return False
        return abs(self.ours.mean - self.paper.value) > hypot(self.ours.sd, self.paper.sd)

    def _against(self, theirs: float) -> Winner | None:
        if self.ours is None:
            return None
        mine, other = round(self.ours.mean, self.digits), round(theirs, self.digits)
        if mine == other:
            return "tie"
        return "ours" if self.measure.better(mine, other) else "paper"


@dataclass(frozen=True)
class PaperRow:
    """A line of the layout."""

    group: str
    label: str
    cells: tuple[PaperCell, ...]
    recipe: str | None  # whose runs; None where there are none
    runs: int
    extra: bool  # ours only: the paper has no such line


@dataclass(frozen=True)
class PaperTable:
    """A table or figure in the paper's layout."""

    name: str
    title: str
    place: str  # in the paper
    headings: tuple[str, str]  # of blocks and of lines
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    claims: tuple[ClaimResult, ...]
    notes: tuple[Note, ...]
    across: str = ""  # what the columns of a figure count

    @property
    def cells(self) -> tuple[PaperCell, ...]:
        """Those of the paper's own lines."""
        return tuple(cell for row in self.rows if not row.extra for cell in row.cells)

    @property
    def filled(self) -> int:
        """How many of them have our figure."""
        return sum(cell.ours is not None for cell in self.cells)

    @property
    def wins(self) -> dict[Winner, int]:
        """Whose figure is better, counted over cells that have both."""
        winners = [cell.winner for cell in self.cells]
        return {who: winners.count(who) for who in ("ours", "paper", "tie")}

    @property
    def share(self) -> str:
        """How much of the table is filled, and who wins how often, in words."""
        told = f"{self.filled} of {len(self.cells)} cells filled"
        if all(cell.paper is None for cell in self.cells):
            return f"{told}. The paper prints no numbers."
        wins = self.wins
        both = sum(wins.values())
        counts = f"ours in {wins['ours']}, the paper in {wins['paper']}, equal in {wins['tie']}"
        clear = sum(cell.clear for cell in self.cells)
        spread = f" {clear} differ by more than both standard deviations together."
        return f"{told}. Better of {both} compared: {counts}.{spread if self._has_spread else ''}"

    @property
    def _has_spread(self) -> bool:
        """Whether any cell has a standard deviation on both sides."""
        both = ((cell.ours, cell.paper) for cell in self.cells)
        return any(ours and paper and None not in (ours.sd, paper.sd) for ours, paper in both)
