"""Options that a mode does not use stay at their defaults: nothing is ignored in silence."""

import inspect
from typing import Any


def refuse_unused(owner: type, when: str, /, **given: Any) -> None:
    """Refuse a value other than the one `owner`'s constructor has by itself; `when` names the mode.

    >>> refuse_unused(CGPAttention, "where regularizer is 'kl'", latent_prior=latent_prior)
    """
    known = inspect.signature(owner).parameters
    for name, value in given.items():
        usual = known[name].default
        if value != usual:
            raise ValueError(
                f"expected {name} to be {usual!r}, its default, {when}, since it would have no effect, "
                f"got {value!r}"
            )
