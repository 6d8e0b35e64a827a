"""The command line: everything it does is one call away in Python."""

from gpattention.cli.main import main

__all__ = ["main"]
