"""The closed forms of a CPU's training step against the plain operations, forward and gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.gp.closed import CHUNK, closed_moments
from gpattention.gp.roots import inverse_root
from gpattention.gp.sparse import ClosedSCGPPosterior, FusedSCGPPosterior, UnitFeatures
from tests.oracles import densities, divergences, sparse

SIZES = [(17, 17), (64, 64), (30, 50)]
MODELS = {"direct": gp.direct_posterior, "cgp": gp.cgp_posterior}


def inputs(model: str, n: int, m: int, batch: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=g, dtype=torch.float64)

    tokens = {"q": normal(batch, 2, n, 8, scale=0.5), "k": normal(batch, 2, m, 8, scale=0.5)}
    if model == "cgp":
        tokens["o"] = normal(batch, 2, m, 8, scale=0.5)
    numbers = {"noise": (0.01, 0.05), "scale_q": (1.0, 0.7), "scale_k": (0.8, 1.2)}
    parameters = {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}
    return {
        **tokens,
        "v": normal(batch, 2, m, 5),
        **parameters,
        "log_amplitude": normal(batch, 2, n, scale=0.3),
    }


def evaluate(
    model: str, given: dict[str, Tensor], cost: Any, dtype: torch.dtype, mode: Any, **masks: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Mean, variance and cost, and the gradients of a random function of them."""
    leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in given.items()}
    tokens = [leaves[name] for name in ("q", "k", "o", "v") if name in leaves]
    options = {name: leaves[name] for name in ("noise", "scale_q", "scale_k", "log_amplitude")}
    with gp.fused_kernels(mode):
        p = MODELS[model](*tokens, **options, **masks, with_variance=True, with_cost=cost)
        assert (p._closed is not None) == (mode == "auto")
        found = [p.mean, p.variance, p.log_density().key]
        if cost == "kl":
            found.append(p.kl())
        elif cost == "marginal":
            total = p.fused_cost("marginal")
            found.append(-p.log_density("marginal").total if total is None else total)
        g = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype) for x in found]
        loss = sum((x * w).sum() for x, w in zip(found, weights, strict=True))
        return [x.detach() for x in found], list(torch.autograd.grad(loss, list(leaves.values())))


