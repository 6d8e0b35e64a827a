"""Names that tell runs apart: in a sweep every setting has a folder `seed-0`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Names of different folders, with as many of those above as it takes to tell them apart."""
    names = [folder.name for folder in folders]
    depth = 1
    while max(Counter(names).values()) > 1:
        depth += 1
        twice = {name for name, count in Counter(names).items() if count > 1}
        names = [
            "/".join(folder.parts[-depth:]) if name in twice else name
            for name, folder in zip(names, folders, strict=True)
        ]
    return names
