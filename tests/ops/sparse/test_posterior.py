"""The sparse model's kernels against float64, outputs and every gradient, under Triton's interpreter."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpattention import gp
from gpattention.gp.sparse import FusedSCGPPosterior
from gpattention.ops import sparse, switch
from gpattention.ops.sparse import Sizes, shared_matrices
from tests.gp.samples import sample
from tests.ops import comparison
from tests.ops.sparse.problems import Sparse, check, evaluate

pytest.importorskip("triton")

QUICK = [
    Sparse(7, 7, masked=True, amplified=True),
    Sparse(3, 35, 5, 3, masked=True, pooled=True, values="dual", include_noise=False),
    Sparse(6, 5, 4, 3, masked=True, amplified=True, conditional="independent"),
]
PARTS = [("mean",), ("variance",), ("query", "key"), ("kl",), ("key",), ("mean", "variance", "query", "key")]
LARGE = [
    Sparse(5, 6, 3, 6, lead=(2, 2)),
    Sparse(9, 8, 5, pooled=True, amplified=True, lead=(2, 1)),
    Sparse(33, 70, 20, 9, masked=True),
    Sparse(40, 5, 33, 40, 5, 17, spread=0.6, amplified=True),
    Sparse(16, 16, noise=1e-3, spread=0.5, values="dual"),
    Sparse(
        35, 20, 20, 9, masked=True, pooled=True, values="dual", include_noise=False, conditional="independent"
    ),
    Sparse(9, 40, 33, 5, 6, lead=(2, 2), spread=0.6, amplified=True, conditional="independent"),
    Sparse(1, 1, 1, 2),
    Sparse(2, 3, 2, 2, lead=(3, 2)),  # few keys: padding must not round
]
S = sample(1, 1, queries=5, keys=4, dtype=torch.float32)
TOKENS = S.q, S.k, S.o, S.v, S.inducing_q, S.inducing_k


@pytest.mark.parametrize("problem", QUICK, ids=str)
def test_outputs_and_gradients(problem: Sparse) -> None:
    check(problem)


@pytest.mark.slow
@pytest.mark.parametrize("asked", PARTS, ids="+".join)
def test_gradients_of_each_output_alone(asked: tuple[str, ...]) -> None:
    check(replace(QUICK[0], asked=asked))
    check(replace(QUICK[1], asked=asked, values="paper"))


@pytest.mark.slow
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_large_and_odd_sizes(problem: Sparse) -> None:
    check(problem)


@pytest.mark.slow
def test_the_gradient_of_the_keys_amplitude_keeps_its_digits_in_long_sequences() -> None:
    """|z|^2 grows with the tokens and cancels: the trace of the matrix gradient loses 1e-5 of it at 2,048."""
    problem = Sparse(32, 2_048, 16, None, 32, 32, spread=0.25, noise=1e-2, asked=("key", "mean"))
    exact = evaluate(problem, "cpu", torch.float64)["dscale_k"]
    with gp.fused_kernels("on"):
        fused = evaluate(problem, "cpu", torch.float32)["dscale_k"].double()
    assert (fused - exact).norm() < 2e-6 * exact.norm()


@pytest.mark.parametrize("shape", [(), (2,), (2, 1), (2, 2), (1, 2)], ids=str)
def test_parameters_of_heads_and_of_sequences(shape: tuple[int, ...]) -> None:
    """As many sequences as heads: only the axis tells whose a parameter is."""
    x = sample(2, 2, queries=3, keys=4, dtype=torch.float32)
    values = torch.linspace(0.1, 0.4, 4)[: torch.Size(shape).numel()].reshape(shape)

    def found(mode: switch.Mode) -> list[Tensor]:
        noise, scale_q, scale_k = ((values * factor).clone().requires_grad_() for factor in (1, 3, 4))
        with gp.fused_kernels(mode):
            p = gp.scgp_posterior(
                x.q, x.k, x.o, x.v, x.inducing_q, noise=noise, scale_q=scale_q, scale_k=scale_k
            )
            loss = p.mean.square().sum() + p.variance.sum()
        return [p.mean, p.variance, *torch.autograd.grad(loss, (noise, scale_q, scale_k))]

    for fused, plain in zip(found("on"), found("off"), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_splits_of_the_long_axis_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample(1, 1, queries=70, keys=100, dtype=torch.float32)

    def found() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.o, x.v, x.inducing_q)]
        with gp.fused_kernels("on"):
            p = gp.scgp_posterior(*leaves, noise=0.1, mask=x.mask, objectives=())
            loss = p.mean.square().sum() + p.variance.sum()
        return [p.mean.detach(), p.variance.detach(), *torch.autograd.grad(loss, leaves)]

    split = found()
    monkeypatch.setattr("gpattention.ops.sparse._PROGRAMS", 1)
    whole = found()
    assert Sizes(1, 1, 70, 100, 5, 5, 3, 4, two=False, pooled=False).cut("sums", 100) == (1, 128)
    for a, b in zip(split, whole, strict=True):
        assert float((a - b).norm() / b.norm()) < 3e-6


def test_cuts_fill_a_gpu_and_cover_every_token() -> None:
    for heads, tokens in ((400, 64), (16, 4096), (4, 1_048_576), (4, 1_000_001), (1, 33)):
        sizes = Sizes(heads, 1, tokens, tokens, 16, 16, 32, 32, two=False, pooled=False)
        splits, each = sizes.cut("sums", tokens)
        assert splits * each >= tokens > (splits - 1) * each
        assert heads * splits <= max(512, heads)
    assert splits == 2
    assert Sizes(4, 1, 1, 1, 16, 16, 32, 32, two=False, pooled=False).cut("sums", 2**20) == (128, 8192)


@pytest.fixture
def _untaped() -> Iterator[None]:
    with comparison.without_tapes():
        yield


@pytest.mark.usefixtures("_untaped")  # tapes know nothing of what is changed here
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("inducing", [5, 17])
def test_factors_are_kept_or_made_again(kept: bool, inducing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 32 inducing inputs, where a gradient can be asked for; the results have the same bits."""
    x, told = sample(1, 1, queries=3, keys=4, inducing=(inducing,) * 2, dtype=torch.float32), []

    def noted(*args: Any, train: bool, again: bool = False) -> Any:
        told.append((train, again))
        return make(*args, train=train, again=again)

    def found(k: Tensor = x.k, noise: float = 0.1) -> tuple[Tensor, ...]:
        with gp.fused_kernels("on"), gp.deferred_checks():
            p = gp.scgp_posterior(x.q, k, *tokens, noise=noise, objectives=("dtc", "kl"))
        return p.mean, p.variance, p.log_density().total, p.kl()

    make, tokens = sparse.small_factors, (x.o, x.v, x.inducing_q)
    monkeypatch.setattr(sparse, "small_factors", noted)
    k = x.k.clone().requires_grad_()
    usual = [*found(k), *torch.autograd.grad(sum(y.sum() for y in found(k)), k)]
    assert told == [(True, False)] * 2
    monkeypatch.setattr(sparse, "_KEPT", 32 if kept else 0)
    told.clear()
    outputs = found(k)
    loss = sum(y.sum() for y in outputs)
    (first,) = torch.autograd.grad(loss, k, retain_graph=True)
    (second,) = torch.autograd.grad(loss, k)
    assert told == [(True, False)] if kept else [(False, False), (True, True), (True, True)]
    assert torch.equal(first, second)
    told.clear()
    with torch.no_grad():
        found(k)
    plain = found()
    assert told == [(False, False)] * 2
    for one, other in zip(usual, [*outputs, first], strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(plain, outputs, strict=True))
    for reentrant in (True, False):  # recomputed by torch
        asked = checkpoint(lambda k: sum(y.sum() for y in found(k)), k, use_reentrant=reentrant)
        k.grad = None
        asked.backward()
        assert torch.equal(k.grad, first)


