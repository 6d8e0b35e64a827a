"""What must be said under a table: what is missing, reduced, a stand-in, or odd in the paper itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["missing", "reduced", "stand-in", "paper", "reading"]

# in the order in which they are printed
HEADINGS: dict[Kind, str] = {
    "missing": "Missing",
    "reduced": "Reduced, or otherwise than in the paper",
    "stand-in": "Stand-ins, subsets and what the evaluations say of themselves",
    "paper": "The paper's own figures",
    "reading": "How to read",
}


@dataclass(frozen=True)
class Note:
    """One remark, and the recipe that it is about, if it is about one."""

    kind: Kind
    text: str
    recipe: str = ""


def gathered(notes: Iterable[Note]) -> dict[Kind, list[str]]:
    """By kind in the order of printing; the same remark about several recipes once, with their names."""
    about: dict[tuple[Kind, str], list[str]] = {}
    for note in notes:
        recipes = about.setdefault((note.kind, note.text), [])
        if note.recipe and note.recipe not in recipes:
            recipes.append(note.recipe)
    found: dict[Kind, list[str]] = {}
    for kind in HEADINGS:
        for (of, text), recipes in about.items():
            if of == kind:
                found.setdefault(kind, []).append(f"{', '.join(recipes)}: {text}" if recipes else text)
    return found
