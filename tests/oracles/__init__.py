"""Slow NumPy oracles that evaluate the definitions of with explicit inverses."""