@pytest.mark.usefixtures("_untaped")
@pytest.mark.parametrize("kept", [32, 0])
def test_a_failure_is_counted_once_however_factors_come_to_gradients(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "_KEPT", kept)
    k = S.k.clone().requires_grad_()
    with gp.fused_kernels("on"), gp.deferred_checks():
        p = gp.scgp_posterior(S.q, k, *TOKENS[2:], noise=1e-39, objectives=())
    p.mean.sum().backward()  # G / noise overflows
    with pytest.raises(gp.NotPositiveDefiniteError, match="2 on cpu"):
        gp.check_health()


def test_matrices_shared_by_sequences_are_not_repeated() -> None:
    lead = torch.Size([3, 2])
    assert shared_matrices(torch.zeros(5, 4), lead).shape == (1, 2, 5, 4)
    assert shared_matrices(torch.zeros(2, 5, 4), lead).shape == (1, 2, 5, 4)
    assert shared_matrices(torch.zeros(1, 2, 5, 4), lead).shape == (1, 2, 5, 4)
    assert shared_matrices(torch.zeros(3, 1, 5, 4), lead).shape == (3, 2, 5, 4)


both = partial(comparison.both, x=S.q)


def posterior(q: Tensor = S.q, **options: object) -> gp.Posterior:
    return gp.scgp_posterior(q, *TOKENS[1:], noise=0.1, objectives=(), **options)


