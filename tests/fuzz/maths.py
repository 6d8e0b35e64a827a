"""Random problems of every posterior, density, divergence and amplitude against the NumPy oracles."""

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from gpattention import gp
from tests.fuzz.tally import WRONG, Tally, torch_generator
from tests.gp.calls import (
    cgp_kl,
    cgp_log_density,
    direct_kl,
    direct_log_density,
    scgp_kl,
    scgp_log_density,
    sgpa_kl,
)
from tests.oracles import amplitude, densities, divergences, exact, kernels, sgpa, softmax, sparse

DOUBLE, SINGLE = 1e-9, 1e-4  # relative to the largest number of a result
SINGLE_DENSITY = 1e-3  # densities and divergences divide by the noise
SLACK = 100.0  # times what the oracle itself moves by when its matrices are rounded at random


@dataclass(frozen=True)
class Function:
    """A function of ours and its oracle, which take the same names."""

    ours: Callable[..., Any]
    oracle: Callable[..., Any]
    takes: tuple[str, ...]
    extras: tuple[str, ...] = ("mask", "query_mask", "log_amplitude")
    numbers: tuple[str, ...] = ("noise", "scale_q", "scale_k")
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    square: bool = False  # as many queries as keys
    covariance: bool = True
    near: bool = False  # whose oracle overflows where tokens are far from each other
    density: bool = False


