"""What `build_attention` says of an option that nobody takes, and of a constructor that fails by itself."""

from typing import Any

import pytest

from gpattention.attention import Attention, CGPAttention, build_attention
from gpattention.attention.registry import make_attention

SIZES: dict[str, int] = {"embed_dim": 8, "num_heads": 2}


class Broken(CGPAttention):
    """Its constructor has a bug that its caller cannot help."""

    def __init__(self, embed_dim: int, num_heads: int, *, power: float = 1.0, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.power = power + None  # type: ignore[operator]


class Popping(CGPAttention):
    """Takes an option that no signature shows."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        self.shown = options.pop("hidden")
        super().__init__(embed_dim, num_heads, **options)


class Closed(CGPAttention):
    """Hands nothing up, and needs something."""

    def __init__(self, embed_dim: int, num_heads: int, *, rank: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.rank = rank


def make(cls: type[Attention], **options: Any) -> Attention:
    return make_attention(cls, "mine", 8, 2, options)


def test_an_unknown_option_is_named_beside_those_of_all_constructors_above() -> None:
    with pytest.raises(ValueError, match="does not take these options: unknown 'nosie'; known: ") as refused:
        build_attention("cgp", **SIZES, nosie=0.1, dropout=0.1)
    known = str(refused.value).partition("known: ")[2].split(", ")
    assert {"bias", "dropout", "latent_prior", "noise", "normalize"} <= set(known)
    assert not {"self", "embed_dim", "num_heads", "options"} & set(known)
    assert isinstance(refused.value.__cause__, TypeError)


def test_a_mistake_inside_a_constructor_is_told_as_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand") as failure:
        make(Broken, power=2.0, noise=0.1)
    assert failure.traceback[-1].name == "__init__"
    assert failure.traceback[-1].path.name == "test_registry.py"


def test_a_value_of_the_wrong_type_is_no_unknown_option() -> None:
    with pytest.raises(ValueError, match=r"^expected dropout to be a number, got 'much'$"):
        build_attention("cgp", **SIZES, dropout="much")


def test_annotations_that_cannot_be_read_are_not_checked() -> None:
    class Unreadable(Closed):
        pass

    def constructor(self: Closed, embed_dim: int, num_heads: int, *, rank: int) -> None:
        Closed.__init__(self, embed_dim, num_heads, rank=rank)

    constructor.__annotations__["rank"] = "OnlyForTypeCheckers"
    Unreadable.__init__ = constructor  # type: ignore[assignment, method-assign]
    assert make(Unreadable, rank="any").rank == "any"


def test_what_a_constructor_takes_by_other_ways_is_let_through() -> None:
    assert make(Popping, hidden=3, noise=0.1).shown == 3


@pytest.mark.parametrize(
    ("options", "message"), [({}, "missing a required .*'rank'"), ({"rank": 1, "noise": 1}, "'noise'")]
)
def test_a_signature_that_hands_nothing_up_is_the_last_word(options: dict[str, int], message: str) -> None:
    assert make(Closed, rank=1).rank == 1
    with pytest.raises(ValueError, match=f"'mine' attention does not take these options: .*{message}"):
        make(Closed, **options)
