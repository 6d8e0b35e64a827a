"""The kernels around the attention under Triton's interpreter: accuracy, odd sizes, every gradient."""

import pytest
import torch

from gpattention.ops.layers import (
    MOST_PROGRAMS,
    Added,
    finish_sums,
    gelu_linear,
    programs,
    residual_norm,
    tile,
)
from tests.models.fused.problems import Gelu, Norm, Problem, Sums, check, random

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs test_gpu.py")

PROBLEMS = [
    Norm((1, 1), 1, kind="alone"),
    Norm((3, 5), 33, kind="alone"),
    Norm((3, 5), 16, rate=0.25),
    Norm((2, 70), 48, biased=False),
    Norm((4, 3), 130, rate=0.5, kind="inside"),
    Norm((3, 2), 7, kind="inside", biased=False),
    Norm((3, 2, 5), 12, rate=0.1, kind="repeated"),
    pytest.param(Norm((3,), 1000, rate=0.9), marks=pytest.mark.slow),
    Gelu((3, 5), 20, 6, rate=0.25),
    Gelu((35,), 130, 3, biased=False),
    Gelu((1, 1), 1, 1),
    Sums(1, 1, 2),
    Sums(37, 20, 3),
    Sums(9, 129, 4),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_outputs_and_gradients(problem: Problem) -> None:
    check(problem, "cpu")


def test_a_program_takes_several_tiles_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpattention.ops.layers.MOST_PROGRAMS", 3)
    for problem in (Norm((9, 5), 250, rate=0.2), Gelu((70,), 10, 4, rate=0.2), Sums(450, 17)):
        check(problem, "cpu")


def test_tiles_cover_all_rows() -> None:
    for rows, columns in ((1, 1), (6400, 128), (10**6, 1000), (7, 1024)):
        height, width = tile(columns)
        tiles, count = programs(rows, height)
        assert width >= columns
        assert (tiles - 1) * height < rows <= tiles * height
        assert 1 <= count <= min(tiles, MOST_PROGRAMS)


def test_partial_sums_keep_their_shape() -> None:
    (partial,) = random((5, 3, 11))
    torch.testing.assert_close(finish_sums(partial), partial.sum(0))


def test_a_stream_that_is_used_nowhere_else_has_no_gradient_of_its_own() -> None:
    """The last LayerNorm: only what it normalised is read."""
    x, z, weight, shift = random((4, 6), (4, 6), (6,), (6,))
    (w,) = random((4, 6))
    found = []
    for fused in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, z)]
        if fused:
            n = residual_norm(leaves[0], Added(leaves[1], None, 0.0, 0), weight, shift, 1e-5, None)[1]
        else:
            n = torch.nn.functional.layer_norm(leaves[0] + leaves[1], (6,), weight, shift, 1e-5)
        found.append(torch.autograd.grad((n * w).sum(), leaves))
    torch.testing.assert_close(found[1], found[0])


def test_a_stream_whose_norm_is_not_used() -> None:
    x, z, weight, shift = random((4, 6), (4, 6), (6,), (6,))
    x.requires_grad_()
    y = residual_norm(x, Added(z, None, 0.0, 0), weight, shift, 1e-5, None)[0]
    (g,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(g, 2 * (x + z).detach())


def test_dropping_needs_a_seed_and_frozen_weights_get_no_gradient() -> None:
    h, weight = random((3, 4), (2, 4))
    for rate, given in ((0.5, None), (1.0, torch.tensor(1))):
        with pytest.raises(ValueError, match=rf"expected a rate.* got {rate}"):
            gelu_linear(h, None, weight, rate, given, 0)
    h.requires_grad_()
    gelu_linear(h, None, weight, 0.0, None, 0).sum().backward()
    assert h.grad is not None
    assert weight.grad is None
