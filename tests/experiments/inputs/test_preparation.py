"""A recipe's data, and raw images and sentences through what its run keeps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from gpattention.data import ImageData, Normalisation, TextData, load_digits
from gpattention.data.folders import read_images
from gpattention.experiments import Prepared, load_preprocessing, prepare, save_preprocessing
from gpattention.experiments.inputs.preprocessing import ImagePreprocessing, TextPreprocessing
from gpattention.training import Recipe, recipe_from_dict
from tests.experiments.tiny_cola import write_tiny_cola


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
    prepared = prepare(text_recipe(), root)
    assert isinstance(prepared.data, TextData)
    read = round_trip(prepared, tmp_path / "run")
    raw = prepare(text_recipe(form="raw"), root).data
    assert isinstance(raw, TextData)
    for name, tensor in read.sentences([s.capitalize() for s in raw.test.sentences]).items():
        assert torch.equal(tensor, prepared.data.test.inputs[name])
        assert torch.equal(tensor, raw.test.inputs[name])
    assert read.classes == ("unacceptable", "acceptable")
    for wrong, message in (
        (["The cat " * 40], "at most"),
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
        ({"data": {"options": {"bogus": 1}}}, "options of digits among"),
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
    inputs = COLOUR.images([files["RGB"], str(files["RGBA"])])
    assert inputs.shape == (2, 3, 4, 6)
    wanted = torch.tensor([2.0, -2.0, (0.4 - 0.5) / 0.25])[:, None, None].expand(2, 3, 4, 6)
    torch.testing.assert_close(inputs, wanted)
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
    assert torch.equal(*read_images(files, size=4, fit="crop", channels=1))
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


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("no image")
    with pytest.raises(ValueError, match="expected an image file"):
        COLOUR.images([tmp_path / "x.png"])
    with pytest.raises(FileNotFoundError, match="no image file"):
        COLOUR.images([tmp_path / "y.png"])
    with pytest.raises(ValueError, match="got none"):
        COLOUR.images([])
    with pytest.raises(ValueError, match="the one path"):
        COLOUR.images(str(tmp_path / "x.png"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[1 or 3, H, W\]"):
        COLOUR.images(torch.zeros(1, 2, 4, 6))
    with pytest.raises(ValueError, match=r"path of a file or a tensor \[C, H, W\], got ndarray"):
        COLOUR.images([np.zeros((4, 6, 3), np.uint8)])  # type: ignore[list-item]


@pytest.mark.parametrize("size", [(4, 6), (8, 12)], ids=["as it is", "resized"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: 255 * x, r"torch.float32 from 0 to 255"),
        (lambda x: (x - 0.5) / 0.25, r"torch.float32 from -2 to 2"),  # normalised already
        (lambda x: x * torch.nan, "torch.float32 from nan to nan"),
        (lambda x: (255 * x).long(), "torch.int64"),
        (lambda x: (255 * x).to(torch.uint16), "torch.uint16"),
    ],
)
def test_pixels_of_another_range_are_refused(
    change: Callable[[Tensor], Tensor], told: str, size: tuple[int, int]
) -> None:
    image = torch.linspace(0, 1, 3 * size[0] * size[1]).view(3, *size)
    for given in (change(image), [change(image)], change(image)[None]):
        with pytest.raises(ValueError, match=rf"torch.uint8, or floating-point in \[0, 1\], got {told}"):
            COLOUR.images(given)
    assert COLOUR.images(image.half()).isfinite().all()


def test_damaged_preprocessing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"preprocessing\.json"):
        load_preprocessing(tmp_path)
    GREY.save(tmp_path)
    file = tmp_path / "preprocessing" / "preprocessing.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_preprocessing(tmp_path)
    for content in ([], {"format": "other", "kind": "images"}, {"format": "gpattention-preprocessing-1"}):
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="of kind images or texts"):
            load_preprocessing(tmp_path)


def test_a_begun_run_keeps_its_preprocessing(tmp_path: Path) -> None:
    root = write_tiny_cola(tmp_path / "data")
    prepared = prepare(text_recipe(), root)
    run = tmp_path / "run"
    save_preprocessing(run, prepared)
    (run / "recipe.json").write_text("{}")
    save_preprocessing(run, prepared)
    other = prepare(text_recipe(vocabulary={"max_size": 6}), root)
    with pytest.raises(ValueError, match="got other data of the same name"):
        save_preprocessing(run, other)
    read = load_preprocessing(run)
    assert isinstance(read, TextPreprocessing)
    assert isinstance(prepared.preprocessing, TextPreprocessing)
    assert read.encoder.vocabulary == prepared.preprocessing.encoder.vocabulary
