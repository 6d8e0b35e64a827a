"""Equal scores share what is averaged over them, so that the order of the items does not matter."""

from torch import Tensor


def share_among_equals(ordered: Tensor, values: Tensor) -> Tensor:
    """Each of `values` [B] becomes the mean over the items of equal score, where scores [B] are sorted.

    A sum over the first k is then its expectation over all orders of the equal ones.
    """
    _, group, sizes = ordered.unique_consecutive(return_inverse=True, return_counts=True)  # [B], [K]
    sums = values.new_zeros(len(sizes)).index_add_(0, group, values)  # [K]
    return (sums / sizes)[group]
