"""Draws whose noise is made in the kernel: those of the plain operations, with their gradients."""

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.ops.draws import fused_item_draw

pytest.importorskip("triton")


def draws(mode: str, lead: tuple[int, ...], tokens: int, width: int, n: int) -> tuple[Tensor, ...]:
    """Two calls after each other, and the gradients of mean and variance."""
    g = torch.Generator().manual_seed(3)
    mean = torch.randn(*lead, tokens, width, generator=g).requires_grad_()
    variance = torch.rand(*lead, tokens, generator=g)
    variance[..., 0] = 0.0
    variance.requires_grad_()
    noise = gp.ItemNoise(5, torch.arange(lead[0]) * 7, torch.zeros(lead[0], dtype=torch.long))
    weight = torch.randn(n, *mean.shape, generator=g)
    found = []
    for _ in range(2):
        if mode == "on":
            keys, stream = noise.next_draws(lead[0], mean.device)
            with gp.fused_kernels("on"):
                found.append(fused_item_draw(mean, variance, keys, stream=stream, draws=n, squared=True))
        else:
            numbers = noise.normal((n, *mean.shape), mean.dtype, mean.device)
            real = variance > 0
            deviation = torch.where(real, torch.where(real, variance, 1.0).sqrt(), 0.0)
            found.append(mean + deviation[..., None] * numbers)
    return *(x.detach() for x in found), *torch.autograd.grad(
        ((found[0] + found[1]) * weight).sum(), (mean, variance)
    )


@pytest.mark.parametrize(
    ("lead", "tokens", "width", "n"),
    [((2, 3), 5, 4, 1), ((3, 2), 33, 7, 2), ((2,), 4, 16, 3), ((2, 2, 2), 3, 5, 1)],
    ids=str,
)
def test_draws_and_gradients(lead: tuple[int, ...], tokens: int, width: int, n: int) -> None:
    plain, fused = (draws(mode, lead, tokens, width, n) for mode in ("off", "on"))
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_posterior_draws_the_same_either_way() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, o, v = torch.randn(4, 2, 2, 6, 5, generator=g)
    found = []
    for mode in ("off", "on"):
        noise = gp.ItemNoise(1, torch.tensor([4, 9]), torch.zeros(2, dtype=torch.long))
        with gp.fused_kernels(mode):
            posterior = gp.cgp_posterior(q, k, o, v, noise=0.1)
            found.append([posterior.sample(2, generator=noise) for _ in range(2)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not torch.equal(*found[0])


def test_another_batch_is_refused() -> None:
    noise = gp.ItemNoise(1, torch.arange(3), torch.zeros(3, dtype=torch.long))
    posterior = gp.direct_posterior(*torch.randn(3, 2, 4, 3), noise=0.1)
    with gp.fused_kernels("on"), pytest.raises(ValueError, match="expected a batch of 3"):
        posterior.sample(generator=noise)
