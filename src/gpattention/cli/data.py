"""List, get, check and corrupt datasets.

Examples:
  gpattention data list                              what there is, and which of it is here
  gpattention data get cola cifar10 --data ~/data    download, verify, unpack
  gpattention data check cifar10 --data ~/data       exit code 1 if it is not whole
  gpattention data corrupt cifar10 --data ~/data     a CIFAR-10-C of our own making

Without --data the environment variable GPATTENTION_DATA says where the datasets lie.
"""

import os
from contextlib import closing
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from gpattention.checks import check_choice
from gpattention.cli.console import Bar, say
from gpattention.cli.main import App
from gpattention.cli.options import Data, Device, Json, goes_on
from gpattention.data import VARIABLE, Entry, Status, check, get, known
from gpattention.evaluation import SOURCES, corrupt_test_set
from gpattention.numerics import choose_device

MEBIBYTE = 1 << 20
WHOLE = ("bundled", "present")  # states with which nothing is left to do


NAMES = [entry.name for entry in known()]
app = App()
data = App(help=__doc__)
app.add_typer(data, name="data")


@data.command("list")
def list_datasets(json: Json = False, data: Data = None) -> None:
    """List datasets, and which are here.

    Examples:
      gpattention data list
      gpattention data list --data ~/data --json
    """
    found = _statuses(data)
    if json:
        plain = []
        for entry in known():
            status = found.get(entry.name)
            fields = {key: getattr(entry, key) for key in ("name", "kind", "about", "licence")}
            where = None if status is None or status.where is None else str(status.where)
            plain.append({**fields, "source": entry.page, "state": _state(entry, status), "where": where})
        print(dumps(plain, indent=2))
        return
    print(f"{'name':<21}{'kind':<11}{'here':<12}what")
    for entry in known():
        status = found.get(entry.name)
        print(f"{entry.name:<21}{entry.kind:<11}{_state(entry, status):<12}{entry.about}")
        print(f"{'':<44}{entry.licence}\n{'':<44}{entry.page}")
    if not found:
        print(f"\nName the folder of the datasets with --data or {VARIABLE} to see which are here.")


@data.command("get")
@goes_on()
def get_datasets(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help=", ".join(NAMES[1:]))],
    keep: bool = False,
    timeout: float = 60.0,
    data: Data = None,
) -> None:
    """Download, verify and unpack datasets.

    Options:
        keep: keep the archive beside what was unpacked.
        timeout (SECONDS): without an answer before giving up.

    Examples:
      gpattention data get cola --data ~/data
      gpattention data get cifar10 cifar10-c textures --data ~/data --keep

    A download that broke off goes on. Without a network, put the archive into the folder and call again.
    """
    for name in names:
        check_choice("NAME", name, NAMES)
    if data is not None:
        Path(data).expanduser().mkdir(parents=True, exist_ok=True)
    root = _root(data)
    for name in names:
        with closing(Bar(name, "MiB", scale=MEBIBYTE)) as bar:
            where = get(name, root, keep=keep, progress=bar, timeout=timeout)
        say(f"{name}: {where}")


@data.command("check")
def check_datasets(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    ] = None,
    data: Data = None,
) -> int:
    """Say what is here and what is missing; exit code 1 if a dataset that was named is not as published.

    Examples:
      gpattention data check                             all datasets; exit code 0
      gpattention data check cifar10 cola --data ~/data  exit code 1 unless both are there as published
    """
    for name in names or ():
        check_choice("NAME", name, NAMES)
    entries = {entry.name: entry for entry in known()}
    chosen = [status for status in check(_root(data)) if not names or status.name in names]
    for status in chosen:
        for line in _lines(status, entries[status.name]):
            say(line)
    lacking = [status.name for status in chosen if status.state not in WHOLE]
    if names and lacking:
        print(f"\nnot here as published: {', '.join(lacking)}")
        return 1
    return 0


@data.command("corrupt")
@goes_on()
def corrupt(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"whose test images: {', '.join(SOURCES)}")],
    severities: tuple[int, ...] = (1, 2, 3, 4, 5),
    types: tuple[str, ...] | None = None,
    seed: int = 0,
    frost: str | None = None,
    folder: str | None = None,
    subset: bool = False,
    device: Device = "auto",
    data: Data = None,
) -> None:
    """Make corrupted test images from clean ones.

    Options:
        severities: comma-separated.
        types: comma-separated corruptions, or noise, blur, weather, digital (default: all 19).
        seed: seed of all random numbers.
        frost (FOLDER): pictures of frost, or the word generated (default: the folder frost with the data, if
            any).
        folder: where to write (default: CIFAR-10-C-regenerated or CIFAR-100-C-... with the data).
        subset: take fewer test images than published.

    Examples:
      gpattention data corrupt cifar10 --data ~/data
      gpattention data corrupt cifar10 --types noise,fog --severities 1,3,5 --folder noise-and-fog
      gpattention data corrupt cifar100 --frost generated --seed 1

    A call that broke off goes on; a folder of another recipe is refused.
    """
    check_choice("NAME", name, SOURCES)
    with closing(Bar(f"{name}, corrupted", "images")) as bar:
        made = corrupt_test_set(
            name, _root(data), folder=folder, severities=severities, types=types, seed=seed, frost=frost,
            subset=subset, device=choose_device(device), progress=bar,
        )  # fmt: skip
    severe = ", ".join(map(str, made.severities))
    print(f"{made.name}: {len(made.corruptions)} corruptions, severities {severe}")
    say(f"frost: {made.frost}")
    say(f"folder: {made.folder}")


def _root(data: str | None) -> str | None:
    """The folder of --data; None leaves it to the environment variable, which must be set."""
    if data is None and not os.environ.get(VARIABLE):
        raise ValueError(f"expected --data FOLDER, or {VARIABLE}, to say where the datasets lie, got neither")
    return data


def _statuses(root: str | None) -> dict[str, Status]:
    """Statuses by name; none without a folder of datasets, as a list is still worth reading."""
    try:
        return {status.name: status for status in check(root)}
    except ValueError:
        return {}


def _state(entry: Entry, status: Status | None) -> str:
    if status is None:
        return "bundled" if not entry.layouts else "?"
    return status.state


def _lines(status: Status, entry: Entry) -> list[str]:
    """Lines on what is there, what is missing, and the command that gets it."""
    lines = [f"{status.name:<21}{status.state}" + (f": {status.where}" if status.where else "")]
    if status.state == "incomplete":
        shown = ", ".join(status.missing[:3]) + (", ..." if len(status.missing) > 3 else "")
        lines.append(f"  {len(status.missing)} missing: {shown}")
    if status.state == "subset" and entry.kind in ("images", "text"):
        lines.append("  less than published: --set data.options.subset=true trains on it")
    if status.state not in WHOLE and entry.archive is not None:
        command = f"gpattention data get {entry.name}"
        if entry.archive.url is not None:
            lines.append(f"  {command}   (downloads {entry.archive.url})")
        else:
            lines.append(f"  put {entry.archive.file} (md5 {entry.archive.md5}, linked from {entry.page})")
            lines.append(f"  into the folder of the datasets, then {command}")
    return lines
