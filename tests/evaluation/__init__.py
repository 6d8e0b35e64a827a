"""Tests of gpattention.evaluation."""
