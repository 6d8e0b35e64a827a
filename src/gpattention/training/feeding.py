"""Batches of a run: which items come together, where they lie, and how they get to the device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gpattention.data import Batch
from gpattention.models.predict import Inputs, count_items, take
from gpattention.runs import Recipe, TrainingData

RESIDENT_SHARE = 0.25  # of the device's memory that training data may take


@dataclass
class Feed:
    """The batches of each update, in an order that seed and epoch decide, for one of several processes.

    Small data live on the device; batches of large ones, or where the recipe says so, come from the host.
    """

    recipe: Recipe
    data: TrainingData
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        self.items = count_items(self.data.train)
        optimizer = self.recipe.optimizer
        per_update = optimizer.batch_size * optimizer.accumulate
        if self.items < per_update:
            raise ValueError(f"expected at least {per_update} training items, got {self.items}")
        if optimizer.batch_size % self.world_size:
            expected = f"expected optimizer.batch_size to be a multiple of the {self.world_size} processes"
            raise ValueError(f"{expected}, got {optimizer.batch_size}")
        self.steps_per_epoch = self.items // per_update  # what is left over at the end is not used
        tensors = [self.data.train] if isinstance(self.data.train, Tensor) else [*self.data.train.values()]
        self.streams = self.recipe.data.stream
        if self.device.type == "cuda" and not self.streams:
            memory = torch.cuda.get_device_properties(self.device).total_memory
            self.streams = sum(x.numel() * x.element_size() for x in tensors) > RESIDENT_SHARE * memory
        self._stored = self.data
        if not self.streams:
            moves = tensors[0].device != self.device  # else nothing is copied
            whole, labels = self.data.train, self.data.train_labels.to(self.device)
            whole = take(whole, torch.arange(self.items), self.device) if moves else whole
            self._stored = replace(self.data, train=whole, train_labels=labels)

    def updates(self, first_step: int) -> Iterator[list[Batch]]:
        """The batches of every update from a step on, without end."""
        epoch, within = divmod(first_step, self.steps_per_epoch)
        while True:
            batches = self._batches(epoch, within)
            while update := list(islice(batches, self.recipe.optimizer.accumulate)):
                yield update
            epoch, within = epoch + 1, 0

    def first(self, count: int) -> Inputs:
        """At most so many items, those that are stored first, as the first epoch gives them to the model."""
        items = torch.arange(min(self.items, count), device=self._stored.train_labels.device)
        return self._ready(self._cut(items).to(self.device), 0).inputs

    def _batches(self, epoch: int, within: int) -> Iterator[Batch]:
        """This process's share of every batch of an epoch from update `within` on, ready for the model."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + epoch)
        order = torch.randperm(self.items, generator=generator)
        size, accumulate = self.recipe.optimizer.batch_size, self.recipe.optimizer.accumulate
        used = order[: self.steps_per_epoch * accumulate * size]
        shares = used.view(-1, self.world_size, size // self.world_size)[within * accumulate :, self.rank]
        if not self.streams:
            for items in shares.to(self.device):  # [share]
                yield self._ready(self._cut(items), epoch)
            return
        cut: Any = self._cut  # typed for lists of elements, but here an element is a whole batch
        loader: DataLoader[Any] = DataLoader(
            list(shares),  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=cut,
            num_workers=self.recipe.data.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # its own: a loader would take a number from the run's
        )
        for batch in loader:
            yield self._ready(Batch(*batch).to(self.device, non_blocking=True), epoch)

    def _cut(self, items: Tensor) -> Batch:
        """Those items as they are stored, on the device where the numbers of the items lie."""
        return Batch(items, take(self._stored.train, items, items.device), self._stored.train_labels[items])

    def _ready(self, batch: Batch, epoch: int) -> Batch:
        prepare = self.data.prepare
        inputs = batch.inputs if prepare is None else prepare(batch.inputs, batch.items, epoch)
        return Batch(batch.items, cast(inputs, self.dtype), batch.labels)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point inputs in the model's type."""
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
