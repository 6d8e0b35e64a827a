"""`gpattention data`: what there is, what is here, how it gets here."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpattention.cli.arguments import GOES_ON, add_data, add_device, new_command, numbers, seed_number
from gpattention.cli.bar import CountBar
from gpattention.cli.table import say
from gpattention.data import Entry, Status, check, get, known
from gpattention.data.places import VARIABLE
from gpattention.experiments.judging.corrupting import SOURCES, corrupt_test_set
from gpattention.training import choose_device

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

MEBIBYTE = 1 << 20
WHOLE = ("bundled", "present")  # states with which nothing is left to do

EXAMPLES = """\
examples:
  gpattention data list                              what there is, and which of it is here
  gpattention data get cola cifar10 --data ~/data    download, verify, unpack
  gpattention data check cifar10 --data ~/data       exit code 1 if it is not whole
  gpattention data corrupt cifar10 --data ~/data     a CIFAR-10-C of our own making

Without --data the environment variable GPATTENTION_DATA says where the datasets lie.
"""
LIST_EXAMPLES = """\
examples:
  gpattention data list
  gpattention data list --data ~/data --json
"""
GET_EXAMPLES = """\
examples:
  gpattention data get cola --data ~/data
  gpattention data get cifar10 cifar10-c textures --data ~/data --keep

A download that broke off goes on. Without a network, put the archive into the folder and call again.
"""
CHECK_EXAMPLES = """\
examples:
  gpattention data check                             all datasets; exit code 0
  gpattention data check cifar10 cola --data ~/data  exit code 1 unless both are there as published
"""
CORRUPT_EXAMPLES = """\
examples:
  gpattention data corrupt cifar10 --data ~/data
  gpattention data corrupt cifar10 --types noise,fog --severities 1,3,5 --folder noise-and-fog
  gpattention data corrupt cifar100 --frost generated --seed 1

