"""Tests of gpattention.models."""
