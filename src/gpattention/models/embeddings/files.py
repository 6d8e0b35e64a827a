"""Files: that they exist, and what is in them."""

import hashlib
import os
from pathlib import Path


def existing_file(argument: str, path: str | os.PathLike[str]) -> Path:
    """The path, if a file is there."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"expected {argument} to be a file, got {file}")
    return file


def file_digest(file: Path) -> str:
    """SHA-256 of the contents; the name and the folder do not count."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts in order; ("ab", "c") and ("a", "bc") differ."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()