def noise() -> gp.ItemNoise:
    return gp.ItemNoise(0, torch.zeros(1), torch.zeros(1))


def test_what_the_kernels_do_not_give_comes_from_plain_operations() -> None:
    masks = {"mask": S.mask, "query_mask": S.query_mask}
    with torch.no_grad():
        plain = posterior(**masks)
        with gp.fused_kernels("on"):
            fused = posterior(**masks)
            pairs = [
                (fused.variance, plain.variance),
                (fused.covariance(), plain.covariance()),
                (fused.prior_stddev, plain.prior_stddev),
                (
                    fused.sample(2, joint=True, generator=noise()),
                    plain.sample(2, joint=True, generator=noise()),
                ),
                (fused.log_density("jensen").total, plain.log_density("jensen").total),
                (fused.log_density("dtc_bound").total, plain.log_density("dtc_bound").total),
            ]
    assert isinstance(fused, FusedSCGPPosterior)
    for a, b in pairs:
        assert float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.slow
def test_gradients_of_what_comes_from_plain_operations() -> None:
    both(lambda q: posterior(q, mask=S.mask, query_mask=S.query_mask).covariance())
    both(lambda q: posterior(q).sample(2, joint=True, generator=noise()))
    both(lambda q: posterior(q).mean.sum(-1) + posterior(q).log_density("jensen").total)
    both(lambda q: posterior(q).log_density().total)


def test_an_objective_not_announced_is_computed_when_asked() -> None:
    with torch.no_grad(), gp.fused_kernels("on"):
        late = gp.scgp_posterior(*TOKENS, noise=0.1).kl()
        early = gp.scgp_posterior(*TOKENS, noise=0.1, objectives=["kl"]).kl()
    assert torch.equal(late, early)


@pytest.mark.parametrize("masked", [False, True])
def test_row_amplitudes(masked: bool) -> None:
    x = sample(2, 1, queries=5, keys=40, width=2, inducing=(2, 4), dtype=torch.float32)
    options = {"mask": x.mask, "query_mask": x.query_mask} if masked else {"max_log_amplitude": -1.5}
    points = x.inducing_k.expand(2, 1, -1, -1) + x.q[..., :4, :] if masked else x.inducing_k
    found = []
    for mode, dtype in (("off", torch.float64), ("on", torch.float32)):
        leaves = [y.to(dtype).requires_grad_() for y in (x.q, x.k, points, torch.tensor([1.5]))]
        with gp.fused_kernels(mode):
            y = gp.sparse_row_log_amplitude(*leaves[:3], scale=leaves[3], **options)
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    for exact, fused in zip(*found, strict=True):
        assert float((fused - exact).norm() / exact.norm()) < 2e-5


