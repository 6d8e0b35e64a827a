"""Tables of the decoders' benchmark from its records alone: `benchmarks/decoders.py tables`."""

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "decoders.py"


@pytest.fixture(scope="module")
def decoders() -> ModuleType:
    """The script, loaded by its path."""
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("benchmark_decoders", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def record_of(ours: list[float]) -> dict[str, Any]:
    """Seeds whose reference has 70, 71, ... everywhere, and one more score."""
    runs = []
    for seed, own in enumerate(ours):
        usual = 70.0 + seed

        def both(reference: str, names: tuple[str, ...], usual: float = usual, own: float = own) -> Any:
            return {reference: dict.fromkeys(names, usual), "ours": dict.fromkeys(names, own)}

        runs.append(
            {
                "seed": seed, "fitted texts": 6, "kept back": 4, "test texts": 8, "wrong": 0.5,
                "errors": both("1 - top probability", ("auroc", "error")),
                "foreign": both("perplexity", ("code", "mean")),
                "spans": both("surprise", ("code", "code, 9 tokens")),
                "flags": {"combined": {"reviews": 5.0, "code": 60.0}},
                "swaps": both("surprise of the name", ("auroc", "pairs")),
            }
        )  # fmt: skip
    about = {
        "tokens": 16,
        "device": "none",
        "torch": "0",
        "transformers": "0",
        "date": "2026-01-01",
        "seconds": 1.0,
    }
    return {**about, "runs": runs}


def test_differences_are_paired_and_judged_by_students_t(decoders: ModuleType) -> None:
    """Beyond 4.303 standard errors with three seeds, no nearer."""
    clear = decoders._table_rows(record_of([72.0, 73.1, 74.0])["runs"], "errors")
    unclear = decoders._table_rows(record_of([72.0, 70.0, 75.0])["runs"], "errors")
    assert [row[0] for row in clear] == ["1 - top probability", "ours"]
    assert clear[1][2:4] == (3, pytest.approx(73.0333, abs=1e-3))
    assert clear[1][5] == pytest.approx(2.0333, abs=1e-3)
    assert clear[1][7] == "better"
    assert unclear[1][7] == ""
    assert clear[0][7] == ""  # the reference itself


def test_one_command_writes_everything_from_records(decoders: ModuleType, tmp_path: Path) -> None:
    """Tables, numbers and picture; other records beside them are left alone."""
    (tmp_path / "some.json").write_text(json.dumps(record_of([60.0, 61.0, 62.0])))
    (tmp_path / "other.json").write_text(json.dumps({"unlike": 1}))
    decoders.tables(Namespace(folder=str(tmp_path)))
    text = (tmp_path / "tables.md").read_text("utf-8")
    assert "| ours | 61.0 ± 0.6 | -10.0 ± 0.0 worse |" in text
    assert "## some" in text
    assert "## other" not in text
    assert len((tmp_path / "tables.csv").read_text("utf-8").splitlines()) > 10
    assert (tmp_path / "tables.png").stat().st_size > 1000


def test_one_seed_has_no_error(decoders: ModuleType, tmp_path: Path) -> None:
    """And no difference is judged."""
    (tmp_path / "some.json").write_text(json.dumps(record_of([60.0])))
    decoders.tables(Namespace(folder=str(tmp_path)))
    assert "| ours | 60.0 |  |" in (tmp_path / "tables.md").read_text("utf-8")


def test_matched_auroc_compares_only_rows_at_like_positions(decoders: ModuleType) -> None:
    """A score that only tells the position is worth nothing, and one class alone has no AUROC."""
    torch = pytest.importorskip("torch")
    place = torch.tensor([1, 2, 1, 2, 40, 41, 40, 41])
    labels = torch.tensor([True, False, True, False, True, True, True, False])
    value, _ = decoders.matched_auroc(torch.where(place < 10, 0.0, 1.0), labels, place)
    assert value == pytest.approx(0.5)
    none, _ = decoders.matched_auroc(place.float(), torch.ones_like(labels), place)
    assert none != none
