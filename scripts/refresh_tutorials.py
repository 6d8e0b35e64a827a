"""Run tutorials as a reader would, write what their blocks print into them, and keep the pictures they save.

    python scripts/refresh_tutorials.py                                   all of docs/tutorials
    python scripts/refresh_tutorials.py docs/tutorials/ood-detection.md   one page
    python scripts/refresh_tutorials.py docs/notebooks/vit.ipynb          a notebook (nbclient, ipykernel)

The Python blocks of a page and the console blocks marked `<!-- tests: run -->` run in order, in a folder
that holds `recipes`.  Every block of the language `output` becomes what the block above it printed; a PNG
or SVG that a block saved and the page shows goes to docs/images.  tests/test_docs.py runs the same blocks.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from gpattention.cli import main as run_command

ROOT = Path(__file__).resolve().parent.parent
PAGES, IMAGES = ROOT / "docs" / "tutorials", ROOT / "docs" / "images"
FENCE = re.compile(
    r"((?:<!-- tests: (?:run|long|fragment) -->\s*)?)^```(python|console|output)\n(.*?)^```", re.M | re.S
)
LARGEST = 100_000  # bytes of a picture


def main() -> None:
    """Read the command line and refresh the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="default: every tutorial")
    for page in parser.parse_args().pages or sorted(PAGES.glob("*.md")):
        start = time.perf_counter()
        refresh_notebook(page.resolve()) if page.suffix == ".ipynb" else refresh(page.resolve())
        print(f"{page}: {time.perf_counter() - start:.0f} s")


def refresh(page: Path) -> None:
    """Run one page and rewrite it."""
    os.environ["MPLBACKEND"] = "agg"  # notebooks have a backend of their own
    text = page.read_text()
    namespace: dict[str, Any] = {"__name__": "docs"}
    printed = ""

    def renewed(found: re.Match[str]) -> str:
        nonlocal printed
        order, language, body = found.groups()
        if language == "output":
            return f"{order}```output\n{printed.rstrip()}\n```"
        if "fragment" not in order and (language == "python" or "run" in order):
            printed = run(language, body, page.name, namespace)
        return found.group()

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("recipes").symlink_to(ROOT / "recipes")
        page.write_text(FENCE.sub(renewed, text))
        keep_pictures(Path(folder), text)


def refresh_notebook(page: Path) -> None:
    """Run a notebook in the folder of the call, where weights may lie, and keep what it shows."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(page, as_version=4)
    NotebookClient(notebook, timeout=7200, record_timing=False).execute()
    notebook.metadata.language_info = {"name": "python"}  # and no version, which differs between machines
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, page)


def run(language: str, body: str, name: str, namespace: dict[str, Any]) -> str:
    """What a block prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if language == "python":
            exec(compile(body, name, "exec"), namespace)
        for line in body.replace("\\\n", " ").splitlines() if language == "console" else ():
            if words := shlex.split(line, comments=True):
                code = run_command(words[1:])
                if code != 0:
                    raise RuntimeError(f"exit code {code}: {line}\n{printed.getvalue()}")
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def keep_pictures(folder: Path, text: str) -> None:
    """Those which the page shows."""
    for name in re.findall(r"\]\(\.\./images/([\w.-]+)\)", text):
        saved = folder / name
        if saved.is_file():
            if saved.stat().st_size > LARGEST:
                raise RuntimeError(f"expected {name} below {LARGEST} bytes, got {saved.stat().st_size}")
            IMAGES.mkdir(exist_ok=True)
            shutil.copy(saved, IMAGES / name)


if __name__ == "__main__":
    main()
