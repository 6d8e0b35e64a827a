"""Draws have the moments the posterior states, and what may go wrong with them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.calls import CAUSAL_POSTERIORS, JOINT_POSTERIORS, POSTERIORS, Call, change, close, over, seeded
from tests.gp.samples import Sample, sample

ERRORS = 5  # standard errors
BOTH = pytest.mark.parametrize("joint", [False, True], ids=["independent", "joint"])


def stated(p: gp.Posterior, *, joint: bool) -> Tensor:
    """The covariance of all channels of all tokens that a posterior claims.  [Q, D, Q, D]"""
    Q, D = p.mean.shape
    if joint:
        each = p.covariance().expand(D, Q, Q)
    else:
        variance = p.variance if p.variance.ndim == 2 else p.variance[:, None].expand(Q, D)
        if isinstance(p, gp.KEPPosterior):  # a token's channels share one number
            return torch.einsum("ij,ia,jb->iajb", torch.eye(Q, dtype=variance.dtype), p.stddev, p.stddev)
        each = torch.diag_embed(variance.T)
    return torch.diag_embed(each.permute(1, 2, 0)).permute(0, 2, 1, 3)  # channels are independent


@BOTH
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@over(table=POSTERIORS)
def test_draws_are_an_exact_root_of_the_covariance(
    call: Call, cross: bool, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draw r gets 1 in place of random number r and 0 elsewhere, so the draws are the root's columns."""
    if (joint and call in CAUSAL_POSTERIORS.values()) or (cross and call.square):
        pytest.skip("it has no covariance, or no other keys than queries")
    s = sample(queries=3 if cross else 4, keys=4, channels=2, inducing=(3, 3), seed=4)
    p = call(s, **({"mask": torch.tensor([True, False, True, True])} if cross else {}))
    used, total = 0, 120

    def one_hot(shape: tuple[int, ...], **options: Any) -> Tensor:
        nonlocal used
        assert shape[0] == total
        size = int(torch.tensor(shape[1:]).prod())
        numbers = torch.zeros(total, size, dtype=options["dtype"])
        rows = torch.arange(size)
        numbers[used + rows, rows] = 1.0
        used += size
        return numbers.reshape(shape)

    monkeypatch.setattr(torch, "randn", one_hot)
    root = p.sample(total, joint=joint) - p.mean  # [total, Q, D]
    assert 0 < used <= total
    # joint draws add 1e-10 to the diagonal of a prior
    close(torch.einsum("nia,njb->iajb", root, root), stated(p, joint=joint), atol=1e-8)


