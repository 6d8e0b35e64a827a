"""A training run as frozen data: what to train, on what, how; checked when made, kept as TOML."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from gpattention.checks import check_choice, check_name, check_whole, did_you_mean, plain
from gpattention.files import StrPath, nearest_path, parse_toml, read_json, read_toml, write_atomically

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Mapping: "a table"}
_BARE = re.compile(r"[A-Za-z0-9_-]+")  # keys that TOML wants no quotes for
LARGEST_SEED = 2**43  # training makes others of a seed, a million apart, and all must fit into 64 bits
# what a recipe may choose, and the options it may give: those of torch.optim's class of that name
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
    "adam": (torch.optim.Adam, ("betas", "eps", "weight_decay", "amsgrad")),
    "adamw": (torch.optim.AdamW, ("betas", "eps", "weight_decay", "amsgrad")),
    "sgd": (torch.optim.SGD, ("momentum", "dampening", "weight_decay", "nesterov")),
}


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass, in order, with their annotations."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def at_least(least: float, default: Any) -> Any:
    """A field for numbers of at least `least`."""
    return field(default=default, metadata={"least": least})


class Section:
    """A table of a recipe, and the recipe itself: every value is of its field's type, and not too small.

    A whole number where a fraction is allowed becomes one; a table is copied, so that nobody changes it.
    """

    _before = ""  # the names of its values

    def __init_subclass__(cls, section: str) -> None:
        cls._before = f"{section}." if section else ""

    def __post_init__(self) -> None:
        kinds = field_types(type(self))
        for each in fields(self):  # type: ignore[arg-type]
            where = f"{self._before}{each.name}"
            value = _typed(getattr(self, each.name), kinds[each.name], where)
            least = each.metadata.get("least")
            if least is not None and not value >= least:  # also for NaN
                raise ValueError(f"expected {where} >= {least}, got {value}")
            object.__setattr__(self, each.name, value)


def _typed(value: Any, kind: Any, where: str) -> Any:
    value, origin, arguments = plain(value), get_origin(kind), get_args(kind)
    if NoneType in arguments:
        return None if value is None else _typed(value, arguments[0], where)
    kind = origin if origin is Mapping else kind
    if origin is Literal:
        fits, wanted = value in arguments, f"one of {', '.join(map(str, arguments))}"
    elif kind in _WORDS:
        allowed = (int, float) if kind is float else kind
        fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
        wanted = _WORDS[kind]
    else:
        fits, wanted = isinstance(value, kind), f"a {kind.__name__}"
    if not fits:
        raise ValueError(f"expected {where} to be {wanted}, got {value!r}")
    if kind is Mapping:
        return {key: plain(x) for key, x in value.items()}
    return float(value) if kind is float else value


def check_seed(name: str, seed: int) -> None:
    """Refuse a seed that would overflow later, when the folder of a run is made already.

    Args:
        name: what an error calls it.
        seed: seed of a run.

    Raises:
        ValueError: it is no whole number, or too large.
    """
    if not -LARGEST_SEED <= check_whole(name, seed) <= LARGEST_SEED:
        raise ValueError(f"expected {name} from {-LARGEST_SEED} to {LARGEST_SEED}, got {seed}")


@dataclass(frozen=True)
class DataRecipe(Section, section="data"):
    """Which data set, and the options of its loader.

    Attributes:
        name: name of the data set.
        options: options of its loader; for texts also `contextual` and `vocabulary`, see `prepare`.
        stream: bring batches from the host even if the training data fit on the device.
        workers: processes that cut streamed batches.
        group_by_length: make batches of texts of similar length and cut them to it, so that little padding
            is computed; texts must have lengths of their own.
    """

    name: str = "digits"
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    workers: int = at_least(0, 2)
    group_by_length: bool = False


@dataclass(frozen=True)
class ModelRecipe(Section, section="model"):
    """A transformer: its config's fields, and the attention of every layer.

    Attributes:
        type: what it reads.
        attention: the kind, one of `gpattention.attention.list_attention()`.
        below: kind of all layers but the last; None is the same as in the last, or what its kind declares.
        options: options of the attention.
        config: width, depth, heads, patch, ...
    """

    type: Literal["vision", "text"] = "vision"
    attention: str = "cgp"
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    below: str | None = None


@dataclass(frozen=True)
class OptimizerRecipe(Section, section="optimizer"):
    """An optimiser with a learning rate that falls linearly over both phases.

    Attributes:
        name: adam, adamw or sgd; see `OPTIMIZERS`.
        options: options of the optimiser beside its learning rate: weight_decay, momentum, betas, ...
        learning_rate: at the first step.
        final_learning_rate: at the last step.
        restart: let the second phase start its own decay.
        batch_size: items of a batch, of all processes together.
        accumulate: batches per optimiser update.
        clip: largest norm of the gradient; None leaves it as it is.
        keyed_dropout: key dropout masks to items, as draws are, so that any number of processes agrees.
    """

    name: str = "adam"
    options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 5e-4
    final_learning_rate: float = 1e-5
    restart: bool = False
    batch_size: int = at_least(1, 100)
    accumulate: int = at_least(1, 1)
    clip: float | None = None
    keyed_dropout: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        first, last = self.learning_rate, self.final_learning_rate
        if not 0 <= last <= first:
            wanted = "0 <= optimizer.final_learning_rate <= optimizer.learning_rate"
            raise ValueError(f"expected {wanted}, got {last} and {first}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"expected optimizer.clip > 0, got {self.clip}")
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        for option in self.options:
            check_choice(f"an option of optimizer {self.name}", option, OPTIMIZERS[self.name][1])
        try:
            self.build([torch.zeros(1)])  # torch knows which values there are
        except (ValueError, TypeError, IndexError) as error:
            options = f"optimizer.options that {self.name} takes"
            raise ValueError(f"expected {options}, got {dict(self.options)}: {error}") from None

    def build(self, parameters: Any, *, captured: bool = False) -> torch.optim.Optimizer:
        """The optimiser.

        Args:
            parameters: what it updates, as torch.optim takes them.
            captured: whether its steps become part of a CUDA graph.

        Returns:
            A new optimiser without state.
        """
        made, _ = OPTIMIZERS[self.name]
        taken = signature(made).parameters
        # fused updates can be skipped on the device; an optimiser that counts its steps must do so there too
        special = {name: True for name in ("fused", "capturable") if captured and name in taken}
        return made(parameters, lr=self.learning_rate, **self.options, **special)


@dataclass(frozen=True)
class PhaseRecipe(Section, section="phases"):
    """Kernel attention first, then the Gaussian process from its weights.

    Attributes:
        kernel_epochs: epochs of phase 1; 0 starts phase 2 from fresh weights.
        epochs: epochs of phase 2.
        draw: what phase 2 draws from the posterior.
        kernel_options: options of the attention of phase 1.
    """

    kernel_epochs: int = at_least(0, 0)
    epochs: int = at_least(0, 10)
    draw: Literal["none", "independent", "joint"] = "independent"
    kernel_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_epochs + self.epochs < 1:
            raise ValueError("expected at least one epoch in the two phases, got 0")


@dataclass(frozen=True)
class RegularizerRecipe(Section, section="regularizer"):
    """The weight alpha of the regulariser, linear from start to end over phase 2.

    Attributes:
        start: alpha at the first step of phase 2.
        end: alpha at the last step.
        normalised: per head, token and dimension; else a sequence's sum, as the paper writes it.
        floor_warning: warn when a layer's share of its noise floor passes this.
    """

    start: float = at_least(0, 0.0)
    end: float = at_least(0, 0.01)
    normalised: bool = True
    floor_warning: float = 0.9


@dataclass(frozen=True)
class CheckpointRecipe(Section, section="checkpoint"):
    """What is kept of a run.

    Attributes:
        every: epochs between validations and checkpoints.
        keep: last checkpoints kept.
        select: the weights that are kept: of the best validation, by accuracy or by NLL, or the last.
    """

    every: int = at_least(1, 1)
    keep: int = at_least(1, 2)
    select: Literal["best", "best-nll", "last"] = "best"


@dataclass(frozen=True)
class Recipe(Section, section=""):
    """Everything a run depends on but the code.

    Attributes:
        name: also that of its folder, where none is given.
        seed: seed of weights, order, draws and data split.
        data: which data set.
        model: which transformer.
        optimizer: how it is trained.
        phases: for how long.
        regularizer: its weight.
        checkpoint: what is kept.
    """

    name: str = "run"
    seed: int = 0
    data: DataRecipe = field(default_factory=DataRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    phases: PhaseRecipe = field(default_factory=PhaseRecipe)
    regularizer: RegularizerRecipe = field(default_factory=RegularizerRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("name", self.name)

    @property
    def epochs(self) -> int:
        """Epochs of both phases."""
        return self.phases.kernel_epochs + self.phases.epochs

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a TOML or JSON file would hold them."""
        return _plain(self)

    def replace(self, changes: Mapping[str, Any]) -> "Recipe":
        """The recipe with other values, checked as any recipe.

        Args:
            changes: values by their dotted names: `{"phases.epochs": 30, "model.options.noise": 0.1}`.

        Returns:
            A new recipe.

        Raises:
            ValueError: a name is unknown, or a value is not allowed.
        """
        plain = self.to_dict()
        for name, value in changes.items():
            *sections, last = name.split(".")
            table = plain
            for section in sections:
                table = table.setdefault(section, {})
                if not isinstance(table, dict):
                    raise ValueError(f"{section!r} in {name!r} is not a table, but {table!r}")
            table[last] = value
        return recipe_from_dict(plain)


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: a TOML file; its name is the recipe's, unless the file gives one.
        changes: `section.key=value`, as `--set` takes them; see `change_recipe`.

    Returns:
        The recipe.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or a change is not one of a recipe; the message names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no recipe {path}{nearest_path(path, '.toml', beside=['recipes'])}")
    content = read_toml(path)
    try:
        return change_recipe(recipe_from_dict({"name": path.stem, **content}), changes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_recipe(folder: StrPath) -> Recipe:
    """The recipe that a run was begun with.

    Args:
        folder: folder of the run.

    Returns:
        The recipe.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: its file is damaged.
    """
    file = Path(folder) / "recipe.json"
    if not file.is_file():
        raise FileNotFoundError(f"expected a run in {folder}, got no {file.name} there")
    plain = read_json(file, nonfinite=True)
    try:
        return recipe_from_dict(plain)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def change_recipe(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """A recipe with the changes of a command line.

    Args:
        recipe: to change; it stays as it is.
        changes: `section.key=value`, the value written as in TOML; plain words need no quotes.

    Returns:
        The changed recipe.

    Raises:
        ValueError: a change has another form, an unknown name or a value that is not allowed.
    """
    found: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"expected a change of the form section.key=value, got {change!r}")
        try:
            found[name.strip()] = parse_toml(f"x = {text}", change)["x"]
        except ValueError:
            found[name.strip()] = text.strip()
    return recipe.replace(found) if found else recipe


def recipe_from_dict(plain: Mapping[str, Any]) -> Recipe:
    """The inverse of `Recipe.to_dict`.

    Args:
        plain: values by section and name; what is not given is as `Recipe` has it.

    Returns:
        The recipe.

    Raises:
        ValueError: a name is unknown (the message has the nearest valid one), or a value is not allowed.
    """
    return _build(Recipe, plain, where="")


def _build(cls: type[T], plain: Mapping[str, Any], *, where: str) -> T:
    """Build a recipe or a section of one; the classes check the values."""
    if not isinstance(plain, Mapping):
        table = f"[{where[:-1]}]" if where else "a recipe"
        raise ValueError(f"expected {table} to be a table, got {plain!r}")
    kinds = field_types(cls)
    values: dict[str, Any] = {}
    for key, value in plain.items():
        if key not in kinds:
            hint = did_you_mean(key, kinds, cutoff=0.4) or f"; known: {', '.join(kinds)}"
            raise ValueError(f"unknown key {where + key!r}{hint}")
        values[key] = _build(kinds[key], value, where=f"{where}{key}.") if is_dataclass(kinds[key]) else value
    return cls(**values)


def _plain(x: Any) -> Any:
    if is_dataclass(x):
        return {f.name: _plain(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, tuple | list) else x


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The same run with another seed.

    Args:
        recipe: any recipe.
        seed: the new one.

    Returns:
        A new recipe.
    """
    return replace(recipe, seed=seed)


def flat(plain: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Every value of nested tables by its whole name: `phases.epochs`, `model.options.noise`, ..."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def describe_differences(there: Recipe, here: Recipe) -> str:
    """`phases.epochs is 2 there and 8 here, seed is 0 there and 1 here`; empty for equal recipes."""
    one, other = flat(there.to_dict()), flat(here.to_dict())

    def value(of: Mapping[str, Any], name: str) -> str:
        return repr(of[name]) if name in of else "not given"

    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name} is {value(one, name)} there and {value(other, name)} here" for name in names)


def recipe_toml(recipe: Recipe, comment: str = "") -> str:
    """Every value of the recipe, defaults included; TOML has no word for None, so those are left out."""
    plain = recipe.to_dict()
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [_pair(key, value) for key, value in plain.items() if not isinstance(value, Mapping)]
    for section, table in plain.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(section)}]"]
            lines += [_pair(key, value) for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def write_recipe(path: str | Path, recipe: Recipe, comment: str = "") -> None:
    """Write a recipe as TOML, in one piece.

    Args:
        path: path of the file.
        recipe: to write, defaults included.
        comment: stands at the top.
    """
    write_atomically(Path(path), recipe_toml(recipe, comment).encode())


def _pair(key: str, value: Any) -> str:
    return f"{_key(key)} = {toml_value(value)}"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else toml_value(key)


def toml_value(value: Any) -> str:
    """A value as TOML writes it; `ValueError` for one that TOML cannot hold."""
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)  # inf and nan are TOML's words too
    if isinstance(value, bool | int | str):
        # JSON's words are TOML's, but for the one control character that JSON lets pass
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pair(key, x) for key, x in value.items() if x is not None) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(x) for x in value) + "]"
    raise ValueError(f"expected a value that TOML can hold, got {value!r}")