A call that broke off goes on; a folder of another recipe is refused.
"""


def add_parser(commands: "Commands") -> None:
    """Four commands below this one."""
    data = new_command(commands, "data", "list, get, check and corrupt datasets", EXAMPLES)
    data.set_defaults(run_command=lambda _: _helped(data))
    below = data.add_subparsers(title="commands", metavar="COMMAND")
    names = [entry.name for entry in known()]

    listing = new_command(below, "list", "list datasets, and which are here", LIST_EXAMPLES)
    listing.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    add_data(listing)
    listing.set_defaults(run_command=run_list)

    getting = new_command(below, "get", "download, verify and unpack datasets", GET_EXAMPLES)
    getting.add_argument("names", nargs="+", metavar="NAME", choices=names, help=", ".join(names[1:]))
    getting.add_argument("--keep", action="store_true", help="keep the archive beside what was unpacked")
    getting.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS",
        help="without an answer before giving up (default: %(default)g)",
    )  # fmt: skip
    add_data(getting)
    getting.set_defaults(run_command=run_get, when_stopped=GOES_ON)

    checking = new_command(below, "check", "say what is here and what is missing", CHECK_EXAMPLES)
    # argparse would check the default of "*" against choices, so the names are checked by `run_check`
    checking.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names)} (default: all)")
    add_data(checking)
    checking.set_defaults(run_command=run_check)

    corrupting = new_command(below, "corrupt", "make corrupted test images from clean ones", CORRUPT_EXAMPLES)
    corrupting.add_argument("name", choices=list(SOURCES), help="dataset whose test images to corrupt")
    corrupting.add_argument(
        "--severities", default="1,2,3,4,5", help="comma-separated (default: %(default)s)"
    )
    corrupting.add_argument(
        "--types", help="comma-separated corruptions, or noise, blur, weather, digital (default: all 19)"
    )
    corrupting.add_argument(
        "--seed", type=seed_number, default=0, help="of all random numbers (default: %(default)s)"
    )
    corrupting.add_argument(
        "--frost", metavar="FOLDER",
        help="pictures of frost, or the word generated (default: the folder frost with the data, if any)",
    )  # fmt: skip
    corrupting.add_argument(
        "--folder", help="where to write (default: CIFAR-10-C-regenerated or CIFAR-100-C-... with the data)"
    )
    corrupting.add_argument("--subset", action="store_true", help="take fewer test images than published")
    add_device(corrupting)
    add_data(corrupting)
    corrupting.set_defaults(run_command=run_corrupt, when_stopped=GOES_ON)


def run_list(given: argparse.Namespace) -> None:
    """Every dataset with kind, state, contents, licence and source."""
    found = _statuses(given.data)
    if given.json:
        print(json.dumps([_described(entry, found.get(entry.name)) for entry in known()], indent=2))
        return
    print(f"{'name':<21}{'kind':<11}{'here':<12}what")
    for entry in known():
        status = found.get(entry.name)
        print(f"{entry.name:<21}{entry.kind:<11}{_state(entry, status):<12}{entry.about}")
        print(f"{'':<44}{entry.licence}\n{'':<44}{entry.page}")
    if not found:
        print(f"\nName the folder of the datasets with --data or {VARIABLE} to see which are here.")


def run_get(given: argparse.Namespace) -> None:
    """Each dataset in turn, with a bar."""
    if given.data is not None:
        Path(given.data).expanduser().mkdir(parents=True, exist_ok=True)
    root = _root(given)
    for name in given.names:
        bar = CountBar(name, "MiB", scale=MEBIBYTE)
        try:
            where = get(name, root, keep=given.keep, progress=bar, timeout=given.timeout)
        finally:
            bar.end()
        say(f"{name}: {where}")


def run_check(given: argparse.Namespace) -> int:
    """1 if a dataset that was named is not there as published."""
    entries = {entry.name: entry for entry in known()}
    for name in given.names:
        if name not in entries:
            raise ValueError(f"expected NAME to be one of {', '.join(entries)}, got {name!r}")
    chosen = [status for status in check(_root(given)) if not given.names or status.name in given.names]
    for status in chosen:
        for line in _told(status, entries[status.name]):
            say(line)
    lacking = [status.name for status in chosen if status.state not in WHOLE]
    if given.names and lacking:
        print(f"\nnot here as published: {', '.join(lacking)}")
        return 1
    return 0


def run_corrupt(given: argparse.Namespace) -> None:
    """One bar over all corruptions and severities."""
    bar = CountBar(f"{given.name}, corrupted", "images")
    try:
        made = corrupt_test_set(
            given.name,
            _root(given),
            folder=given.folder,
            severities=numbers(given.severities, "--severities"),
            types=None if given.types is None else given.types.split(","),
            seed=given.seed,
            frost=given.frost,
            subset=given.subset,
            device=choose_device(given.device),
            progress=bar,
        )
    finally:
        bar.end()
    print(
        f"{made.name}: {len(made.corruptions)} corruptions, severities {', '.join(map(str, made.severities))}"
    )
    say(f"frost: {made.frost}")
    say(f"folder: {made.folder}")


def _root(given: argparse.Namespace) -> str | None:
    """What --data says; None leaves it to the environment variable, which must be set then."""
    if given.data is None and not os.environ.get(VARIABLE):
        raise ValueError(f"expected --data FOLDER, or {VARIABLE}, to say where the datasets lie, got neither")
    return None if given.data is None else str(given.data)


def _helped(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def _statuses(root: str | None) -> dict[str, Status]:
    """Empty when nobody said where the datasets lie: a list is still worth reading then."""
    try:
        return {status.name: status for status in check(root)}
    except ValueError:
        return {}


def _state(entry: Entry, status: Status | None) -> str:
    if status is None:
        return "bundled" if not entry.layouts else "?"
    return status.state


def _described(entry: Entry, status: Status | None) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "about": entry.about,
        "licence": entry.licence,
        "source": entry.page,
        "state": _state(entry, status),
        "where": None if status is None or status.where is None else str(status.where),
    }


def _told(status: Status, entry: Entry) -> list[str]:
    """What is there, what is missing, and the command that brings it."""
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
