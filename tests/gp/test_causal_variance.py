"""The variance of causal softmax attention: against its oracle, and token by token against all at once."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.oracles import causal_rows
from tests.refusals import refusals

B, H, G, N, C = 3, 4, 2, 13, 3
NOISE = 0.1


def tokens(queries: int = N, keys: int = N, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Queries [B, H, Q, C] and keys [B, G, K, C]."""
    made = torch.Generator().manual_seed(0)
    q = torch.randn(B, H, queries, C, generator=made, dtype=torch.float64)
    k = torch.randn(B, G, keys, C, generator=made, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def causal(queries: int = N, keys: int = N) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None]


def padded(side: str) -> Tensor:
    real = torch.arange(N) < torch.tensor([N, 8, 1])[:, None]  # [B, N]
    real = real if side == "right" else real.flip(-1)
    return causal() & real[:, None]


def window(width: int) -> Tensor:
    return causal() & (torch.arange(N)[:, None] - torch.arange(N) < width)


def packed() -> Tensor:
    segment = torch.tensor([[0] * 5 + [1] * 7 + [2], [0] * N, [0, 1, 1, 1] + [2] * 9])  # [B, N]
    return causal() & (segment[:, :, None] == segment[:, None])


def scattered() -> Tensor:
    """Keys with holes between them, other ones in every row."""
    some = torch.rand(B, N, N, generator=torch.Generator().manual_seed(1)) < 0.6
    return causal() & (some | torch.eye(N, dtype=torch.bool))


SIGHTS: dict[str, Callable[[], Tensor]] = {
    "causal": causal,
    "some earlier": lambda: causal(4, N),
    "one row": lambda: causal(1, N),
    "right padding": lambda: padded("right"),
    "left padding": lambda: padded("left"),
    "window": lambda: window(4),
    "padded window": lambda: window(4) & padded("left"),
    "packed": packed,
    "scattered": scattered,
    "nothing seen": lambda: torch.zeros(1, N, N, dtype=torch.bool),
    "later keys": lambda: (torch.arange(N + 3) <= torch.arange(N)[:, None])[None],
}


