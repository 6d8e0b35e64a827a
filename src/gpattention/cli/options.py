"""How a function becomes a command: its signature is the interface, its docstring the help.

The `Options:` of a docstring, and the `Args:` of settings, are the help of each, `name (METAVAR): ...` where
a value has a name of its own.  Tuples are comma-separated text, and seeds are checked as a recipe's are.
"""

import inspect
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import fields, replace
from functools import partial, wraps
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from gpattention.files import StrPath

GOES_ON = "what is finished is kept; to go on:"  # of commands that were stopped: theirs comes below
F = TypeVar("F", bound=Callable[..., Any])
ENTRY = re.compile(r"^ {4}(\w+)(?: \(([^)]+)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)  # of an `Args:`
Out = typer.Option("--out", "-o")

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change a value of the recipe, as often as needed"),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="FOLDER", help="folder of datasets (default: GPATTENTION_DATA)"),
]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU where there is one", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document instead of the table")]
ShareGpu = Annotated[
    bool,
    typer.Option(
        "--share-gpu",
        help="let processes compute on one GPU at the same time, by NVIDIA's MPS; else they take turns",
    ),
]
Engine = Annotated[
    Literal["local", "ray"],
    typer.Option("--engine", help="processes of this machine, or tasks of a Ray cluster (docs/scaling.md)"),
]


def _seed(text: str | int) -> int:
    if isinstance(text, int):  # the default
        return text
    from gpattention.runs import check_seed
    from gpattention.runs.recipe import LARGEST_SEED

    try:
        check_seed("a seed", int(text))
    except ValueError:
        expected = f"expected a whole number from {-LARGEST_SEED} to {LARGEST_SEED}"
        raise typer.BadParameter(f"{expected}, got {text!r}") from None
    return int(text)


@contextmanager
def working(
    engine: str,
    folders: Iterable[StrPath],
    *,
    jobs: int,
    device: str,
    data: str | None,
    share_gpu: bool = False,
) -> Iterator[tuple[Any, str, str | None]]:
    """Set up what `--engine` and `--share-gpu` ask for; yields engine, device, and folder of the data."""
    from gpattention.numerics import choose_device
    from gpattention.studies.ray_cluster import ray_cluster
    from gpattention.studies.scheduler import shared_gpu

    if engine == "local":
        device = str(choose_device(device))
        if share_gpu and not device.startswith("cuda"):
            raise ValueError(f"expected a CUDA device with --share-gpu, got {device}")
        with shared_gpu(jobs) if share_gpu else nullcontext():
            yield None, device, data
        return
    if share_gpu:
        raise ValueError(
            "expected --share-gpu with --engine local: on a cluster the service is each node's own"
        )
    data = data or os.environ.get("GPATTENTION_DATA")  # which nodes need not have
    with ray_cluster(folders, jobs=jobs, device=device, data=data) as cluster:
        yield cluster, cluster.device, data


class Stopped(Exception):  # noqa: N818 # of a command that somebody stopped
    """A command was stopped; the message says what is kept.

    Attributes:
        add: the option with which the same command goes on; empty if it does so as it is.
        drop: the option without which it does.
    """

    def __init__(self, message: str, add: str = "", drop: str = "") -> None:
        super().__init__(message)
        self.add, self.drop = add, drop

    def command(self, given: Sequence[str]) -> str:
        """The command line that goes on, made of the one that was stopped."""
        kept = [word for word in given if word != self.drop]
        more = [self.add] if self.add and self.add not in kept else []
        return shlex.join(["gpattention", *kept, *more])


@contextmanager
def goes_on(note: str = GOES_ON, add: str | Callable[[], str] = "", drop: str = "") -> Iterator[None]:
    """When the code inside is stopped, report what is kept and the command that goes on."""
    try:
        yield
    except BaseException as stop:
        stopped = isinstance(stop, KeyboardInterrupt) or type(stop).__name__ == "TrainingStoppedError"
        if not stopped:
            raise
        said = str(stop) or "interrupted"  # the training says itself what it keeps
        message = said if ";" in said or not note else f"{said}; {note}"
        raise Stopped(message, add if isinstance(add, str) else add(), drop) from None


