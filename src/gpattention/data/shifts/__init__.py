"""Shifts of images that are no corruptions of CIFAR-10-C: for choices that must not look at those.

>>> from gpattention.data.shifts import SHIFTS, shift
>>> shift(images, "turned", severity=2)
"""

from gpattention.data.shifts.catalogue import SEVERITIES, SHIFTS, Shift, shifts_of
from gpattention.data.shifts.shift import shift

__all__ = ["SEVERITIES", "SHIFTS", "Shift", "shift", "shifts_of"]
