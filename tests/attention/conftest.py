"""Every test of the attention modules starts from the same random state and leaves no failure counted."""

from collections.abc import Iterator

import pytest
import torch

from gpattention import gp


@pytest.fixture(autouse=True)
def _clean_state() -> Iterator[None]:
    torch.manual_seed(0)
    assert not any(gp.health().values())
    yield
    assert not any(gp.health().values())
