"""What files hold, in one digest, to notice that they were replaced."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from gpattention.data.folders import image_files
from gpattention.evaluation.prediction_cache import file_digest


def content_digest(places: Iterable[Path]) -> str:
    """SHA-256 over names and contents of files, and of all images in and below folders.

    A process that judges many runs reads each file once, as long as its size and time of change stay.
    """
    total = hashlib.sha256()
    for place in places:
        for file in image_files(place) if place.is_dir() else [place]:
            found = file.stat()
            content = _of_file(file, found.st_size, found.st_mtime_ns)
            total.update(f"{file.relative_to(place.parent)} {content}\n".encode())
    return total.hexdigest()


@cache
def _of_file(file: Path, size: int, changed: int) -> str:
    return file_digest(file)
