"""Which seeds there are: training makes others of one, a million apart, and all must fit into 64 bits."""

from gpattention.checks import check_whole

LARGEST_SEED = 2**43


def check_seed(name: str, seed: int) -> None:
    """Refuse a seed that would overflow later, when the folder of a run is made already."""
    seed = check_whole(name, seed)
    if not -LARGEST_SEED <= seed <= LARGEST_SEED:
        raise ValueError(f"expected {name} from {-LARGEST_SEED} to {LARGEST_SEED}, got {seed}")
