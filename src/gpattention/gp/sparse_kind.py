"""Which sparse model it is: the choices that `scgp_posterior` offers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Values = Literal["paper", "dual"]
Conditional = Literal["deterministic", "independent"]
VALUES: tuple[Values, ...] = get_args(Values)
CONDITIONALS: tuple[Conditional, ...] = get_args(Conditional)


@dataclass(frozen=True)
class SparseKind:
    """Which sparse model it is: the options of `scgp_posterior`."""

    values: Values
    conditional: Conditional
    include_noise: bool
    delta: float
    group: "ProcessGroup | None"