def gap(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cost", ["none", "marginal", "kl"])
@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_values_and_gradients_are_those_of_plain_operations(
    model, n: int, m: int, cost, masked: bool
) -> None:
    given, masks = inputs(model, n, m), {}
    if masked:
        for name, count in (("mask", m), ("query_mask", n)):
            masks[name] = torch.arange(count) < torch.tensor([count, count - 3, 1])[:, None, None]
    values, gradients = evaluate(model, given, cost, torch.float64, "off", **masks)
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 3e-5)):
        found = evaluate(model, given, cost, dtype, "auto", **masks)
        assert gap(found[0], values) < (allowed if dtype == torch.float64 else 2e-6)
        assert gap(found[1], gradients) < allowed


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "m"), SIZES)
def test_row_sums_are_those_of_plain_operations(n: int, m: int, masked: bool) -> None:
    given, masks = inputs("direct", n, m), {}
    if masked:
        masks["mask"] = torch.arange(m) < torch.tensor([m, m - 3, 0])[:, None, None]
    g = torch.randn(3, 2, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def evaluated(dtype: torch.dtype, mode: Any) -> list[Tensor]:
        q, k, scale = (given[x].to(dtype, copy=True).requires_grad_() for x in ("q", "k", "scale_q"))
        with gp.fused_kernels(mode):
            found = gp.row_log_amplitude(q, k, scale=scale, max_log_amplitude=-2.0, **masks)
        return [found.detach(), *torch.autograd.grad((found * g.to(dtype)).sum(), (q, k, scale))]

    expected = evaluated(torch.float64, "off")
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        assert gap(evaluated(dtype, "auto"), expected) < allowed


def test_row_sums_can_be_differentiated_twice() -> None:
    q, k = (torch.randn(1, n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 4))
    assert torch.autograd.gradgradcheck(gp.row_log_amplitude, (q, k))


@pytest.mark.parametrize("model", MODELS)
def test_many_sequences_are_taken_in_chunks(model) -> None:
    given = inputs(model, 64, 64, batch=CHUNK // 64**2)
    assert len(given["q"]) * 2 > CHUNK // 64**2
    expected = evaluate(model, given, "kl", torch.float64, "off")
    for a, b in zip(evaluate(model, given, "kl", torch.float64, "auto"), expected, strict=True):
        assert gap(a, b) < 1e-12


@pytest.mark.parametrize("n", [1, 16, 24, 25, 48, 49, 64, 130])
def test_inverse_roots_of_any_size(n: int) -> None:
    X = torch.randn(3, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    M = X @ X.mT + torch.eye(n)
    root, pivots, info = inverse_root(M)
    L = torch.linalg.cholesky(M)
    torch.testing.assert_close(root @ L, torch.eye(n, dtype=M.dtype).expand_as(M))
    torch.testing.assert_close(pivots, L.diagonal(dim1=-2, dim2=-1))
    assert not info.any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "m"), [*SIZES, (20, 150)])
def test_variances_without_gradients_are_those_of_plain_operations(n: int, m: int, masked: bool) -> None:
    given, masks = inputs("direct", n, m), {}
    if masked:
        for name, count in (("mask", m), ("query_mask", n)):
            masks[name] = torch.arange(count) < torch.tensor([count, count - 3, 0])[:, None, None]
    noise = given["noise"][:, None, None]

    def variances(dtype: torch.dtype, mode: Any) -> list[Tensor]:
        process = gp.UnitProcess(*(x.to(dtype) for x in (given["q"], given["k"], noise)), **masks)
        with gp.fused_kernels(mode):
            return [gp.unit_variance(process)]

    expected = variances(torch.float64, "off")
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        assert gap(variances(dtype, "auto"), expected) < allowed


def test_where_plain_operations_stay() -> None:
    given = inputs("direct", 5, 5)

    def closed(**changed: Any) -> Any:
        p = {"requires": True, "mode": "auto", "scale": 1.0, "dtype": torch.float64, **changed}
        q, k, v = ((p["scale"] * given[x]).to(p["dtype"]).requires_grad_(p["requires"]) for x in "qkv")
        with gp.fused_kernels(p["mode"]):
            return gp.direct_posterior(q, k, v, noise=0.01, with_variance=True)._closed

    assert closed() is not None
    assert closed(mode="off") is None
    assert closed(requires=False) is None
    assert closed(dtype=torch.float32, scale=100.0) is None  # distances need float64 there
    assert closed(scale=100.0) is not None
    with torch.no_grad():
        assert closed() is None
    with gp.deferred_checks():
        assert closed() is None


@pytest.mark.parametrize("model", MODELS)
def test_a_matrix_without_a_factor_is_named(model) -> None:
    given = inputs(model, 40, 40)
    for x in ("q", "k", "o"):
        if x in given:
            given[x] = given[x][..., :1, :].expand(-1, -1, 40, -1)  # all tokens are one
    given["noise"] = torch.full((2,), 1e-9, dtype=torch.float64)
    with pytest.raises(gp.NotPositiveDefiniteError, match=r"K_[ko] \+ noise I .*smallest noise"):
        evaluate(model, given, "kl", torch.float32, "auto")


def test_gradients_are_not_differentiated_again() -> None:
    given = inputs("direct", 5, 5)
    q, k, v = (given[x].requires_grad_() for x in "qkv")
    p = gp.direct_posterior(q, k, v, noise=0.01, with_variance=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(p.variance.sum(), q, create_graph=True)
    assert closed_moments(p.given, torch.ones(1), cost="none", name="C") is not None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("m", [5, 32])
@pytest.mark.parametrize("values", ["paper", "dual"])
def test_the_sparse_model_by_inverted_roots(values, m: int, masked: bool) -> None:
    given = inputs("cgp", 17, 17)
    given["inducing"] = torch.randn(2, m, 8, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
    mask = torch.arange(17) < torch.tensor([17, 14, 1])[:, None, None] if masked else None

    def run(mode: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in given.items()}
        tokens = [leaves.pop(name) for name in ("q", "k", "o", "v", "inducing")]
        with gp.fused_kernels(mode):
            p = gp.scgp_posterior(*tokens, **leaves, mask=mask, values=values)
            found = [p.mean, p.variance, p.log_density().total, p.kl()]
            loss = sum((x.sin() if x.ndim > 2 else x).sum() for x in found)
            return [x.detach() for x in found], list(torch.autograd.grad(loss, [*tokens, *leaves.values()]))

    expected = run("off", torch.float64)
    # two to three times what was seen: in float32 1.2e-6 and 1.8e-5, the plain operations 1.4e-6 and 1.0e-5
    for dtype, *allowed in ((torch.float64, 1e-14, 1e-13), (torch.float32, 3e-6, 4e-5)):
        for a, b, most in zip(run("auto", dtype), expected, allowed, strict=True):
            assert gap(a, b) < most


def sparse_inputs(m: int, n: int = 17, batch: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(m)
    return {**inputs("cgp", n, n, batch), "inducing": torch.randn(2, m, 8, generator=g, dtype=torch.float64)}


def evaluate_sparse(
    given: dict[str, Tensor], dtype: torch.dtype, mode: Any, objective: Any, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Mean, variance and the announced objective, and the gradients of a function of them."""
    leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in given.items()}
    tokens = [leaves[name] for name in ("q", "k", "o", "v", "inducing")]
    numbers = {name: leaves[name] for name in ("noise", "scale_q", "scale_k", "log_amplitude")}
    announced = [] if objective is None else [objective]
    with gp.fused_kernels(mode):
        p = gp.scgp_posterior(*tokens, **numbers, objectives=announced, **options)
        assert isinstance(p, ClosedSCGPPosterior) == (mode == "auto")
        found = [p.mean, p.variance]
        if objective == "kl":
            found.append(p.kl())
        elif objective == "dtc":
            density = p.log_density()
            found += [density.query, 0.5 * density.key]
        loss = sum((x.sin() if x.ndim > 2 else x).sum() for x in found)
        return [x.detach() for x in found], list(torch.autograd.grad(loss, list(leaves.values())))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("conditional", ["deterministic", "independent"])
@pytest.mark.parametrize("objective", [None, "dtc", "kl"])
@pytest.mark.parametrize("m", [5, 32])
@pytest.mark.parametrize("values", ["paper", "dual"])
def test_the_sparse_model_is_that_of_plain_operations(
    values, m: int, objective, conditional, masked: bool
) -> None:
    given = sparse_inputs(m)
    options: dict[str, Any] = {"values": values, "conditional": conditional}
    if masked:
        options["mask"] = torch.arange(17) < torch.tensor([17, 14, 1])[:, None, None]
    expected = evaluate_sparse(given, torch.float64, "off", objective, **options)
    # as in the test of inverted roots; the noise's gradient is a sum whose terms cancel
    for dtype, *allowed in ((torch.float64, 1e-14, 1e-12), (torch.float32, 3e-6, 4e-5)):
        found = evaluate_sparse(given, dtype, "auto", objective, **options)
        for a, b, most in zip(found, expected, allowed, strict=True):
            assert gap(a, b) < most


@pytest.mark.parametrize("values", ["paper", "dual"])
def test_the_sparse_model_is_that_of_the_oracle(values) -> None:
    given = sparse_inputs(6, n=9, batch=1)
    arrays = {name: x[0, 0].numpy() if x.ndim == 4 else x[0].numpy() for name, x in given.items()}
    names = ("q", "k", "o", "v")
    tokens = [arrays[name] for name in names]
    numbers: dict[str, Any] = {name: float(given[name][0]) for name in ("noise", "scale_q", "scale_k")}
    numbers["log_amplitude"] = given["log_amplitude"][0, 0].numpy()
    sets = [arrays["inducing"]] * 2
    options: dict[str, Any] = {**numbers, "values": values, "delta": 1e-6}
    mean, covariance = sparse.scgp_posterior(*tokens, *sets, **options)
    query, key = densities.scgp_log_density(*tokens, *sets, objective="dtc", **options)
    kl = divergences.scgp_kl(*tokens, *sets, **options)

    one_head = {name: x[:, :1] if x.ndim == 4 else x[:1] for name, x in given.items()}
    one_head["log_amplitude"] = given["log_amplitude"][:, :1]
    (own_mean, variance, own_query, half_key), _ = evaluate_sparse(
        one_head, torch.float64, "auto", "dtc", values=values
    )
    (_, _, own_kl), _ = evaluate_sparse(one_head, torch.float64, "auto", "kl", values=values)
    expected = [mean, np.diag(covariance), query, 0.5 * key, kl]
    found = [own_mean, variance, own_query, half_key, own_kl]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x.squeeze(0, 1).numpy(), y, rtol=1e-10, atol=1e-12)


def test_sparse_gradients_are_numerical_ones() -> None:
    given = sparse_inputs(3, n=4, batch=2)
    names = ("q", "k", "o", "v", "inducing", "noise", "scale_q", "scale_k", "log_amplitude")

    def moments(*leaves: Tensor) -> tuple[Tensor, ...]:
        tokens, numbers = leaves[:5], dict(zip(names[5:], leaves[5:], strict=True))
        p = gp.scgp_posterior(*tokens, **numbers, values="dual", objectives=["kl"])
        assert isinstance(p, ClosedSCGPPosterior)
        return p.mean, p.variance, p.kl()

    assert torch.autograd.gradcheck(moments, [given[name].requires_grad_() for name in names], atol=1e-4)


def test_sparse_sequences_are_taken_in_chunks() -> None:
    given = sparse_inputs(32, batch=CHUNK // 32**2)
    expected = evaluate_sparse(given, torch.float64, "off", "kl", values="dual")
    found = evaluate_sparse(given, torch.float64, "auto", "kl", values="dual")
    for a, b in zip(found, expected, strict=True):
        assert gap(a, b) < 1e-12


def test_another_sparse_objective_than_the_announced_one() -> None:
    given = sparse_inputs(5)
    tokens = [given[name].requires_grad_() for name in ("q", "k", "o", "v", "inducing")]
    p = gp.scgp_posterior(*tokens, noise=0.01, objectives=["kl"])
    assert isinstance(p, ClosedSCGPPosterior)
    with gp.fused_kernels("off"):
        plain = gp.scgp_posterior(*tokens, noise=0.01)
    torch.testing.assert_close(p.log_density().total, plain.log_density().total)
    torch.testing.assert_close(p.log_density("jensen").total, plain.log_density("jensen").total)
    torch.testing.assert_close(p.covariance(), plain.covariance())


@pytest.mark.parametrize("masked", [False, True])
def test_row_sums_from_shared_features(masked: bool) -> None:
    given = sparse_inputs(5)
    mask = torch.arange(17) < torch.tensor([17, 14, 1])[:, None, None] if masked else None

    def evaluated(dtype: torch.dtype, mode: Any) -> list[Tensor]:
        tokens = [given[x].to(dtype, copy=True).requires_grad_() for x in ("q", "k", "o", "inducing")]
        q, k, o, m = tokens
        with gp.fused_kernels(mode):
            features = UnitFeatures.of(q, k, o, m, mask, mask)
            assert (features is not None) == (mode == "auto")
            found = gp.sparse_row_log_amplitude(
                q, k, m, scale=0.3, mask=mask, query_mask=mask, max_log_amplitude=-1.0, features=features
            )
        return [found.detach(), *torch.autograd.grad(found.sin().sum(), (q, k, m))]

    expected = evaluated(torch.float64, "off")
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        assert gap(evaluated(dtype, "auto"), expected) < allowed


def test_where_the_sparse_model_stays_plain() -> None:
    given = sparse_inputs(5)

    def kind_of(**changed: Any) -> type:
        p = {"mode": "auto", "scale": 1.0, "dtype": torch.float64, "objectives": ["kl"], **changed}
        tokens = [(p["scale"] * given[x]).to(p["dtype"]) for x in ("q", "k", "o", "v", "inducing")]
        with gp.fused_kernels(p["mode"]):
            leaves = [x.requires_grad_() for x in tokens]
            return type(gp.scgp_posterior(*leaves, noise=0.01, objectives=p["objectives"]))

    assert kind_of() is ClosedSCGPPosterior
    assert not issubclass(kind_of(mode="off"), FusedSCGPPosterior)
    assert not issubclass(kind_of(objectives=None), FusedSCGPPosterior)
    assert not issubclass(kind_of(objectives=["dtc", "kl"]), FusedSCGPPosterior)
    assert not issubclass(kind_of(dtype=torch.float32, scale=40.0), FusedSCGPPosterior)
    with torch.no_grad():
        assert not issubclass(kind_of(), FusedSCGPPosterior)


def test_a_sparse_matrix_without_a_factor_is_named() -> None:
    given = sparse_inputs(32)
    tokens = [given[name].float().requires_grad_() for name in ("q", "k", "o", "v")]
    points = given["inducing"][:, :1].expand(-1, 32, -1).float()  # all are one
    with pytest.raises(gp.NotPositiveDefiniteError, match=r"K_mm \+ delta I"):
        gp.scgp_posterior(*tokens, points, noise=0.01, delta=0.0, objectives=["kl"])
    with pytest.raises(gp.NotPositiveDefiniteError, match=r"I \+ Phi_.* / noise .*smallest noise"):
        gp.scgp_posterior(*tokens, given["inducing"].float(), noise=1e-12, objectives=["kl"])
