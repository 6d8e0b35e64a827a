"""Entropy of the normalised kernel against the definition."""

import math

import numpy as np
import pytest
import torch

from gpattention.gp import attention_entropy
from tests.oracles.signals import entropy


def tokens(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dot", [False, True])
def test_the_definition(dot: bool, causal: bool, seed: int) -> None:
    q, k = tokens(seed, 2, 3, 6, 4), tokens(seed + 9, 2, 3, 6, 4)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None]  # [2, 1, 6]
    found = attention_entropy(q, k, dot=dot, mask=mask, causal=causal)
    for item, real in enumerate((6, 4)):
        for head in range(3):
            given = (x[item, head, :real].numpy() for x in (q, k))
            np.testing.assert_allclose(
                found[item, head, :real], entropy(*given, dot=dot, causal=causal), atol=1e-12
            )
    single = attention_entropy(q.float(), k.float(), dot=dot, mask=mask, causal=causal)
    torch.testing.assert_close(single.double(), found, atol=1e-5, rtol=0)


def test_bounds_and_large_logits() -> None:
    q, k = tokens(0, 5, 4, scale=100.0), tokens(1, 7, 4, scale=100.0)
    for given in (q, 0 * q, 1e-3 * q):
        found = attention_entropy(given.float(), k.float(), dot=True)
        assert found.isfinite().all()
        assert (found >= 0).all()
        assert (found <= math.log(7) + 1e-6).all()
    torch.testing.assert_close(
        attention_entropy(0 * q, k, dot=True), torch.full((5,), math.log(7.0)).double()
    )
    assert attention_entropy(q, k, mask=torch.zeros(7, dtype=torch.bool)).isfinite().all()


def test_long_sequences_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = tokens(2, 2, 9, 3), tokens(3, 2, 9, 3)
    whole = attention_entropy(q, k, causal=True)
    monkeypatch.setattr("gpattention.gp.entropy._ROWS", 4)
    torch.testing.assert_close(attention_entropy(q, k, causal=True), whole)
