"""Sentences to inputs: words, encoding, frozen vectors and where they come from."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention.data import load
from gpattention.data.cola import FILES, read_cola
from gpattention.experiments.inputs import contextual as places
from gpattention.experiments.inputs.contextual import (
    Contextual,
    cache_folder,
    contextual_from_dict,
    find_path,
    open_contextual,
)
from gpattention.experiments.inputs.texts import (
    TextEncoder,
    encode_texts,
    sentence_words,
    text_training_data,
    with_words,
)
from gpattention.models import TextConfig, TextTransformer
from gpattention.models.embeddings import NoEmbedding, Vocabulary
from tests.experiments.tiny_cola import NAMES, write_tiny_cola

GLOVE = "the 1 0\ncat 0 1\nsat 2 2\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Our friends won't buy this, let alone that.", "our friends wo n't buy this , let alone that ."),
        ("One more and I'm giving up.", "one more and i 'm giving up ."),
        ("She'll say they\u2019ve left; who'd know?", "she 'll say they 've left ; who 'd know ?"),
        ("José cannot pay $100,000 to Mrs. Parker.", "josé can not pay $ 100,000 to mrs. parker ."),
        ('Susan said "shut up".', "susan said `` shut up '' ."),
        ("A well-known o'clock (really)!", "a well-known o'clock ( really ) !"),
        ("Jose\u0301", "josé"),  # the accent typed apart is the same word
        ("`` r ''", "`` r ''"),
        ("...", ". . ."),
        ("  ", ""),
    ],
)
def test_words_of_a_sentence(text: str, words: str) -> None:
    assert sentence_words(text) == words.split()


def test_words_stay_what_they_are_when_cut_again() -> None:
    text = "The man's well-known dog didn't (yet) bark at 3.5 o'clock, \"did it\"?"
    once = sentence_words(text)
    assert sentence_words(" ".join(once)) == once


def test_raw_files_give_the_words_of_the_tokenized_ones(tmp_path: Path) -> None:
    folder = write_tiny_cola(tmp_path) / "cola_public"
    assert {f"{name}.tsv" for name in NAMES} == set(FILES)
    for file in FILES:
        cut = [sentence_words(sentence) for sentence in read_cola(folder / "raw" / file).sentences]
        assert cut == read_cola(folder / "tokenized" / file).words


def test_encoder_fills_every_batch_up_to_one_length() -> None:
    vocabulary = Vocabulary.from_sentences([["the", "cat", "sat"]])
    encode = TextEncoder(vocabulary, NoEmbedding(), 5)
    inputs = encode([["the", "dog"], ["sat"]])
    assert set(inputs) == {"tokens", "padding_mask"}
    assert inputs["tokens"].tolist() == [
        [vocabulary.index("the"), 1, 0, 0, 0],
        [vocabulary.index("sat"), 0, 0, 0, 0],
    ]
    assert torch.equal(inputs["padding_mask"], inputs["tokens"] == 0)
    with pytest.raises(ValueError, match="at most 5 words, got one of 6"):
        encode([["the"] * 6])


@pytest.fixture
def glove(tmp_path: Path) -> Path:
    file = tmp_path / "vectors.txt"
    file.write_text(GLOVE)
    return file


def test_encoded_data_and_its_facts_make_a_model(tmp_path: Path, glove: Path) -> None:
    data = load("cola", write_tiny_cola(tmp_path), subset=True)
    wanted = Contextual("glove", str(glove))
    encoded, encoder = encode_texts(data, wanted, {"min_count": 1})
    training = text_training_data(encoded, encoder)
    longest = max(len(words) for part in data.parts.values() for words in part.words)
    assert training.facts == {
        "classes": 2, "vocabulary": len(encoder.vocabulary), "contextual_width": 2, "max_length": longest,
    }  # fmt: skip
    for part in encoded.parts.values():
        assert part.inputs["tokens"].shape == (len(part), longest)
        assert part.inputs["contextual"].shape == (len(part), longest, 2)
        where = torch.tensor([[w == "sat" for w in [*s, *[""] * (longest - len(s))]] for s in part.words])
        assert torch.equal(part.inputs["contextual"][where], torch.full((int(where.sum()), 2), 2.0))
    model = TextTransformer(TextConfig(**training.facts, width=8, heads=2, attention="softmax"))
    assert isinstance(training.train, dict)
    assert model(training.train).logits.shape == (len(data.train), 2)


def test_the_vocabulary_is_the_training_part_s(tmp_path: Path) -> None:
    data = load("cola", write_tiny_cola(tmp_path), subset=True)
    _, encoder = encode_texts(data, Contextual(), {})
    assert set(encoder.vocabulary.words) == {w for s in data.train.words for w in s}
    _, small = encode_texts(data, Contextual(), {"max_size": 5})
    assert len(small.vocabulary) == 5
    with pytest.raises(ValueError, match="among min_count, max_size, lowercase, got 'size'"):
        encode_texts(data, Contextual(), {"size": 5})
    with pytest.raises(ValueError, match="vocabulary to be a table of min_count, max_size, lowercase, got 3"):
        encode_texts(data, Contextual(), 3)  # type: ignore[arg-type]


def test_with_words_cuts_every_part(tmp_path: Path) -> None:
    root = write_tiny_cola(tmp_path)
    raw, cut = load("cola", root, subset=True, form="raw"), load("cola", root, subset=True)
    changed = with_words(raw)
    for name, part in changed.parts.items():
        assert part.words == cut.parts[name].words
        assert torch.equal(part.labels, raw.parts[name].labels)


def test_contextual_round_trip_and_refusals() -> None:
    plain = {"kind": "hf", "path": "here", "layer": -2, "cache": "there"}
    assert contextual_from_dict(plain).to_dict() == plain
    assert contextual_from_dict({}) == Contextual()
    assert not contextual_from_dict({"kind": "learned"}).used
    for wrong, message in (
        ({"kind": "bert"}, "one of none, learned, glove, hf, elmo, got 'bert'"),
        (
            {"kind": "glove", "path": "x", "layer": 1},
            "among kind, path, cache, width, lowercase, got 'layer'",
        ),
        ({"kind": "hf"}, "expected a path for contextual 'hf', got None"),
        ({"kind": "none", "path": "x"}, "expected no path for contextual 'none', got 'x'"),
        ("glove", "expected contextual to be a table with a kind, got 'glove'"),
    ):
        with pytest.raises(ValueError, match=message):
            contextual_from_dict(wrong)


def test_paths_are_found_here_in_the_data_and_in_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glove: Path
) -> None:
    monkeypatch.delenv("GPATTENTION_DATA", raising=False)
    assert find_path(str(glove)) == glove
    assert find_path("vectors.txt", tmp_path) == glove
    monkeypatch.setenv("GPATTENTION_DATA", str(tmp_path))
    assert find_path("vectors.txt") == glove
    with pytest.raises(FileNotFoundError, match=r"'nothing\.txt': no nothing\.txt and .*nothing\.txt"):
        find_path("nothing.txt")
    package = tmp_path / "carrier" / "model"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise RuntimeError('a path needs no import')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert find_path("package:carrier/model") == package
    with pytest.raises(FileNotFoundError, match="to be in its package"):
        find_path("package:carrier/other")
    for absent in ("package:not_installed_here/model", "package:../model"):
        with pytest.raises(FileNotFoundError, match="to name an installed package"):
            find_path(absent)


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPATTENTION_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(Contextual()) == tmp_path / "gpattention" / "embeddings"
    monkeypatch.setenv("GPATTENTION_CACHE", "/elsewhere")
    assert cache_folder(Contextual()) == Path("/elsewhere/embeddings")
    assert cache_folder(Contextual("hf", "x", cache="/mine")) == Path("/mine")


class _Counting:
    """Stands for an encoder of transformers: a word's vector is its length."""

    width, name, computed = 1, "counting", 0

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options

    def embed(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        _Counting.computed += len(sentences)
        return [torch.tensor([[float(len(word))] for word in sentence]) for sentence in sentences]


def test_encoders_compute_each_sentence_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "HuggingFaceEmbedding", _Counting)
    monkeypatch.setattr(_Counting, "computed", 0)
    told: list[tuple[int, int]] = []
    wanted = Contextual("hf", str(tmp_path), cache=str(tmp_path / "cache"), options={"layer": 0})
    for _ in range(2):
        embedding = open_contextual(wanted, progress=lambda done, total: told.append((done, total)))
        assert [x.flatten().tolist() for x in embedding.embed([["a", "bcd"], ["ef"]])] == [[1, 3], [2]]
    assert _Counting.computed == 2
    assert told == [(0, 2), (2, 2)]


def test_elmo_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    from tests.models.embeddings import elmo_files

    with pytest.raises(FileNotFoundError, match=r"one file \*options\.json in .*, got 0"):
        open_contextual(Contextual("elmo", str(tmp_path)))
    elmo_files.write(tmp_path, elmo_files.OPTIONS, elmo_files.random_weights(elmo_files.OPTIONS))
    wanted = Contextual("elmo", str(tmp_path), cache=str(tmp_path / "cache"), options={"gamma": 0.0})
    embedding = open_contextual(wanted)
    assert embedding.embed([["a", "b"]])[0].abs().max() == 0
