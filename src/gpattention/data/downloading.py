"""Downloads that go on where they stopped and are not believed before their checksum."""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if the server says

_BLOCK = 1 << 20
_RANGE_NOT_SATISFIABLE = 416


def md5_of(file: Path) -> str:
    """MD5 of the contents, as the publishers give it: against damage, not against malice."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def check_md5(file: Path, md5: str) -> None:
    """`ValueError` if the file is not the one that was published."""
    found = md5_of(file)
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
        progress: told the bytes so far, and in all.
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
    told = str(answer.headers.get("Content-Range", ""))
    return told.replace("=", " ").startswith(f"bytes {have}-")
