"""A recipe's data, and raw images and sentences through what its run keeps."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from gpattention.data import ImageData, Normalisation, TextData, load, load_digits
from gpattention.data.files import read_images
from gpattention.models import TextConfig, TextTransformer
from gpattention.runs import (
    Contextual,
    Prepared,
    Recipe,
    inputs,
    load_preprocessing,
    open_contextual,
    prepare,
    recipe_from_dict,
    save_preprocessing,
    sentence_words,
)
from gpattention.runs.inputs import (
    ImagePreprocessing,
    cache_folder,
    contextual_from_dict,
    encode_texts,
    find_path,
)
from tests.runs.tiny_cola import write_tiny_cola


def text_recipe(**options: Any) -> Recipe:
    data = {"name": "cola", "options": {"subset": True, **options}}
    return recipe_from_dict({"data": data, "model": {"type": "text"}})


def round_trip(prepared: Prepared, folder: Path) -> Any:
    save_preprocessing(folder, prepared)
    return load_preprocessing(folder)


def test_images(tmp_path: Path) -> None:
    prepared = prepare(recipe_from_dict({"seed": 3, "data": {"name": "digits"}}))
    assert isinstance(prepared.data, ImageData)
    assert torch.equal(prepared.data.test.images, load_digits(3).test.images)
    assert prepared.training.facts == {"classes": 8, "image_size": (8, 8), "channels": 1, "patch": 2}
    read = round_trip(prepared, tmp_path)
    assert read == prepared.preprocessing
    images = prepared.data.test.images[:5]
    assert torch.equal(read.images(images), prepared.data.inputs(images))
    with pytest.raises(ValueError, match="expected a run on texts, got one on images"):
        read.sentences(["Hello."])


def test_texts_read_back_encode_raw_sentences_as_the_data(tmp_path: Path) -> None:
    root = write_tiny_cola(tmp_path / "data")
    prepared, raw = prepare(text_recipe(), root), prepare(text_recipe(form="raw"), root).data
    assert isinstance(prepared.data, TextData)
    assert isinstance(raw, TextData)
    read = round_trip(prepared, tmp_path / "run")
    for name, part in raw.parts.items():
        assert part.words == prepared.data.parts[name].words
    test = prepared.data.test
    for name, tensor in read.sentences([s.capitalize() for s in raw.test.sentences]).items():
        assert torch.equal(tensor, test.inputs[name])
        assert torch.equal(tensor, raw.test.inputs[name])
    lengths = torch.tensor([len(words) for words in test.words])
    assert torch.equal((~test.inputs["padding_mask"]).sum(-1), lengths)
    assert torch.equal(test.inputs["padding_mask"], test.inputs["tokens"] == 0)
    assert read.classes == ("unacceptable", "acceptable")
    for wrong, message in (
        (["The cat " * 40], f"at most {read.encoder.length} words, got one of 80"),
        (["The cat.", " "], "a sentence with words, got ' '"),
        ("The cat.", "a list of sentences, got the string"),
    ):
        with pytest.raises(ValueError, match=message):
            read.sentences(wrong)
    with pytest.raises(ValueError, match="expected a run on images, got one on texts"):
        read.images([])


def test_a_run_knows_its_frozen_vectors_again(tmp_path: Path) -> None:
    root = write_tiny_cola(tmp_path / "data")
    vectors = root / "glove.txt"
    vectors.write_text("the 1 0\ncat 0 1\n")
    prepared = prepare(text_recipe(contextual={"kind": "glove", "path": "glove.txt"}), root)
    assert prepared.training.facts["contextual_width"] == 2
    save_preprocessing(tmp_path / "run", prepared)
    found = load_preprocessing(tmp_path / "run", root).sentences(["The cat."])["contextual"][0]
    assert found[:4].tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
    with pytest.raises(FileNotFoundError, match=r"glove\.txt"):
        load_preprocessing(tmp_path / "run", tmp_path)
    vectors.write_text("the 1 0\ncat 0 2\n")
    with pytest.raises(ValueError, match=r"the files of glove\.txt are not those of the training"):
        load_preprocessing(tmp_path / "run", root)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"data": {"name": "cola"}}, "data of images for a vision model, got 'cola'"),
        ({"model": {"type": "text"}}, "data of texts for a text model, got 'digits'"),
        ({"data": {"options": {"contextual": {}}}}, "data.options.contextual with a text model only"),
        ({"model": {"type": "text"}, "data": {"options": {"contextual": {"kind": "x"}}}}, "got 'x'"),
        ({"data": {"options": {"bogus": 1}}}, "option of digits"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(plain: dict[str, Any], message: str, tmp_path: Path) -> None:
    root = write_tiny_cola(tmp_path)
    if plain.get("data", {}).get("name") == "cola":
        plain["data"]["options"] = {"subset": True}
    with pytest.raises(ValueError, match=message):
        prepare(recipe_from_dict(plain), root)


COLOUR = ImagePreprocessing(("a", "b"), (4, 6), 3, Normalisation((0.5,) * 3, (0.25,) * 3, "test"))
GREY = ImagePreprocessing(("a", "b"), (4, 6), 1, Normalisation((0.5,), (0.25,), "test"))


def test_image_files_of_any_size_and_kind(tmp_path: Path) -> None:
    flat = np.zeros((9, 13, 3), np.uint8)
    flat[:] = (255, 0, 102)
    files = {}
    for mode in ("RGB", "RGBA", "L", "P"):
        files[mode] = tmp_path / f"{mode}.png"
        Image.fromarray(flat).convert(mode).save(files[mode])
    wanted = torch.tensor([2.0, -2.0, (0.4 - 0.5) / 0.25])[:, None, None].expand(2, 3, 4, 6)
    torch.testing.assert_close(COLOUR.images([files["RGB"], str(files["RGBA"])]), wanted)
    coloured_grey = COLOUR.images([files["L"]])[0]
    assert torch.equal(coloured_grey[0], coloured_grey[2])
    torch.testing.assert_close(GREY.images([files["RGB"]])[0, 0], coloured_grey[0])
    assert COLOUR.images([files["P"]]).isfinite().all()


def test_grey_of_16_bits_is_not_cut_off(tmp_path: Path) -> None:
    pixels = np.linspace(0, 65535, 24).astype(np.uint16).reshape(4, 6)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    Image.fromarray((pixels >> 8).astype(np.uint8)).save(tmp_path / "y.png")
    for made in (GREY, COLOUR):
        assert torch.equal(made.images([tmp_path / "x.png"]), made.images([tmp_path / "y.png"]))
    files = [tmp_path / "x.png", tmp_path / "y.png"]
    assert torch.equal(*read_images(files, size=4, fit="crop"))
    for kind in (np.int32, np.float32):
        Image.fromarray(pixels.astype(kind)).save(tmp_path / "x.tif")
        with pytest.raises(ValueError, match=r"x\.tif: .*pixels of 32 bits \(mode [IF]\)"):
            GREY.images([tmp_path / "x.tif"])
        with pytest.raises(ValueError, match=r"x\.tif: .*pixels of 32 bits"):
            read_images([tmp_path / "x.tif"], size=4, fit="crop")


def test_photographs_are_turned_upright(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[:2] = 255  # bright above
    upside_down = Image.fromarray(pixels[::-1, ::-1].copy())
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    upside_down.save(tmp_path / "photo.png", exif=exif)
    upright = torch.from_numpy(pixels).permute(2, 0, 1)
    assert torch.equal(COLOUR.images([tmp_path / "photo.png"]), COLOUR.images(upright))


def test_tensors_files_and_sizes_agree(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (3, 11, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "x.png")
    from_file = COLOUR.images([tmp_path / "x.png"])
    assert torch.equal(COLOUR.images([pixels]), from_file)
    assert torch.equal(COLOUR.images(pixels), from_file)
    assert torch.equal(COLOUR.images(pixels.double() / 255), from_file)
    assert torch.equal(COLOUR.images([pixels, tmp_path / "x.png"]), from_file.repeat(2, 1, 1, 1))
    exact = torch.rand(2, 1, 4, 6)
    assert torch.equal(GREY.images(exact), GREY.normalisation(exact))  # not rounded when nothing is resized
    assert torch.equal(GREY.images(list(exact)), GREY.normalisation(exact))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (["x.png"], ValueError, "expected an image file"),
        (["y.png"], FileNotFoundError, "no image file y.png"),
        ([], ValueError, "got none"), ("x.png", ValueError, "the one path 'x.png'"),
        (torch.zeros(1, 2, 4, 6), ValueError, r"\[1 or 3, H, W\], got shape \(2, 4, 6\)"),
        ([np.zeros((4, 6, 3), np.uint8)], ValueError, r"a tensor \[C, H, W\], got ndarray"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(
    given: Any, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.png").write_text("no image")
    with pytest.raises(error, match=message):
        COLOUR.images(given)


@pytest.mark.parametrize("size", [(4, 6), (8, 12)], ids=["as it is", "resized"])
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda x: 255 * x, r"torch.float32 from 0 to 255"),
        (lambda x: (x - 0.5) / 0.25, r"torch.float32 from -2 to 2"),  # normalised already
        (lambda x: x * torch.nan, "torch.float32 from nan to nan"),
        (lambda x: (255 * x).long(), "torch.int64"),
        (lambda x: (255 * x).to(torch.uint16), "torch.uint16"),
    ],
)
def test_pixels_of_another_range_are_refused(
    change: Callable[[Tensor], Tensor], shown: str, size: tuple[int, int]
) -> None:
    image = torch.linspace(0, 1, 3 * size[0] * size[1]).view(3, *size)
    for given in (change(image), [change(image)], change(image)[None]):
        with pytest.raises(ValueError, match=rf"torch.uint8, or floating-point in \[0, 1\], got {shown}"):
            COLOUR.images(given)
    assert COLOUR.images(image.half()).isfinite().all()


KNOWN = '"format": "gpattention-preprocessing-1"'
DAMAGED = {
    "{": "is not JSON",
    "[]": "of kind images or texts",
    '{"format": "other", "kind": "images"}': "of kind images or texts",
    f"{{{KNOWN}}}": "of kind images or texts",
    f'{{{KNOWN}, "kind": "images"}}': "does not say what inputs are made of: no 'classes'",
    f'{{{KNOWN}, "kind": "images", "classes": ["a"], "size": 3}}': "does not say what inputs",
    f'{{{KNOWN}, "kind": "images", "classes": [], "size": [1, 1], "channels": "x"}}': "expected channels",
}


def test_damaged_preprocessing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"preprocessing\.json"):
        load_preprocessing(tmp_path)
    GREY.save(tmp_path)
    for content, message in DAMAGED.items():
        (tmp_path / "preprocessing" / "preprocessing.json").write_text(content)
        with pytest.raises(ValueError, match=rf"preprocessing\.json.*{message}"):
            load_preprocessing(tmp_path)


def test_a_begun_run_keeps_its_preprocessing(tmp_path: Path) -> None:
    root, run = write_tiny_cola(tmp_path / "data"), tmp_path / "run"
    prepared = prepare(text_recipe(), root)
    save_preprocessing(run, prepared)
    (run / "recipe.json").write_text("{}")
    save_preprocessing(run, prepared)
    with pytest.raises(ValueError, match="got other data of the same name"):
        save_preprocessing(run, prepare(text_recipe(vocabulary={"max_size": 6}), root))
    assert load_preprocessing(run).encoder.vocabulary == prepared.preprocessing.encoder.vocabulary  # type: ignore


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
    assert sentence_words(words) == words.split()  # cut again, they stay what they are


@pytest.fixture
def glove(tmp_path: Path) -> Path:
    file = tmp_path / "vectors.txt"
    file.write_text("the 1 0\ncat 0 1\nsat 2 2\n")
    return file


def test_encoded_data_and_its_facts_make_a_model(tmp_path: Path, glove: Path) -> None:
    root = write_tiny_cola(tmp_path)
    options = {"contextual": {"kind": "glove", "path": str(glove)}, "vocabulary": {"min_count": 1}}
    prepared = prepare(text_recipe(**options), root)
    data, training = prepared.data, prepared.training
    assert isinstance(data, TextData)
    words = {word for sentence in data.train.words for word in sentence}
    longest = max(len(words) for part in data.parts.values() for words in part.words)
    assert training.facts == {
        "classes": 2, "vocabulary": len(words) + 2, "contextual_width": 2, "max_length": longest,
    }  # fmt: skip
    for part in data.parts.values():
        assert part.inputs["tokens"].shape == (len(part), longest)
        assert part.inputs["contextual"].shape == (len(part), longest, 2)
        where = torch.tensor([[w == "sat" for w in [*s, *[""] * (longest - len(s))]] for s in part.words])
        assert torch.equal(part.inputs["contextual"][where], torch.full((int(where.sum()), 2), 2.0))
    model = TextTransformer(TextConfig(**training.facts, width=8, heads=2, attention="softmax"))
    assert model(training.train).logits.shape == (len(data.train), 2)


def test_the_vocabulary_is_the_training_part_s(tmp_path: Path) -> None:
    data = load("cola", write_tiny_cola(tmp_path), subset=True)
    _, encoder = encode_texts(data, Contextual(), {})
    assert set(encoder.vocabulary.words) == {w for s in data.train.words for w in s}
    assert len(encode_texts(data, Contextual(), {"max_size": 5})[1].vocabulary) == 5
    for wrong, shown in (({"size": 5}, "min_count, max_size, lowercase, got 'size'"), (3, "a table, got 3")):
        with pytest.raises(ValueError, match=f"vocabulary to be .*{shown}"):
            encode_texts(data, Contextual(), wrong)  # type: ignore[arg-type]


def test_contextual_round_trip_and_refusals() -> None:
    plain = {"kind": "hf", "path": "here", "layer": -2, "cache": "there"}
    assert contextual_from_dict(plain).to_dict() == plain
    assert contextual_from_dict({}) == Contextual()
    assert not contextual_from_dict({"kind": "learned"}).used
    for wrong, message in (
        ({"kind": "bert"}, "kind .* none, learned, glove, hf, elmo, got 'bert'"),
        ({"kind": "glove", "path": "x", "layer": 1}, "kind, path, cache, width, lowercase, got 'layer'"),
        ({"kind": "hf"}, "a path for contextual 'hf', got None"),
        ({"kind": "none", "path": "x"}, "no path for contextual 'none', got 'x'"),
        ("glove", "contextual to be a table with a kind, got 'glove'"),
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
    with pytest.raises(FileNotFoundError, match=r"'package:carrier/other': no .*other"):
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
    monkeypatch.setattr(inputs, "HuggingFaceEmbedding", _Counting)
    monkeypatch.setattr(_Counting, "computed", 0)
    seen: list[tuple[int, int]] = []
    wanted = Contextual("hf", str(tmp_path), cache=str(tmp_path / "cache"), options={"layer": 0})
    for _ in range(2):
        embedding = open_contextual(wanted, progress=lambda done, total: seen.append((done, total)))
        assert [x.flatten().tolist() for x in embedding.embed([["a", "bcd"], ["ef"]])] == [[1, 3], [2]]
    assert _Counting.computed == 2
    assert seen == [(0, 2), (2, 2)]


def test_elmo_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    from tests.models.embeddings import elmo_files

    with pytest.raises(FileNotFoundError, match=r"one file \*options\.json in .*, got 0"):
        open_contextual(Contextual("elmo", str(tmp_path)))
    elmo_files.write(tmp_path, elmo_files.OPTIONS, elmo_files.random_weights(elmo_files.OPTIONS))
    wanted = Contextual("elmo", str(tmp_path), cache=str(tmp_path / "cache"), options={"gamma": 0.0})
    embedding = open_contextual(wanted)
    assert embedding.embed([["a", "b"]])[0].abs().max() == 0
