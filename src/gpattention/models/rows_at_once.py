"""How many rows run at once where nobody says: one table for every prediction."""

from collections.abc import Callable
from typing import TypeVar

import torch

from gpattention.checks import check_count

T = TypeVar("T")
FEWER = 256  # rows that are tried where more do not fit
ROWS = {"cpu": 256, "cuda": 2000}  # by kind of device: few rows leave a GPU idle


def run_rows(run: Callable[[int], T], batch_size: int | None, device: torch.device) -> T:
    """`run(rows)` with the rows given; else with those of the device, and fewer if memory does not suffice.

    `run` may be called twice, so it must begin anew with every call.
    """
    if batch_size is not None:
        batch_size = check_count("batch_size", batch_size, least=1)
        return run(batch_size)
    rows = ROWS.get(device.type, FEWER)
    try:
        return run(rows)
    except torch.OutOfMemoryError:
        if rows <= FEWER:
            raise
    # after the handler, whose error holds on to the tensors of the failed run
    torch.cuda.empty_cache()
    return run(FEWER)
