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


def test_pairs_that_were_asked_for_are_compared(decoders: ModuleType, tmp_path: Path) -> None:
    """Seed by seed, of scores that the records know; the layer at 3/4 of the depth is the third of four."""
    record = record_of([72.0, 73.1, 74.0])
    ours, base = "... and ours, all heads", "fitted: entropy, top, margin, position"
    for n, run in enumerate(record["runs"]):
        run["errors"] |= {ours: {"auroc": 60.0 + 3 * n, "error": 1.0}, base: {"auroc": 59.0 + 3 * n}}
        layers = {f"hidden states, layer {layer}": {"code": layer, "mean": layer} for layer in (1, 2, 3, 4)}
        run["foreign"] |= layers | {"combined of the handle": {"code": 50.0, "mean": (2.0, 50.0, 90.0)[n]}}
    (found,) = decoders._asked_rows(record["runs"], "errors")
    assert found == (ours, base, "auroc", 3, 63.0, pytest.approx(3**0.5), 1.0, 0.0, "better")
    of_texts = decoders._asked_rows(record["runs"], "foreign")
    assert [row[:3] for row in of_texts] == [
        ("combined of the handle", "hidden states, layer 3", what) for what in ("code", "mean")
    ]
    assert [row[-1] for row in of_texts] == ["better", ""]
    (tmp_path / "some.json").write_text(json.dumps(record))
    decoders.tables(Namespace(folder=str(tmp_path)))
    text = (tmp_path / "tables.md").read_text("utf-8")
    assert f"| {ours} - {base} | +1.00 ± 0.00 better |" in text
    assert f'"errors, differences","{ours} - {base}",auroc,3,63.0' in (tmp_path / "tables.csv").read_text(
        "utf-8"
    )


def test_costs_are_tables_without_what_was_not_measured(decoders: ModuleType, tmp_path: Path) -> None:
    """And resident memory is said to be that of the whole process."""
    about = {"device": "CPU", "threads": 1, "torch": "0", "transformers": "0", "date": "2026-01-01"}
    cost = {"float32": {"plain pass": 1.5, "plain pass, MiB": float("nan")}}
    (tmp_path / "cost.json").write_text(json.dumps({**about, "cost": cost}))
    decoders.tables(Namespace(folder=str(tmp_path)))
    text = (tmp_path / "tables.md").read_text("utf-8")
    assert "| plain pass | 1.5 |" in text
    assert "plain pass, MiB" not in text
    assert "MiB at the peak of the whole process." in text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_the_peak_of_a_call_is_its_own(decoders: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier call took and gave back does not count."""
    monkeypatch.setattr(
        decoders.ctypes, "CDLL", lambda _: None
    )  # the allocator stays that of the other tests
    nothing = decoders.resident_peak(lambda: None)
    much = decoders.resident_peak(lambda: bytearray(64 * 2**20))
    again = decoders.resident_peak(lambda: None)
    assert 60 < much - nothing < 80
    assert abs(again - nothing) < 10


@pytest.mark.filterwarnings("ignore:log variances of a handle")
def test_thinned_keys_are_reported_with_their_excess(decoders: ModuleType) -> None:
    """A variance given some of the keys is never smaller, and by how much it is larger is said."""
    import gpattention
    from tests.hosts.decoder_hosts import decoder, texts

    handle, nearly = (gpattention.attach(decoder("grouped llama"), max_keys=m) for m in (2, 7))
    found = decoders.excess_table(handle, texts()["input_ids"])
    none = decoders.excess_table(nearly, texts()["input_ids"])
    assert found["least"] > -1e-5
    assert found["largest"] > found["mean"] > 1e-4
    assert none["largest"] < found["largest"]


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
