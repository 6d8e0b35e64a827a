"""The datasets that the library knows: where they are, what is missing, how to get and load them.

The file of a dataset calls `register`; there is no other list of datasets.  Downloads
continue where they stopped, and are used only if their checksum is right.
"""

import hashlib
import http.client
import inspect
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gpattention.checks import check_choice, check_whole
from gpattention.data.datasets import ImageData
from gpattention.data.files import image_files, unpack
from gpattention.files import StrPath

VARIABLE = "GPATTENTION_DATA"
GIGABYTE = 1 << 30
SUBSET = "pass subset=True (data.options.subset=true in a recipe) if that is meant"  # the advice of errors
KINDS = ("images", "corrupted", "text", "ood")  # in the order in which `known` lists them

State = Literal["bundled", "present", "subset", "incomplete", "missing"]
Progress = Callable[[int, int | None], None]  # bytes so far, and all bytes if the server says how many

_BLOCK = 1 << 20
_RANGE_NOT_SATISFIABLE = 416


class NoRootError(ValueError):
    """The error if neither `root` nor the environment names the folder of the datasets."""


def data_root(root: StrPath | None = None) -> Path:
    """The folder that holds the datasets.

    Args:
        root: the folder; the value of the environment variable GPATTENTION_DATA if not given.

    Returns:
        An existing folder.

    Raises:
        NoRootError: neither names a folder.
        FileNotFoundError: there is no such folder.
    """
    given = os.environ.get(VARIABLE) if root is None else root
    if not given:
        ways = f"root (--data on the command line) or the environment variable {VARIABLE}"
        raise NoRootError(f"expected the folder of the datasets, got none: name it with {ways}")
    folder = Path(given).expanduser()
    if not folder.is_dir():
        said = f"the environment variable {VARIABLE}" if root is None else "root (--data on the command line)"
        raise FileNotFoundError(f"expected {said} to be a folder, got {folder}")
    return folder