def _causal(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(function, causal=True)


def _sparse_softmax(q, k, v, inducing_k, **options):
    return gp.softmax_posterior(q, k, v, inducing=inducing_k, **options).variance


def _sparse_softmax_oracle(q, k, v, inducing_k, *, mask=None, **options):
    real = np.ones(len(k), bool) if mask is None else mask
    centre = k[real].mean(0) if real.any() else 0.0  # the oracle wants them scaled and centred like the keys
    inducing = (inducing_k - centre) * k.shape[1] ** -0.25
    return softmax.sparse_softmax_variance(q, k, inducing, mask=mask, **options)


def _capped(q, k, *, max_log_amplitude=None, **options):
    found = amplitude.row_log_amplitude(q, k, **options)
    if max_log_amplitude is None:
        return found
    return np.where(found == 0, 0.0, np.minimum(found, max_log_amplitude))  # 0: padding, or no key to see


DIRECT, CGP = ("q", "k", "v"), ("q", "k", "o", "v")
SCGP, SGPA = (*CGP, "inducing_q", "inducing_k"), ("q", "v", "inducing_k", "inducing_v", "scale_tril")
TAU = {"observation_noise": (None, 0.3, 0.05)}
VALUES = {"values": ("paper", "dual"), "delta": (1e-6, 1e-4, 1e-2)}
SCGP_OBJECTIVES = ("dtc", "dtc_bound", "marginal", "jensen", "double_jensen", "printed")
KERNELS = {
    "rbf": (gp.rbf, kernels.rbf),
    "ard": tuple(partial(f, lengthscale=1.7, variance=0.6) for f in (gp.ard_rbf, kernels.ard_rbf)),
    "short": tuple(partial(f, lengthscale=0.2, variance=2.0) for f in (gp.ard_rbf, kernels.ard_rbf)),
    "dot": tuple(partial(f, lengthscale=2.0, variance=0.5) for f in (gp.exp_dot, kernels.exp_dot)),
}

FUNCTIONS = {
    "direct": Function(gp.direct_posterior, exact.direct_posterior, DIRECT),
    "direct causal": Function(
        _causal(gp.direct_posterior), exact.causal_direct_posterior, DIRECT, ("mask", "log_amplitude"),
        square=True, covariance=False,
    ),
    "softmax": Function(
        gp.softmax_posterior, softmax.softmax_posterior, DIRECT, ("mask", "query_mask"),
        ("noise", "prior_scale"), near=True,
    ),
    "softmax causal": Function(
        _causal(gp.softmax_posterior), softmax.causal_softmax_posterior, DIRECT, ("mask",),
        ("noise", "prior_scale"), square=True, covariance=False, near=True,
    ),
    "softmax sparse": Function(
        _sparse_softmax, _sparse_softmax_oracle, (*DIRECT, "inducing_k"), ("mask", "query_mask"),
        ("noise", "prior_scale"), {"delta": (1e-6, 1e-3)}, near=True,
    ),
    "cgp": Function(gp.cgp_posterior, exact.cgp_posterior, CGP, choices={}),
    "cgp causal": Function(
        gp.causal_cgp_posterior, exact.causal_cgp_posterior, CGP, ("mask", "log_amplitude"),
        square=True, covariance=False,
    ),
    "scgp": Function(
        gp.scgp_posterior, sparse.scgp_posterior, SCGP,
        choices={
            **VALUES, "include_noise": (True, False), "conditional": ("deterministic", "independent"),
        },
    ),
    "sgpa": Function(
        gp.sgpa_posterior, sgpa.sgpa_posterior, SGPA, ("mask",), (),
        {"kernel": tuple(KERNELS), "jitter": (1e-6, 1e-4)}, square=True, near=True,
    ),
    "cgp density": Function(
        cgp_log_density, densities.cgp_log_density, CGP, density=True,
        choices={"objective": ("marginal", "jensen", "joint"), "latent_prior": ("noisy", "latent"), **TAU},
    ),
    "direct density": Function(
        direct_log_density, densities.direct_log_density, DIRECT, density=True,
        choices={"objective": ("marginal", "joint"), **TAU},
    ),
    "scgp density": Function(
        scgp_log_density, densities.scgp_log_density, SCGP, density=True,
        choices={"objective": SCGP_OBJECTIVES, **VALUES},
    ),
    "cgp kl": Function(cgp_kl, divergences.cgp_kl, CGP, choices=TAU, density=True),
    "direct kl": Function(direct_kl, divergences.direct_kl, DIRECT, choices=TAU, density=True),
    "scgp kl": Function(scgp_kl, divergences.scgp_kl, SCGP, choices=VALUES, density=True),
    "sgpa kl": Function(
        sgpa_kl, sgpa.sgpa_kl, SGPA, ("mask",), (),
        {"kernel": tuple(KERNELS), "jitter": (1e-6, 1e-4)}, square=True, near=True, density=True,
    ),
    "rows": Function(
        gp.row_log_amplitude, _capped, ("q", "k"), ("mask", "query_mask"), ("scale",),
        {"max_log_amplitude": (None, -0.5, 2.0)},
    ),
    "rows causal": Function(
        _causal(gp.row_log_amplitude), partial(_capped, causal=True), ("q", "k"), ("mask",), ("scale",),
        square=True,
    ),
    "rows sparse": Function(
        gp.sparse_row_log_amplitude, amplitude.sparse_row_log_amplitude, ("q", "k", "inducing_k"),
        ("mask", "query_mask"), ("scale",), {"floor": (1e-3, 0.1), "delta": (1e-6, 1e-3)},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """The arguments of one call, and how many leading axes they have."""

    lead: tuple[int, ...]
    tensors: dict[str, Tensor]
    extras: dict[str, Tensor]
    numbers: dict[str, Any]
    options: dict[str, Any]
    distance: float  # how far tokens may lie from each other, beside their spread


def check(r: random.Random, tally: Tally) -> None:
    """One function at one random problem, in float64 and float32."""
    name = r.choice(list(FUNCTIONS))
    function = FUNCTIONS[name]
    problem = random_problem(r, function)
    for dtype in (torch.float64, torch.float32):
        compare(name, function, _as(problem, dtype), tally)
    if r.random() < 0.2:
        check_half(name, function, problem, tally)
    if r.random() < 0.3:
        check_gradients(name, function, problem, tally)


def random_problem(r: random.Random, function: Function) -> Problem:
    g = torch_generator(r)
    lead = tuple(r.randint(1, 3) for _ in range(r.randint(0, 2)))
    keys, width, channels = r.randint(1, 9), r.randint(1, 5), r.randint(1, 4)
    queries = keys if function.square or r.random() < 0.5 else r.randint(1, 9)
    spread = 10 ** r.uniform(-1.5, 0.4)
    distance = 10 ** r.uniform(0, 1 if function.near else 4.5)
    arrange = random_arrangement(r, g, width, distance, near=function.near)
    sizes = {"q": queries, "k": keys, "o": keys, "inducing_q": r.randint(1, 5), "inducing_k": r.randint(1, 5)}
    tensors = {}
    for key, n in sizes.items():
        axes = () if key.startswith("inducing") else lead
        tensors[key] = arrange(spread * normal(g, *axes, n, width))
    if r.random() < 0.15:
        tensors["o"] = tensors["k"].clone()
    tensors["v"] = 10 ** r.uniform(-2, 2) * normal(g, *lead, keys, channels)
    m = sizes["inducing_k"]
    tensors["inducing_v"] = normal(g, m, channels)
    raw = normal(g, channels, m, m)
    tensors["scale_tril"] = 0.3 * raw.tril(-1) + torch.diag_embed(0.3 + raw.diagonal(dim1=-2, dim2=-1).abs())
    extras = random_extras(r, g, function, lead, queries, keys)
    tensors = {key: tensors[key] for key in function.takes}
    spoil_padding(r, tensors, extras, queries == keys)
    return Problem(
        lead,
        tensors,
        extras,
        {key: random_number(r, g, key, lead) for key in function.numbers},
        {key: r.choice(values) for key, values in function.choices.items()},
        distance,
    )


def normal(g: torch.Generator, *shape: int) -> Tensor:
    """Whole in float32, so that both types see the same tokens."""
    return torch.randn(*shape, generator=g).double()


def random_arrangement(
    r: random.Random, g: torch.Generator, width: int, distance: float, *, near: bool
) -> Callable[[Tensor], Tensor]:
    """Where tokens lie: about the origin, far from it, in two clusters, one far away, some alike."""
    kind = r.choice(["plain", "plain", "alike", "offset"] + ([] if near else ["clusters", "outlier"]))
    direction = normal(g, width)
    direction = distance * direction / direction.norm()

    def arrange(x: Tensor) -> Tensor:
        if kind == "alike":
            x = x[..., torch.randint(x.shape[-2], (x.shape[-2],), generator=g), :]
        elif kind == "offset":
            x = x + direction
        elif kind == "clusters":
            x = x + direction * (torch.rand(x.shape[-2], 1, generator=g) < 0.5)
        elif kind == "outlier":
            x = x + direction * (torch.arange(x.shape[-2]) == 0)[:, None]
        return x.float().double()

    return arrange


def random_number(r: random.Random, g: torch.Generator, key: str, lead: tuple[int, ...]) -> Any:
    low, high = (-3, 0.5) if key == "noise" else (-0.7, 0.7)
    if lead and r.random() < 0.4:  # one per head
        return (10 ** torch.empty(lead[-1]).uniform_(low, high, generator=g)).double()
    return float(np.float32(10 ** r.uniform(low, high)))


def random_extras(
    r: random.Random, g: torch.Generator, function: Function, lead: tuple[int, ...], queries: int, keys: int
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, n in (("mask", keys), ("query_mask", queries)):
        if name not in function.extras or r.random() < 0.3:
            continue
        axes = r.choice([(), lead, tuple(1 if r.random() < 0.5 else a for a in lead)])
        mask = torch.rand(*axes, n, generator=g) < r.choice([0.3, 0.7, 0.95])
        if r.random() < 0.8:
            mask[..., r.randrange(n)] = True  # else whole sequences may be padding
        found[name] = mask
    if "log_amplitude" in function.extras and r.random() < 0.5:
        found["log_amplitude"] = 0.5 * normal(g, *lead, queries)
    return found


def spoil_padding(
    r: random.Random, tensors: dict[str, Tensor], extras: dict[str, Tensor], square: bool
) -> None:
    """Write anything where tokens are padding."""
    key_mask, query_mask = extras.get("mask"), extras.get("query_mask")
    query_mask = key_mask if query_mask is None and square else query_mask
    rubbish = r.choice([float("nan"), float("inf"), -1e30, 0.0])
    for name in ("q", "k", "o", "v"):
        mask = query_mask if name == "q" else key_mask
        if name in tensors and mask is not None:
            tensors[name] = torch.where(mask[..., None], tensors[name], rubbish)
    if "log_amplitude" in extras and query_mask is not None:
        extras["log_amplitude"] = torch.where(query_mask, extras["log_amplitude"], rubbish)


def _as(p: Problem, dtype: torch.dtype) -> Problem:
    def to(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return Problem(
        p.lead, {k: to(x) for k, x in p.tensors.items()}, {k: to(x) for k, x in p.extras.items()},
        {k: to(x) for k, x in p.numbers.items()}, p.options, p.distance,
    )  # fmt: skip


def called(function: Function, p: Problem) -> list[Tensor]:
    """All that the function gives, a list of tensors."""
    options = dict(p.options)
    if "kernel" in options:
        options["kernel"] = KERNELS[options["kernel"]][0]
    result = function.ours(*p.tensors.values(), **p.numbers, **p.extras, **options)
    if isinstance(result, gp.LogDensity):
        return [result.query, result.key]
    if isinstance(result, Tensor):
        return [result]
    found = [result.mean, result.variance]
    return [*found, result.covariance()] if function.covariance else found


def expected(function: Function, p: Problem, index: tuple[int, ...]) -> list[np.ndarray]:
    """What the oracle says of one sequence and head."""

    def at(x: Any, trailing: int) -> Any:
        if not isinstance(x, Tensor):
            return x
        axes = x.shape[: x.ndim - trailing]
        here = index[len(index) - len(axes) :]
        x = x[tuple(0 if n == 1 else i for n, i in zip(axes, here, strict=True))]
        return x.numpy() if x.dtype == torch.bool else x.double().numpy()

    trailing = {"inducing_v": 2, "scale_tril": 3}
    tensors = [at(x, trailing.get(name, 2)) for name, x in p.tensors.items()]
    numbers = {name: float(at(x, 0)) for name, x in p.numbers.items()}
    extras = {name: at(x, 1) for name, x in p.extras.items()}
    options = dict(p.options)
    if "kernel" in options:
        options["kernel"] = KERNELS[options["kernel"]][1]
    taken = inspect.signature(function.oracle).parameters
    options = {k: x for k, x in options.items() if k in taken or "options" in taken}
    result = function.oracle(*tensors, **numbers, **extras, **options)
    if isinstance(result, tuple) and function.density:
        return [np.asarray(x) for x in result]
    if not isinstance(result, tuple):
        return [np.asarray(result)]
    mean, spread = result
    if not function.covariance:
        return [mean, spread]
    diagonal = np.diagonal(spread, axis1=-2, axis2=-1)
    return [mean, diagonal.T if spread.ndim == 3 else diagonal, spread]


@contextmanager
def rounded(relative: float, seed: int) -> Iterator[None]:
    """Matrices that the oracles invert are rounded at random: what moves then, no algorithm can promise."""
    generator, inv, slogdet = np.random.default_rng(seed), np.linalg.inv, np.linalg.slogdet

    def moved(call: Callable[[np.ndarray], Any], matrix: np.ndarray) -> Any:
        noise = generator.standard_normal(matrix.shape)
        return call(matrix * (1 + relative * (noise + noise.T) / 2))

    with mock.patch.multiple(np.linalg, inv=partial(moved, inv), slogdet=partial(moved, slogdet)):
        yield


def compare(name: str, function: Function, p: Problem, tally: Tally) -> None:
    try:
        found = called(function, p)
    except (gp.NumericalError, ValueError) as error:
        tally.add("refusals")
        lacks_digits = isinstance(error, gp.NotPositiveDefiniteError) or is_too_far(error, p)
        if not lacks_digits:
            tally.fault(WRONG, f"{name}: refused a sound problem: {error}")
        return
    dtype = next(iter(p.tensors.values())).dtype
    single = dtype == torch.float32
    for index in product(*map(range, p.lead)):
        try:
            with np.errstate(all="ignore"):
                wanted = expected(function, p, index)
        except (AssertionError, np.linalg.LinAlgError):
            tally.add("beyond the oracle")
            continue
        slack = None
        for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            here = ours[index].double().numpy() if ours.ndim > theirs.ndim else ours.double().numpy()
            if not np.isfinite(theirs).all():
                tally.add("beyond the oracle")
                continue
            tally.add("comparisons")
            scale = max(1.0, float(np.abs(theirs).max(initial=0)))
            if here.shape != theirs.shape:
                tally.fault(WRONG, f"{name}: shape {here.shape}, expected {theirs.shape}")
                continue
            gap = float(np.abs(here - theirs).max(initial=0)) / scale
            bound = bound_of(function, p, single=single)
            if gap <= bound:
                continue
            if slack is None:
                slack = oracle_slack(function, p, index, wanted, 6e-8 if single else 1e-16)
            if not gap <= bound + slack[place] / scale:
                tally.fault(
                    WRONG,
                    f"{name}[{place}] {dtype} differs by {gap:.1e} of its size, bound {bound:.0e} + "
                    f"{slack[place] / scale:.0e}; up to {p.distance:.0f} apart; {p.options} "
                    f"{p.numbers} {list(p.extras)}",
                )


def is_too_far(error: Exception, p: Problem) -> bool:
    """Whether float32 tokens may be refused for lying too many length scales apart."""
    return type(error).__name__ == "TooFarApartError" and p.distance > 8_000


def bound_of(function: Function, p: Problem, *, single: bool) -> float:
    """float64 has 16 digits, and squares of distances that many more to lose: 1e-9 up to 100 apart."""
    if single:
        return SINGLE_DENSITY if function.density else SINGLE
    return DOUBLE * max(1.0, (p.distance / 100) ** 2)


def oracle_slack(
    function: Function, p: Problem, index: tuple[int, ...], wanted: list[np.ndarray], relative: float
) -> list[float]:
    """How far rounding moves each result of the oracle, with slack."""
    most = [0.0] * len(wanted)
    for seed in range(3):
        with rounded(relative, seed), np.errstate(all="ignore"):
            try:
                moved = expected(function, p, index)
            except (AssertionError, np.linalg.LinAlgError):
                return [float("inf")] * len(wanted)
        gaps = [float(np.abs(a - b).max(initial=0)) for a, b in zip(moved, wanted, strict=True)]
        most = [
            max(a, SLACK * b) if np.isfinite(b) else float("inf") for a, b in zip(most, gaps, strict=True)
        ]
    return most


def check_half(name: str, function: Function, p: Problem, tally: Tally) -> None:
    """Half precision is float32's answer, rounded."""
    half = _as(p, torch.bfloat16)
    raised = _as(half, torch.float32)
    try:
        want = called(function, raised)
        found = called(function, half)
    except (gp.NumericalError, ValueError):
        tally.add("refusals")
        return
    for a, b in zip(found, want, strict=True):
        tally.add("comparisons")
        if not torch.equal(a, b.to(a.dtype)):  # sums over tokens stay in float32
            tally.fault(WRONG, f"{name}: bfloat16 is not float32 rounded")


def check_gradients(name: str, function: Function, p: Problem, tally: Tally) -> None:
    """Finite wherever the result is, and 0 at padding, whatever is written there."""
    leaves = {key: x.clone().requires_grad_() for key, x in p.tensors.items()}
    try:
        results = called(function, Problem(p.lead, leaves, p.extras, p.numbers, p.options, p.distance))
        grads = torch.autograd.grad(sum(x.sum() for x in results), list(leaves.values()), allow_unused=True)
    except (gp.NumericalError, ValueError):
        tally.add("refusals")
        return
    if not all(bool(x.isfinite().all()) for x in results):
        return
    key_mask, query_mask = p.extras.get("mask"), p.extras.get("query_mask")
    square = "k" not in leaves or leaves["q"].shape[-2] == leaves["k"].shape[-2]
    query_mask = key_mask if query_mask is None and square else query_mask
    for key, grad in zip(leaves, grads, strict=True):
        if grad is None:
            continue
        tally.add("comparisons")
        mask = {"q": query_mask, "k": key_mask, "o": key_mask, "v": key_mask}.get(key)
        if not bool(grad.isfinite().all()):
            tally.fault(WRONG, f"{name}: the gradient of {key} is not finite")
        elif mask is not None and bool(torch.where(mask[..., None], 0.0, grad).any()):
            tally.fault(WRONG, f"{name}: padding of {key} has a gradient")
