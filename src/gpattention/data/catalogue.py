"""The datasets that the library knows: where they lie, what is missing, how to get and load them.

The file of a dataset calls `register` with its `Entry`; nothing else lists datasets.  Downloads go on where
they stopped and are not believed before their checksum.
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
SUBSET = "pass subset=True (data.options.subset=true in a recipe) if that is meant"  # what an error advises
KINDS = ("images", "corrupted", "text", "ood")  # in the order in which `known` lists them

State = Literal["bundled", "present", "subset", "incomplete", "missing"]
Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if the server says

_BLOCK = 1 << 20
_RANGE_NOT_SATISFIABLE = 416


class NoRootError(ValueError):
    """Neither `root` nor the environment says where the datasets are."""


def data_root(root: StrPath | None = None) -> Path:
    """The folder that holds the datasets.

    Args:
        root: the folder; what the environment variable GPATTENTION_DATA says if not given.

    Returns:
        An existing folder.

    Raises:
        NoRootError: if neither says where it is.
        FileNotFoundError: if there is no such folder.
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
    """A published file.

    Attributes:
        file: its name.
        md5: checksum of the whole.
        url: where it is; None: it must be fetched by hand, as its page says.
        limit: bytes that it may unpack to.
    """

    file: str
    md5: str
    url: str | None
    limit: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Files or folders that make up the dataset; less than the published amount is a subset."""

    folder: str  # relative to the root
    paths: tuple[str, ...] = ()  # inside the folder
    data: tuple[str, ...] = ()  # those of the paths that hold the images, and
    least: int = 0  # how many bytes they have together, at least
    images: int = 0  # how many image files are in the folder


@dataclass(frozen=True, slots=True)
class Entry:
    """One dataset that `load` knows.

    Attributes:
        name: as `load` takes it.
        kind: "images", "text", "corrupted" or "ood".
        about: what it is, in a line.
        licence: terms, and what to cite.
        page: address of the publisher.
        load: the function that reads it, called with `root`, `seed` and options as far as it has them.
        layouts: what files it has, any one will do; none: it comes with the library.
        archive: where it comes from.
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


def register(entry: Entry) -> None:
    """Make a dataset known to `load`, `check` and `get`."""
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
        ValueError: if there is none.
    """
    check_choice("name", name, [entry.name for entry in known()])
    return CATALOGUE[name]


def load(name: str, root: StrPath | None = None, seed: int = 0, **options: Any) -> Any:
    """A dataset by name: `ImageData`, `TextData`, `CorruptedImages` (cifar10-c) or `Images` (textures).

    Args:
        name: one of `known()`; digits comes with the library.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        seed: decides the split, where there is one, and the augmentation.
        options: of the dataset: see `load_digits`, `load_cifar`, `load_cola`, `load_imdb`, `load_corrupted`,
            `load_ood`.  Where there is a split, `split_seed` decides it in the seed's place: runs of several
            seeds then have the same parts, and their ensemble validation items that none was trained on.

    Returns:
        What the dataset's own function returns.

    Raises:
        ValueError: for a name or an option that there is not, or a file that is damaged.
        FileNotFoundError: if the files are not there.
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
    if isinstance(data, ImageData) and data.augmentation is not None:  # which is of the training
        data = replace(data, augmentation=replace(data.augmentation, seed=seed))
    return data


@dataclass(frozen=True, slots=True)
class Status:
    """One dataset on this machine; print it to see what to do.

    Attributes:
        name: of the dataset.
        state: "bundled", "present", "subset", "incomplete" or "missing".
        where: the folder that was found.
        missing: paths relative to the root.
        how: what to do about it; empty if nothing is to be done.
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
    """The state of every known dataset; files are looked for, not read: `load` notices damaged ones.

    Args:
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.

    Returns:
        One status per dataset.

    Raises:
        NoRootError: if nothing says where the folder is.
        FileNotFoundError: if there is no such folder.
    """
    folder = data_root(root)
    return tuple(status_of(entry, folder) for entry in known())


def status_of(entry: Entry, folder: Path) -> Status:
    """The state of one dataset: that of the best of its layouts.

    Args:
        entry: which.
        folder: of the datasets.

    Returns:
        Its status.
    """
    if not entry.layouts:
        return Status(entry.name, "bundled", None, (), "")
    begun = [layout for layout in entry.layouts if (folder / layout.folder).is_dir()]
    if not begun:
        return Status(entry.name, "missing", None, _missing(entry.layouts[0], folder), _how(entry))
    found = [_state_of(entry, layout, folder) for layout in begun]
    # one whole layout will do, whatever was begun beside it
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
    """What is not there, or has nothing in it."""

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
    """Download, verify and unpack a dataset, unless it is there.

    An archive that lies in the root already, whole or as a part, is used; one that was put there by hand
    stays.  Where there is no network, that is the way: the error says which file to bring.

    Args:
        name: one of `known()`.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        keep: whether a downloaded archive stays beside what was unpacked.
        progress: called with the bytes so far, and in all.
        timeout: seconds without an answer before giving up.

    Returns:
        The folder that holds the dataset.

    Raises:
        ValueError: for a name that there is not, a wrong checksum, or an archive of something else.
        FileNotFoundError: if the archive has to be brought by hand.
        ConnectionError: if the download failed; the next call goes on where it stopped.
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
    """`ValueError` if the file is not the one that was published: against damage, not against malice."""
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
    """Fetch `url` into `file`, which appears only when it is whole and its checksum is right.

    What arrives is kept as FILE.part; after an interruption the next call asks for the rest (HTTP Range).
    A part that turns out wrong, or too long, is deleted.

    Args:
        url: http or https.
        file: where to.
        md5: checksum of the whole.
        limit: bytes after which to give up.
        timeout: seconds without an answer.
        progress: called with the bytes so far, and in all.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"expected url to begin with https:// or http://, got {url!r}")
    part = file.with_name(f"{file.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.is_symlink():  # somebody else's, who would have us write elsewhere
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
            return  # nothing is left to send: the checksum will tell whether the part is the whole
        raise
    with answer:
        # a server may ignore the range, or send another one
        if not (answer.status == http.client.PARTIAL_CONTENT and _begins_at(answer, have)):
            have = 0  # the server sends the whole
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


def _begins_at(answer: http.client.HTTPResponse, have: int) -> bool:
    """Whether the server sends the range that was asked for, as in `Content-Range: bytes 5-9/10`."""
    text = str(answer.headers.get("Content-Range", ""))
    return text.replace("=", " ").startswith(f"bytes {have}-")
