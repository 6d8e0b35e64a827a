"""Tests of vocabularies and frozen embeddings."""
