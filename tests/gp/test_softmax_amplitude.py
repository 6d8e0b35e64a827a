"""Amplitudes of eq. 21: the identity they stand for, and log-sum-exp by parts."""

import pytest
import torch
from torch import Tensor

from gpattention.gp import key_log_amplitude, query_log_amplitude, rbf, softmax
from gpattention.gp.softmax import log_sum_exp

N, C = 7, 3


def tokens() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, N, C, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    return q, k


def mask() -> Tensor:
    """The last sequence has no key at all."""
    return torch.tensor([[[True] * 4 + [False] * 3], [[False] * N]])  # [2, 1, N]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_kernel_weights_are_softmax_in_every_frame(masked: bool, causal: bool) -> None:
    q, k = tokens()
    g = torch.Generator().manual_seed(1)
    A = torch.randn(C, C, generator=g, dtype=torch.float64)
    q_bar, k_bar = (torch.randn(1, C, generator=g, dtype=torch.float64) for _ in range(2))
    x, y = (q - q_bar) @ A.mT, (k - k_bar) @ torch.linalg.inv(A)
    log_a = query_log_amplitude(q, k, x, k_bar, mask=mask() if masked else None, causal=causal)
    log_b = key_log_amplitude(k, y, q_bar, k_bar)
    weights = log_a.exp()[..., None] * rbf(x, y) * log_b.exp()[..., None, :]
    visible = torch.ones(N, N, dtype=torch.bool)
    visible = (visible.tril() if causal else visible) & (mask()[..., None, :] if masked else True)
    sees = visible.any(-1).expand(2, 2, N)
    exact = (q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1)
    torch.testing.assert_close(torch.where(visible, weights, 0.0)[sees], exact[sees], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_by_parts_are_all_rows(masked: bool, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = tokens()
    options = {"mask": mask() if masked else None, "causal": causal}
    found = []
    for rows in (1024, 3):
        monkeypatch.setattr(softmax, "_ROWS", rows)
        total = log_sum_exp(q, k, **options)
        found.append((total, *torch.autograd.grad(total.sin().sum(), (q, k))))
    for whole, parts in zip(*found, strict=True):
        assert bool(whole.isfinite().all())  # also where no key is seen
        torch.testing.assert_close(parts, whole, rtol=1e-13, atol=1e-13)
