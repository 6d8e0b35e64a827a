"""Sums over processes, values that count once, and the gradients of replicated parameters."""

from pathlib import Path

import torch
from torch import Tensor

from gpattention.gp.sharding import count_traffic, counted_once, sum_gradients, sum_over_shards
from tests.processes import group_of_one


def test_the_sum_over_shards_can_be_differentiated_twice(tmp_path: Path) -> None:
    x = torch.linspace(0.5, 1.5, 3, dtype=torch.float64, requires_grad=True)
    with group_of_one(tmp_path) as group:

        def energy(x: Tensor) -> Tensor:
            (total,) = sum_over_shards([x], group)
            return counted_once(total.sin().sum(), group)

        assert torch.autograd.gradgradcheck(energy, x)


def test_gradients_of_every_type_are_summed(tmp_path: Path) -> None:
    learned = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64)]
    unused, fixed = torch.ones(3, requires_grad=True), torch.ones(3)
    sum((x.double() * 3).sum() for x in learned).backward()  # type: ignore[union-attr]
    with group_of_one(tmp_path) as group, count_traffic() as traffic:
        sum_gradients([*learned, unused, fixed], group)
    assert [x.grad.tolist() for x in (*learned, unused) if x.grad is not None] == [[3, 3], [3, 3], [0, 0, 0]]
    assert fixed.grad is None
    assert (traffic.collectives, traffic.payload) == (2, 4 * 5 + 8 * 2)


def test_values_are_shared_without_a_group() -> None:
    x = torch.ones(3, requires_grad=True)
    assert counted_once(x, None) is x
