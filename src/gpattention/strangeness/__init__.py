"""What is usual for a model, learnt from held-out items, and how far from it an item is.

>>> from gpattention.strangeness import Strangeness
>>> strangeness = Strangeness.fit(model.signals(held_out), labels)
>>> strangeness.flag(model.signals(inputs), rate=0.01)  # [B]
"""

from gpattention.strangeness.adaptive_temperature import AdaptiveTemperature
from gpattention.strangeness.strangeness import (
    PARTS,
    Explanation,
    Head,
    State,
    Strangeness,
    available_parts,
    fit_parts,
    score_part,
)

__all__ = [
    "PARTS", "AdaptiveTemperature", "Explanation", "Head", "State", "Strangeness", "available_parts",
    "fit_parts", "score_part",
]  # fmt: skip
