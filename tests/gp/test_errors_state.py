"""State that outlives a call refuses what does not fit it: the growing causal model, the health counter."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from tests.gp.samples import sample

INF, NAN = float("inf"), float("nan")


def refused(match: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        call(*args, **options)
    assert not isinstance(caught.value, gp.NumericalError)  # an argument's fault, not a number's


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
    module = importlib.import_module("gpattention.gp.cholesky")
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
    "direct kl": lambda q, k, o, v, **x: gp.direct_kl(q, k, v, **x),
    "direct joint": lambda q, k, o, v, **x: gp.direct_log_density(q, k, v, objective="joint", **x),
    "cgp": lambda *t, **x: gp.cgp_posterior(*t, **x).variance,
    "cgp together": lambda *t, **x: gp.cgp_posterior(*t, with_variance=True, **x),
    "cgp covariance": lambda *t, **x: gp.cgp_posterior(*t, **x).covariance(),
    "causal": lambda *t, **x: gp.causal_cgp_posterior(*t, **x).variance,
    "growing": lambda *t, **x: in_sequence(gp.CausalCGPState(**x), *t),
}


@pytest.mark.parametrize("name", KEYS_WITHOUT_A_FACTOR)
def test_the_noise_told_of_keys_is_beside_their_amplitude(name: str) -> None:
    """1e-4 beside s_k^2 = 1e6 is 1e-10; the advice that 1e-4 is safe would otherwise look followed."""
    s = sample(queries=7, keys=7, spread=3.0, dtype=torch.float32)
    k = s.k[:1].expand(7, -1)  # one key seven times
    with pytest.raises(gp.NotPositiveDefiniteError, match=r"K_k \+ noise I .* smallest noise 1\.0e-10\. "):
        KEYS_WITHOUT_A_FACTOR[name](s.q, k, s.o, s.v, noise=1e-4, scale_k=1e3)
