"""Data sets, and what happens to them before a model sees them; imports nothing else of the library."""
