"""Parts of a dataset, decided by the seed."""

from collections.abc import Sequence

from torch import Tensor

from gpattention.data.keyed import SPLIT, permutation


def split(n: int, sizes: Sequence[int], seed: int, stage: int = 0) -> tuple[Tensor, ...]:
    """Disjoint parts of 0 to n - 1 of the given sizes that make up the whole, each sorted, [size] int64.

    `stage` separates a split from a later split of one of its parts by the same seed.
    """
    if any(size < 1 for size in sizes) or sum(sizes) != n:
        raise ValueError(f"expected sizes >= 1 that add up to n = {n}, got {list(sizes)}")
    order = permutation(n, SPLIT, seed, stage)
    return tuple(part.sort().values for part in order.split(list(sizes)))
