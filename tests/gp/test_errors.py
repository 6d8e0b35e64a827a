"""Wrong arguments are refused by name and value; numbers that cannot be trusted are raised, not returned."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.gp.inputs import check_values, prepare
from gpattention.numerics import cholesky
from tests.gp.calls import (
    cgp_kl,
    cgp_log_density,
    direct_kl,
    direct_log_density,
    scgp_log_density,
)
from tests.gp.samples import Sample, sample

Call = Callable[..., Any]
INF, NAN = float("inf"), float("nan")
S = sample(2, 3, queries=5, keys=7, width=3, channels=4, inducing=(5, 6))
SQUARE = sample(2, 3, queries=7, keys=7, width=3, channels=4, inducing=(5, 6))
EYE = torch.eye(6, dtype=torch.float64)
FREE = {"inducing_v": EYE[:, :4], "scale_tril": EYE.expand(4, 6, 6)}  # of SGPA, [m, D] and [D, m, m]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def caller(function: Call, names: str, given: Sample = S, **fixed: Any) -> Call:
    """call(sample, **changes): the named fields of the sample, each replaced by a change of its name."""

    def call(s: Sample = given, **changes: Any) -> Any:
        tokens = [changes.pop(name) if name in changes else getattr(s, name) for name in names.split()]
        return function(*tokens, **(fixed | changes))

    return call


def callers(names: str, *functions: Call) -> list[Call]:
    return [caller(function, names, noise=0.1) for function in functions]


SCGP = "q k o v inducing_q inducing_k"
direct, direct_density, direct_kl = callers("q k v", gp.direct_posterior, direct_log_density, direct_kl)
cgp, cgp_density, cgp_kl = callers("q k o v", gp.cgp_posterior, cgp_log_density, cgp_kl)
scgp, scgp_density = callers(SCGP, gp.scgp_posterior, scgp_log_density)
(softmax,) = callers("q k v", gp.softmax_posterior)
causal_cgp = caller(gp.causal_cgp_posterior, "q k o v", SQUARE, noise=0.1)
row = caller(gp.row_log_amplitude, "q k")
sparse_row = caller(gp.sparse_row_log_amplitude, "q k inducing_q")
sgpa = caller(gp.sgpa_posterior, "q v inducing_k", SQUARE, **FREE)
MODELS = {"direct": direct, "cgp": cgp, "scgp": scgp}
OTHERS = {"softmax": softmax, "causal cgp": causal_cgp, "row": row, "sparse row": sparse_row, "sgpa": sgpa}
EVERY = MODELS | OTHERS
every_call = pytest.mark.parametrize("call", EVERY.values(), ids=EVERY)
every_model = pytest.mark.parametrize("call", MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def _warn_always() -> Iterator[None]:
    torch.set_warn_always(True)  # reading a number that requires a gradient warns only once otherwise
    yield
    torch.set_warn_always(False)


def refused(match: str, call: Call, *args: Any, **changes: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        call(*args, **changes)
    assert not isinstance(caught.value, gp.NumericalError)  # an argument's fault, not a number's


def numbers(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, gp.Posterior):
        return result.mean, result.variance
    return (result.query, result.key) if isinstance(result, gp.LogDensity) else (result,)


@every_call
def test_tokens_that_are_no_matrix(call: Call) -> None:
    head = "expected q to be a floating-point .* got shape "
    refused(head + r"\(3,\) and torch.float64", call, q=torch.zeros(3, dtype=torch.float64))
    refused(head + r"\(2, 3, 5, 3\) and torch.int64", call, q=torch.zeros(2, 3, 5, 3, dtype=torch.int64))
    refused(head + r"\(2, 3, 0, 3\)", call, q=S.q[..., :0, :])
    refused(head + r"\(2, 3, 5, 0\)", call, q=S.q[..., :0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"k": S.k[..., :2]}, r"expected k of width 3 like q, got shape \(2, 3, 7, 2\)"),
        ({"inducing_q": S.inducing_q[:, :1]}, r"expected inducing_q of width 3 like q, got shape \(5, 1\)"),
        ({"inducing_k": S.inducing_k[:, :1]}, r"expected inducing_k of width 3 like q, got shape \(6, 1\)"),
        ({"o": S.o[..., :6, :]}, r"expected o with 7 tokens like k, got shape \(2, 3, 6, 3\)"),
        ({"v": S.v[..., :6, :]}, r"expected v with 7 tokens like k, got shape \(2, 3, 6, 4\)"),
        ({"o": S.o.numpy()}, "expected o to be a tensor, got ndarray"),
        ({"k": S.k.float()}, "expected k of torch.float64 like q, got torch.float32"),
        ({"v": S.v.bfloat16()}, "expected v of torch.float64 like q, got torch.bfloat16"),
        ({"v": S.v.to("meta")}, "expected v on cpu like q, got meta"),
        ({"inducing_q": S.inducing_q.to("meta")}, "expected inducing_q on cpu like q, got meta"),
        ({"inducing_k": S.inducing_k[0]}, r"expected inducing_k .* got shape \(3,\)"),
        ({"k": S.k[:, :2]}, r"leading axes that broadcast together, got q \(2, 3, 5, 3\), k \(2, 2, 7, 3\)"),
        ({"log_amplitude": tensor(1.0, 2.0)}, r"expected log_amplitude of shape .* got shape \(2,\)"),
        ({"log_amplitude": torch.zeros(4, 1, 5)}, r"log_amplitude .* \(2, 3\), got shape \(4, 1, 5\)"),
    ],
)
def test_inputs_that_do_not_fit_together(changes: dict, match: str) -> None:
    refused(match, scgp, **changes)


TWICE = sample(2, 2, queries=7, keys=7, inducing=(5, 6))  # B == H, where a [B, N] mask would broadcast


@every_call
def test_masks_that_could_mean_two_things(call: Call) -> None:
    head = r"expected mask to be bool \(True = real token\) of shape \[7\] or \[2, 2, 7\] .*mask\[:, None\]"
    refused(head + r".* got shape \(2, 7\) and torch.bool", call, TWICE, mask=TWICE.mask[:, 0])
    refused(head + r".* got shape \(2, 2, 7\) and torch.int64", call, TWICE, mask=TWICE.mask.long())
    refused(head + r".* got shape \(2, 2, 6\)", call, TWICE, mask=TWICE.mask[..., :6])
    refused(head + r".* got shape \(3, 1, 7\)", call, TWICE, mask=torch.ones(3, 1, 7, dtype=torch.bool))
    refused("expected mask on cpu like its tokens, got meta", call, TWICE, mask=TWICE.mask.to("meta"))


@every_model
def test_query_masks_are_checked_against_the_queries(call: Call) -> None:
    refused(r"expected query_mask .* \[5\] or \[2, 3, 5\] .* got shape \(2, 3, 7\)", call, query_mask=S.mask)
    refused("expected query_mask on cpu .*, got meta", call, query_mask=S.query_mask.to("meta"))


PARAMETERS = [(call, name) for call in MODELS.values() for name in ("noise", "scale_q", "scale_k")]
PARAMETERS += [(softmax, "noise"), (softmax, "prior_scale"), (row, "scale"), (sparse_row, "scale")]


@pytest.mark.parametrize("bad", [0.0, -0.5, INF, -INF, NAN])
@pytest.mark.parametrize(("call", "name"), PARAMETERS)
def test_parameters_must_be_positive_and_finite(call: Call, name: str, bad: float) -> None:
    match = f"expected {name} to be positive and finite, got {bad}$"
    refused(match, call, **{name: bad})
    refused(match, call, **{name: tensor(0.5, bad, 2.0).requires_grad_()})  # one per head


@pytest.mark.parametrize(("call", "name"), PARAMETERS)
def test_parameters_of_a_wrong_shape_or_type(call: Call, name: str) -> None:
    head = rf"expected {name} to be a floating-point scalar .* leading axes \(2, 3\), got shape "
    refused(head + r"\(2,\) and torch.float64", call, **{name: tensor(1.0, 1.0)})
    refused(head + r"\(4, 1, 1\) and torch.float64", call, **{name: torch.ones(4, 1, 1).double()})
    refused(head + r"\(3,\) and torch.int64", call, **{name: torch.ones(3, dtype=torch.int64)})
    refused(f"expected {name} on cpu like q, got meta", call, **{name: tensor(1.0).to("meta")})


@pytest.mark.parametrize("call", [direct_density, cgp_density, direct_kl, cgp_kl])
def test_observation_noise_may_be_zero_but_not_negative(call: Call) -> None:
    for bad in (-0.1, INF, NAN):
        for given in (bad, tensor(0.1, bad, 0.2).requires_grad_()):
            refused(f"expected observation_noise .* finite, got {bad}$", call, observation_noise=given)
    refused(r"observation_noise .* got shape \(2,\)", call, observation_noise=tensor(0.1, 0.1))
    zero, zeros = call(observation_noise=0.0), call(observation_noise=tensor(0.0, 0.0, 0.0))
    torch.testing.assert_close(numbers(zeros), numbers(zero), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "changes", "match"),
    [
        (cgp_density, {"objective": "elbo"}, "objective to be one of marginal, jensen, .*, got 'elbo'"),
        (cgp_density, {"latent_prior": "flat"}, "latent_prior to be one of noisy, latent, got 'flat'"),
        (cgp_density, {"samples": 0}, "expected samples to be a whole number >= 1, got 0"),
        (direct_density, {"objective": "jensen"}, "objective to be one of marginal, joint, got 'jensen'"),
        (scgp_density, {"objective": "vfe"}, "objective to be one of dtc, dtc_bound, .*, got 'vfe'"),
        (scgp_density, {"objective": "marginal", "chunk": 0}, "chunk to be a whole number >= 1, got 0"),
        (scgp_density, {"objective": "jensen", "features": 0}, "features to be a whole number >= 1, got 0"),
        (scgp_density, {"objective": "dtc", "features": 8}, "features=8 .* 'dtc' does not hold linearly"),
        (scgp, {"conditional": "fitc"}, "conditional to be one of deterministic, independent, got 'fitc'"),
        (scgp, {"values": "raw"}, "expected values to be one of paper, dual, got 'raw'"),
        (scgp, {"objectives": ["kl", "elbo"]}, "objectives to be one of dtc, kl, got 'elbo'"),
        (cgp, {"with_cost": "elbo"}, "expected with_cost to be one of none, marginal, kl, got 'elbo'"),
        (direct, {"with_cost": "elbo"}, "expected with_cost to be one of none, marginal, kl, got 'elbo'"),
        (softmax, {"centre": "mean"}, "expected centre 'tokens', 'none' or a pair .* got 'mean'"),
        (softmax, {"centre": (S.q[0, 0, 0, :2],) * 2}, r"centre of the queries .*3\], got shape \(2,\)"),
        (softmax, {"inducing": S.inducing_k[:, :2]}, r"expected inducing of width 3 .* got shape \(6, 2\)"),
        (softmax, {"inducing": S.inducing_k[0]}, r"expected inducing to be .* got shape \(3,\)"),
        (sparse_row, {"floor": NAN}, "expected floor > 0, got nan"),
        (gp.noise_floor, {"noise": 0.1, "scale": 1.0}, "scale and tokens belong together"),
        (gp.noise_floor, {"noise": tensor(0.1, -0.5).requires_grad_()}, "expected noise >= 0, got -0.5"),
        (gp.noise_floor, {"noise": 1.0, "observation_noise": -2.0}, "observation_noise >= 0, got -2"),
        (cgp, {"log_amplitude": tensor(0, 0, 0, 0, 400).requires_grad_()}, "reaches 400.0, .* most 354"),
        (sgpa, {"inducing_v": tensor(0)[None]}, r"inducing_v .*4\], got shape \(1, 1\)"),
        (sgpa, {"scale_tril": tensor(0)}, r"scale_tril .*6\], got shape \(1,\)"),
    ],
)  # fmt: skip
def test_options(call: Call, changes: dict[str, Any], match: str) -> None:
    refused(match, call, **changes)


@pytest.mark.parametrize("bad", [-1e-6, 1.0, NAN])
def test_delta_and_jitter_stay_below_the_unit_diagonal(bad: float) -> None:
    for call in (scgp, sparse_row, softmax):
        refused(rf"expected delta in \[0, 1\), got {bad}", call, delta=bad)
    for jitter in (bad, 0.0):
        refused(rf"expected jitter in \(0, 1\), got {jitter}", sgpa, jitter=jitter)


def test_forms_that_do_not_exist() -> None:
    refused("sparse variance has no causal form", softmax, SQUARE, causal=True, inducing=S.inducing_k)
    refused("centre='tokens' looks ahead", softmax, SQUARE, causal=True, centre="tokens")
    for call, causal in ((direct, {"causal": True}), (softmax, {"causal": True}), (causal_cgp, {})):
        refused(r"q with 7 tokens like k \(causal\), got shape \(2, 3, 5, 3\)", call, S, **causal)
    refused("no latent inputs", lambda: prepare(S.q, S.k, S.v, noise=0.1).latent)
    for p in (direct(SQUARE, causal=True), softmax(SQUARE, causal=True), causal_cgp(SQUARE)):
        for undefined in (p.covariance, lambda p=p: p.sample(joint=True)):
            with pytest.raises(gp.UndefinedCovarianceError, match=r"use .variance, or .sample\(joint=F"):
                undefined()
        refused("expected n >= 1 draws, got 0", p.sample, 0)
        assert p.sample(2).shape == (2, 2, 3, 7, 4)


def test_kernels() -> None:
    for kernel in (gp.rbf, gp.ard_rbf, gp.exp_dot):
        refused(r"expected x to be .* got shape \(3,\) and torch.float64", kernel, S.q[0, 0, 0], S.k)
        refused(r"expected y to be .* got shape \(2, 3, 7, 3\) and torch.int64", kernel, S.q, S.k.long())
        refused("expected y of width 3 like x, got width 2", kernel, S.q, S.k[..., :2])
    for kernel in (gp.ard_rbf, gp.exp_dot):
        for bad in (0.0, -1.0, NAN):
            refused(f"expected lengthscale .*, got {bad}", kernel, S.q, S.k, lengthscale=bad)
            refused(f"expected variance .*, got {bad}", kernel, S.q, S.k, variance=bad)
        refused(r"lengthscale .*3\], got shape \(2,\)", kernel, S.q, S.k, lengthscale=tensor(1, 2))


READS = {"direct": "q k v log_amplitude", "cgp": "q k o v log_amplitude", "softmax": "q k v"}
READS |= {"row": "q k", "sgpa": "q v"}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", EVERY)
def test_numbers_that_are_not_finite(name: str, bad: float) -> None:
    """Refused with their count at real tokens; padded tokens may hold anything."""
    call, mask = EVERY[name], torch.ones(2, 2, 7, dtype=torch.bool)
    mask[0, 1, 2:4] = False
    for field in next(reads for key, reads in READS.items() if key in name).split():
        x = getattr(TWICE, field).clone()
        x[0, 1, 2:4] = bad
        dirty, extra = replace(TWICE, **{field: x}), {"log_amplitude"} & {field}
        match = f"^{field} holds {x[0, 1, 2:4].numel()} non-finite numbers at real tokens"
        with pytest.raises(gp.NonFiniteError, match=match):
            call(dirty, **dict.fromkeys(extra, x))
        clean = call(TWICE, mask=mask, **dict.fromkeys(extra, TWICE.log_amplitude))
        padded = call(dirty, mask=mask, **dict.fromkeys(extra, x))
        torch.testing.assert_close(numbers(padded), numbers(clean), rtol=0, atol=0)


def test_parameters_without_tokens_must_be_finite() -> None:
    inducing = {scgp: "inducing_q", softmax: "inducing", sgpa: "inducing_k"}
    for call, name in inducing.items():
        clean = S.inducing_k if name == "inducing_k" else S.inducing_q
        dirty = clean.clone().index_fill_(0, torch.tensor([1]), NAN)
        with pytest.raises(gp.NonFiniteError, match=f"{name} holds 3 non-finite numbers"):
            call(**{name: dirty})
    for name, x in FREE.items():
        with pytest.raises(gp.NonFiniteError, match=f"{name} holds {x.numel()} non-finite numbers"):
            sgpa(**{name: x + NAN})


def test_no_cholesky_factor_says_how_many_where_and_the_noise() -> None:
    s = sample(2, 3, queries=5, keys=7, spread=2.0, dtype=torch.float32)
    s.q[0, 1], s.q[1, 2] = s.q[0, 1, :1].clone(), s.q[1, 2, :1].clone()  # in two sequences queries coincide
    matrices = {direct_density: "K_q + tau^2 I", cgp_density: "marginal covariance of the queries"}
    for call, matrix in matrices.items():
        assert call(s).total.isfinite().all()
        for zero in (0.0, torch.zeros(3, requires_grad=True)):
            with pytest.raises(gp.NotPositiveDefiniteError) as caught:
                call(s, observation_noise=zero)
            assert str(caught.value).startswith(
                f"2 of 6 matrices {matrix} (5 x 5, float32) are not positive definite; the earliest pivot "
                "to fail is number 2 of matrix [0, 1], smallest noise 0.0e+00. Raise the noise"
            )


def test_finite_tokens_whose_sum_overflows_are_let_through() -> None:
    huge = torch.full((1, 4, 2), 3e38)
    assert not bool(huge.sum().isfinite())
    check_values({"v": huge})
    huge[0, 0, 0] = float("inf")
    huge[0, 1, 0] = float("-inf")
    with pytest.raises(gp.NonFiniteError, match="v holds 2 non-finite"):
        check_values({"v": huge})


def test_a_matrix_that_is_not_finite_does_not_ask_for_more_noise() -> None:
    A = torch.eye(3).expand(4, 3, 3).clone()
    A[2, 1, 1] = NAN
    with pytest.raises(gp.NonFiniteError, match=r"K \+ noise I holds 1 non-finite numbers"):
        cholesky(A, name="K + noise I", noise=0.1)
    A[2, 1, 1] = -1
    with pytest.raises(gp.NotPositiveDefiniteError, match=r"pivot to fail is number 2 of matrix \[2\]"):
        cholesky(A, name="K + noise I", noise=0.1)


def test_a_growing_state_keeps_its_widths_axes_and_type() -> None:
    state = gp.CausalCGPState(noise=0.1)
    s = sample(2, 3, width=3, channels=4)
    q, k, o, v = (x[..., 0, :] for x in (s.q, s.k, s.o, s.v))
    state.append(q, k, o, v)
    match = "tokens of width 3 and values of width 4 as before, got "
    refused(match + "2 and 4", state.append, q[..., :2], k[..., :2], o[..., :2], v)
    refused(match + "3 and 1", state.append, q, k, o, v[..., :1])
    refused("expected k of width 3 like q", state.append, q, k[..., :2], o, v)
    axes = r"expected tokens with leading axes \(2, 3\) as before, got "
    refused(axes + r"\(1, 3\)", state.append, q[:1], k[:1], o[:1], v[:1])
    refused(axes + r"\(3,\)", state.append, q[0], k[0], o[0], v[0])
    single = [x.float() for x in (q, k, o, v)]
    refused("computed in torch.float64 as before, got torch.float32", state.append, *single)
    with pytest.raises(gp.NonFiniteError, match="v holds 24 non-finite numbers"):
        state.append(q, k, o, v * NAN)
    assert len(state) == 1  # a refused token leaves no trace
    state.append(q[:1], k[:1], o[:1], v)  # one token that all sequences share


@pytest.mark.parametrize("name", ["noise", "scale_q", "scale_k"])
@pytest.mark.parametrize("bad", [0.0, -1.0, INF, NAN])
def test_a_growing_state_refuses_its_parameters_at_once(name: str, bad: float) -> None:
    for given in (bad, torch.tensor([0.5, bad], requires_grad=True)):
        options = {"noise": 0.1, name: given}
        refused(f"expected {name} to be positive and finite, got {bad}$", gp.CausalCGPState, **options)


def test_a_health_counter_cannot_be_made_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("gpattention.numerics")
    monkeypatch.setattr(module, "_failures", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must exist before a CUDA graph is captured"):
        module.failure_counter(torch.device("cuda", 0))
    with torch.inference_mode():
        counter = module.failure_counter(torch.device("cpu"))
    assert (counter.is_inference(), gp.health()) == (False, {"cpu": 0})


def in_sequence(state: gp.CausalCGPState, *tokens: Tensor) -> None:
    for i in range(tokens[0].shape[-2]):
        state.append(*(x[..., i, :] for x in tokens))


KEYS_WITHOUT_A_FACTOR: dict[str, Callable[..., Any]] = {
    "direct": lambda q, k, o, v, **x: gp.direct_posterior(q, k, v, **x).variance,
    "direct kl": lambda q, k, o, v, **x: gp.direct_posterior(q, k, v, **x).kl(),
    "direct joint": lambda q, k, o, v, **x: gp.direct_posterior(q, k, v, **x).log_density("joint"),
    "cgp": lambda *t, **x: gp.cgp_posterior(*t, **x).variance,
    "cgp together": lambda *t, **x: gp.cgp_posterior(*t, with_variance=True, **x),
    "cgp covariance": lambda *t, **x: gp.cgp_posterior(*t, **x).covariance(),
    "causal": lambda *t, **x: gp.causal_cgp_posterior(*t, **x).variance,
    "growing": lambda *t, **x: in_sequence(gp.CausalCGPState(**x), *t),
}


@pytest.mark.parametrize("name", KEYS_WITHOUT_A_FACTOR)
def test_the_noise_named_of_keys_is_beside_their_amplitude(name: str) -> None:
    """1e-4 beside s_k^2 = 1e6 is 1e-10; the advice that 1e-4 is safe would otherwise look followed."""
    s = sample(queries=7, keys=7, spread=3.0, dtype=torch.float32)
    k = s.k[:1].expand(7, -1)  # one key seven times
    with pytest.raises(gp.NotPositiveDefiniteError, match=r"K_k \+ noise I .* smallest noise 1\.0e-10\. "):
        KEYS_WITHOUT_A_FACTOR[name](s.q, k, s.o, s.v, noise=1e-4, scale_k=1e3)
