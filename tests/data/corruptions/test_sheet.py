"""The picture sheet; skipped without Pillow."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "corruption_sheet.py"


def test_the_sheet_is_drawn(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    sheet = tmp_path / "sheet.png"
    for arguments in ([], ["--image", str(sheet), "--side", "16", "--seed", "1"]):
        command = [sys.executable, str(SCRIPT), str(sheet), *arguments, "--zoom", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "19 corruptions at 5 severities" in done.stdout
        side = 16 if arguments else 32
        with image_module.open(sheet) as opened:
            assert opened.format == "PNG"
            assert opened.size == (130 + 6 * (side + 4), 14 + 19 * (side + 4))
