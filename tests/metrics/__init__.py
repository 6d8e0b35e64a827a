"""Metrics against loops, scikit-learn and each other."""
