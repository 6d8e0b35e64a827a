"""Walk docs/walk.md as a stranger would, in an empty folder, and write the time of every command into it.

    python scripts/walk.py --hardware "2 CPU cores, 24 GB"

The first Python block becomes the file that its console block runs.  REPOSITORY is this checkout.
"""

import argparse
import datetime
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "walk.md"
BLOCK = re.compile(r"^```(python|console|output)\n(.*?)^```", re.M | re.S)
TIMES = re.compile(r"(<!-- walk: times -->\n).*?(<!-- walk: end -->)", re.S)


def main() -> None:
    """Read the page, type its commands, write their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", required=True, help="in words")
    given = parser.parse_args()
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        measured, printed = walk(text, Path(folder))
    rows = "\n".join(f"| `{line}` | {seconds:.0f} s |" for line, seconds in measured)
    today = datetime.datetime.now(datetime.UTC).date()
    total = sum(seconds for _, seconds in measured)
    note = f"{given.hardware}, {today}, by `python scripts/walk.py`: times of that machine and its network"
    note += f", {total:.0f} s in all."
    table = f"\n| command | took |\n|---|--:|\n{rows}\n\n{note}\n\n"
    text = TIMES.sub(lambda found: found[1] + table + found[2], text)
    text = re.sub(r"(?<=```output\n).*?(?=^```)", lambda _: printed, text, count=1, flags=re.M | re.S)
    PAGE.write_text(text)
    print(note)


def walk(text: str, folder: Path) -> tuple[list[tuple[str, float]], str]:
    """Commands with their seconds, and what the Python file printed."""
    blocks = BLOCK.findall(text)
    commands = [line for kind, body in blocks if kind == "console" for line in body.splitlines()]
    code = next(body for kind, body in blocks if kind == "python")
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    shell = subprocess.Popen(
        ["bash"], cwd=folder, env=environment, text=True, bufsize=1,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert shell.stdin is not None
    assert shell.stdout is not None
    measured, printed = [], ""
    for command in commands:
        if command.endswith("python flag.py"):
            (folder / "gpattention" / "flag.py").write_text(code)
        start, lines = time.perf_counter(), []
        typed = command.replace("REPOSITORY", str(ROOT))
        shell.stdin.write(f"{typed} </dev/null; code=$?; echo; echo @@ $code\n")
        for line in shell.stdout:
            if line.startswith("@@"):
                break
            lines.append(line)
        said = "".join(lines).strip()
        measured.append((command, time.perf_counter() - start))
        print(f"{measured[-1][1]:6.1f} s  {command}\n{said[-1500:]}", flush=True)
        if line.strip() != "@@ 0":
            raise RuntimeError(f"{command}: {line.strip()}")
        if command.endswith("python flag.py"):
            printed = said + "\n"
    shell.stdin.close()
    return measured, printed


if __name__ == "__main__":
    main()
