"""Attention that knows what it does not know: Gaussian-process attention for PyTorch."""

from gpattention import gp

__version__ = "0.1.0"

__all__ = ["__version__", "gp"]
