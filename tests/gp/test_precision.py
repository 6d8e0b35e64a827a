"""Arithmetic set from outside: backward passes under autocast, and who owns the precision of products."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpattention import gp
from gpattention.gp.sparse import latent_trace
from gpattention.numerics import _LEVELS, full_precision
from tests.gp.samples import Sample, sample
from tests.threads import Pause, at_once, paused

WRITTEN_OUT: dict[str, Callable[[Sample], Tensor]] = {  # by autograd functions of our own
    "gram": lambda s: gp.rbf(s.k, s.k).square().sum(),
    "cross gram": lambda s: gp.rbf(s.q, s.k).square().sum(),
    "cgp moments": lambda s: cgp_moments(
        gp.cgp_posterior(s.q, s.k, s.o, s.v, noise=0.01, with_variance=True)
    ),
    "density": lambda s: (
        gp.cgp_posterior(s.q, s.k, s.o, s.v, noise=0.01, with_variance=True).log_density().query.sum()
    ),
    "latent trace": lambda s: latent_trace(s.o, s.v.mT, chunk=7).square().sum(),
}


def cgp_moments(posterior: gp.Posterior) -> Tensor:
    return posterior.mean.square().sum() + posterior.log_variance.sum()


def gradients(function: Callable[[Sample], Tensor], dtype: torch.dtype, *, autocast: bool) -> list[Tensor]:
    """Of q, k, o and v; the forward pass is never lowered, so that only the backward pass can be."""
    s = sample(2, 2, queries=24, keys=24, width=8, spread=0.4, seed=1, dtype=dtype)
    leaves = [t.requires_grad_() for t in (s.q, s.k, s.o, s.v)]
    loss = function(s)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [g for g in found if g is not None]


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_gradients_that_are_written_out_do_not_see_autocast(name: str) -> None:
    function = WRITTEN_OUT[name]
    inside = gradients(function, torch.float32, autocast=True)
    assert_close(inside, gradients(function, torch.float32, autocast=False), rtol=0, atol=0)
    exact = gradients(function, torch.float64, autocast=False)
    for single, double in zip(inside, exact, strict=True):
        assert (single - double).norm() < 1e-4 * double.norm()


@pytest.fixture
def _nothing_set() -> Iterator[None]:
    """Every level inherits from the one before, as when torch starts."""
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    before = [(level, read(*level)) for level in _LEVELS]
    for level in _LEVELS:
        write(*level, "none")
    yield
    for level, precision in before:
        write(*level, precision)


def products() -> tuple[str, str]:
    """The precision in force."""
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def kernel_seeing_precision(seen: list[tuple[str, str]]) -> Callable[[Tensor, Tensor], Tensor]:
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        seen.append(products())
        return gp.rbf(x, y)

    return kernel


def call(seen: list[tuple[str, str]]) -> None:
    s = sample(dtype=torch.float32)
    m, D = s.inducing_k.shape[0], s.v.shape[-1]
    free = torch.zeros(m, D), torch.eye(m).expand(D, m, m)
    gp.sgpa_posterior(s.q, s.v, s.inducing_k, *free, kernel=kernel_seeing_precision(seen))


@pytest.mark.usefixtures("_nothing_set")
@pytest.mark.parametrize("level", _LEVELS)
def test_a_call_leaves_the_precision_of_products_where_it_was_set(level: tuple[str, str]) -> None:
    """What the caller sets afterwards has its effect, as if the call had not been."""
    untouched, seen = products(), list[tuple[str, str]]()
    torch._C._set_fp32_precision_setter(*level, "tf32")
    lowered = products()
    assert "tf32" in lowered
    call(seen)
    assert "tf32" not in {precision for pair in seen for precision in pair}
    assert products() == lowered
    torch._C._set_fp32_precision_setter(*level, "none")
    assert products() == untouched


@pytest.mark.usefixtures("_nothing_set")
def test_a_precision_of_its_own_stays_its_own() -> None:
    """Also where it equals the one that would be inherited."""
    torch.backends.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    call([])
    assert products() == ("tf32", "tf32")
    torch.backends.fp32_precision = "ieee"
    assert products() == ("ieee", "tf32")


@pytest.mark.usefixtures("_nothing_set")
def test_threads_that_need_full_precision_at_once_share_the_change() -> None:
    """Who ends first does not lower it for those that still compute."""
    torch.backends.fp32_precision = "tf32"
    pauses = Pause(), Pause()
    with ExitStack() as longer:
        with paused(full_precision(pauses[0]), pauses[0]):
            longer.enter_context(paused(full_precision(pauses[1]), pauses[1]))
            assert products() == ("ieee", "ieee")
        assert products() == ("ieee", "ieee")
    assert products() == ("tf32", "tf32")


@pytest.mark.usefixtures("_nothing_set")
def test_threads_leave_the_precision_of_products_where_it_was_set() -> None:
    torch.backends.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    seen: list[tuple[str, str]] = []
    at_once([lambda: [call(seen) for _ in range(10)]] * 4)
    assert set(seen) == {("ieee", "ieee")}
    assert products() == ("tf32", "tf32")
