"""The records of runs in one file beside their results: all that these are made of, without weights.

Run folders are large and are not committed.  Results are therefore made of records alone: from run folders
where these are evaluated, else from the archive of an earlier call.  So results can be made again, and
completed with further runs, when the run folders are gone.
"""

import io
import json
import lzma
import re
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpattention.data.unpacking import unpack as unpack_archive
from gpattention.evaluation.records import read_suites
from gpattention.experiments.judging.weights import recorded_weights
from gpattention.experiments.reporting import read_run
from gpattention.reading import read_json, read_object
from gpattention.runs import RunData
from gpattention.studies.reproduction.plan import Plan
from gpattention.studies.reproduction.results.reading import find_runs_of, none_evaluated

ARCHIVE = "records.tar.xz"
# positions in a text are not aligned to four bytes, as xz takes them to be: 6 % smaller without
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME, "pb": 0}]
EXPECTED = "RUN/recipe.json, RUN/metrics.csv, RUN/events.jsonl or RUN/evaluation/SUITE.json"
LARGEST, FILES = 1 << 30, 100_000  # bytes and files that an archive may hold
_NAME = re.compile(r"([^/\\]+-seed-?\d+)/(recipe\.json|metrics\.csv|events\.jsonl|evaluation/[^/\\]+\.json)")


@dataclass(frozen=True)
class Records:
    """What results are made of."""

    runs: Path  # folders as the plan names them, with records alone
    archive: bytes  # of these runs, and of those that an earlier archive has besides
    archived: tuple[str, ...]  # runs that came from the earlier archive


def gather(plan: Plan, runs: Path, archive: Path, place: Path) -> Records:
    """The records of a plan's runs that are evaluated or broke off, unpacked into a new folder.

    Args:
        plan: whose runs, or some of them; the archive keeps those that are not asked for.
        runs: their folder; it need not be there if there is an archive.
        archive: of an earlier call, for runs that are not evaluated in `runs`; it need not be there.
        place: an empty folder to write to.
    """
    staged, kept = place / "runs", place / "kept"
    staged.mkdir()
    kept.mkdir()
    if archive.is_file():
        unpack(archive, kept)
    # without an archive, a folder that is not there is a mistake and is told as one
    found = find_runs_of(plan, runs) if runs.is_dir() or not archive.is_file() else {}
    for name, run in found.items():
        _write_records(run, staged / name)
        if (kept / name).exists():
            _keep_suites(archive, kept / name, staged / name)
            shutil.rmtree(kept / name)
    names = [training.folder for training in plan.trainings]
    archived = tuple(name for name in names if (kept / name).is_dir())
    for name in archived:
        (kept / name).rename(staged / name)
        _check_readable(archive, staged / name)
    if not found and not archived:
        raise none_evaluated(plan, f"{runs} or {archive}" if archive.is_file() else str(runs))
    return Records(staged, packed((staged, kept)), archived)


def _keep_suites(archive: Path, earlier: Path, now: Path) -> None:
    """Suites that the run folder was not judged by stay, if they are of the same weights."""
    judged = {file.name for file in (now / "evaluation").glob("*.json")}
    further = [file for file in sorted((earlier / "evaluation").glob("*.json")) if file.name not in judged]
    if not further:
        return
    _check_readable(archive, earlier)
    if _weights(earlier) != _weights(now):
        names = ", ".join(file.stem for file in further)
        raise ValueError(
            f"{archive} has {names} of {now.name}, of other weights than in the run folder, which has not: "
            f"evaluate the run by {names}, or remove the archive"
        )
    (now / "evaluation").mkdir(exist_ok=True)
    for file in further:
        shutil.copyfile(file, now / "evaluation" / file.name)


def _weights(run: Path) -> tuple[Any, set[Any]]:
    """What tells whether two records are of one run: its recipe, and the digests that were judged."""
    digests = {recorded_weights(suite) for suite in read_suites(run).values()}
    return read_json(run / "recipe.json", nonfinite=True), digests


def packed(folders: Sequence[Path]) -> bytes:
    """All files in these folders as an archive; the same files give the same bytes."""
    files = {f.relative_to(folder).as_posix(): f for folder in folders for f in folder.rglob("*")}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(name for name, file in files.items() if file.is_file()):
            content = files[name].read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            member.mtime, member.uid, member.gid = 0, 0, 0
            tar.addfile(member, io.BytesIO(content))
    return lzma.compress(stream.getvalue(), filters=COMPRESSION)


def unpack(archive: Path, folder: Path) -> None:
    """Write the records that an archive holds; `ValueError`, and nothing written, if it is not whole."""
    unpack_archive(archive, folder, limit=LARGEST, files=FILES, check=partial(_check_names, archive))


def _check_names(archive: Path, names: Sequence[str]) -> None:
    files: dict[str, list[str]] = {}
    for name in names:
        named = _NAME.fullmatch(name)
        if named is None:
            raise ValueError(f"{archive}: expected {EXPECTED}, got {name!r}")
        files.setdefault(named[1], []).append(named[2])
    for run, found in files.items():
        judged = any(name.startswith("evaluation/") for name in found)
        if "recipe.json" not in found or not (judged or "events.jsonl" in found):  # events tell of a failure
            raise ValueError(
                f"{archive}: expected recipe.json and an evaluation of {run}, or events.jsonl, "
                f"got {', '.join(sorted(found))}"
            )


def _check_readable(archive: Path, run: Path) -> None:
    """Before anything is written; an error must not tell of a folder that is gone with the call."""
    try:
        found = read_run(run)
        _ = found.parsed
    except (KeyError, TypeError, ValueError) as error:
        told = str(error).replace(f"{run.parent}/", "")
        raise ValueError(f"{archive}: expected records of {run.name} to read, got: {told}") from None
    if not found.suites and not found.failure:
        raise ValueError(f"{archive}: expected an evaluation or a failure of {run.name}, got neither")


def _write_records(run: RunData, place: Path) -> None:
    place.mkdir()
    folder = Path(run.folder)
    _write_json(place / "recipe.json", run.recipe)
    for name in ("metrics.csv", "events.jsonl"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, place / name)
    if run.suites:
        (place / "evaluation").mkdir()
    for file in sorted((folder / "evaluation").glob("*.json")):
        plain = read_object(file, nonfinite=True)
        if plain["suite"] == "clean" and not run.texts:
            plain.get("curves", {}).pop("gallery", None)  # pixels: they are large, and no figure needs them
        _write_json(place / "evaluation" / file.name, plain)


def _write_json(file: Path, plain: Any) -> None:
    """Without spaces; numbers are the same, to the last digit."""
    file.write_text(json.dumps(plain, separators=(",", ":")) + "\n")
