"""The blocks of docs/convert.md and docs/export.md run."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NEEDS = {
    "convert.md": ("transformers", "accelerate", "pytorch_lightning"),
    "export.md": ("onnxruntime", "onnxscript"),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", NEEDS)
def test_code_blocks_run(page: str) -> None:
    for module in NEEDS[page]:
        pytest.importorskip(module)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert len(blocks) > 3
    namespace: dict[str, object] = {"__name__": "docs"}
    with torch.random.fork_rng():
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
