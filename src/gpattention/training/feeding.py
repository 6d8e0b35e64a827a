"""Batches of a run: which items come together, where they lie, and how they get to the device."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpattention.data import Batch
from gpattention.models.rows import Inputs, count_items, take
from gpattention.training.recipe import Recipe
from gpattention.training.results import TrainingData

RESIDENT_SHARE = 0.25  # of the device's memory that training data may take


def training_bytes(data: TrainingData) -> int:
    """Bytes of the training inputs."""
    tensors = [data.train] if isinstance(data.train, Tensor) else list(data.train.values())
    return sum(x.numel() * x.element_size() for x in tensors)


def must_stream(recipe: Recipe, data: TrainingData, device: torch.device) -> bool:
    """Whether batches are brought from the host one by one; small data live on the device."""
    if recipe.data.stream:
        return True
    if device.type != "cuda":
        return False
    return training_bytes(data) > RESIDENT_SHARE * torch.cuda.get_device_properties(device).total_memory


@dataclass
class Feed:
    """The batches of each update, in an order that seed and epoch decide, for one of several processes."""

    recipe: Recipe
    data: TrainingData
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1
    _epoch: int = field(default=-1, init=False)
    _order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), init=False)

    def __post_init__(self) -> None:
        self.items = count_items(self.data.train)
        optimizer = self.recipe.optimizer
        per_update = optimizer.batch_size * optimizer.accumulate
        if self.items < per_update:
            raise ValueError(
                f"expected at least {per_update} training items for one update, got {self.items}"
            )
        if optimizer.batch_size % self.world_size:
            raise ValueError(
                f"expected optimizer.batch_size to be a multiple of the {self.world_size} processes, "
                f"got {optimizer.batch_size}"
            )
        self.streams = must_stream(self.recipe, self.data, self.device)
        if not self.streams:
            everything = torch.arange(self.items)
            self._inputs = take(self.data.train, everything, self.device) if self._moves else self.data.train
            self._labels = self.data.train_labels.to(self.device)

    @property
    def steps_per_epoch(self) -> int:
        """Updates; what is left over at the end of an epoch is not used."""
        return self.items // (self.recipe.optimizer.batch_size * self.recipe.optimizer.accumulate)

    def updates(self, first_step: int) -> Iterator[list[Batch]]:
        """The batches of every update from a step on, without end."""
        epoch, within = divmod(first_step, self.steps_per_epoch)
        while True:
            yield from self._streamed(epoch, within) if self.streams else self._resident(epoch, within)
            epoch, within = epoch + 1, 0

    def first(self, count: int) -> Inputs:
        """At most so many items, those that are stored first, as the first epoch gives them to the model."""
        items = torch.arange(min(self.items, count))
        inputs = take(self.data.train, items, self.device)
        if self.data.prepare is not None:
            inputs = self.data.prepare(inputs, items.to(self.device), 0)
        return cast(inputs, self.dtype)

    @property
    def _moves(self) -> bool:
        where = (
            self.data.train if isinstance(self.data.train, Tensor) else next(iter(self.data.train.values()))
        )
        return where.device != self.device

    def _cuts(self, epoch: int, within: int) -> list[Tensor]:
        """This process's share of every batch from update `within` on.  [share] each"""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + epoch)
            self._order, self._epoch = torch.randperm(self.items, generator=generator), epoch
        size, accumulate = self.recipe.optimizer.batch_size, self.recipe.optimizer.accumulate
        used = self._order[: self.steps_per_epoch * accumulate * size].view(
            -1, self.world_size, size // self.world_size
        )
        return list(used[within * accumulate :, self.rank])

    def _resident(self, epoch: int, within: int) -> Iterator[list[Batch]]:
        cuts = [items.to(self.device) for items in self._cuts(epoch, within)]
        for group in self._grouped(cuts):
            yield [
                self._ready(Batch(items, take(self._inputs, items, self.device), self._labels[items]), epoch)
                for items in group
            ]

    def _streamed(self, epoch: int, within: int) -> Iterator[list[Batch]]:
        cuts = self._cuts(epoch, within)
        pinned = self.device.type == "cuda"
        loader = DataLoader(
            _Cut(self.data, cuts),
            batch_size=None,
            num_workers=self.recipe.data.workers,
            pin_memory=pinned,
            generator=torch.Generator(),  # its own: a loader would take a number from the run's
        )
        group: list[Batch] = []
        for batch in loader:
            group.append(self._ready(Batch(*batch).to(self.device, non_blocking=True), epoch))
            if len(group) == self.recipe.optimizer.accumulate:
                yield group
                group = []

    def _grouped(self, cuts: list[Tensor]) -> Iterator[list[Tensor]]:
        accumulate = self.recipe.optimizer.accumulate
        for start in range(0, len(cuts), accumulate):
            yield cuts[start : start + accumulate]

    def _ready(self, batch: Batch, epoch: int) -> Batch:
        inputs = (
            batch.inputs if self.data.prepare is None else self.data.prepare(batch.inputs, batch.items, epoch)
        )
        return Batch(batch.items, cast(inputs, self.dtype), batch.labels)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point inputs in the model's type."""
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


class _Cut(Dataset[Batch]):
    """A dataset whose elements are whole batches: one indexing instead of one per item."""

    def __init__(self, data: TrainingData, cuts: list[Tensor]) -> None:
        self._data, self._cuts = data, cuts

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, index: int) -> Batch:
        items = self._cuts[index]
        inputs = take(self._data.train, items, torch.device("cpu"))
        return Batch(items, inputs, self._data.train_labels[items])
