"""Samples times items as rows of small batches: how every prediction is cut into chunks.

Row r of n items times S samples is sample r % S of item r // S.  Its noise is made from the seed, the
sample and the item alone, so that no way of cutting the rows changes a draw.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from gpattention.checks import check_count
from gpattention.gp import ItemNoise
from gpattention.gp.concurrency import evaluation_mode

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
Progress: TypeAlias = Callable[[int, int], object]
_predicting: ContextVar[bool] = ContextVar("gpattention_predicting", default=False)


@dataclass(frozen=True)
class Rows:
    """A chunk of rows, on the model's device."""

    inputs: Inputs  # [R, ...] each
    items: Tensor  # [R] position of each row's item in the inputs, where those lie
    numbers: Tensor  # [R] number of the item, which its noise is made from
    samples: Tensor  # [R] which of the item's samples it is
    noise: ItemNoise  # of R rows


class Network(Protocol):
    """The part of `nn.Module` that running a model without training it needs."""

    def modules(self) -> Iterator[nn.Module]:
        """Itself and everything in it."""
        ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The same with their names."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters."""
        ...


def count_items(inputs: Inputs) -> int:
    """How many items the inputs hold; all tensors lead with them."""
    if not isinstance(inputs, Tensor | Mapping):
        raise ValueError(
            f"expected inputs to be a tensor or a mapping of tensors, got {type(inputs).__name__}"
            f"{_hint(inputs)}"
        )
    named = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    if not named:
        raise ValueError("expected inputs to be a tensor or a mapping of tensors, got an empty mapping")
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.ndim == 0:
            found = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"expected {name} to be a tensor with the batch first, got {found}")
    counts = {name: len(x) for name, x in named.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"expected inputs with one number of items, got {counts}")
    count = next(iter(counts.values()))
    if count == 0:
        raise ValueError("expected inputs with at least one item, got 0")
    return count


def _hint(inputs: object) -> str:
    """What whoever passed this may have meant."""
    if type(inputs).__module__ == "numpy":
        return ": torch.from_numpy makes a tensor of it"
    kinds = {type(x).__name__ for x in inputs} if isinstance(inputs, list | tuple) else set()
    if isinstance(inputs, str) or kinds == {"str"}:
        return " of texts: a tokenizer makes tensors of them"
    if kinds:
        return f" of {', '.join(sorted(kinds))}: give each the name of the model's argument, in a mapping"
    if isinstance(inputs, Iterable):
        return ": pass its batches one by one, first_item= the items before"
    return ""


def device_of(inputs: Inputs) -> torch.device:
    """Where the inputs lie."""
    return inputs.device if isinstance(inputs, Tensor) else next(iter(inputs.values())).device


def model_device(model: Network, inputs: Inputs) -> torch.device:
    """Where the model computes; for one without parameters, or that fetches them, where its inputs lie."""
    parameter = next(iter(model.parameters()), None)
    return device_of(inputs) if parameter is None or parameter.is_meta else parameter.device


def iterate_rows(
    inputs: Inputs,
    *,
    samples: int,
    seed: int,
    batch_size: int,
    device: torch.device,
    first_item: int = 0,
    progress: Progress | None = None,
) -> Iterator[Rows]:
    """All rows in chunks of at most `batch_size`, each moved to `device`.

    `first_item` is the number of the first item, for callers that bring the items in parts;
    `progress(done, total)` is called after every chunk with numbers of rows.
    """
    samples = check_count("samples", samples, least=1)
    batch_size = check_count("batch_size", batch_size, least=1)
    first_item = check_count("first_item", first_item, least=0)
    total = count_items(inputs) * samples
    for start in range(0, total, batch_size):
        row = torch.arange(start, min(start + batch_size, total), device=device_of(inputs))  # [R]
        items = row // samples  # [R]
        numbers, sample = (items + first_item).to(device), (row % samples).to(device)  # [R], [R]
        noise = ItemNoise(seed, numbers, sample)
        yield Rows(take(inputs, items, device), items, numbers, sample, noise)
        if progress is not None:
            progress(min(start + batch_size, total), total)


def collect(
    forward: Callable[[Rows], Tensor],  # a chunk to its [R, C]
    inputs: Inputs,
    *,
    samples: int,
    seed: int,
    batch_size: int,
    device: torch.device,
    first_item: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """Run all rows and keep what `forward` gives, where the inputs lie.  [S, B, C]"""
    parts = []
    for rows in iterate_rows(
        inputs,
        samples=samples,
        seed=seed,
        batch_size=batch_size,
        device=device,
        first_item=first_item,
        progress=progress,
    ):
        out = forward(rows)  # [R, C]
        if out.ndim != 2 or len(out) != len(rows.items):
            raise ValueError(
                f"expected the model to give [{len(rows.items)}, C], one row per input, "
                f"got shape {tuple(out.shape)}"
            )
        parts.append(out.to(device_of(inputs)))
    return torch.cat(parts).unflatten(0, (-1, samples)).transpose(0, 1).contiguous()


@contextmanager
def evaluating(model: Network) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode is restored afterwards.

    Blocks of several threads, of one model or of models that share modules, restore it when the last ends.
    """
    token = _predicting.set(True)
    try:
        with evaluation_mode(model.modules()), torch.no_grad():
            yield
    finally:
        _predicting.reset(token)


def is_predicting() -> bool:
    """Whether this thread is inside an `evaluating` block; compilers cannot ask."""
    return not torch.compiler.is_compiling() and _predicting.get()


def take(inputs: Inputs, items: Tensor, device: torch.device) -> Inputs:
    """The inputs of those items.  [R, ...]"""
    if isinstance(inputs, Tensor):
        return inputs[items].to(device)
    return {name: x[items.to(x.device)].to(device) for name, x in inputs.items()}
