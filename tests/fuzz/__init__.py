"""Seeded random attacks on the library: `make fuzz` runs them for minutes, `make test` for seconds."""
