"""Which process group the tokens of a module are spread over; no part of the module's state."""

from typing import TYPE_CHECKING, Any

from gpattention.gp.sharding import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TokenShards:
    """A reference to a process group, or to none.

    A group belongs to a running job: copies of a module use the same one, a pickled module forgets it.
    """

    __slots__ = ("group",)

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        check_group(group)
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenShards":
        return self

    def __reduce__(self) -> tuple[type["TokenShards"], tuple[()]]:
        return TokenShards, ()
