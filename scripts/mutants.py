"""Plant known bugs, one at a time, in a copy of the project and check that the tests notice.

Each file tests/mutants/*.patch is a small plausible bug with a first line `# tests: PATHS` that names
the tests which must fail.  Exit status 1 if a mutant survives or a patch no longer applies.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "pyproject.toml", "README.md")


def main() -> int:
    """Run every mutant, print a table, name the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants to run (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="mutants tested at once (default 2)")
    arguments = parser.parse_args()
    patches = sorted((ROOT / "tests" / "mutants").glob("*.patch"))
    if arguments.names:
        unknown = set(arguments.names) - {p.stem for p in patches}
        if unknown:
            parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
        patches = [p for p in patches if p.stem in arguments.names]
    print(f"{len(patches)} mutants; first the tests they must break, unharmed")
    needed = " ".join(dict.fromkeys(t for p in patches for t in tests_of(p)))
    healthy = run_tests(None, needed.split())
    if healthy.returncode:
        print(healthy.stdout[-3000:])
        print("the tests fail without any mutant: nothing to learn")
        return 1
    with ThreadPoolExecutor(arguments.workers) as pool:
        verdicts = list(pool.map(verdict, patches))
    for patch, (killed, witness) in zip(patches, verdicts, strict=True):
        print(f"{'killed' if killed else 'SURVIVED':>9}  {patch.stem:<40} {witness}")
    survivors = sum(not killed for killed, _ in verdicts)
    print(f"{len(patches) - survivors} of {len(patches)} mutants killed")
    return 1 if survivors else 0


def tests_of(patch: Path) -> list[str]:
    """The tests named in the patch's first line."""
    first = patch.read_text().splitlines()[0]
    marker = "# tests: "
    if not first.startswith(marker):
        raise SystemExit(f"{patch.name}: expected a first line '{marker}PATHS', got {first!r}")
    return first.removeprefix(marker).split()


def verdict(patch: Path) -> tuple[bool, str]:
    """Whether the tests notice the bug, and which one did first."""
    result = run_tests(patch, tests_of(patch))
    if result.returncode == 1:
        failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
        return True, failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else "failed"
    if result.returncode == 0:
        return False, "no test failed"
    return False, f"could not run: {result.stdout.strip().splitlines()[-1:] or result.stderr[-200:]}"


def run_tests(patch: Path | None, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """The tests on a copy of the project with the patch applied; 1 = a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        if patch is not None:
            applied = subprocess.run(
                ["git", "apply", "--unsafe-paths", f"--directory={copy}", str(patch)],
                cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if applied.returncode:
                return subprocess.CompletedProcess([], 2, applied.stderr or "patch failed", "")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, "-m", "not slow and not gpu", *tests],
            cwd=copy, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
