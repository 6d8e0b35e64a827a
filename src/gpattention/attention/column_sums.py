"""Column sums of tall matrices, the gradient of a bias, in two short launches.

torch's own sum over rows takes longer than the product that made them, at a few thousand rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_PROGRAMS = 512  # partial sums of a first stage
_ENTRIES = 2048  # of a program's tile
_COLUMNS = 8  # that one program of the second stage sums: a sector of memory
MOST_COLUMNS = 1024  # a tile holds whole rows


def tile(columns: int, entries: int = _ENTRIES) -> tuple[int, int]:
    """Rows of a tile, and the power of two its columns are padded to."""
    width = max(16, 1 << (columns - 1).bit_length())
    return max(1, entries // width), width


def programs(rows: int, tile_rows: int) -> tuple[int, int]:
    """How many tiles there are, and how many programs share them."""
    tiles = -(-rows // tile_rows)
    return tiles, min(tiles, MOST_PROGRAMS)


def finish_sums(partial: Tensor) -> Tensor:
    """Sum of at most `MOST_PROGRAMS` partial sums.  [P, ...] -> [...]"""
    from gpattention.attention.column_sums_kernels import finish_kernel

    count, columns = partial.shape[0], partial[0].numel()
    out = torch.empty(partial.shape[1:], dtype=partial.dtype, device=partial.device)
    padded = max(16, 1 << (count - 1).bit_length())
    finish_kernel[(-(-columns // _COLUMNS),)](
        partial, out, count, columns, COUNT=padded, COLUMNS=_COLUMNS, num_warps=4
    )
    return out


def gather_and_sum(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Two to four matrices [rows, C] side by side [rows, parts * C], and their column sums [parts * C]."""
    from gpattention.attention.column_sums_kernels import gather_kernel

    (rows, columns), like = parts[0].shape, parts[0]
    total = len(parts) * columns
    tile_rows, width = tile(columns)
    tiles, count = programs(rows, tile_rows)
    out = torch.empty(rows, total, dtype=like.dtype, device=like.device)
    partial = torch.empty(count, total, dtype=like.dtype, device=like.device)
    read = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
    strided = [each for part in (read * 2)[:4] for each in (part, part.stride(0))]
    gather_kernel[(count,)](
        *strided, out, partial, rows, tiles, total, columns,
        PARTS=len(parts), ROWS=tile_rows, CP=width, num_warps=4,
    )  # fmt: skip
    return out, finish_sums(partial)


def gather_and_sum_reference(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The same in plain operations."""
    out = torch.cat(list(parts), 1)
    return out, out.sum(0)
