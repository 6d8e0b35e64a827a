"""What is usual for an attached model: its strangeness, and temperatures that rise with strangeness.

Both are fitted to the held-out items that the draws are fitted to; shifted items are these items, changed.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpattention.gp import NumericalError
from gpattention.hosts.fitting import IGNORED, Batch
from gpattention.hosts.language import TokenUsual
from gpattention.models.predict import Inputs
from gpattention.models.signals import input_batches
from gpattention.strangeness import AdaptiveTemperature, Strangeness
from gpattention.strangeness.strangeness import remove_fitted

if TYPE_CHECKING:
    from gpattention.hosts.attach import Handle

_FILES = {"strangeness": "strangeness", "temperature": "adaptive_temperature", "tokens": "tokens"}
NOT_FITTED = "expected a handle that was fitted, got one that was not: call handle.fit(held_out, labels)"


@dataclass(frozen=True, eq=False)
class Usual:
    """What a handle knows of usual items.

    Attributes:
        strangeness: of items; None if it could not be fitted.
        temperature: of each item; None if that of the settings holds for all.
        tokens: what is usual at every position of a text, of language models.
        why_not: why there is no strangeness.
    """

    strangeness: Strangeness | None = None
    temperature: AdaptiveTemperature | None = None
    tokens: TokenUsual | None = None
    why_not: str = NOT_FITTED

    def fitted(self) -> Strangeness:
        """The strangeness; `ValueError` with the reason if there is none."""
        if self.strangeness is None:
            raise ValueError(self.why_not)
        return self.strangeness

    def save(self, folder: Path) -> None:
        """Write all parts, and remove the files of parts that an earlier save may have left."""
        for part, name in _FILES.items():
            if (found := getattr(self, part)) is not None:
                found.save(folder)
            else:
                remove_fitted(folder, name)

    @classmethod
    def load(cls, folder: Path) -> "Usual":
        """The parts that `save` wrote."""
        kinds: Any = {"strangeness": Strangeness, "temperature": AdaptiveTemperature, "tokens": TokenUsual}
        there = [part for part, name in _FILES.items() if (folder / f"{name}.json").is_file()]
        return cls(**{part: kinds[part].load(folder) for part in there})


def fit_usual(
    handle: "Handle",
    batches: list[Batch],
    shifted: Mapping[str, Inputs | Iterable[Any]] | None,
    *,
    adaptive: bool,
    samples: int,
    seed: int,
) -> Usual:
    """Fit strangeness and, if `adaptive`, temperatures to held-out items, by a handle with fitted settings.

    A host without a strangeness (no linear head, too few items) can still draw: unless more was asked for,
    the reason is kept for calls that need the strangeness.
    """
    classes: Tensor | None = None  # unless the model classifies items, and all of them have one
    if handle.task == "classification":
        classes = torch.cat([batch.labels.cpu().long() for batch in batches])  # [B]
        classes = None if bool((classes == IGNORED).any()) else classes
    if adaptive and (shifted is None or classes is None):
        got = "no shifted items" if shifted is None else "none"
        raise ValueError(f"expected shifted= items with classes for temperature='adaptive', got {got}")
    sets = {
        name: list(input_batches([found] if isinstance(found, Tensor | Mapping) else found))
        for name, found in (shifted or {}).items()
    }
    try:
        signals = handle.signals([batch.inputs for batch in batches])
        changed = {name: handle.signals(inputs)[: len(signals)] for name, inputs in sets.items()}
        for name, found in changed.items():
            if len(found) != len(signals):
                expected = f"expected shifted {name!r} to be the {len(signals)} held-out items in their order"
                raise ValueError(f"{expected}, got {len(found)}")
        strangeness = Strangeness.fit(
            signals, classes, shifted=changed or None, head=_linear(handle), seed=seed,
            origins=torch.arange(len(signals)) if changed else None,
        )  # fmt: skip
    except (ValueError, NumericalError) as error:
        if shifted is not None:
            raise
        return Usual(why_not=f"expected a handle with a strangeness, got one whose fit found none: {error}")
    if not adaptive or classes is None:
        return Usual(strangeness)

    def drawn(inputs: list[Inputs]) -> Tensor:
        return _drawn_logits(handle, inputs, samples, seed)[:, : len(signals)]

    temperature = AdaptiveTemperature.fit(
        drawn([batch.inputs for batch in batches]), signals, classes, seed=seed,
        shifted={name: (drawn(sets[name]), found, classes) for name, found in changed.items()},
    )  # fmt: skip
    return Usual(strangeness, temperature)


def _drawn_logits(handle: "Handle", batches: list[Inputs], samples: int, seed: int) -> Tensor:
    """Draws of the logits of all items, without a temperature; one draw if no site draws.  [S, B, C]"""
    bare, parts, seen = copy(handle), list[Tensor](), 0
    bare.settings = replace(handle.settings, temperature=1.0)
    for batch in batches:
        found: Any = bare.predict(batch, samples if bare.settings.any_drawn else 1, seed, first_item=seen)
        parts.append(found.logits.cpu())
        seen += len(found)
    return torch.cat(parts, 1)


def _linear(handle: "Handle") -> tuple[Tensor, Tensor] | None:
    """Weight [C, E] and bias [C] of the head of a classifier."""
    head = handle._runner.head
    if head is None or handle.task != "classification":
        return None
    weight = head.weight.detach().float().cpu()
    return weight, weight.new_zeros(len(weight)) if head.bias is None else head.bias.detach().float().cpu()
