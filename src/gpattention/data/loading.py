"""Batches from the host, for data that does not live on the device: workers and pinned memory."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpattention.data.batch import Batch, Part
from gpattention.data.batching import batches


def loader(
    part: Part,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 2,
    pin_memory: bool | None = None,
    done: int = 0,
) -> "DataLoader[Batch]":
    """One epoch of `Batch`es of a part on the CPU, the very batches of `batches`.

    Images come as they are stored; bring them to the device, then call `ImageData.inputs`: 8-bit pixels
    are a quarter of the bytes.

    Args:
        part: `Images` or `Texts`.
        batch_size: items of all ranks together.
        seed: with `epoch`, decides the order.
        epoch: make a new loader for each.
        shuffle: whether the order is not that of the part.
        drop_last: whether a smaller last batch is left out.
        rank: whose share.
        world_size: how many ranks.
        workers: processes that cut batches; 0 cuts them in this one.
        pin_memory: whether batches are pinned; as a rule, where there is a CUDA device.
        done: batches to leave out at the beginning, to continue an epoch.
    """
    if workers < 0:
        raise ValueError(f"expected workers >= 0, got {workers}")
    if done < 0:
        raise ValueError(f"expected done >= 0, got {done}")
    order = batches(len(part), batch_size, seed, epoch, drop_last, rank, world_size, shuffle=shuffle)[done:]
    return DataLoader(
        _ByBatch(part, order),
        batch_size=None,  # an element is a batch already
        num_workers=workers,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
    )


class _ByBatch(Dataset[Batch]):
    """A dataset whose elements are whole batches: one indexing instead of one per item."""

    def __init__(self, part: Part, order: list[Tensor]) -> None:
        self._part = part
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Batch:
        return self._part.batch(self._order[index])
