"""The corruptions of CIFAR-10-C, made anew from any clean test set.

>>> from gpattention.data.corruptions import corrupt, regenerate
>>> corrupt(images, "fog", severity=3)
>>> regenerate(images, labels, "cifar10-c-regenerated", seed=0)
"""

from gpattention.data.corruptions.catalogue import CATEGORIES, CORRUPTIONS, SEVERITIES
from gpattention.data.corruptions.corrupt import corrupt
from gpattention.data.corruptions.corruption import Corruption
from gpattention.data.corruptions.regenerate import Regenerated, regenerate

__all__ = ["CATEGORIES", "CORRUPTIONS", "SEVERITIES", "Corruption", "Regenerated", "corrupt", "regenerate"]
