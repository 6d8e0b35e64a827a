"""The sheet of corruptions."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
image_module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
if not SCRIPTS.exists():
    pytest.skip("scripts are not part of a source distribution", allow_module_level=True)


def run(*arguments: object) -> str:
    command = [sys.executable, SCRIPTS / "corruption_sheet.py", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_sheet_is_drawn(tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    for side, arguments in ((32, []), (16, ["--image", sheet, "--side", "16", "--seed", "1"])):
        printed = run(sheet, *arguments, "--zoom", "1")
        assert "19 corruptions at 5 severities" in printed
        with image_module.open(sheet) as opened:
            assert opened.format == "PNG"
            assert opened.size == (130 + 6 * (side + 4), 14 + 19 * (side + 4))
