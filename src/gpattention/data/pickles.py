"""Pickles of the CIFAR files, read without running anything they name.

A pickle may call whatever it names.  These files name three things of NumPy to describe an array of bytes;
here they stand for plain records, and every other name is refused.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


class _Type:
    """What `numpy.dtype` describes: only its code is kept."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code.decode("ascii", "replace") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, which one byte has not."""


class _Array:
    """What `numpy.ndarray` describes: shape, type and bytes."""

    def __init__(self) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        if not (isinstance(self.state, tuple) and len(self.state) == 5):
            raise ValueError(f"expected the state of an array, got {type(self.state).__name__}")
        _, shape, kind, fortran, raw = self.state
        if not isinstance(kind, _Type) or kind.code not in ("u1", "|u1") or not isinstance(raw, bytes):
            raise ValueError(f"expected an array of type u1 in bytes, got {getattr(kind, 'code', kind)!r}")
        # frombuffer refuses to make more than there are bytes
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _NdArray:
    """Stands for the class `numpy.ndarray`, which is named but never made."""


def _reconstruct(*_: object) -> _Array:
    return _Array()


class _Restricted(pickle.Unpickler):
    """Finds nothing but the three records above."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and name == "_reconstruct":
            return _reconstruct
        if (module, name) == ("numpy", "ndarray"):
            return _NdArray
        if (module, name) == ("numpy", "dtype"):
            return _Type
        raise pickle.UnpicklingError(f"expected NumPy arrays, lists and strings only, got {module}.{name}")

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError(f"expected no persistent objects, got {pid!r}")


def read_pickle(file: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle: its arrays are uint8, its strings decoded."""
    with file.open("rb") as stream:
        try:
            content = _Restricted(stream, encoding="bytes").load()
            if isinstance(content, dict):
                return {str(_plain(key)): _plain(value) for key, value in content.items()}
        except Exception as error:  # a damaged pickle can raise almost anything
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"{file}: expected a CIFAR pickle, got {told}") from None
    raise ValueError(f"{file}: expected a CIFAR pickle of a dictionary, got {type(content).__name__}")


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.array()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return value
