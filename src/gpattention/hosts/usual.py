"""What is usual for an attached model: its strangeness, and a temperature that rises with it, fitted along.

Both are fitted to the held-out items that the draws are fitted to; shifted items are the same, changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        strangeness: of items, None where it could not be fitted.
        temperature: of each item, None where the settings have the one of all.
        tokens: of a language model, what is usual at every position.
        why_not: why there is no strangeness.
    """

    strangeness: Strangeness | None = None
    temperature: AdaptiveTemperature | None = None
    tokens: TokenUsual | None = None
    why_not: str = NOT_FITTED

    def fitted(self) -> Strangeness:
        """The strangeness; `ValueError` says why there is none."""
        if self.strangeness is None:
            raise ValueError(self.why_not)
        return self.strangeness

    def save(self, folder: Path) -> None:
        """Write what there is, and remove what an earlier save may have left."""
        for part, name in _FILES.items():
            if (found := getattr(self, part)) is not None:
                found.save(folder)
            else:
                remove_fitted(folder, name)

    @classmethod
    def load(cls, folder: Path) -> "Usual":
        """Whatever `save` wrote."""
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
    """Fit it to held-out items, with the settings that the handle has.

    A host that has no strangeness (no linear head, too few items) can still draw: unless more was asked for,
    the reason is kept for whoever asks for the strangeness.
    """
    labels = _class_labels(handle, batches)
    if adaptive and (shifted is None or labels is None):
        got = "no shifted items" if shifted is None else "none"
        raise ValueError(
            f"expected shifted= items, and a class for each, for temperature='adaptive', got {got}"
        )
    sets = {name: _inputs(found) for name, found in (shifted or {}).items()}
    try:
        signals = handle.signals([batch.inputs for batch in batches])
        changed = {name: handle.signals(inputs)[: len(signals)] for name, inputs in sets.items()}
        items = f"the {len(signals)} held-out items in their order"
        for name, found in changed.items():
            if len(found) != len(signals):
                raise ValueError(f"expected shifted {name!r} to be {items}, got {len(found)}")
        strangeness = Strangeness.fit(
            signals, labels, shifted=changed or None, head=_linear(handle), seed=seed,
            origins=torch.arange(len(signals)) if changed else None,
        )  # fmt: skip
    except (ValueError, NumericalError) as error:
        if shifted is not None:
            raise
        return Usual(why_not=f"expected a handle with a strangeness, got one whose fit found none: {error}")
    if not adaptive or labels is None:
        return Usual(strangeness)

    def drawn(inputs: list[Inputs]) -> Tensor:
        return handle._drawn_logits(inputs, samples, seed)[:, : len(signals)]

    temperature = AdaptiveTemperature.fit(
        drawn([batch.inputs for batch in batches]), signals, labels, seed=seed,
        shifted={name: (drawn(sets[name]), found, labels) for name, found in changed.items()},
    )  # fmt: skip
    return Usual(strangeness, temperature)


def _class_labels(handle: "Handle", batches: list[Batch]) -> Tensor | None:
    """One class for each item, where the model classifies items and all of them have one.  [B]"""
    if handle.task != "classification":
        return None
    labels = torch.cat([batch.labels.cpu().long() for batch in batches])
    return None if bool((labels == IGNORED).any()) else labels


def _inputs(found: Inputs | Iterable[Any]) -> list[Inputs]:
    """Batches, without their labels."""
    return list(input_batches([found] if isinstance(found, Tensor | Mapping) else found))


def _linear(handle: "Handle") -> tuple[Tensor, Tensor] | None:
    """Weight [C, E] and bias [C] of the head of a classifier."""
    head = handle._runner.head
    if head is None or handle.task != "classification":
        return None
    weight = head.weight.detach().float().cpu()
    return weight, weight.new_zeros(len(weight)) if head.bias is None else head.bias.detach().float().cpu()
