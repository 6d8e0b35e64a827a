"""The command line: text in, exit code out."""

from gpattention.cli.main import main

__all__ = ["main"]
