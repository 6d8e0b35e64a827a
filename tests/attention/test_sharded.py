"""SCGP attention whose tokens are spread over processes gives what one process gives."""

import copy
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from gpattention import gp
from gpattention.attention import Attention, build_attention
from gpattention.ops import ShardNoise, sum_gradients
from tests.attention.variants import BATCH, EMBED, HEADS, Variant, build, padding, tokens
from tests.processes import group_of_one, in_processes, same_but_rounding, spied

LENGTH, POINTS = 13, (5, 4)
CUTS = {1: (0, 13), 2: (0, 4, 13), 4: (0, 4, 5, 10, 13)}
FIVE = {"num_inducing": 5}
SHARED = ("regularizer", "parameters")


class Case(NamedTuple):
    """A module and a way of calling it."""

    name: str
    options: dict[str, Any]
    draw: str = "independent"
    dtype: torch.dtype = torch.float64
    masked: bool = True
    training: bool = True


TWO = {"num_inducing": POINTS, "normalize": "none"}
CASES = [
    Case("kl", TWO | {"regularizer": "kl"}),
    Case("dtc", TWO | {"regularizer": "dtc"}, draw="joint"),
    Case("dtc dual", TWO | {"regularizer": "dtc", "values": "dual"}, masked=False),
    Case("dtc bound", FIVE | {"regularizer": "dtc_bound", "normalize": "none"}, draw="none"),
    Case("kl, one set", FIVE | {"regularizer": "kl", "normalize": "none"}, draw="joint"),
    Case("kl, rows", FIVE | {"regularizer": "kl"}),
    Case("dtc, rows", {"num_inducing": POINTS, "regularizer": "dtc"}, draw="joint"),
    Case("kl, evaluating", TWO | {"regularizer": "kl"}, training=False),
    Case("nothing", TWO | {"regularizer": "none"}, draw="none"),
    Case("kl, float32", TWO | {"regularizer": "kl"}, dtype=torch.float32),
    Case("dtc, float32", TWO | {"regularizer": "dtc"}, draw="joint", dtype=torch.float32),
]
NAMED = {case.name: case for case in CASES}


def module_of(case: Case) -> Attention:
    module = build(Variant(case.name, "scgp", case.options), dtype=case.dtype)
    return module.train(case.training)


def inputs(case: Case) -> tuple[Tensor, Tensor | None]:
    x = tokens(length=LENGTH, dtype=case.dtype)
    if not case.masked:
        return x, None
    ignore = padding(length=LENGTH)
    ignore[:, 4] = True  # the second of four processes holds padding alone
    return x, ignore


def attend(module: Attention, x: Tensor, ignore: Tensor | None, case: Case, noise: Any) -> Any:
    need = ("output", "variance", "regularizer")
    return module(x, key_padding_mask=ignore, draw=case.draw, generator=noise, need=need)


def total_loss(out: Any) -> Tensor:
    return out.output.sin().sum() + out.variance.sqrt().sum() + 3 * out.regularizer.square()


def gradients(module: Attention) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def numbers(module: Attention, x: Tensor, out: Any) -> dict[str, Tensor]:
    """All results; those that belong to tokens have them in the second axis from the end."""
    return {
        "output": out.output.detach(),
        "variance": out.variance.detach()[..., None],
        "regularizer": out.regularizer.detach(),
        "inputs": x.grad,
        "parameters": gradients(module),
    }


def keyed() -> dict[str, Any]:
    items = torch.arange(BATCH)
    return {"seed": 3, "items": items, "samples": torch.zeros_like(items)}


def sharded(case: Case, rank: int, count: int, group: Any) -> tuple[dict[str, Tensor], list[Any]]:
    start, end = CUTS[count][rank : rank + 2]
    module = module_of(case).shard_tokens(group)  # type: ignore[operator]
    x, ignore = inputs(case)
    x = x[:, start:end].clone().requires_grad_()
    ignore = None if ignore is None else ignore[:, start:end]
    noise = ShardNoise(**keyed(), first_token=start, tokens=LENGTH)
    with spied() as forward:
        out = attend(module, x, ignore, case, noise if case.draw != "none" else None)
    with spied() as backward:
        total_loss(out).backward()
    with spied() as summed:
        sum_gradients(module.parameters(), group)
    return numbers(module, x, out), [forward, backward, summed]


def work(rank: int) -> dict[Any, Any]:
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    found: dict[Any, Any] = {}
    for count, group in groups.items():
        if rank < count:
            found |= {(count, case.name): sharded(case, rank, count, group) for case in CASES}
    found["refused"] = refusals()
    found["copied"] = copies(rank)
    return found


