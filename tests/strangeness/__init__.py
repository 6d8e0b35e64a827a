"""Tests of gpattention.strangeness."""
