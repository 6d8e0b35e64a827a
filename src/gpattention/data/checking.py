"""`check`: what is in the folder of the datasets, what is missing, and how to get it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpattention.data.catalogue import Entry, Layout, known
from gpattention.data.folders import image_files
from gpattention.data.places import StrPath, data_root

State = Literal["bundled", "present", "subset", "incomplete", "missing"]


@dataclass(frozen=True, slots=True)
class Status:
    """One dataset on this machine."""

    name: str
    state: State
    where: Path | None  # the folder that was found
    missing: tuple[str, ...]  # paths relative to the root
    how: str  # what to do about it; empty if nothing is to be done

    def __str__(self) -> str:
        lines = [f"{self.name:<20} {self.state}" + (f": {self.where}" if self.where else "")]
        if self.state == "incomplete":
            shown = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
            lines.append(f"  {len(self.missing)} missing: {shown}")
        if self.how:
            lines.append(f"  {self.how}")
        return "\n".join(lines)


def check(root: StrPath | None = None) -> tuple[Status, ...]:
    """The state of every known dataset; print them one by one.

    Files are looked for, not read: `load` notices damaged ones.
    """
    folder = data_root(root)
    return tuple(status_of(entry, folder) for entry in known())


def status_of(entry: Entry, folder: Path) -> Status:
    """The state of one dataset: that of the best of its layouts."""
    if not entry.layouts:
        return Status(entry.name, "bundled", None, (), "")
    begun = [layout for layout in entry.layouts if (folder / layout.folder).is_dir()]
    if not begun:
        return Status(entry.name, "missing", None, _missing(entry.layouts[0], folder), _how(entry))
    found = [_state_of(entry, layout, folder) for layout in begun]
    return min(found, key=lambda status: ("present", "subset", "incomplete").index(status.state))


def _state_of(entry: Entry, layout: Layout, folder: Path) -> Status:
    where = folder / layout.folder
    missing = _missing(layout, folder)
    if missing:
        return Status(entry.name, "incomplete", where, missing, _how(entry))
    bytes_there = sum((where / path).stat().st_size for path in layout.data)
    if bytes_there < layout.least or (layout.images and len(image_files(where)) < layout.images):
        return Status(entry.name, "subset", where, (), f"load with subset=True, or else {_how(entry)}")
    return Status(entry.name, "present", where, (), "")


def _missing(layout: Layout, folder: Path) -> tuple[str, ...]:
    paths = [f"{layout.folder}/{path}" for path in layout.paths] or [layout.folder]
    return tuple(path for path in paths if not _there(folder / path))


def _there(path: Path) -> bool:
    """A file with something in it, or a folder with something in it."""
    if path.is_dir():
        return next(path.iterdir(), None) is not None
    return path.is_file() and path.stat().st_size > 0


def _how(entry: Entry) -> str:
    archive = entry.archive
    if archive is None:
        return ""
    if archive.url is not None:
        return f"get({entry.name!r}, root) downloads {archive.url}"
    return (
        f"put {archive.file} (md5 {archive.md5}, linked from {entry.page}) into the root, "
        f"then get({entry.name!r}, root) unpacks it"
    )
