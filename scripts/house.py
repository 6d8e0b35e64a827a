"""The size of the house: files and lines per room, and how many files a common task walks through.

    python scripts/house.py            lines of code, files, medians, tests; exit code 1 beyond the limits
    python scripts/house.py --walks    modules whose code runs in train, evaluate and attach().predict

Lines of code are those that are neither blank, comment nor docstring.
"""

import argparse
import ast
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gpattention"
SHORT = 60  # lines of a file that may be a fragment
LIMITS = {"files": 220, "code": 27_000, "median": 120, "short": 0.12, "tests": 32_000}
# The limits of code and tests are those of the first house.  These files, each whole, and their tests came
# with later work; the two are counted without them as well.
LATER = """
attention/kep_svgp.py cli/tokens.py data/imdb.py data/text_shifts.py evaluation/suites/criterion.py
evaluation/suites/examples.py gp/causal.py gp/closed.py gp/roots.py gp/singular.py graphs.py
hosts/families/decoders.py hosts/generating.py hosts/language.py hosts/moments.py hosts/painting.py
hosts/sharing.py hosts/tokens.py hosts/usual.py metrics/resampling.py models/encoder.py
models/moments.py models/signals.py ops/operators.py reports/sections/verdict.py strangeness
studies/ray_cluster.py studies/verdicts.py
"""
LATER_TESTS = """
cli/test_tokens.py data/test_imdb.py data/test_text_shifts.py evaluation/suites/test_criterion.py
gp/test_causal_variance.py gp/test_closed.py gp/test_singular.py hosts/decoder_hosts.py
hosts/test_decoders.py hosts/test_language.py hosts/test_moments.py hosts/test_sharing.py
hosts/test_signals.py hosts/test_usual.py metrics/test_resampling.py models/test_encoder.py
models/test_moments.py models/test_signals.py ops/test_operators.py oracles/causal_rows.py
oracles/moments.py oracles/signals.py oracles/singular.py oracles/strangeness.py strangeness
studies/test_ray_cluster.py studies/test_verdicts.py test_graphs.py
"""


def code_lines(path: Path) -> int:
    """Lines that are neither blank, comment nor docstring."""
    text = path.read_text(encoding="utf-8")
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in strings
        for number, line in enumerate(text.splitlines(), 1)
    )


def lines_of(path: Path) -> int:
    """All lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def total(count: Callable[[Path], int], root: Path, names: Sequence[str] = (".",)) -> int:
    """The sum of a count over the files below these names."""
    places = [root / name for name in names]
    if missing := [place for place in places if not place.exists()]:
        raise FileNotFoundError(f"{missing[0]} is listed in {Path(__file__).name} and not there")
    return sum(
        count(path) for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))
    )


def sizes() -> int:
    """Print a table of rooms; 1 if the house is larger than it should be."""
    rooms: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "(top)", []).append(path)
    print(f"{'room':<12}{'files':>6}{'lines':>7}{'code':>7}{'<60':>5}{'tests':>7}")
    lengths, code = [], 0
    for room, paths in rooms.items():
        here = [lines_of(path) for path in paths]
        lines = sum(map(code_lines, paths))
        beside = sum(lines_of(path) for path in (ROOT / "tests" / room).rglob("*.py"))
        print(
            f"{room:<12}{len(paths):>6}{sum(here):>7}{lines:>7}{sum(n < SHORT for n in here):>5}{beside:>7}"
        )
        lengths += here
        code += lines
    found = {
        "files": len(lengths),
        "code": code,
        "median": statistics.median(lengths),
        "short": sum(n < SHORT for n in lengths) / len(lengths),
        "tests": total(lines_of, ROOT / "tests"),
    }
    first = {
        "code": code - total(code_lines, PACKAGE, LATER.split()),
        "tests": found["tests"] - total(lines_of, ROOT / "tests", LATER_TESTS.split()),
    }
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    size = sum((ROOT / name.decode()).stat().st_size for name in tracked.split(b"\0") if name)
    failed = False
    for name, value in found.items():
        kept = value >= LIMITS[name] if name == "median" else value <= LIMITS[name]
        failed |= not kept
        shown = f"{value:.3f}" if name == "short" else f"{value:,.0f}"
        print(f"{name:<8}{shown:>9}   limit {LIMITS[name]:,}{'' if kept else '   beyond it'}")
    for name, value in first.items():
        print(f"{name:<8}{value:>9,}   limit {LIMITS[name]:,}, without the files that came with later work")
    print(f"tracked {size / 2**20:>9.1f}   MiB")
    return int(failed)


def traced(work: Callable[[], object]) -> set[str]:
    """Files of the package whose functions run in this work."""
    seen: set[str] = set()
    root = str(PACKAGE)

    def note(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(root):
            seen.add(code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


def walks() -> int:
    """Print how many files a training, an evaluation and a prediction of an attached model run through."""
    import torch
    from torch import nn

    import gpattention
    from gpattention.cli import main

    small = ["phases.kernel_epochs=1", "phases.epochs=1", "model.config.width=16"]
    changes = [word for change in small for word in ("--set", change)]
    recipe = str(ROOT / "recipes" / "digits-cgp.toml")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in ("first", "second"):  # the first one imports what is imported late
            words = ["--run", f"{folder}/{run}", "--device", "cpu"]
            found["train"] = traced(lambda words=words: main(["train", recipe, *changes, *words]))
            words = [f"{folder}/{run}", "--suite", "clean", "--limit", "50"]
            found["evaluate"] = traced(lambda words=words: main(["evaluate", *words]))
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    host = nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(320, 3)
    )
    torch.manual_seed(0)
    handle = gpattention.attach(host.eval())
    handle.predict(torch.randn(4, 10, 32), samples=4)
    found["attach.predict"] = traced(lambda: handle.predict(torch.randn(4, 10, 32), samples=4))
    for name, files in found.items():
        print(f"{name:<16}{len(files):>4} files")
    return 0


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walks", action="store_true", help="trace train, evaluate and attach().predict")
    return walks() if parser.parse_args().walks else sizes()


if __name__ == "__main__":
    sys.exit(main())
