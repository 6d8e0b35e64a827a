"""The random numbers of a token do not depend on the process that holds it."""

import pytest
import torch

from tests.gp.test_sharding import BATCH, CHANNELS, CUTS, HEADS, QUERIES, M, item_noise


@pytest.mark.parametrize("width", [4, 5])
def test_a_token_has_its_numbers_wherever_it_is(width: int) -> None:
    shape = (2, BATCH, HEADS, QUERIES, width)
    whole = item_noise().normal(shape, torch.float64, torch.device("cpu"))
    for count, (cuts, _) in CUTS.items():
        for rank in range(count):
            rows = slice(cuts[rank], cuts[rank + 1])
            noise = item_noise(first_token=rows.start, tokens=QUERIES)
            part = (*shape[:3], rows.stop - rows.start, width)
            assert noise.normal(part, torch.float64, torch.device("cpu")).equal(whole[..., rows, :])


def test_shared_numbers_take_their_turn() -> None:
    """As many streams pass as in one process, so that later layers agree too."""
    a, b = item_noise(), item_noise(first_token=3, tokens=QUERIES)
    cpu, shape = torch.device("cpu"), (1, BATCH, M, CHANNELS)
    assert b.shared_normal(shape, torch.float64, cpu).equal(a.normal(shape, torch.float64, cpu))
    tokens = (1, BATCH, QUERIES, CHANNELS)
    rest = b.normal((1, BATCH, 2, CHANNELS), torch.float64, cpu)
    assert rest.equal(a.normal(tokens, torch.float64, cpu)[:, :, 3:5])


def test_tokens_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"expected first_token in \[0, 4\)"):
        item_noise(first_token=4, tokens=4)
    noise = item_noise(first_token=3, tokens=4)
    with pytest.raises(ValueError, match="at most 1, got 2"):
        noise.normal((1, BATCH, 2, 3), torch.float32, torch.device("cpu"))
