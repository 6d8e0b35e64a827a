"""From a recipe to data: loaded, encoded, and with all that prediction will need without it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpattention.data import ImageData, TextData, load
from gpattention.data.places import StrPath
from gpattention.experiments.inputs.contextual import contextual_from_dict
from gpattention.experiments.inputs.images import image_training_data
from gpattention.experiments.inputs.preprocessing import ImagePreprocessing, Preprocessing, TextPreprocessing
from gpattention.experiments.inputs.texts import encode_texts, text_training_data, with_words
from gpattention.training import Recipe, TrainingData

OWN_OPTIONS = ("contextual", "vocabulary")  # of `data.options`: ours, not the loader's


@dataclass(frozen=True, eq=False)
class Prepared:
    """A recipe's data, ready to train on and to evaluate with."""

    recipe: Recipe
    data: ImageData | TextData  # texts are encoded
    training: TrainingData
    preprocessing: Preprocessing


def prepare(
    recipe: Recipe,
    root: StrPath | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Load the recipe's data, encode texts, and bring both into the form that training takes.

    Args:
        recipe: `data.options` are those of the loader; for texts also `contextual` (see
            `experiments.contextual`) and `vocabulary` (min_count, max_size, lowercase).
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        progress: called with (done, total) of the sentences whose frozen vectors must be computed.
    """
    options = dict(recipe.data.options)
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options}
    if recipe.model.type == "vision" and own:
        raise ValueError(f"expected data.options.{min(own)} with a text model only, got a vision model")
    contextual = contextual_from_dict(own.get("contextual", {}))  # a mistake shows before the data is read
    data = load(recipe.data.name, root, recipe.seed, **options)
    if recipe.model.type == "vision":
        if not isinstance(data, ImageData):
            raise ValueError(f"expected data of images for a vision model, got {recipe.data.name!r}")
        return Prepared(recipe, data, image_training_data(data), _of_images(data))
    if not isinstance(data, TextData):
        raise ValueError(f"expected data of texts for a text model, got {recipe.data.name!r}")
    if options.get("form") == "raw":
        data = with_words(data)
    data, encoder = encode_texts(data, contextual, own.get("vocabulary", {}), root, progress=progress)
    preprocessing = TextPreprocessing(data.classes, encoder, contextual)
    return Prepared(recipe, data, text_training_data(data, encoder), preprocessing)


def save_preprocessing(folder: StrPath, prepared: Prepared) -> None:
    """Write RUN/preprocessing; `load_preprocessing` reads it.

    A run that was begun on other data (another vocabulary, other moments) is refused, not overwritten.
    """
    folder, made = Path(folder), prepared.preprocessing
    if (folder / "recipe.json").exists() and made.is_saved(folder) and not made.is_same(folder):
        raise ValueError(f"expected the data that {folder} was trained on, got other data of the same name")
    made.save(folder)


def _of_images(data: ImageData) -> ImagePreprocessing:
    return ImagePreprocessing(data.classes, data.image_size, data.channels, data.normalisation)