@dataclass(frozen=True, slots=True)
class Archive:
    """A published archive.

    Attributes:
        file: its name.
        md5: its checksum.
        url: its address; None if it has to be fetched by hand, as the page of the dataset says.
        limit: most bytes that it may unpack to.
    """

    file: str
    md5: str
    url: str | None
    limit: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The files or folders of a dataset; with less than the published amount it is a subset."""

    folder: str  # relative to the root
    paths: tuple[str, ...] = ()  # in the folder
    data: tuple[str, ...] = ()  # paths that hold the images
    least: int = 0  # bytes of all `data` files together, at least
    images: int = 0  # number of image files in the folder


@dataclass(frozen=True, slots=True)
class Entry:
    """One dataset that `load` knows.

    Attributes:
        name: the name that `load` takes.
        kind: "images", "text", "corrupted" or "ood".
        about: a description in one line.
        licence: terms, and what to cite.
        page: address of the publisher.
        load: the function that reads it, called with those of `root`, `seed` and options that it takes.
        layouts: alternative sets of files; none if the dataset comes with the library.
        archive: the published archive.
    """

    name: str
    kind: Literal["images", "text", "corrupted", "ood"]
    about: str
    licence: str
    page: str
    load: Callable[..., Any]
    layouts: tuple[Layout, ...] = ()
    archive: Archive | None = None


CATALOGUE: dict[str, Entry] = {}


def register(*fields: Any, **named: Any) -> None:
    """Make a dataset, with the fields of its `Entry`, known to `load`, `check` and `get`."""
    entry = Entry(*fields, **named)
    CATALOGUE[entry.name] = entry


def known() -> tuple[Entry, ...]:
    """Every dataset that `load` knows by name.

    Returns:
        Entries by kind; of one kind, the one that comes with the library first.
    """
    return tuple(sorted(CATALOGUE.values(), key=lambda each: (KINDS.index(each.kind), bool(each.layouts))))


def entry_of(name: str) -> Entry:
    """The dataset of that name.

    Args:
        name: one of `known()`.

    Returns:
        Its entry.

    Raises:
        ValueError: there is none.
    """
    check_choice("name", name, [entry.name for entry in known()])
    return CATALOGUE[name]


def load(name: str, root: StrPath | None = None, seed: int = 0, **options: Any) -> Any:
    """A dataset by name: `ImageData`, `TextData`, `CorruptedImages` (cifar10-c) or `Images` (textures).

    Args:
        name: one of `known()`; digits comes with the library.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        seed: of the split, if there is one, and of the augmentation.
        options: of the dataset: see `load_digits`, `load_cifar`, `load_cola`, `load_imdb`, `load_corrupted`,
            `load_ood`.  For datasets with a split, `split_seed` replaces the seed there: runs of different
            seeds then have the same parts, and an ensemble has validation items that no member trained on.

    Returns:
        The result of the dataset's own function.

    Raises:
        ValueError: an unknown name or option, or a damaged file.
        FileNotFoundError: the files are missing.
    """
    entry = entry_of(name)
    parameters = inspect.signature(entry.load).parameters
    given = {key: value for key, value in {"root": root, "seed": seed}.items() if key in parameters}
    allowed = {p.name: p.annotation for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if entry.kind in ("images", "text"):
        allowed["split_seed"] = int
    for option, value in options.items():
        check_choice(f"an option of {name}", option, allowed)
        if allowed[option] is bool and not isinstance(value, bool):  # a recipe's text 'False' would be true
            raise ValueError(f"expected option {option} of {name} to be true or false, got {value!r}")
    if "split_seed" not in options:
        return entry.load(**given, **options)
    given["seed"] = check_whole(f"option split_seed of {name}", options.pop("split_seed"))
    data = entry.load(**given, **options)
    if isinstance(data, ImageData) and data.augmentation is not None:  # part of training, not of the split
        data = replace(data, augmentation=replace(data.augmentation, seed=seed))
    return data


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a dataset on this machine; printed, it says what to do.

    Attributes:
        name: of the dataset.
        state: "bundled", "present", "subset", "incomplete" or "missing".
        where: the folder that was found.
        missing: paths relative to the root.
        how: what to do about it; empty if there is nothing to do.
    """

    name: str
    state: State
    where: Path | None
    missing: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        lines = [f"{self.name:<20} {self.state}" + (f": {self.where}" if self.where else "")]
        if self.state == "incomplete":
            shown = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
            lines.append(f"  {len(self.missing)} missing: {shown}")
        if self.how:
            lines.append(f"  {self.how}")
        return "\n".join(lines)


def check(root: StrPath | None = None) -> tuple[Status, ...]:
    """The state of every known dataset.  Files are not read: only `load` notices damage.

    Args:
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.

    Returns:
        One status for each dataset.

    Raises:
        NoRootError: nothing names the folder.
        FileNotFoundError: there is no such folder.
    """
    folder = data_root(root)
    return tuple(status_of(entry, folder) for entry in known())


def status_of(entry: Entry, folder: Path) -> Status:
    """The state of one dataset: that of its best layout.

    Args:
        entry: the dataset.
        folder: of all datasets.

    Returns:
        Its status.
    """
    if not entry.layouts:
        return Status(entry.name, "bundled", None, (), "")
    begun = [layout for layout in entry.layouts if (folder / layout.folder).is_dir()]
    if not begun:
        return Status(entry.name, "missing", None, _missing(entry.layouts[0], folder), _how(entry))
    found = [_state_of(entry, layout, folder) for layout in begun]
    # one complete layout is enough
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
    """Files and folders that do not exist or are empty."""

    def empty(path: Path) -> bool:
        return not (any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size)

    names = [f"{layout.folder}/{path}" for path in layout.paths] or [layout.folder]
    return tuple(name for name in names if empty(folder / name))


def _how(entry: Entry) -> str:
    archive = entry.archive
    if archive is None:
        return ""
    if archive.url is not None:
        return f"get({entry.name!r}, root) downloads {archive.url}"
    file = f"{archive.file} (md5 {archive.md5}, linked from {entry.page})"
    return f"put {file} into the root, then get({entry.name!r}, root) unpacks it"


