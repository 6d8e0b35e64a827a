"""From a raw image or sentence to a model's inputs, without the dataset: kept in every run's folder.

RUN/preprocessing/preprocessing.json, and vocabulary.json beside it where the model reads words.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from gpattention.checks import check_count
from gpattention.data import Normalisation
from gpattention.data.folders import eight_bit, open_image
from gpattention.data.places import StrPath, check_name
from gpattention.experiments.inputs.contextual import Contextual, contextual_from_dict, open_contextual
from gpattention.experiments.inputs.texts import TextEncoder, sentence_words
from gpattention.models.embeddings import Vocabulary
from gpattention.models.embeddings.extras import require
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import read_json

FORMAT = "gpattention-preprocessing-1"
FOLDER, FILE, WORDS = "preprocessing", "preprocessing.json", "vocabulary.json"
ROUNDING = 1e-3  # of pixels in half precision


class Preprocessing(ABC):
    """How a run turns what people have into what its model takes."""

    kind: ClassVar[Literal["images", "texts"]]
    classes: tuple[str, ...]

    def images(self, given: Sequence[StrPath | Tensor] | Tensor) -> Tensor:
        """Model inputs [B, C, H, W] of image files or tensors."""
        raise ValueError(f"expected a run on images, got one on {self.kind}")

    def sentences(self, given: Sequence[str]) -> dict[str, Tensor]:
        """Model inputs of sentences as people write them."""
        raise ValueError(f"expected a run on texts, got one on {self.kind}")

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything but the vocabulary."""

    def save(self, folder: Path) -> None:
        """Write it into a run's folder."""
        place = folder / FOLDER
        make_folder(place)
        write_atomically(place / FILE, (json.dumps(self._content(), indent=2) + "\n").encode())

    def is_saved(self, folder: Path) -> bool:
        """Whether a run's folder has one."""
        return (folder / FOLDER / FILE).is_file()

    def is_same(self, folder: Path) -> bool:
        """Whether the one of a run's folder equals this."""
        return _read(folder / FOLDER / FILE) == self._content()

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": self.kind, "classes": list(self.classes), **self.to_dict()}


@dataclass(frozen=True)
class ImagePreprocessing(Preprocessing):
    """Size, channels and normalisation of a run on images."""

    kind = "images"
    classes: tuple[str, ...]
    size: tuple[int, int]  # height and width
    channels: int
    normalisation: Normalisation

    def images(self, given: Sequence[StrPath | Tensor] | Tensor) -> Tensor:
        """Model inputs of image files, or of tensors [C, H, W] (or one [B, C, H, W]); 8-bit or in [0, 1].

        Images of another size are resized to the model's with Pillow (bilinear, antialiased; the aspect
        ratio is not kept), greyscale becomes colour and colour greyscale as the model needs it,
        transparency is dropped, grey of 16 bits brought to 8, and photographs are turned upright.
        Tensors that are resized or change their channels are rounded to 8 bits first.
        """
        if isinstance(given, str | os.PathLike):
            raise ValueError(f"expected a list of image files, got the one path {str(given)!r}")
        if isinstance(given, Tensor) and given.ndim == 3:
            given = given[None]
        if len(given) == 0:
            raise ValueError("expected at least one image, got none")
        shape = (self.channels, *self.size)
        if isinstance(given, Tensor) and given.shape[1:] == shape:
            _check_pixels(given)
            return self.normalisation(given)
        each = [self._one(image) for image in given]
        return torch.stack([self.normalisation(image) for image in each])

    def _one(self, image: StrPath | Tensor) -> Tensor:
        if isinstance(image, Tensor):
            if image.ndim != 3 or image.shape[0] not in (1, 3):
                raise ValueError(f"expected an image [1 or 3, H, W], got shape {tuple(image.shape)}")
            _check_pixels(image)
            if image.shape == (self.channels, *self.size):
                return image
            return self._fitted(_as_pillow(image))
        if not isinstance(image, str | os.PathLike):
            kind = type(image).__name__
            raise ValueError(f"expected an image to be the path of a file or a tensor [C, H, W], got {kind}")
        if not Path(image).is_file():
            raise FileNotFoundError(f"no image file {image}")
        require("PIL", extra="train", user="reading image files")
        from PIL import ImageOps

        with open_image(image) as opened:
            return self._fitted(ImageOps.exif_transpose(opened))

    def _fitted(self, image: Any) -> Tensor:
        """A Pillow image as [C, H, W] uint8 of the model's size."""
        from PIL import Image

        height, width = self.size
        image = eight_bit(image, self.channels)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.array(image).reshape(height, width, self.channels)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def to_dict(self) -> dict[str, Any]:
        """Everything."""
        n = self.normalisation
        return {
            "size": list(self.size),
            "channels": self.channels,
            "normalisation": {"mean": list(n.mean), "std": list(n.std), "source": n.source},
        }


