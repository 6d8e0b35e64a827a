"""Leading axes that broadcast together: PyTorch's own answer, also where the short way gives it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpattention.numerics import broadcast

shapes = st.lists(st.lists(st.integers(0, 3), max_size=4).map(torch.Size), min_size=1, max_size=4)


@given(shapes)
def test_as_pytorch_broadcasts(some: list[torch.Size]) -> None:
    try:
        expected = torch.broadcast_shapes(*some)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            broadcast(*some)
    else:
        assert broadcast(*some) == expected
        assert isinstance(broadcast(*some), torch.Size)
