"""`get`: a dataset from its publisher into the folder of the datasets."""

from pathlib import Path

from gpattention.data.catalogue import Archive, Entry, entry_of
from gpattention.data.checking import status_of
from gpattention.data.downloading import Progress, check_md5, download
from gpattention.data.places import StrPath, data_root
from gpattention.data.unpacking import unpack


def get(
    name: str,
    root: StrPath | None = None,
    *,
    keep: bool = False,
    progress: Progress | None = None,
    timeout: float = 60.0,
) -> Path:
    """Download, verify and unpack a dataset, unless it is there; the folder that holds it.

    An archive that lies in the root already, whole or as a part, is used; one that was put there by hand
    stays.  Where there is no network, that is the way: the error says which file to bring.

    Args:
        name: one of `known()`.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        keep: whether a downloaded archive stays beside what was unpacked.
        progress: told the bytes so far, and in all.
        timeout: seconds without an answer before giving up.
    """
    entry = entry_of(name)
    if entry.archive is None:
        raise ValueError(f"expected a dataset to download, got {name!r}, which comes with the library")
    folder = data_root(root)
    before = status_of(entry, folder)
    if before.where is not None and before.state == "present":
        return before.where
    file = folder / entry.archive.file
    brought = file.exists()
    if brought:
        check_md5(file, entry.archive.md5)
    else:
        _download(entry, entry.archive, file, progress, timeout)
    unpack(file, folder, limit=entry.archive.limit)
    after = status_of(entry, folder)
    if after.where is None or after.state != "present":
        lacking = f", without {', '.join(after.missing[:3])}" if after.missing else ""
        raise ValueError(f"{file}: expected all of {name} in it, got what makes it {after.state}{lacking}")
    if not (keep or brought):
        file.unlink()
    return after.where


def _download(entry: Entry, archive: Archive, file: Path, progress: Progress | None, timeout: float) -> None:
    by_hand = f"put {archive.file} (md5 {archive.md5}, see {entry.page}) into {file.parent} and call again"
    if archive.url is None:
        raise FileNotFoundError(
            f"expected {file}, got no such file; {entry.name} is not downloaded: {by_hand}"
        )
    try:
        download(archive.url, file, archive.md5, limit=archive.limit, timeout=timeout, progress=progress)
    except ConnectionError as error:
        raise ConnectionError(f"{error}; try again, or {by_hand}") from error
