"""The suites against NumPy."""
