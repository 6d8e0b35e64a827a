"""Which figures of a column may be compared: those that were computed on as many items of the same sets."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Sets = tuple[tuple[str, int | None], ...]  # names of sets, and their items; None where nobody says how many


@dataclass(frozen=True)
class Basis:
    """What a figure was computed on, as each of its runs has it."""

    runs: frozenset[Sets]

    @staticmethod
    def of(runs: Iterable[Sets]) -> "Basis":
        """Runs on the same are told once."""
        return Basis(frozenset(runs))

    @property
    def items(self) -> int:
        """Of the run that has most; 0 where nobody says."""
        return max((_known(sets) for sets in self.runs), default=0)

    def text(self) -> str:
        """Such as "31 items", or "90 items of 3 sets"."""
        told = sorted({(_known(sets), len(sets)) for sets in self.runs})
        return " or ".join(
            f"{f'{count:,}' if count else 'unknown'} items{f' of {many} sets' if many > 1 else ''}"
            for count, many in told
        )


def compared(bases: Sequence[Basis | None]) -> frozenset[int]:
    """Places of the rows that can be compared: most of those that have a figure, all on the same.

    Of groups of one size it is the one with most items.  None is a row without a figure.
    """
    groups = Counter(basis for basis in bases if basis is not None)
    if not groups:
        return frozenset()
    main = max(groups, key=lambda basis: (groups[basis], basis.items))
    return frozenset(place for place, basis in enumerate(bases) if basis == main)


def judged_items(
    suite: str, place: str, predictor: str, curves: Mapping[str, Any], settings: Mapping[str, Any]
) -> int | None:
    """How many items of a set a predictor was judged on; None where the evaluation does not say."""
    place = "corrupted/mean" if place.startswith("corrupted/") else place
    told = curves.get("items", {}).get(predictor, {}).get(place)
    if told is None and (suite, place) == ("clean", "test"):  # evaluations before items were counted
        told = sum(curves.get("reliability", {}).get(predictor, {}).get("count", ())) or None
    if told is None:
        told = settings.get("limit")
    return None if told is None else int(told)


def _known(sets: Sets) -> int:
    return sum(count for _, count in sets if count is not None)
