"""Pictures of what a newcomer sees first: README as a page, the quick demo in a terminal, under way and done.

    pip install playwright pyte markdown
    python scripts/first_screens.py [readme] [demo] [-o docs/images]

Needs a Chromium (`scripts/browser.sh`).  The demo really runs, in a pseudo-terminal of 100 x 44.
"""

import argparse
import fcntl
import html
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import markdown
import pyte
from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINES = 100, 44
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ font: 16px/1.5 sans-serif; color: #1f2328; max-width: 860px; margin: 24px auto; padding: 0 24px }}
h1, h2 {{ border-bottom: 1px solid #d1d9e0; padding-bottom: 6px }} img {{ max-width: 100% }}
pre {{ background: #f6f8fa; padding: 14px; border-radius: 6px; font-size: 13px; overflow: auto }}
code {{ font-family: monospace; background: #f6f8fa }} table {{ border-collapse: collapse }}
th, td {{ border: 1px solid #d1d9e0; padding: 5px 12px }} a {{ color: #0969da; text-decoration: none }}
</style>{body}"""
SCREEN = """<!doctype html><meta charset="utf-8"><body style="margin: 0"><pre style="margin: 0; padding: 14px;
background: #16181d; color: #d7dae0; font: 13px/1.3 monospace; display: inline-block">{body}</pre>"""


def main() -> int:
    """Make the pictures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="readme, demo (default: both)")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "docs" / "images", help="folder of pictures")
    arguments = parser.parse_args()
    what = arguments.what or ["readme", "demo"]
    if unknown := set(what) - {"readme", "demo"}:
        parser.error(f"expected readme or demo, got {', '.join(sorted(unknown))}")
    if "readme" in what:
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        body = markdown.markdown(text, extensions=["fenced_code", "tables"])
        shoot(PAGE.format(body=body), arguments.out / "readme-page.png", base=ROOT, width=960)
    if "demo" in what:
        screens = list(demo_screens())
        for name, screen in (("demo-under-way", screens[len(screens) // 2]), ("demo-done", screens[-1])):
            shoot(SCREEN.format(body=screen), arguments.out / f"{name}.png", base=ROOT, width=800, of="pre")
    return 0


def demo_screens() -> Iterator[str]:
    """Screens of `gpattention demo --quick`, one for every second, as HTML."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gpattention", "demo", "--quick"]
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        with subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environment, cwd=folder
        ) as process:
            os.close(child)
            last = time.monotonic()
            while True:
                try:
                    seen = os.read(parent, 2**16)
                except OSError:  # Linux says so when the other end closes
                    break
                if not seen:
                    break
                stream.feed(seen)
                if time.monotonic() - last > 1:
                    last = time.monotonic()
                    yield as_html(screen)
        if process.returncode:
            raise SystemExit(f"the demo ended with code {process.returncode}")
        yield as_html(screen)


def as_html(screen: pyte.Screen) -> str:
    """The screen's characters in their colours, without empty lines at the end."""
    lines = []
    for y in range(screen.lines):
        row, line = screen.buffer[y], ""
        for x in range(screen.columns):
            cell = row[x]
            colour = cell.fg if re.fullmatch("[0-9a-f]{6}", cell.fg) is None else f"#{cell.fg}"
            style = "" if colour == "default" else f"color: {colour.replace('bright', 'light')};"
            style += "font-weight: bold;" if cell.bold else ""
            line += (
                f'<span style="{style}">{html.escape(cell.data)}</span>' if style else html.escape(cell.data)
            )
        lines.append(line.rstrip())
    return "\n".join(lines).rstrip()


def shoot(page: str, out: Path, *, base: Path, width: int, of: str = "body") -> None:
    """Write a picture of the page in at most 256 colours."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", dir=base, encoding="utf-8") as file:
        file.write(page)
        file.flush()
        with sync_playwright() as playwright:
            found = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": width, "height": 800})
            tab.goto(f"file://{file.name}")
            picture = tab.locator(of).screenshot()
            browser.close()
    # pale grey behind code and reds of single words are lost in a palette chosen by area alone
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    few = whole.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    few.save(out, optimize=True)
    print(f"{out}: {out.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    sys.exit(main())
