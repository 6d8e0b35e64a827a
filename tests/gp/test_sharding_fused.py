"""Tokens spread over processes whose sums come from fused kernels: numbers and gradients of one process."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from gpattention import gp
from gpattention.ops import ShardNoise
from tests.gp import test_sharding
from tests.gp.test_sharding import CUTS, QUERIES, Case, agree, evaluate, shard
from tests.processes import in_processes, spied

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for CPUs")

CASES = [
    Case("kl", dtype=torch.float32),
    Case("dtc", "dual", dtype=torch.float32),
    Case("dtc", sets=1, dtype=torch.float32),
    Case("dtc_bound", sets=1, dtype=torch.float32),  # which no kernel has
    Case("kl", dtype=torch.float32, conditional="independent"),
]
# four processes take the interpreter's time four times: two kinds of densities tell whether they agree
OF = {2: CASES, 4: CASES[:2]}


def problem(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of one sequence and head, because the interpreter takes its time."""
    tokens, shared = test_sharding.problem(case)
    return {name: x[:1, :1] for name, x in tokens.items()}, {name: x[:1] for name, x in shared.items()}


def item_noise(**shard: int) -> Any:
    items = torch.arange(1)
    return (ShardNoise if shard else gp.ItemNoise)(7, items, torch.zeros_like(items), **shard)


def work(rank: int) -> dict[Any, Any]:
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    found: dict[Any, Any] = {}
    for count, group in groups.items():
        for case in OF[count] if rank < count else ():
            tokens, shared = problem(case)
            noise = partial(item_noise, first_token=CUTS[count][0][rank], tokens=QUERIES)
            with gp.fused_kernels("on"):
                found[count, case.name] = evaluate(case, shard(tokens, rank, count), shared, noise, group)
    found["traffic"] = [traffic(rank, repeat) for repeat in (1, 3)]
    found["refused"] = other_weights(rank)
    return found


def traffic(rank: int, repeat: int) -> tuple[Any, Any]:
    """Names and bytes of the collectives of a step with a regulariser."""
    case = Case("dtc", sets=1, dtype=torch.float32, repeat=repeat)
    posterior, learned = made(case, rank)
    with spied() as forward:
        loss = posterior.mean.square().sum() + posterior.log_density("dtc").total.sum()
    with spied() as backward, gp.fused_kernels("on"):
        torch.autograd.grad(loss, learned)
    return forward, backward


def made(case: Case, rank: int) -> tuple[Any, list[Tensor]]:
    tokens, shared = problem(case)
    here = {name: x.clone() for name, x in (shard(tokens, rank, 4, case.repeat) | shared).items()}
    learned = [x.requires_grad_() for x in here.values() if x.is_floating_point()]
    flat = {name: x[..., 0] if name in ("log_amplitude", "mask", "query_mask") else x
            for name, x in here.items()}  # fmt: skip
    with gp.fused_kernels("on"), spied() as sent:
        posterior = gp.scgp_posterior(**flat, objectives=["dtc"], group=dist.group.WORLD)  # type: ignore[arg-type]
    assert [name for name, _ in sent] == ["all_reduce"]
    return posterior, learned


def other_weights(rank: int) -> tuple[str, bool]:
    """What a process gets whose regulariser counts for more than the others', at once and later."""
    found = []
    for check in (nullcontext, gp.deferred_checks):
        posterior, learned = made(Case("dtc", dtype=torch.float32), rank)
        loss = posterior.mean.sum() + (1 + (rank == 2)) * posterior.log_density("dtc").total.sum()
        with gp.fused_kernels("on"), check():
            try:
                found.append(torch.autograd.grad(loss, learned)[1])  # of the keys
            except ValueError as error:
                found.append(str(error))
    return found[0], bool(found[1].isnan().all())


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return in_processes(work, 4, tmp_path_factory.mktemp("meeting"))


def test_one_all_reduce_each_way_whatever_the_length(processes: list[Any]) -> None:
    for found in processes:
        (short_forward, short_back), (long_forward, long_back) = found["traffic"]
        assert short_forward == long_forward == []  # the posterior had its one before
        assert [name for name, _ in short_back] == ["all_reduce"]
        assert short_back == long_back


def test_regularisers_of_other_weights_are_refused(processes: list[Any]) -> None:
    for found in processes:
        message, poisoned = found["refused"]
        assert "the same on every process" in message
        assert poisoned


@pytest.mark.parametrize(
    ("case", "count"),
    [pytest.param(case, n, id=f"{case.name}-{n}") for n, cases in OF.items() for case in cases],
)
def test_shards_agree_with_one_process(processes: list[Any], case: Case, count: int) -> None:
    with gp.fused_kernels("on"):
        whole = evaluate(case, *problem(case), item_noise, None)
    parts = [processes[rank][count, case.name].numbers for rank in range(count)]
    agree(parts, whole)
