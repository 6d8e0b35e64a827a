"""KEP-SVGP's own: its loss over a whole batch, which tokens its directions are made of, and refusals."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpattention import gp
from gpattention.gp.singular import spaced_rows
from tests.gp.calls import kep_arguments
from tests.gp.samples import Sample, sample
from tests.oracles import singular
from tests.refusals import refusals

FIELDS = ["q", "k", "o", "inducing_q", "inducing_k", "inducing_v", "scale_tril"]
CLOSE = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 1e-4}}


def of(s: Sample, index: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    source = vars(s) if index is None else s.at(*index)
    return kep_arguments(*(source[name] for name in FIELDS))


def loss_by_oracle(s: Sample, masked: bool) -> float:
    cells = product(range(s.q.shape[0]), range(s.q.shape[1]))
    return singular.kep_svgp_ksvd([(of(s, c), s.at(*c)["mask"] if masked else None) for c in cells])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_the_loss_and_its_gradient_equal_the_oracle(masked: bool, dtype: torch.dtype) -> None:
    s = sample(3, 2, dtype=dtype)
    leaves = [x.detach().requires_grad_() for x in of(s)]
    loss = gp.kep_svgp_posterior(*leaves, mask=s.mask if masked else None).ksvd()
    assert_close(float(loss.detach()), loss_by_oracle(s, masked), **CLOSE[dtype])
    gradients = torch.autograd.grad(loss, leaves[:3])
    for name, gradient in zip(
        "qko", gradients, strict=True
    ):  # along one direction, by the oracle's differences
        exact, step = s.to(torch.float64), 1e-6
        way = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        ends = [Sample(**{**vars(exact), name: vars(exact)[name] + sign * step * way}) for sign in (1, -1)]
        slope = (loss_by_oracle(ends[0], masked) - loss_by_oracle(ends[1], masked)) / (2 * step)
        assert float((gradient.double() * way).sum()) == pytest.approx(slope, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("count", [1, 3, 5, 8])
def test_evenly_spaced_rows_of_the_real_tokens(count: int) -> None:
    x = torch.randn(4, 2, 6, 3)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 1], [0] * 6]).bool()
    found = spaced_rows(gp.keep_rows(x, mask[:, None]), count, mask[:, None])
    assert found.shape == (4, 2, min(count, 6), 3)
    for ours, rows, kept in zip(found, x, mask, strict=True):
        n = int(kept.sum())
        alone = spaced_rows(rows[:, kept], count) if n else rows[:, :0]
        assert torch.equal(ours[:, : alone.shape[1]], alone)
        assert bool((ours[:, alone.shape[1] :] == 0).all())
    assert torch.equal(spaced_rows(x, 8), x)
    assert torch.equal(spaced_rows(x, 3), x[..., [0, 2, 5], :])


def test_a_token_of_nothing_has_no_direction_and_a_finite_gradient() -> None:
    s = sample(1, 1)
    s.q[..., 2, :] = 0
    leaves = [x.detach().requires_grad_() for x in of(s)]
    posterior = gp.kep_svgp_posterior(*leaves)
    assert bool((posterior.e[..., 2, :] == 0).all())
    gradients = torch.autograd.grad(posterior.variance.sum() + posterior.ksvd(), leaves, allow_unused=True)
    assert all(g is None or bool(g.isfinite().all()) for g in gradients)


NAMES = ["q", "k", "x", "W_e", "W_r", "log_scale", "inducing_mean", "scale_tril"]


def call(**changed: Tensor) -> Callable[[], gp.KEPPosterior]:
    given: dict[str, Any] = {**dict(zip(NAMES, of(sample()), strict=True)), **changed}
    return lambda: gp.kep_svgp_posterior(**given)


ZEROS = torch.zeros(7, 2, dtype=torch.float64)
test_refusals = refusals(
    [
        (call(k=ZEROS), "k of 7 tokens of width 3 like q", r"\(7, 2\)"),
        (call(x=ZEROS[:4]), "x of 7 tokens", r"\(4, 2\)"),
        (call(W_r=ZEROS), "W_r of 5 rows and 3 columns", r"\(7, 2\)"),
        (call(log_scale=ZEROS), "log_scale of 3 numbers", r"\(7, 2\)"),
        (call(inducing_mean=ZEROS), "inducing_mean of 3 rows", r"\(7, 2\)"),
        (call(scale_tril=ZEROS), r"scale_tril of shape \[..., 4, 3, 3\]", r"\(7, 2\)"),
        (call(combine=ZEROS), r"combine of shape \[7, 14\]", r"\(7, 2\)"),
        (call(mask=ZEROS), "mask to be bool", "float64"),
        (call(log_scale=ZEROS[0, :1].expand(3) / 0), "log_scale", "3 non-finite"),
        (call(scale_tril=torch.zeros(4, 3, 3).double()), "the diagonal of scale_tril", "got 0.0"),
    ]
)
