"""Figures over seeds: means, their standard errors, and differences of two means."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Literal

CLEAR = 2.0  # standard errors beyond which a difference is called one

Basis = Literal["paired", "unpaired", "one side", "unknown"]


@dataclass(frozen=True)
class Estimate:
    """One figure of several runs."""

    values: Mapping[int, float]  # by seed

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.values.values())

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None of one run."""
        count = len(self.values)
        return stdev(self.values.values()) / sqrt(count) if count > 1 else None

    @property
    def count(self) -> int:
        """Runs."""
        return len(self.values)

    def text(self, digits: int, scale: float = 1.0) -> str:
        """Mean and standard error."""
        told = f"{self.mean * scale:.{digits}f}"
        return told if self.error is None else f"{told} ± {self.error * scale:.{digits}f}"


@dataclass(frozen=True)
class Difference:
    """One figure less another."""

    mean: float
    error: float | None  # None where it cannot be told
    basis: Basis

    @property
    def in_errors(self) -> float | None:
        """How many standard errors it is wide, with its sign."""
        return self.mean / self.error if self.error else None

    @property
    def clear(self) -> bool:
        """Whether it is beyond two standard errors; what has no error is never clear."""
        return self.error is not None and abs(self.mean) > CLEAR * self.error

    def text(self, digits: int, scale: float = 1.0) -> str:
        """With its sign and its standard error."""
        told = f"{self.mean * scale:+.{digits}f}"
        return told if self.error is None else f"{told} ± {self.error * scale:.{digits}f}"


def difference(one: Estimate, other: Estimate) -> Difference:
    """Seed by seed where at least two seeds are in both, as these share their split; else of the means.

    Where one side is a single figure its own error is not known and the other's stands alone.
    """
    shared = sorted(set(one.values) & set(other.values))
    if len(shared) > 1:
        paired = Estimate({seed: one.values[seed] - other.values[seed] for seed in shared})
        return Difference(paired.mean, paired.error, "paired")
    mean = one.mean - other.mean
    known = [estimate.error for estimate in (one, other) if estimate.error is not None]
    if not known:
        return Difference(mean, None, "unknown")
    return Difference(mean, hypot(*known), "unpaired" if len(known) == 2 else "one side")


def beyond(one: Estimate, value: float) -> Difference:
    """Against a figure of someone else's, taken as it is printed."""
    return Difference(one.mean - value, one.error, "unknown" if one.error is None else "one side")
