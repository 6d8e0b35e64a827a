"""The blocks of docs/attach.md, docs/convert.md and docs/export.md run."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "needs"),
    [
        ("attach.md", ()),
        pytest.param(
            "convert.md", ("transformers", "accelerate", "pytorch_lightning"), marks=pytest.mark.slow
        ),
        pytest.param("export.md", ("onnxruntime", "onnxscript"), marks=pytest.mark.slow),
    ],
)
def test_code_blocks_run(
    page: str, needs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in needs:
        pytest.importorskip(module)
    if page == "attach.md":
        monkeypatch.chdir(tmp_path)  # the page saves
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(blocks) > 3
    namespace: dict[str, object] = {"__name__": "docs"}
    with torch.random.fork_rng():
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
