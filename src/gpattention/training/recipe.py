"""A training run as frozen data: what to train, on what, how; read from TOML, refused when misspelt."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class DataRecipe:
    """Which data set, and the options of its loader."""

    name: str = "digits"
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False  # bring batches from the host even if the training data fit on the device
    workers: int = 2  # processes that cut streamed batches


@dataclass(frozen=True)
class ModelRecipe:
    """A transformer: its config's fields, and the attention of every layer or of each."""

    type: Literal["vision", "text"] = "vision"
    attention: str = "cgp"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the attention
    config: Mapping[str, Any] = field(default_factory=dict)  # width, depth, heads, patch, ...


@dataclass(frozen=True)
class OptimizerRecipe:
    """Adam with a learning rate that falls linearly over both phases."""

    learning_rate: float = 5e-4
    final_learning_rate: float = 1e-5
    restart: bool = False  # let the second phase start its own decay
    batch_size: int = 100
    accumulate: int = 1  # batches per optimiser update
    clip: float | None = None  # largest norm of the gradient
    keyed_dropout: bool = False  # dropout masks keyed to items, as draws are: any number of processes agrees


@dataclass(frozen=True)
class PhaseRecipe:
    """Kernel attention first, then the Gaussian process from its weights."""

    kernel_epochs: int = 0  # phase 1; 0 starts phase 2 from fresh weights
    epochs: int = 10  # phase 2
    draw: Literal["none", "independent", "joint"] = "independent"  # in phase 2
    kernel_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RegularizerRecipe:
    """The weight alpha of the regulariser, linear from start to end over phase 2."""

    start: float = 0.0
    end: float = 0.01
    normalised: bool = True  # per head, token and dimension; else a sequence's sum, as the paper writes it
    floor_warning: float = 0.9  # warn when a layer's share of its noise floor passes this


@dataclass(frozen=True)
class CheckpointRecipe:
    """What is kept of a run."""

    every: int = 1  # epochs between validations and checkpoints
    keep: int = 2  # last checkpoints kept
    select: Literal["best", "best-nll", "last"] = "best"  # of the validations: by accuracy, or by NLL


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on but the code."""

    name: str = "run"
    seed: int = 0
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    phases: PhaseRecipe = field(default_factory=PhaseRecipe)
    regularizer: RegularizerRecipe = field(default_factory=RegularizerRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def epochs(self) -> int:
        """Of both phases."""
        return self.phases.kernel_epochs + self.phases.epochs

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a TOML or JSON file would hold them."""
        return _plain(self)


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe; `changes` are `section.key=value`, the value written as in TOML."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no recipe {path}")
    try:
        plain = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    for change in changes:
        _apply(plain, change)
    return recipe_from_dict({"name": path.stem, **plain})


def recipe_from_dict(plain: Mapping[str, Any]) -> Recipe:
    """The inverse of `Recipe.to_dict`; an unknown key is refused with the nearest valid name."""
    return _build(Recipe, plain, where="")


def _build(cls: type[T], plain: Mapping[str, Any], *, where: str) -> T:
    if not isinstance(plain, Mapping):
        raise ValueError(f"expected [{where}] to be a table, got {plain!r}")
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in plain.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ValueError(f"unknown key {where + key!r}{hint}")
        kind = hints[key]
        if isinstance(kind, type) and is_dataclass(kind):
            values[key] = _build(kind, value, where=f"{where}{key}.")
        else:
            values[key] = _typed(value, kind, where + key)
    return cls(**values)


def _typed(value: Any, kind: Any, where: str) -> Any:
    """Whole numbers where fractions are allowed; anything else must be of its type."""
    text = str(kind)
    if kind is float or text == "float | None":
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if value is None and kind is not float:
            return None
        raise ValueError(f"expected {where} to be a number, got {value!r}")
    if kind is int and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"expected {where} to be a whole number, got {value!r}")
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"expected {where} to be true or false, got {value!r}")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"expected {where} to be text, got {value!r}")
    if "Mapping" in text and not isinstance(value, Mapping):
        raise ValueError(f"expected {where} to be a table, got {value!r}")
    if "Literal" in text and value not in kind.__args__:
        raise ValueError(f"expected {where} to be one of {', '.join(kind.__args__)}, got {value!r}")
    return dict(value) if isinstance(value, Mapping) else value


def _apply(plain: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"expected a change of the form section.key=value, got {change!r}")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # plain words need no quotes
    *sections, last = key.strip().split(".")
    table = plain
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"{section!r} in {change!r} is not a table")
    table[last] = value


def _check(recipe: Recipe) -> None:
    positive = {
        "optimizer.batch_size": recipe.optimizer.batch_size,
        "optimizer.accumulate": recipe.optimizer.accumulate,
        "checkpoint.every": recipe.checkpoint.every,
        "checkpoint.keep": recipe.checkpoint.keep,
    }
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"expected {name} >= 1, got {value}")
    counts = {
        "data.workers": recipe.data.workers,
        "phases.kernel_epochs": recipe.phases.kernel_epochs,
        "phases.epochs": recipe.phases.epochs,
    }
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"expected {name} >= 0, got {count}")
    if recipe.epochs < 1:
        raise ValueError("expected at least one epoch in the two phases")
    if not 0 <= recipe.optimizer.final_learning_rate <= recipe.optimizer.learning_rate:
        raise ValueError(
            "expected 0 <= optimizer.final_learning_rate <= optimizer.learning_rate, got "
            f"{recipe.optimizer.final_learning_rate} and {recipe.optimizer.learning_rate}"
        )
    if recipe.optimizer.clip is not None and not recipe.optimizer.clip > 0:
        raise ValueError(f"expected optimizer.clip > 0, got {recipe.optimizer.clip}")
    for name, alpha in (("start", recipe.regularizer.start), ("end", recipe.regularizer.end)):
        if not alpha >= 0:
            raise ValueError(f"expected regularizer.{name} >= 0, got {alpha}")


def _plain(x: Any) -> Any:
    if is_dataclass(x):
        return {f.name: _plain(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return [_plain(value) for value in x]
    return x


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The same run with another seed."""
    return replace(recipe, seed=seed)
