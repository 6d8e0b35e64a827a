"""Every Python block of the README and of the guides runs; the README's table tells the truth."""

import re
from pathlib import Path

import pytest
import torch

from gpattention.attention import attention_class, list_attention

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/attention.md",
    "docs/models.md",
    "docs/training.md",
    "docs/metrics.md",
    "docs/data.md",
    "docs/corruptions.md",
    "docs/evaluation.md",
    "docs/recipes.md",
    "docs/paper-tables.md",
    "docs/report.md",
    "docs/speed.md",
)
BUILT_IN = ("cgp", "direct", "kernel", "scgp", "sgpa", "softmax", "softmax-gp")


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks, f"{page} shows no code"
    monkeypatch.setattr("gpattention.attention.registry._KINDS", dict(_kinds()))
    namespace: dict[str, object] = {}
    with torch.random.fork_rng():
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)


def _kinds() -> dict[str, type]:
    return {kind: attention_class(kind) for kind in BUILT_IN}


def test_the_guide_has_an_example_of_every_kind() -> None:
    guide = (ROOT / "docs/attention.md").read_text()
    for kind in BUILT_IN:
        section = re.search(rf"\n## {kind}\n(.*?)(?=\n## |\Z)", guide, re.DOTALL)
        assert section, f"no section on {kind}"
        assert f'"{kind}"' in section.group(1)
        assert "```python" in section.group(1)


def test_the_readme_table_agrees_with_the_registry() -> None:
    rows = {}
    for line in (ROOT / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].strip("`") in BUILT_IN and len(cells) == 7:
            rows[cells[0].strip("`")] = cells[1:]
    assert set(rows) == set(BUILT_IN)
    assert set(BUILT_IN) <= set(list_attention())
    for kind, (draws, cross, causal, rows_too, regularizers, _) in rows.items():
        cls = attention_class(kind)
        assert (draws == "yes") == cls.draws, kind
        assert (cross == "yes") == cls.crosses, kind
        assert (causal == "yes") == cls.causal_form, kind
        assert (rows_too == "yes") == cls.normalizes, kind
        assert tuple(regularizers.split(", ")) == cls.regularizers, kind
