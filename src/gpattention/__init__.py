"""Attention that knows what it does not know: Gaussian-process attention for PyTorch."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpattention import gp
    from gpattention.graphs import graphed
    from gpattention.hosts import (
        attach,
        conversion_of,
        convert,
        export_onnx,
        export_program,
        find_sites,
        from_pretrained,
        predict,
        regularizer,
        signals,
    )

__version__ = "0.2.0"

__all__ = [
    "__version__",
    "attach",
    "conversion_of",
    "convert",
    "export_onnx",
    "export_program",
    "find_sites",
    "from_pretrained",
    "gp",
    "graphed",
    "predict",
    "regularizer",
    "signals",
]

# imported when first asked for: `import gpattention` and `gpattention --help` need no torch
_LAZY = [name for name in __all__ if name not in ("__version__", "gp")]


def __getattr__(name: str) -> Any:
    """Names of the parts, and the mathematics as a module."""
    if name == "gp":
        return import_module("gpattention.gp")
    if name not in _LAZY:
        missing = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(missing, name=name, obj=sys.modules[__name__])  # Python suggests a similar name
    room = "gpattention.graphs" if name == "graphed" else "gpattention.hosts"
    value = getattr(import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "gp"})
