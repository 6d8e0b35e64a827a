"""CoLA: plain tab-separated text, pooled and split as in the paper."""

from pathlib import Path

import pytest
import torch

from gpattention.data import load
from gpattention.data.cola import read_cola
from tests.data import official
from tests.refusals import refusals


def test_no_quote_rules_and_no_other_line_ends(tmp_path: Path) -> None:
    official.write_cola(tmp_path)
    texts = read_cola(tmp_path / "cola_public" / "tokenized" / "out_of_domain_dev.tsv")
    assert len(texts) == 4
    assert texts.sentences[1] == '"out_of_domain_dev 1 said \u2018no\u2019\u2028 to it .'
    assert texts.words[1][-3:] == ["to", "it", "."]
    assert texts.labels.tolist() == [0, 1, 0, 1]
    windows = tmp_path / "windows.tsv"
    windows.write_bytes(b"a\t1\t\tOne .\r\nb\t0\t*\tTwo .\r\n")
    assert read_cola(windows).sentences == ("One .", "Two .")


@pytest.mark.parametrize("folder", ["cola_public", "cola/cola_public", "CoLA/cola_public"])
def test_split(folder: str, tmp_path: Path) -> None:
    official.write_cola(tmp_path, folder=folder)
    data = load("cola", tmp_path, subset=True)
    assert data.name == "cola-subset"
    sizes = {name: len(part) for name, part in data.parts.items()}
    assert sizes == {"train": 26, "validation": 2, "test": 8, "ood/out-of-domain": 4}
    pooled = [s for part in (data.train, data.validation, data.test) for s in part.sentences]
    assert len(set(pooled)) == 36
    assert {s.split()[0] for s in pooled} == {'"in_domain_train', '"in_domain_dev'}
    for part in data.parts.values():  # labels stay with their sentences
        assert part.labels.tolist() == [int(s.split()[1]) % 2 for s in part.sentences]
    other = load("cola", tmp_path, seed=1, subset=True)
    assert set(other.test.sentences) != set(data.test.sentences)
    assert load("cola", tmp_path, subset=True).train.sentences == data.train.sentences
    raw = load("cola", tmp_path, subset=True, form="raw")
    assert raw.train.sentences == tuple(s.replace(" .", ".") for s in data.train.sentences)
    assert raw.train.labels.equal(data.train.labels)


def test_sizes_of_the_paper(tmp_path: Path) -> None:
    official.write_cola(tmp_path, (8551, 527, 516))
    data = load("cola", tmp_path)
    sizes = {name: len(part) for name, part in data.parts.items()}
    assert sizes == {"train": 6536, "validation": 726, "test": 1816, "ood/out-of-domain": 516}
    assert data.name == "cola"
    assert data.train.labels.dtype == torch.int64
    assert data.classes == ("unacceptable", "acceptable")


def read_line(folder: Path, line: str) -> None:
    (folder / "x.tsv").write_text(f"a\t1\t\tGood .\n{line}\n")
    read_cola(folder / "x.tsv")


def load_whole(root: Path, **options: str) -> None:
    official.write_cola(root)
    load("cola", root, **options)


LINE = r"x.tsv, line [23]: expected source, label 0 or 1, mark and sentence"
test_refusals = refusals([
    (lambda folder: read_line(folder, "a\t1\tNo mark ."), LINE, ""),
    (lambda folder: read_line(folder, "a\t2\t\tA label ."), LINE, ""),
    (lambda folder: read_line(folder, 'a\t1\t\tA\ttab "'), LINE, ""),
    (lambda root: load_whole(root), r"\(8551, 527, 516\) sentences", r"\(30, 6, 4\): pass subset"),
    (lambda root: load_whole(root, form="words"), "form to be one of tokenized, raw", "words"),
])  # fmt: skip


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cola_public or cola/cola_public .* get\('cola', root\)"):
        load("cola", tmp_path)
    official.write_cola(tmp_path)
    (tmp_path / "cola_public" / "raw" / "in_domain_dev.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"in_domain_dev\.tsv"):
        load("cola", tmp_path, form="raw")
