"""Whether a host has its batch first, where the shape of an answer cannot tell.

A host of [tokens, batch, width] answers once per column.  Where there are as many of these as rows were
passed, all shapes are as expected and every number is wrong; with fewer rows they part.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gpattention.models.rows import Inputs, count_items, device_of, take


def is_ambiguous(inputs: Inputs) -> bool:
    """Whether another axis is as long as the batch."""
    items = count_items(inputs)
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
    return items > 1 and any(items in x.shape[1:] for x in tensors)


@torch.no_grad()
def check_batch_first(
    count: Callable[[Inputs], tuple[int, list[int]]],  # inputs to how many answers, and sequences per call
    inputs: Inputs,
    function: str,
) -> None:
    """Run one row and two: answers, and the sequences that attention sees, must double."""
    device = device_of(inputs)
    one, two = (count(take(inputs, torch.arange(rows, device=device), device)) for rows in (1, 2))
    if (one[0], two[0]) != (1, 2) or [2 * seen for seen in one[1]] != two[1]:
        raise ValueError(
            f"expected one answer for each of 1 and 2 inputs, got {one[0]} and {two[0]}, from attention over "
            f"{one[1]} and {two[1]} sequences: where batches are not the first axis, pass call= to {function}"
        )
