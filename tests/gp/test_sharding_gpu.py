"""Tokens spread over processes that compute on a GPU: NCCL with one process, gloo with two on one device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from tests.gp.test_sharding import BY_TOKEN, CUTS, QUERIES, Case, Found, evaluate, item_noise, problem, shard
from tests.processes import group_of_one, in_processes, same_but_rounding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = [Case("kl"), Case("dtc"), Case("kl", dtype=torch.float32), Case("dtc", "dual", 1, torch.float32)]


def on_gpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in tensors.items()}


def whole(case: Case) -> Found:
    tokens, shared = problem(case)
    return evaluate(case, on_gpu(tokens), on_gpu(shared), partial(item_noise, "cuda"), None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nccl_sums_what_one_process_sums(case: Case, tmp_path: Path) -> None:
    tokens, shared = problem(case)
    noise = partial(item_noise, "cuda", first_token=0, tokens=QUERIES)
    with group_of_one(tmp_path, "nccl") as group:
        found = evaluate(case, on_gpu(tokens), on_gpu(shared), noise, group)
    assert [name for name, _ in found.forward + found.backward] == ["all_reduce", "all_reduce"]
    for name, expected in whole(case).numbers.items():
        same_but_rounding(found.numbers[name], expected, name)


def test_two_processes_on_one_device(tmp_path: Path) -> None:
    parts = in_processes(half, 2, tmp_path)
    for case in CASES:
        for name, expected in whole(case).numbers.items():
            found = [part[case.name][name] for part in parts]
            together = torch.cat(found, -2) if name in BY_TOKEN else found[0]
            same_but_rounding(together, expected.cpu(), name)


def half(rank: int) -> dict[str, Any]:
    found = {}
    for case in CASES:
        tokens, shared = problem(case)
        noise = partial(item_noise, "cuda", first_token=CUTS[2][0][rank], tokens=QUERIES)
        here = on_gpu(shard(tokens, rank, 2))
        numbers = evaluate(case, here, on_gpu(shared), noise, dist.group.WORLD).numbers
        found[case.name] = {name: x.cpu() for name, x in numbers.items()}
    return found
