"""Tests of `gpattention.data`."""