@BOTH
@over(table=JOINT_POSTERIORS)
def test_seeded_draws_repeat_and_leave_the_global_generator_alone(call: Call, joint: bool) -> None:
    p = call(sample(2, 3, seed=5))
    state = torch.get_rng_state()
    x, again, other = (p.sample(3, generator=seeded(seed), joint=joint) for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert x.shape == (3, *p.mean.shape)
    assert torch.equal(x, again)
    assert float((x - other).abs().min()) > 0
    assert float((x[0] - x[1]).abs().min()) > 0


@BOTH
@over(table=JOINT_POSTERIORS)
def test_draws_at_padded_queries_are_zero(call: Call, joint: bool) -> None:
    s = sample(2, 3, seed=6)
    x = call(s, **call.extra(s)).sample(5, generator=seeded(3), joint=joint)
    padded = ~(s.query_mask if "query_mask" in call.extras else s.mask)
    assert int(padded.sum()) > 5
    assert bool((x[:, padded] == 0).all())
    assert bool((x[:, ~padded] != 0).all())


def drawn_from(call: Call, s: Sample, *, joint: bool) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Two draws as a function of all tokens and numbers, with random numbers held fixed."""
    names = (*call.arguments, *call.parameters)
    numbers = [torch.tensor(x, dtype=torch.float64) for x in call.parameters.values()]
    leaves = [getattr(s, name) for name in call.arguments] + numbers

    def draws(*inputs: Tensor) -> Tensor:
        given = dict(zip(names, inputs, strict=True))
        moved = replace(s, **{name: given[name] for name in call.arguments})
        options = {name: given[name] for name in call.parameters}
        return call(moved, **options).sample(2, generator=seeded(4), joint=joint)

    return draws, tuple(x.clone().requires_grad_() for x in leaves)


def small() -> Sample:
    return sample(queries=3, keys=3, width=2, channels=1, inducing=(2, 2), seed=7)


@over(table=POSTERIORS)
def test_draws_are_differentiable(call: Call) -> None:
    for joint in (False,) if call in CAUSAL_POSTERIORS.values() else (False, True):
        assert torch.autograd.gradcheck(*drawn_from(call, small(), joint=joint))


def coinciding() -> Sample:
    """All tokens in one place, where every prior covariance is singular."""
    s = sample(queries=8, keys=8, seed=9, dtype=torch.float32)
    return change(s, ("q", "k", "o"), lambda x: s.q[:1].expand_as(x).contiguous())


@over(table=JOINT_POSTERIORS)
def test_joint_draws_of_coinciding_tokens_in_float32_coincide(call: Call) -> None:
    p, n = call(coinciding()), 2000
    x = p.sample(n, generator=seeded(5), joint=True)
    assert x.dtype == torch.float32
    deviation = x - p.mean
    if "inducing_q" in call.arguments and not call.square and call.options.get("include_noise", True):
        assert float(x.std(1).min()) > 0.01  # the sparse model's own noise tells the tokens apart
    else:  # tokens differ by the root of the 1e-10 that a prior Gram gets, times factors of about 1
        close(deviation, deviation[:, :1].expand_as(deviation), rtol=0.0, atol=5e-4)
    ratio = deviation[:, 0].square().mean(0) / p.variance[0]  # [D], standard error sqrt(2 / n)
    assert float((ratio - 1).abs().max()) < ERRORS * (2 / n) ** 0.5


LAYOUTS = {
    "each token twice": lambda x: x.repeat_interleave(2, -2),
    "nearly in one place": lambda x: 0.01 * x,
    "crowded": lambda x: torch.cat([0.3 * x, 0.3 * x.flip(-1) + 0.1]),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@over(table=JOINT_POSTERIORS)
def test_joint_draws_of_tokens_close_together_work_in_float32(
    call: Call, layout: Callable[[Tensor], Tensor]
) -> None:
    """A prior Gram matrix rounded to float32 has eigenvalues of -1e-7; a draw must not need its root."""
    s = sample(queries=16, keys=16, seed=10, dtype=torch.float32)
    moved = change(s, ("q", "k", "o"), layout)
    v = torch.cat([s.v, s.v])[: moved.k.shape[-2]]
    x = call(replace(moved, v=v)).sample(3, generator=seeded(6), joint=True)
    wide = replace(moved, v=v).to(torch.float64)
    p = call(wide)
    limit = 8 * p.stddev if p.stddev.ndim == 2 else 8 * p.stddev[:, None]
    assert bool(((x.double() - p.mean).abs() < limit + 1e-3).all())


def stretched(s: Sample, queries: list[int], keys: list[int], junk: float) -> Sample:
    """The sample's tokens at these places of longer sequences; the other places are padding full of junk."""

    def spread(x: Tensor, places: list[int], to: int, axis: int, fill: float) -> Tensor:
        shape = list(x.shape)
        shape[axis] = to
        return x.new_full(shape, fill).index_copy(axis, torch.tensor(places), x)

    q, k = (queries, 9), (keys, 9)
    moved = {name: spread(getattr(s, name), *q, -2, junk) for name in ("q",)}
    moved |= {name: spread(getattr(s, name), *k, -2, junk) for name in ("k", "o", "v")}
    moved["log_amplitude"] = spread(s.log_amplitude, *q, -1, 0.0)
    moved["query_mask"] = spread(torch.ones_like(s.query_mask), *q, -1, False)
    moved["mask"] = spread(torch.ones_like(s.mask), *k, -1, False)
    return replace(s, **moved)


@over(table=JOINT_POSTERIORS)
def test_joint_draws_do_not_depend_on_padding(call: Call) -> None:
    """Behind the tokens it changes nothing; between them, what is written there changes nothing."""
    s = call.problem(3, 2)
    rows = torch.arange(3)
    queries, keys = list(range(s.q.shape[-2])), list(range(s.k.shape[-2]))

    def draws(x: Sample) -> Tensor:
        result = call(x, **call.extra(x))
        return result.sample(4, generator=gp.ItemNoise(1, rows, rows), joint=True)

    plain = replace(s, mask=torch.ones_like(s.mask), query_mask=torch.ones_like(s.query_mask))
    expected = draws(plain)
    assert float(expected.std(0).max()) > 1e-2
    for junk in (0.0, 3.0):
        padded = draws(stretched(s, queries, keys, junk))
        close(padded[..., : len(queries), :], expected)
        assert not padded[..., len(queries) :, :].any()
    between = [0, 2, *range(3, 9)]
    one, other = (
        draws(stretched(s, between[: len(queries)], between[: len(keys)], junk)) for junk in (0.0, 3.0)
    )
    close(one, other)
