"""Tests of gpattention.data.corruptions."""