def get(
    name: str,
    root: StrPath | None = None,
    *,
    keep: bool = False,
    progress: Progress | None = None,
    timeout: float = 60.0,
) -> Path:
    """Download, verify and unpack a dataset, unless it is present.

    An archive in the root, complete or in part, is used, and kept if it was put there by hand.  That is also
    the way without a network: the error names the file to bring.

    Args:
        name: one of `known()`.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        keep: whether to keep a downloaded archive after unpacking it.
        progress: called with the bytes so far and the total.
        timeout: seconds to wait for an answer.

    Returns:
        The folder of the dataset.

    Raises:
        ValueError: an unknown name, a wrong checksum, or an archive with other content.
        FileNotFoundError: the archive has to be brought by hand.
        ConnectionError: the download failed; the next call continues where it stopped.
    """
    entry = entry_of(name)
    archive = entry.archive
    if archive is None:
        raise ValueError(f"expected a dataset to download, got {name!r}, which comes with the library")
    folder = data_root(root)
    before = status_of(entry, folder)
    if before.where is not None and before.state == "present":
        return before.where
    file = folder / archive.file
    brought = file.exists()
    by_hand = f"put {archive.file} (md5 {archive.md5}, see {entry.page}) into {folder} and call again"
    if brought:
        check_md5(file, archive.md5)
    elif archive.url is None:
        raise FileNotFoundError(f"expected {file}, got no such file; {name} is not downloaded: {by_hand}")
    else:
        try:
            download(archive.url, file, archive.md5, limit=archive.limit, timeout=timeout, progress=progress)
        except ConnectionError as error:
            raise ConnectionError(f"{error}; try again, or {by_hand}") from error
    unpack(file, folder, limit=archive.limit)
    after = status_of(entry, folder)
    if after.where is None or after.state != "present":
        lacking = f", without {', '.join(after.missing[:3])}" if after.missing else ""
        raise ValueError(f"{file}: expected all of {name} in it, got what makes it {after.state}{lacking}")
    if not (keep or brought):
        file.unlink()
    return after.where


def check_md5(file: Path, md5: str) -> None:
    """Refuse a file that is not the published one; this protects against damage, not against attacks."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        raise ValueError(f"{file}: expected md5 {md5}, got {found}: a damaged or a different file")


def download(
    url: str,
    file: Path,
    md5: str,
    *,
    limit: int = 8 << 30,
    timeout: float = 60.0,
    progress: Progress | None = None,
) -> None:
    """Download `url` to `file`, which appears only when it is complete and its checksum is right.

    Bytes are collected in FILE.part; after an interruption the next call asks for the rest (HTTP Range).  A
    part that is wrong or too long is deleted.

    Args:
        url: http or https.
        file: the target.
        md5: checksum of the whole file.
        limit: most bytes to accept.
        timeout: seconds to wait for an answer.
        progress: called with the bytes so far and the total.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"expected url to begin with https:// or http://, got {url!r}")
    part = file.with_name(f"{file.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.is_symlink():  # would make us write to another place
        raise ValueError(f"expected {part} to be a file of an earlier download or nothing, got a link")
    try:
        _fetch(url, part, limit, timeout, progress)
        check_md5(part, md5)
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise ConnectionError(f"could not download {url}: {error}") from error
    except ValueError:
        part.unlink()
        raise
    os.replace(part, file)


def _fetch(url: str, part: Path, limit: int, timeout: float, progress: Progress | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_NOT_SATISFIABLE and have:
            return  # nothing is left to send: the checksum shows whether the part is complete
        raise
    with answer:
        # a server may ignore the range and send the whole file, or send another range
        text = str(answer.headers.get("Content-Range", "")).replace("=", " ")  # such as bytes 5-9/10
        if not (answer.status == http.client.PARTIAL_CONTENT and text.startswith(f"bytes {have}-")):
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length is not None and length.isdigit() else None
        with part.open("ab" if have else "wb") as stream:
            while block := answer.read(_BLOCK):
                have += len(block)
                if have > limit:
                    raise ValueError(f"expected at most {limit} bytes from {url}, got more")
                stream.write(block)
                if progress is not None:
                    progress(have, total)
    if total is not None and have < total:
        raise ConnectionError(f"the connection ended after {have} of {total} bytes; call again to go on")