def command(function: F) -> F:
    """A function as typer takes it: types that a command line has, and the help of its docstring.

    Args:
        function: its parameters without a default become arguments, the others options.

    Returns:
        The same function, called with text for each tuple.
    """
    about, parameters = _documented(function), []
    converted: dict[str, Callable[[str], Any]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        name, default = parameter.name, parameter.default
        hint, *infos = _parts(parameter.annotation)
        if (element := _element(hint)) is not None:
            converted[name] = partial(_split, name, element)
            default = default if default is None else ",".join(map(str, default))
            hint = str | None
        elif str in get_args(hint) and get_origin(hint) in (Union, UnionType):  # a device or path may be text
            hint = str | None if type(None) in get_args(hint) else str
        if hint is not typer.Context:
            # one flag, given here: a bool would get a second one that denies it
            flag = f"--{name.replace('_', '-')}"
            made = typer.Argument() if default is parameter.empty else typer.Option(flag)
            info = copy(infos[0]) if infos else made
            metavar, text = about.get(name, (None, None))
            info.help, info.metavar = info.help or text, info.metavar or metavar
            if name == "seed":
                info.parser, info.metavar = _seed, "N"
            hint = Annotated[hint, info]
        parameters.append(parameter.replace(annotation=hint, default=default))

    @wraps(function)
    def wrapped(**given: Any) -> Any:
        texts = {name: split(given[name]) for name, split in converted.items() if given[name] is not None}
        return function(**{**given, **texts})

    return _with_parameters(wrapped, parameters)


def takes(
    settings: type,
    name: str,
    *,
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
    flags: Mapping[str, str] | None = None,
    usual: Any = None,
) -> Callable[[F], F]:
    """Give a command an option for every field of a dataclass: one more field is one more flag.

    The command receives the dataclass, made of the options, as its argument `name`.  A field's type and
    default are its option's, the `Args:` of the class its help.

    Args:
        settings: a dataclass whose fields have defaults.
        name: name of the command's argument.
        only: fields that become options; all if not given.
        skip: fields that do not.
        flags: names of options that are not called as their fields.
        usual: an instance with other defaults.
    """
    usual = settings() if usual is None else usual
    hints, about, flags = get_type_hints(settings, include_extras=True), _documented(settings), flags or {}
    chosen = [f.name for f in fields(settings) if (only is None or f.name in only) and f.name not in skip]
    added = []
    for field in chosen:
        metavar, text = about.get(field, (None, ""))
        info = typer.Option(flags.get(field, f"--{field.replace('_', '-')}"), help=text, metavar=metavar)
        hint = Annotated[hints[field], info] if len(_parts(hints[field])) == 1 else hints[field]
        keyword = inspect.Parameter.KEYWORD_ONLY
        added.append(inspect.Parameter(field, keyword, default=getattr(usual, field), annotation=hint))

    def decorate(command: F) -> F:
        @wraps(command)
        def wrapped(**given: Any) -> Any:
            made = {field: given.pop(field) for field in chosen}
            return command(**{name: replace(usual, **made)}, **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        return _with_parameters(wrapped, [*(p for p in own if p.name != name), *added])

    return decorate


def _with_parameters(function: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    # arguments without a default come first, whatever the order of the decorators
    ordered = sorted(parameters, key=lambda p: p.default is not inspect.Parameter.empty)
    function.__signature__ = inspect.Signature(
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in ordered]
    )
    function.__annotations__ = {p.name: p.annotation for p in ordered}
    return function


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The type of an annotation, and what it says to typer."""
    return get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)


def _documented(documented: Any) -> dict[str, tuple[str | None, str]]:
    """Metavar and help that a function, or a class and its bases, give each name."""
    found: dict[str, tuple[str | None, str]] = {}
    for each in reversed(getattr(documented, "__mro__", [documented])):
        _, *listed = re.split(r"(?:Args|Options):\n", inspect.cleandoc(each.__doc__ or ""))
        for entry in ENTRY.finditer("".join(listed)):
            found[entry[1]] = entry[2], " ".join(entry[3].split()).rstrip(".")
    return found


def _element(hint: Any) -> Any:
    """The type of the elements of a tuple or sequence; None of other types."""
    if get_origin(hint) in (Union, UnionType):
        return next((found for each in get_args(hint) if (found := _element(each))), None)
    return get_args(hint)[0] if get_origin(hint) in (tuple, Sequence) else None


def _split(name: str, element: type, text: str) -> tuple[Any, ...]:
    """`a,b` or `0,1,2` of an option."""
    found = []
    for each in text.split(","):
        try:
            found.append(int(each) if element is int else each)
        except ValueError:
            option = name.replace("_", "-")
            raise ValueError(f"expected --{option} to be whole numbers, got {each!r}") from None
    return tuple(found)