def test_padding_hides_whatever_is_written_there() -> None:
    hidden = ~S.mask
    spoiled = [x.masked_fill(hidden[..., None], float("nan")) for x in (S.k, S.o, S.v)]
    queries = S.q.masked_fill(~S.query_mask[..., None], float("nan"))
    options = {"noise": 0.1, "mask": S.mask, "query_mask": S.query_mask, "objectives": ("dtc",)}
    with gp.fused_kernels("on"):
        clean = gp.scgp_posterior(*TOKENS, **options)
        spoilt = gp.scgp_posterior(queries, *spoiled, *TOKENS[4:], **options)
    assert isinstance(spoilt, FusedSCGPPosterior)
    assert torch.equal(clean.mean, spoilt.mean)
    assert torch.equal(clean.variance, spoilt.variance)
    assert torch.equal(clean.log_density().total, spoilt.log_density().total)
    assert (clean.mean[~S.query_mask] == 0).all()
    assert (clean.variance[~S.query_mask] == 0).all()


def test_what_is_made_when_asked_for_does_not_see_autocast() -> None:
    """The plain posterior is made inside the block and kept for everything that is asked of it later."""
    with gp.fused_kernels("on"):
        clean, lowered = (gp.scgp_posterior(*TOKENS, noise=1e-2, objectives=()) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prior = lowered.prior_stddev
    exact = gp.scgp_posterior(*(x.double() for x in TOKENS), noise=1e-2)
    torch.testing.assert_close(prior, exact.prior_stddev.float(), rtol=1e-5, atol=0)
    assert torch.equal(prior, clean.prior_stddev)
    assert torch.equal(lowered.covariance(), clean.covariance())


def test_coinciding_inducing_inputs_raise_or_are_counted() -> None:
    same = S.inducing_q[:1].expand(3, -1)
    with gp.fused_kernels("on"), pytest.raises(gp.NotPositiveDefiniteError) as caught:
        gp.scgp_posterior(*TOKENS[:4], same, noise=0.1, delta=0.0)
    assert "1 of 1 matrices K_mm + delta I (3 x 3, float32)" in str(caught.value)
    with gp.fused_kernels("on"), gp.deferred_checks():
        p = gp.scgp_posterior(*TOKENS[:4], same, noise=0.1, delta=0.0, objectives=())
    assert p.mean.isnan().all()
    with pytest.raises(gp.NotPositiveDefiniteError, match="on cpu"):
        gp.check_health()


def test_a_small_matrix_without_a_factor_is_named() -> None:
    with gp.fused_kernels("on"), pytest.raises(gp.NotPositiveDefiniteError) as caught:
        gp.scgp_posterior(*TOKENS, noise=1e-39, objectives=())  # G / noise overflows
    assert "1 of 1 matrices I + Psi^T Psi / noise (6 x 6, float32)" in str(caught.value)


def test_too_many_inducing_inputs_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_has_triton", lambda: True)
    monkeypatch.delenv("GPATTENTION_FUSED", raising=False)
    cuda = torch.device("cuda")
    many = {"channels": 32, "inducing": 65}
    assert switch.why_not_fused_on(cuda, torch.float32, inducing=32) is None
    assert "32 measured on a GPU" in (switch.why_not_fused_on(cuda, torch.float32, inducing=64) or "")
    assert (
        switch.why_not_fused_on(cuda, torch.float32, **many)
        == "65 inducing inputs are more than the 64 that fit on chip"
    )
