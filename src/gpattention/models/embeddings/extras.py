"""Optional packages, imported when they are first needed."""

import importlib
from types import ModuleType


def require(module: str, *, extra: str, user: str) -> ModuleType:
    """The module, or an `ImportError` that says which extra of this library brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # the package is there, and something it needs is not
        raise ImportError(
            f"{user} needs {module}: pip install 'gpattention[{extra}]'", name=module
        ) from error
