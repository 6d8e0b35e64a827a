"""Gaussian-process uncertainty for models that exist already."""