@dataclass(frozen=True)
class TextPreprocessing(Preprocessing):
    """Vocabulary, frozen embedding and length of a run on texts."""

    kind = "texts"
    classes: tuple[str, ...]
    encoder: TextEncoder
    contextual: Contextual

    def sentences(self, given: Sequence[str]) -> dict[str, Tensor]:
        """Model inputs; sentences are cut into words by `sentence_words`, longer ones than known refused."""
        if isinstance(given, str):
            raise ValueError(f"expected a list of sentences, got the string {given!r}")
        return self.encoder([self.words(sentence) for sentence in given])

    def words(self, sentence: str) -> list[str]:
        """The words of one sentence, as the model sees them."""
        found = sentence_words(sentence)
        if not found:
            raise ValueError(f"expected a sentence with words, got {sentence!r}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything but the vocabulary; the embedding's fingerprint tells other files from those used."""
        return {
            "vocabulary": WORDS,
            "length": self.encoder.length,
            "contextual": {**self.contextual.to_dict(), "fingerprint": self.encoder.embedding.name},
        }

    def save(self, folder: Path) -> None:
        """Write both files, the vocabulary first."""
        self.encoder.vocabulary.save(folder / FOLDER / WORDS)
        super().save(folder)

    def is_same(self, folder: Path) -> bool:
        """Whether the one of a run's folder equals this, words included."""
        return super().is_same(folder) and Vocabulary.load(folder / FOLDER / WORDS) == self.encoder.vocabulary


def load_preprocessing(run: StrPath, root: StrPath | None = None) -> Preprocessing:
    """What `Preprocessing.save` wrote into a run's folder.

    Args:
        run: the run's folder.
        root: where the files of a frozen embedding are, if not where the recipe says; see `find_path`.
    """
    place = Path(run) / FOLDER
    content = _read(place / FILE)
    try:
        classes = tuple(str(name) for name in content["classes"])
        if content["kind"] == "images":
            return _image_preprocessing(classes, content)
        plain = dict(content["contextual"])
        fingerprint = plain.pop("fingerprint")
        contextual = contextual_from_dict(plain)
        length = check_count("length", content["length"])
        words = place / check_name("vocabulary", content["vocabulary"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{place / FILE} does not say what inputs are made of: {reason}") from None
    embedding = open_contextual(contextual, root)
    if embedding.name != fingerprint:
        raise ValueError(
            f"{place / FILE}: expected the frozen embedding {fingerprint}, got {embedding.name}: "
            f"the files of {contextual.path} are not those of the training"
        )
    return TextPreprocessing(classes, TextEncoder(Vocabulary.load(words), embedding, length), contextual)


def _image_preprocessing(classes: tuple[str, ...], content: Mapping[str, Any]) -> ImagePreprocessing:
    height, width = (check_count("size", side) for side in content["size"])
    channels, found = check_count("channels", content["channels"]), content["normalisation"]
    mean, std = ([float(x) for x in found[name]] for name in ("mean", "std"))
    normalisation = Normalisation(tuple(mean), tuple(std), str(found["source"]))
    if len(mean) != channels:
        raise ValueError(f"expected one mean for each of {channels} channels, got {len(mean)}")
    return ImagePreprocessing(classes, (height, width), channels, normalisation)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}: the run says not what its inputs are made of")
    content = read_json(file)
    known = isinstance(content, dict) and content.get("format") == FORMAT
    if not known or content.get("kind") not in ("images", "texts"):
        raise ValueError(f"{file}: expected format {FORMAT} of kind images or texts")
    return dict(content)


def _check_pixels(images: Tensor) -> None:
    """Bytes, or numbers in [0, 1]: bytes in another type, or what is normalised already, look alike later."""
    if images.dtype == torch.uint8 or images.numel() == 0:
        return
    expected = "expected images of torch.uint8, or floating-point in [0, 1], got"
    if not images.is_floating_point():
        raise ValueError(f"{expected} {images.dtype}")
    least, most = (float(x) for x in images.aminmax())  # NaN is neither
    if not -ROUNDING <= least <= most <= 1 + ROUNDING:
        raise ValueError(f"{expected} {images.dtype} from {least:g} to {most:g}")


def _as_pillow(image: Tensor) -> Any:
    require("PIL", extra="train", user="resizing images")
    from PIL import Image

    if image.dtype != torch.uint8:
        image = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = image.cpu().permute(1, 2, 0).numpy()  # [H, W, C]
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else np.ascontiguousarray(pixels))