def refusals() -> dict[str, str]:
    world: Any = dist.group.WORLD

    def scgp(**options: Any) -> Any:
        return build_attention("scgp", embed_dim=EMBED, num_heads=HEADS, **options)

    calls = {
        "pooled": lambda: scgp(inducing="pooled").shard_tokens(world),
        "regularizer": lambda: scgp(regularizer="jensen").shard_tokens(world),
        "weights": lambda: scgp().shard_tokens(world)(tokens(dtype=torch.float32), need=("weights",)),
        "generator": lambda: scgp().shard_tokens(world)(tokens(dtype=torch.float32), draw="joint"),
        "group": lambda: scgp().shard_tokens("world"),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"expected|weights") as caught:
            call()
        found[name] = str(caught.value)
    return found


def copies(rank: int) -> dict[str, Any]:
    """How many collectives the module and its copies need for a call, and what is saved of it."""
    module = module_of(CASES[0]).shard_tokens(dist.group.WORLD)  # type: ignore[operator]
    made = {
        "itself": module,
        "copy": copy.deepcopy(module),
        "pickled": pickle.loads(pickle.dumps(module)),
        "ended": copy.deepcopy(module).shard_tokens(None),
    }
    found: dict[str, Any] = {"state": sorted(module.state_dict())}
    for name, one in made.items():
        with spied() as seen, torch.no_grad():
            found[name] = one(tokens(seed=rank)).output
        found[f"{name} sent"] = len(seen)
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return in_processes(work, 4, tmp_path_factory.mktemp("meeting"))


every_case = pytest.mark.parametrize("name", list(NAMED))
both_counts = pytest.mark.parametrize("count", [2, 4])


def unsharded(case: Case) -> dict[str, Tensor]:
    module, (x, ignore) = module_of(case), inputs(case)
    x.requires_grad_()
    out = attend(module, x, ignore, case, gp.ItemNoise(**keyed()) if case.draw != "none" else None)
    total_loss(out).backward()
    return numbers(module, x, out)


@every_case
@both_counts
def test_shards_agree_with_one_process(processes: list[Any], name: str, count: int) -> None:
    expected = unsharded(NAMED[name])
    parts = [processes[rank][count, name][0] for rank in range(count)]
    for field, whole in expected.items():
        if field in SHARED:
            for part in parts:
                same_but_rounding(part[field], whole, field)
        else:
            same_but_rounding(torch.cat([part[field] for part in parts], -2), whole, field)


def payload(case: Case) -> list[tuple[str, int]]:
    """Row sums where rows are normalised, then the sums of the posterior."""
    m, small = (5, 5) if case.options["num_inducing"] == 5 else POINTS
    width, size = EMBED // HEADS, BATCH * HEADS * case.dtype.itemsize
    shared = m * small if m != small else 0
    sums = size * (2 * m**2 + small**2 + shared + small * width + 3)
    rows = [] if case.options.get("normalize") == "none" else [("all_reduce", size * small)]
    return [*rows, ("all_reduce", sums)]


@every_case
@both_counts
def test_one_all_reduce_each_way_and_one_for_row_sums(processes: list[Any], name: str, count: int) -> None:
    case = NAMED[name]
    parameters = sum(p.numel() for p in module_of(case).parameters()) * case.dtype.itemsize
    for rank in range(count):
        forward, backward, summed = processes[rank][count, name][1]
        assert forward == payload(case)
        assert backward == payload(case)[::-1]
        assert summed == [("all_reduce", parameters)]


def test_what_cannot_be_shared(processes: list[Any], tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        alone = refusals()
    for found in (alone, *(found["refused"] for found in processes)):
        assert "got 'pooled'" in found["pooled"]
        assert "got 'jensen'" in found["regularizer"]
        assert "every pair of tokens" in found["weights"]
        assert "ShardNoise" in found["generator"]
        assert "got 'world'" in found["group"]


def test_the_group_is_no_part_of_the_state(processes: list[Any], tmp_path: Path) -> None:
    plain = module_of(CASES[0])
    with group_of_one(tmp_path):
        alone = copies(0)
    assert [alone[f"{name} sent"] for name in ("itself", "copy", "pickled", "ended")] == [1, 1, 0, 0]
    for rank, process in enumerate(processes):
        found = process["copied"]
        assert found["state"] == sorted(plain.state_dict())
        sent = [found[f"{name} sent"] for name in ("itself", "copy", "pickled", "ended")]
        assert sent == [1, 1, 0, 0]
        assert found["copy"].equal(found["itself"])
        alone = plain(tokens(seed=rank)).output.detach()
        same_but_rounding(found["pickled"], alone, "pickled")
        same_but_rounding(found["ended"], alone, "ended")
        assert float((found["itself"] - alone).abs().max()) > 1e-3
