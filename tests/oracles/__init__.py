"""Slow NumPy oracles that evaluate the definitions of MATH.md with explicit inverses."""
