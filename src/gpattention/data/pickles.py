"""Pickles of the CIFAR files, read by a small machine that can call nothing.

A pickle is a program.  Python's own machine calls whatever the file names, and can be made to build, out of a
few hundred bytes, what takes for ever to look at.  This one knows the instructions for numbers, strings,
lists, tuples and dictionaries, and the three names of NumPy by which these files describe an array of bytes;
everything else is refused.  Every instruction takes time in proportion to its bytes.
"""

import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LARGEST = 1 << 30  # bytes of a file; the largest that was published has 155 MB
CALLS = 64  # descriptions of arrays and types; the published files have two

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NAMES = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    **{(module, "_reconstruct"): "_reconstruct" for module in _MODULES},
}
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # of Python 2: bytes
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(frozen=True, slots=True)
class _Name:
    """One of NumPy's three."""

    name: str


@dataclass(slots=True, eq=False)
class _Described:
    """An array or a type, as the file describes it: nothing is made of it before all of it is known."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


def read_pickle(file: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle: arrays of uint8, strings, numbers, lists of strings and numbers."""
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file}: expected at most {LARGEST} bytes, got {file.stat().st_size}")
    raw = file.read_bytes()
    try:
        content = _Machine().run(raw)
        if isinstance(content, dict):
            plain = _Plain(2 * len(raw))
            return {plain.string(key): plain.value(value) for key, value in content.items()}
    except Exception as error:  # a damaged pickle can raise almost anything
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: expected a CIFAR pickle, got {told[:500]}") from None
    raise ValueError(f"{file}: expected a CIFAR pickle of a dictionary, got {type(content).__name__}")


class _Machine:
    """A stack, and the values that the file remembers by number."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._calls = 0
        self._steps: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(_VALUES, self._stack.append),
            **dict.fromkeys(_STRINGS, lambda text: self._stack.append(text.encode("latin-1"))),
            **{name: lambda _, x=x: self._stack.append(x) for name, x in _CONSTANTS.items()},  # type: ignore[misc]
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._remember),
            **dict.fromkeys(
                ("GET", "BINGET", "LONG_BINGET"), lambda place: self._stack.append(self._memo[place])
            ),
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "MARK": lambda _: self._stack.append(_MARK),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "TUPLE": lambda _: self._stack.append(tuple(self._marked())),
            "LIST": lambda _: self._stack.append(self._marked()),
            "DICT": lambda _: self._set({}, self._marked(), push=True),
            "APPEND": lambda _: self._extend([self._pop()]),
            "APPENDS": lambda _: self._extend(self._marked()),
            "SETITEM": lambda _: self._set_top([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda _: self._set_top(self._marked()),
            "GLOBAL": lambda names: self._name(*names.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*[self._pop(), self._pop()][::-1]),
            "REDUCE": lambda _: self._describe(),
            "BUILD": lambda _: self._complete(self._pop()),
        }
        for name, count in _TUPLES.items():
            self._steps[name] = lambda _, count=count: self._tuple(count)  # type: ignore[misc]

    def run(self, raw: bytes) -> Any:
        """What the program leaves."""
        for instruction, argument, _ in pickletools.genops(raw):
            if instruction.name == "STOP":
                return self._pop()
            step = self._steps.get(instruction.name)
            if step is None:
                raise pickle.UnpicklingError(f"the instruction {instruction.name}")
            step(argument)
        raise pickle.UnpicklingError("no end")

    def _pop(self) -> Any:
        found = self._stack.pop()
        if found is _MARK:
            raise pickle.UnpicklingError("a mark in the place of a value")
        return found

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise pickle.UnpicklingError(f"no {kind.__name__} where one is to be filled")
        return self._stack[-1]

    def _marked(self) -> list[Any]:
        """What was put down since the last mark."""
        found = []
        while (each := self._stack.pop()) is not _MARK:
            found.append(each)
        return found[::-1]

    def _tuple(self, count: int) -> None:
        self._stack.append(tuple([self._pop() for _ in range(count)][::-1]))

    def _remember(self, place: int) -> None:
        found = self._pop()
        self._stack.append(found)
        self._memo[place] = found

    def _extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _set_top(self, values: list[Any]) -> None:
        self._set(self._top(dict), values)

    def _set(self, mapping: dict[Any, Any], values: list[Any], *, push: bool = False) -> None:
        keys = values[::2]
        # the hash of a tuple of tuples would take for ever
        if len(values) % 2 or not all(type(key) in (bytes, str) for key in keys):
            raise pickle.UnpicklingError("keys that are no strings")
        mapping.update(zip(keys, values[1::2], strict=True))
        if push:
            self._stack.append(mapping)

    def _name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise pickle.UnpicklingError("a name that is no string")
        known = _NAMES.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(
                f"expected NumPy arrays, lists and strings only, got {module[:80]}.{name[:80]}"
            )
        self._stack.append(_Name(known))

    def _describe(self) -> None:
        arguments, called = self._pop(), self._pop()
        self._calls += 1
        if self._calls > CALLS:
            raise pickle.UnpicklingError(f"more than {CALLS} arrays and types")
        if type(called) is not _Name or called.name == "ndarray" or type(arguments) is not tuple:
            raise pickle.UnpicklingError("the call of something else than an array or a type")
        self._stack.append(_Described(called.name, arguments))

    def _complete(self, state: Any) -> None:
        self._top(_Described).state = state


class _Plain:
    """Values as they are handed on; what is not plain is refused."""

    def __init__(self, room: int) -> None:
        self._room = room  # bytes of strings: a file can name one string again and again

    def value(self, value: Any) -> Any:
        """An array, a string, a number, or a list of the latter two."""
        if type(value) is _Described:
            return _array(value)
        if type(value) is list:
            return [self._scalar(each) for each in value]
        return self._scalar(value)

    def _scalar(self, value: Any) -> Any:
        if type(value) in (bytes, str):
            return self.string(value)
        if value is None or type(value) in (bool, int, float):
            return value
        raise ValueError(
            f"expected arrays, and lists of numbers and strings, got {type(value).__name__.strip('_')}"
        )

    def string(self, value: bytes | str) -> str:
        """Decoded, whatever it holds."""
        self._room -= len(value)
        if self._room < 0:
            raise ValueError("expected strings that are as long as the file, got longer ones")
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _array(described: _Described) -> np.ndarray:
    state = described.state
    if described.name != "_reconstruct" or not (type(state) is tuple and len(state) == 5):
        raise ValueError(f"expected the state of an array, got {type(state).__name__.strip('_')}")
    _, shape, kind, fortran, raw = state
    code = kind.arguments[0] if type(kind) is _Described and kind.name == "dtype" and kind.arguments else None
    if code not in ("u1", "|u1", b"u1", b"|u1") or type(raw) is not bytes:
        raise ValueError("expected an array of type u1 in bytes, got another")
    if type(shape) is not tuple or not all(type(side) is int and 0 <= side <= len(raw) for side in shape):
        raise ValueError("expected the shape of an array, got none")
    # frombuffer makes nothing, and reshape refuses what does not fit
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran is True or fortran == 1 else "C")
