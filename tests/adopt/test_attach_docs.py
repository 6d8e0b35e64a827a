"""Every block of the guide to attach runs."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "attach.md"


def test_code_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the page saves
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, object] = {}
    with torch.random.fork_rng():
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), namespace)