def oracle(q: Tensor, k: Tensor, visible: Tensor, max_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """[B, H, Q], [B, G, Q]"""
    visible = visible.expand(B, -1, -1)
    unit, of_keys = np.zeros((B, H, q.shape[2])), np.zeros((B, G, q.shape[2]))
    for b in range(B):
        for h in range(H):
            found = causal_rows.unit_variances(
                q[b, h].double().numpy(), k[b, h * G // H].double().numpy(), visible[b].numpy(),
                noise=NOISE, max_keys=max_keys,
            )  # fmt: skip
            unit[b, h], of_keys[b, h * G // H] = found
    return unit, of_keys


@pytest.mark.parametrize("max_keys", [1, 2, 3, 100])
@pytest.mark.parametrize("name", SIGHTS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_every_sight_equals_the_oracle(name: str, max_keys: int, dtype: torch.dtype, close: float) -> None:
    visible = SIGHTS[name]()
    q, k = tokens(*visible.shape[1:], dtype=dtype)
    found = gp.causal_unit_variance(q, k, noise=NOISE, sight=gp.Sight(visible, max_keys=max_keys))
    unit, of_keys = oracle(q, k, visible, max_keys)
    np.testing.assert_allclose(found.unit.numpy(), unit, atol=close)
    np.testing.assert_allclose(found.of_keys.numpy(), of_keys, atol=close)


@pytest.mark.parametrize(("queries", "max_keys"), [(N, 100), (N, 2), (5, 3), (1, 4)])
def test_without_a_mask_rows_end_with_the_last_key(queries: int, max_keys: int) -> None:
    q, k = tokens(queries)
    sight = gp.Sight(queries=queries, keys=N, max_keys=max_keys)
    assert torch.equal(sight.matrix(), causal(queries))
    found = gp.causal_unit_variance(q, k, noise=NOISE, sight=sight)
    unit, of_keys = oracle(q, k, causal(queries), max_keys)
    np.testing.assert_allclose(found.unit.numpy(), unit, atol=1e-10)
    np.testing.assert_allclose(found.of_keys.numpy(), of_keys, atol=1e-10)


def test_it_is_the_variance_of_causal_softmax_attention() -> None:
    q, k = tokens()
    k = k.repeat_interleave(H // G, 1)
    shrink = C**-0.25
    posterior = gp.softmax_posterior(q, k, k, noise=NOISE, causal=True)
    unit = gp.causal_unit_variance(q * shrink, k * shrink, noise=NOISE).unit
    amplitude = gp.query_log_amplitude(
        q * shrink, k * shrink, q * shrink, torch.zeros(1, C, dtype=q.dtype), causal=True
    )
    torch.testing.assert_close((2 * amplitude).exp() * unit, posterior.variance)


def test_own_keys_sum_to_the_log_determinant() -> None:
    q, k = tokens()
    found = gp.causal_unit_variance(q, k, noise=NOISE).of_keys.log().sum(-1)  # [B, G]
    K = gp.rbf(k, k) + NOISE * torch.eye(N, dtype=k.dtype)
    torch.testing.assert_close(found, torch.logdet(K))


@pytest.mark.parametrize("name", ["causal", "left padding", "window", "packed"])
def test_later_tokens_change_nothing(name: str) -> None:
    visible = SIGHTS[name]()
    q, k = tokens()
    first = gp.causal_unit_variance(q, k, noise=NOISE, sight=gp.Sight(visible, max_keys=3)).unit
    q[:, :, 7:], k[:, :, 7:] = 3.0, -2.0
    again = gp.causal_unit_variance(q, k, noise=NOISE, sight=gp.Sight(visible, max_keys=3)).unit
    torch.testing.assert_close(first[:, :, :7], again[:, :, :7])


def test_padding_counts_for_nothing_whatever_is_written_there() -> None:
    visible = padded("left")
    q, k = tokens()
    sight = gp.Sight(visible, max_keys=3)
    first = gp.causal_unit_variance(q, k, noise=NOISE, sight=sight).unit
    k = torch.where(visible.any(-2)[:, None, :, None], k, torch.nan)
    again = gp.causal_unit_variance(q, k, noise=NOISE, sight=sight).unit
    assert torch.equal(first, again)


def test_fewer_keys_never_make_a_variance_smaller() -> None:
    q, k = tokens()
    exact = gp.causal_unit_variance(q, k, noise=NOISE).unit
    for max_keys in (1, 2, 5):
        thin = gp.causal_unit_variance(
            q, k, noise=NOISE, sight=gp.Sight(queries=N, keys=N, max_keys=max_keys)
        )
        assert bool((thin.unit >= exact - 1e-12).all())


def test_heads_may_have_noise_of_their_own() -> None:
    q, k = tokens()
    noise = torch.tensor([0.1, 0.5], dtype=q.dtype)
    found = gp.causal_unit_variance(q, k, noise=noise, sight=gp.Sight(window(4), max_keys=3)).unit
    for head, own in enumerate(noise.tolist()):
        alone = gp.causal_unit_variance(
            q[:, 2 * head : 2 * head + 2],
            k[:, head : head + 1],
            noise=own,
            sight=gp.Sight(window(4), max_keys=3),
        )
        torch.testing.assert_close(found[:, 2 * head : 2 * head + 2], alone.unit)


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("max_keys", [1, 3, 4, 100])
def test_token_by_token_equals_all_at_once(start: int, max_keys: int) -> None:
    q, k = tokens()
    whole = gp.causal_unit_variance(q, k, noise=NOISE, sight=gp.Sight(causal(), max_keys=max_keys))
    state = gp.CausalVarianceState(k[:, :, :start], noise=NOISE, max_keys=max_keys)
    for i in range(start, N):
        row = state.append(q[:, :, i : i + 1], k[:, :, i : i + 1])
        torch.testing.assert_close(row.unit[..., 0], whole.unit[..., i])
        torch.testing.assert_close(row.of_keys[..., 0], whole.of_keys[..., i])
    assert len(state) == N
    assert state.bytes > k.numel() * k.element_size()


def test_items_of_different_lengths_go_on_together() -> None:
    q, k = tokens()
    number, more = torch.tensor([6, 2, 0]), 7
    state = gp.CausalVarianceState(k[:, :, :6], noise=NOISE, count=number, max_keys=3)
    rows = [state.append(q[:, :, i : i + 1], k[:, :, 6 + i : 7 + i]).unit for i in range(more)]
    for item, count in enumerate(number.tolist()):
        keys = torch.cat([k[item : item + 1, :, :count], k[item : item + 1, :, 6:]], 2)
        sight = gp.Sight(queries=more, keys=count + more, max_keys=3)
        alone = gp.causal_unit_variance(q[item : item + 1, :, :more], keys, noise=NOISE, sight=sight)
        torch.testing.assert_close(torch.cat(rows, -1)[item : item + 1], alone.unit)


def test_five_hundred_tokens_in_float32_token_by_token() -> None:
    made = torch.Generator().manual_seed(2)
    # like keys of language models: long, near one another, with one far away from all others
    k = 0.3 * torch.randn(1, 1, 500, 16, generator=made) + 4
    k[:, :, 0] = -6
    q = 0.3 * torch.randn(1, 2, 500, 16, generator=made) + 3.7
    whole = gp.causal_unit_variance(q, k, noise=NOISE, sight=gp.Sight(queries=500, keys=500)).unit
    state = gp.CausalVarianceState(k[:, :, :20], noise=NOISE)
    rows = [state.append(q[:, :, i : i + 1], k[:, :, i : i + 1]).unit for i in range(20, 500)]
    assert math.isclose(float((torch.cat(rows, -1) - whole[..., 20:]).abs().max()), 0, abs_tol=1e-5)


test_refusals = refusals([
    (lambda: gp.causal_unit_variance(tokens()[1][:, :1], tokens()[1], noise=NOISE), "divisor", "3, 1, 13"),
    (lambda: gp.causal_unit_variance(*tokens(), noise=0.0), "noise", "0.0"),
    (lambda: gp.causal_unit_variance(*tokens(), noise=NOISE, sight=gp.Sight(causal(4))), "4 queries", "13"),
    (lambda: gp.Sight(queries=4, keys=3), "queries", "4"),
    (lambda: gp.Sight(causal(), max_keys=0), "max_keys", "0"),
    (lambda: gp.Sight(causal().long()), "visible", "int64"),
    (lambda: gp.CausalVarianceState(tokens()[0][0], noise=NOISE), "expected k", "4, 13, 3"),
    (lambda: gp.CausalVarianceState(tokens()[1], noise=NOISE).append(*tokens()), "one token", "3, 2, 13, 3"),
])  # fmt: skip
