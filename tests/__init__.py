"""Tests of gpattention."""
