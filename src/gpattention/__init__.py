"""Attention that knows what it does not know: Gaussian-process attention for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpattention import gp

if TYPE_CHECKING:
    from gpattention.adopt.attach import attach
    from gpattention.adopt.convert import conversion_of, convert
    from gpattention.adopt.convert_predict import predict
    from gpattention.adopt.export import export_program
    from gpattention.adopt.export_onnx import export_onnx
    from gpattention.adopt.regularizer import regularizer
    from gpattention.adopt.sites import find_sites
    from gpattention.adopt.storage_loading import from_pretrained

__version__ = "0.1.0"

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
    "predict",
    "regularizer",
]

# imported when first asked for: `import gpattention` stays fast
_LAZY = {
    "attach": "gpattention.adopt.attach",
    "conversion_of": "gpattention.adopt.convert",
    "convert": "gpattention.adopt.convert",
    "export_onnx": "gpattention.adopt.export_onnx",
    "export_program": "gpattention.adopt.export",
    "find_sites": "gpattention.adopt.sites",
    "from_pretrained": "gpattention.adopt.storage_loading",
    "predict": "gpattention.adopt.convert_predict",
    "regularizer": "gpattention.adopt.regularizer",
}


def __getattr__(name: str) -> Any:
    """Names of the parts above `gp`."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
