"""A training run as frozen data: what to train, on what, how; checked when made, read from TOML."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from gpattention.data.places import check_name
from gpattention.reading import parse_toml, read_toml
from gpattention.training.field_types import check_types, field_types

T = TypeVar("T")


@dataclass(frozen=True)
class DataRecipe:
    """Which data set, and the options of its loader."""

    name: str = "digits"
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False  # bring batches from the host even if the training data fit on the device
    workers: int = 2  # processes that cut streamed batches

    def __post_init__(self) -> None:
        check_types(self, "data")
        _at_least(0, "data", workers=self.workers)


@dataclass(frozen=True)
class ModelRecipe:
    """A transformer: its config's fields, and the attention of every layer or of each."""

    type: Literal["vision", "text"] = "vision"
    attention: str = "cgp"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the attention
    config: Mapping[str, Any] = field(default_factory=dict)  # width, depth, heads, patch, ...

    def __post_init__(self) -> None:
        check_types(self, "model")


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

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        _at_least(1, "optimizer", batch_size=self.batch_size, accumulate=self.accumulate)
        if not 0 <= self.final_learning_rate <= self.learning_rate:
            raise ValueError(
                "expected 0 <= optimizer.final_learning_rate <= optimizer.learning_rate, got "
                f"{self.final_learning_rate} and {self.learning_rate}"
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"expected optimizer.clip > 0, got {self.clip}")


@dataclass(frozen=True)
class PhaseRecipe:
    """Kernel attention first, then the Gaussian process from its weights."""

    kernel_epochs: int = 0  # phase 1; 0 starts phase 2 from fresh weights
    epochs: int = 10  # phase 2
    draw: Literal["none", "independent", "joint"] = "independent"  # in phase 2
    kernel_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "phases")
        _at_least(0, "phases", kernel_epochs=self.kernel_epochs, epochs=self.epochs)
        if self.kernel_epochs + self.epochs < 1:
            raise ValueError("expected at least one epoch in the two phases, got 0")


@dataclass(frozen=True)
class RegularizerRecipe:
    """The weight alpha of the regulariser, linear from start to end over phase 2."""

    start: float = 0.0
    end: float = 0.01
    normalised: bool = True  # per head, token and dimension; else a sequence's sum, as the paper writes it
    floor_warning: float = 0.9  # warn when a layer's share of its noise floor passes this

    def __post_init__(self) -> None:
        check_types(self, "regularizer")
        _at_least(0, "regularizer", start=self.start, end=self.end)


@dataclass(frozen=True)
class CheckpointRecipe:
    """What is kept of a run."""

    every: int = 1  # epochs between validations and checkpoints
    keep: int = 2  # last checkpoints kept
    select: Literal["best", "best-nll", "last"] = "best"  # of the validations: by accuracy, or by NLL

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        _at_least(1, "checkpoint", every=self.every, keep=self.keep)


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on but the code."""

    name: str = "run"  # also that of its folder, where none is given
    seed: int = 0
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    phases: PhaseRecipe = field(default_factory=PhaseRecipe)
    regularizer: RegularizerRecipe = field(default_factory=RegularizerRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)

    def __post_init__(self) -> None:
        check_types(self)
        check_name("name", self.name)

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
    plain = read_toml(path)
    for change in changes:
        apply_change(plain, change)
    try:
        return recipe_from_dict({"name": path.stem, **plain})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def recipe_from_dict(plain: Mapping[str, Any]) -> Recipe:
    """The inverse of `Recipe.to_dict`; an unknown key is refused with the nearest valid name."""
    return _build(Recipe, plain, where="")


def _build(cls: type[T], plain: Mapping[str, Any], *, where: str) -> T:
    """Names of the file to names of the fields; what the values must be is the classes' own business."""
    if not isinstance(plain, Mapping):
        raise ValueError(
            f"expected {f'[{where[:-1]}]' if where else 'a recipe'} to be a table, got {plain!r}"
        )
    kinds = field_types(cls)
    values: dict[str, Any] = {}
    for key, value in plain.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(kinds)}"
            raise ValueError(f"unknown key {where + key!r}{hint}")
        kind = kinds[key]
        table = isinstance(kind, type) and is_dataclass(kind)
        values[key] = _build(kind, value, where=f"{where}{key}.") if table else value
    return cls(**values)


def apply_change(plain: dict[str, Any], change: str) -> None:
    """`section.key=value`, the value written as in TOML, in the plain values of a recipe."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"expected a change of the form section.key=value, got {change!r}")
    try:
        value = parse_toml(f"x = {text}", change)["x"]
    except ValueError:
        value = text.strip()  # plain words need no quotes
    *sections, last = key.strip().split(".")
    table = plain
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"{section!r} in {change!r} is not a table")
    table[last] = value


def _at_least(least: int, section: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not number >= least:  # also for NaN
            raise ValueError(f"expected {section}.{name} >= {least}, got {number}")


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
