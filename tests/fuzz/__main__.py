"""`make fuzz`: every area for its share of the time, then a table of what was counted.

python -m tests.fuzz [--seed N] [--minutes M] [--workers W] [AREA ...]
python -m tests.fuzz --case AREA:NUMBER             one case again

Exit code 1 where an answer is wrong, a traceback is seen, a file lies outside, or bits differ.
"""

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.tally import CASES_OF_A_SEED, FAULTS, Tally, run_cases

ROOT = Path(__file__).parents[2]
# parts of the time: by what a case costs and by how much there is to find
AREAS = {"maths": 2, "modules": 1.5, "commands": 3, "kills": 2, "threads": 1.5, "files": 3}
SHOWN = 12  # faults of an area that are told in full


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"{', '.join(AREAS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=4.0, help="in all (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="areas at once (default: %(default)s)")
    parser.add_argument("--case", metavar="AREA:NUMBER", help="repeat one case")
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # one area, in this process
    given = parser.parse_args()
    if unknown := set(given.areas) - set(AREAS):
        parser.error(f"expected areas among {', '.join(AREAS)}, got {', '.join(sorted(unknown))}")
    if given.case:
        area, _, number = given.case.partition(":")
        if area not in AREAS or not number.isdigit():
            parser.error(f"expected a case as in maths:17, got {given.case!r}")
        return tell([run_cases(area, check_of(area), [int(number)])])
    if given.seconds is not None:
        (area,) = given.areas
        tally = one_area(area, given.seed, given.seconds)
        sys.stdout.write(json.dumps({"counts": tally.counts, "faults": tally.faults}) + "\n")
        return 0
    areas = {area: AREAS[area] for area in given.areas or AREAS}
    unit = 60 * given.minutes * min(given.workers, len(areas)) / sum(areas.values())
    # the longest first, so that none is left alone at the end
    order = sorted(areas, key=lambda area: -areas[area])
    with ThreadPoolExecutor(given.workers) as pool:
        found = dict(
            zip(order, pool.map(lambda a: in_process(a, given.seed, unit * areas[a]), order), strict=True)
        )
    return tell([found[area] for area in areas])


def check_of(area: str):
    return importlib.import_module(f"tests.fuzz.{area}").check


def one_area(area: str, seed: int, seconds: float) -> Tally:
    """Cases of the seed for that time; at least one."""
    check, first = check_of(area), seed * CASES_OF_A_SEED
    start = time.monotonic()
    tally = run_cases(area, check, itertools.count(first), start + seconds)
    tally.counts["seconds"] = round(time.monotonic() - start)
    return tally


def in_process(area: str, seed: int, seconds: float) -> Tally:
    """An area in a process of its own: what it breaks there stays there."""
    command = [sys.executable, "-m", "tests.fuzz", area, "--seed", str(seed), "--seconds", str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    tally = Tally(area)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        tally.fault(FAULTS[1], f"the process ended with code {done.returncode}: {done.stderr[-2000:]}")
        return tally
    tally.counts.update(found["counts"])
    tally.faults = [(kind, what) for kind, what in found["faults"]]
    return tally


def tell(tallies: list[Tally]) -> int:
    """The table, the faults, and the four counts; 1 unless all are 0."""
    out = sys.stdout
    heads = ("area", "cases", "comparisons", "refusals", *FAULTS, "seconds")
    rows = [(t.area, *(str(t.counts.get(head, 0)) for head in heads[1:])) for t in tallies]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        out.write("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) + "\n")
    for tally in tallies:
        for kind, what in tally.faults[:SHOWN]:
            out.write(f"\n{tally.area}, {kind}: {what}\n")
    totals = {kind: sum(t.counts.get(kind, 0) for t in tallies) for kind in FAULTS}
    out.write("\n" + "".join(f"{kind}: {number}\n" for kind, number in totals.items()))
    return 1 if any(totals.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
