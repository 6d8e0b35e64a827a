"""Tokens spread over processes that compute on a GPU: NCCL with one process, gloo with two on one device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from gpattention import gp
from gpattention.ops import Mode
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


def modes(case: Case) -> tuple[Mode, ...]:
    """Plain operations, and fused kernels where there are any."""
    return ("off", "on") if case.dtype == torch.float32 else ("off",)


@pytest.mark.parametrize(
    ("case", "mode"), [(c, m) for c in CASES for m in modes(c)], ids=lambda x: getattr(x, "name", x)
)
def test_nccl_sums_what_one_process_sums(case: Case, mode: Mode, tmp_path: Path) -> None:
    tokens, shared = problem(case)
    noise = partial(item_noise, "cuda", first_token=0, tokens=QUERIES)
    with group_of_one(tmp_path, "nccl") as group, gp.fused_kernels(mode):
        found = evaluate(case, on_gpu(tokens), on_gpu(shared), noise, group)
    # joint draws are of plain operations, which sum once more
    times = 2 if mode == "on" else 1
    assert [[name for name, _ in way] for way in (found.forward, found.backward)] == [
        ["all_reduce"] * times
    ] * 2
    with gp.fused_kernels(mode):
        expected = whole(case).numbers
    for name, value in expected.items():
        same_but_rounding(found.numbers[name], value, name)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_two_processes_on_one_device(mode: Mode, tmp_path: Path) -> None:
    parts = in_processes(partial(half, mode=mode), 2, tmp_path)
    for case in (c for c in CASES if mode in modes(c)):
        with gp.fused_kernels(mode):
            alone = whole(case).numbers
        for name, expected in alone.items():
            found = [part[case.name][name] for part in parts]
            together = torch.cat(found, -2) if name in BY_TOKEN else found[0]
            same_but_rounding(together, expected.cpu(), name)


def half(rank: int, mode: Mode) -> dict[str, Any]:
    found = {}
    for case in (c for c in CASES if mode in modes(c)):
        tokens, shared = problem(case)
        noise = partial(item_noise, "cuda", first_token=CUTS[2][0][rank], tokens=QUERIES)
        here = on_gpu(shard(tokens, rank, 2))
        with gp.fused_kernels(mode):
            numbers = evaluate(case, here, on_gpu(shared), noise, dist.group.WORLD).numbers
        found[case.name] = {name: x.cpu() for name, x in numbers.items()}
    return found
