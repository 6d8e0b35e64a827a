"""Tokens spread over processes: the numbers and gradients of one process, and what it took to get them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from gpattention import gp
from gpattention.ops import (
    ShardNoise,
    check_group,
    count_traffic,
    counted_once,
    sum_gradients,
    sum_over_shards,
)
from tests.processes import group_of_one, in_processes, same_but_rounding, spied

BATCH, HEADS, WIDTH, CHANNELS, M, L = 2, 3, 4, 5, 6, 4
QUERIES, KEYS = 11, 9
# uneven shards; the second of four holds one key, which is padding in every sequence
CUTS = {1: ((0, 11), (0, 9)), 2: ((0, 3, 11), (0, 5, 9)), 4: ((0, 3, 4, 8, 11), (0, 5, 6, 7, 9))}
ON_TOKENS = {"q": 0, "log_amplitude": 0, "query_mask": 0, "k": 1, "o": 1, "v": 1, "mask": 1}
BY_TOKEN = ("mean", "variance", "independent", "joint", "q", "log_amplitude", "k", "o", "v")


class Case(NamedTuple):
    """One way of calling."""

    objective: str = "kl"
    values: str = "paper"
    sets: int = 2
    dtype: torch.dtype = torch.float64
    repeat: int = 1  # how often each token is there
    conditional: str = "deterministic"

    @property
    def name(self) -> str:
        return " ".join(str(x).removeprefix("torch.") for x in self)


CASES = [
    *(Case(objective, values) for objective in ("kl", "dtc", "dtc_bound") for values in ("paper", "dual")),
    *(Case(objective, sets=1) for objective in ("kl", "dtc")),
    *(Case(objective, dtype=torch.float32) for objective in ("kl", "dtc")),
    Case("dtc", "dual", 1, torch.float32),
    Case(repeat=3),
    Case(conditional="independent"),
]


def problem(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tokens, masks and amplitudes; inducing inputs and parameters."""
    g = torch.Generator().manual_seed(5)
    normal = partial(torch.randn, generator=g, dtype=torch.float64)
    uniform = partial(torch.rand, generator=g, dtype=torch.float64)
    tokens = {
        "q": normal(BATCH, HEADS, QUERIES, WIDTH),
        "k": normal(BATCH, HEADS, KEYS, WIDTH),
        "o": normal(BATCH, HEADS, KEYS, WIDTH),
        "v": normal(BATCH, HEADS, KEYS, CHANNELS),
        "log_amplitude": 0.3 * normal(BATCH, HEADS, QUERIES, 1),
        "mask": uniform(BATCH, 1, KEYS, 1) < 0.7,
        "query_mask": uniform(BATCH, 1, QUERIES, 1) < 0.7,
    }
    tokens["mask"][..., 5, :] = False
    tokens = {name: x.repeat_interleave(case.repeat, -2) for name, x in tokens.items()}
    shared = {
        "inducing_q": normal(HEADS, M, WIDTH),
        "inducing_k": normal(HEADS, L, WIDTH),
        "noise": 0.1 + uniform(HEADS),
        "scale_q": 0.7 + uniform(HEADS),
        "scale_k": 0.7 + uniform(HEADS),
    }
    if case.sets == 1:
        del shared["inducing_k"]
    for name, x in (tokens | shared).items():
        if x.is_floating_point():
            (tokens if name in tokens else shared)[name] = x.to(case.dtype)
    return tokens, shared


def shard(tokens: dict[str, Tensor], rank: int, count: int, repeat: int = 1) -> dict[str, Tensor]:
    found = {}
    for name, x in tokens.items():
        cuts = CUTS[count][ON_TOKENS[name]]
        found[name] = x[..., cuts[rank] * repeat : cuts[rank + 1] * repeat, :]
    return found


@dataclass
class Found:
    """All results of one process, and what it sent for them."""

    numbers: dict[str, Tensor]
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    counted: tuple[int, int]  # all-reduces and bytes, by our own count


def evaluate(
    case: Case, tokens: dict[str, Tensor], shared: dict[str, Tensor], noise: Any, group: Any
) -> Found:
    """Mean, variance, draws, regulariser and all gradients of a loss that holds all of them."""
    leaves = {name: x.clone() for name, x in (tokens | shared).items()}
    learned = {name: x.requires_grad_() for name, x in leaves.items() if x.is_floating_point()}
    arguments = {name: x[..., 0] if name in ("log_amplitude", "mask", "query_mask") else x
                 for name, x in leaves.items()}  # fmt: skip
    with spied() as forward, count_traffic() as traffic:
        posterior = gp.scgp_posterior(
            **arguments, values=case.values, conditional=case.conditional, group=group,  # type: ignore[arg-type]
        )  # fmt: skip
        numbers = {
            "mean": posterior.mean,
            "variance": posterior.variance[..., None],
            "independent": posterior.sample(2, generator=noise()),
            "joint": posterior.sample(2, generator=noise(), joint=True),
            "regularizer": posterior.kl()
            if case.objective == "kl"
            else posterior.log_density(case.objective).total,  # type: ignore[arg-type]
        }
    own = ("mean", "variance", "independent", "joint")
    loss = sum(numbers[name].sin().sum() for name in own)
    loss = loss + 0.1 * numbers["regularizer"].square().sum()
    with spied() as backward, count_traffic() as returned:
        loss.backward()
    counted = (traffic.collectives + returned.collectives, traffic.payload + returned.payload)
    if group is not None:
        sum_gradients([learned[name] for name in shared], group)
    gradients = {name: x.grad for name, x in learned.items()}
    return Found({name: x.detach() for name, x in (numbers | gradients).items()}, forward, backward, counted)


def item_noise(device: str = "cpu", **shard: int) -> Any:
    items = torch.arange(BATCH, device=device)
    return (ShardNoise if shard else gp.ItemNoise)(7, items, torch.zeros_like(items), **shard)


def work(rank: int) -> dict[Any, Any]:
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    found: dict[Any, Any] = {}
    for count, group in groups.items():
        if rank >= count:
            found["stranger"] = refused(check_group, group)
            continue
        for case in CASES:
            tokens, shared = problem(case)
            first = CUTS[count][0][rank] * case.repeat
            noise = partial(item_noise, first_token=first, tokens=QUERIES * case.repeat)
            here = shard(tokens, rank, count, case.repeat)
            found[count, case.name] = evaluate(case, here, shared, noise, group)
    found["refused"] = refusals(rank)
    return found


def refused(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


def refusals(rank: int, count: int = 4) -> dict[str, str]:
    tokens, shared = problem(Case())
    here = shard(tokens, rank, count)
    tensors = [here[name] for name in ("q", "k", "o", "v")] + [shared["inducing_q"]]
    posterior = gp.scgp_posterior(*tensors, noise=0.1, group=dist.group.WORLD)
    seeded = torch.Generator().manual_seed(0)
    return {
        "generator": refused(posterior.sample, generator=seeded),
        "joint": refused(posterior.sample, joint=True),
        "objective": refused(posterior.log_density, "double_jensen"),
        "group": refused(gp.scgp_posterior, *tensors, noise=0.1, group="world"),
        "group of rows": refused(gp.sparse_row_log_amplitude, *tensors[:2], tensors[-1], group="world"),
    }


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return in_processes(work, 4, tmp_path_factory.mktemp("meeting"))


def agree(parts: list[dict[str, Tensor]], whole: Found) -> None:
    """The numbers of all processes with those of one."""
    for name, expected in whole.numbers.items():
        if name in BY_TOKEN:
            same_but_rounding(torch.cat([part[name] for part in parts], -2), expected, name)
            continue
        for part in parts:  # every process has all of what is shared
            same_but_rounding(part[name], expected, name)


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
both_counts = pytest.mark.parametrize("count", [2, 4])


@every_case
@both_counts
def test_shards_agree_with_one_process(processes: list[Any], case: Case, count: int) -> None:
    whole = evaluate(case, *problem(case), item_noise, None)
    parts = [processes[rank][count, case.name].numbers for rank in range(count)]
    agree(parts, whole)


def formula(case: Case) -> int:
    """Bytes of the sums, per sequence and head: nothing in it knows the number of tokens."""
    small = L if case.sets == 2 else M
    numbers = 2 * M**2 + small**2 + small * CHANNELS + 3 + (L * M if case.sets == 2 else 0)
    return BATCH * HEADS * numbers * case.dtype.itemsize


@every_case
@both_counts
def test_one_all_reduce_each_way(processes: list[Any], case: Case, count: int) -> None:
    for rank in range(count):
        found = processes[rank][count, case.name]
        assert found.forward == [("all_reduce", formula(case))]
        assert found.backward == [("all_reduce", formula(case))]
        assert found.counted == (2, 2 * formula(case))


@every_case
def test_a_group_of_one_is_one_process(case: Case, tmp_path: Path) -> None:
    whole = evaluate(case, *problem(case), item_noise, None)
    noise = partial(item_noise, first_token=0, tokens=QUERIES * case.repeat)
    with group_of_one(tmp_path) as group:
        found = evaluate(case, *problem(case), noise, group)
    for name, expected in whole.numbers.items():
        same_but_rounding(found.numbers[name], expected, name)


def test_one_process_sends_nothing() -> None:
    found = evaluate(Case(), *problem(Case()), item_noise, None)
    assert found.forward == found.backward == []


def test_what_a_group_cannot_do(processes: list[Any], tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        alone = refusals(0, count=1)
    for found in (alone, *(found["refused"] for found in processes)):
        assert "expected generator to be a ShardNoise" in found["generator"]
        assert "expected generator to be a ShardNoise" in found["joint"]
        assert "got 'double_jensen'" in found["objective"]
        assert "got 'world'" in found["group"]
        assert "got 'world'" in found["group of rows"]
    assert "expected group to be a process group that this process is in" in processes[3]["stranger"]


@pytest.mark.parametrize("width", [4, 5])
def test_a_token_has_its_numbers_wherever_it_is(width: int) -> None:
    shape = (2, BATCH, HEADS, QUERIES, width)
    whole = item_noise().normal(shape, torch.float64, torch.device("cpu"))
    for count, (cuts, _) in CUTS.items():
        for rank in range(count):
            rows = slice(cuts[rank], cuts[rank + 1])
            noise = item_noise(first_token=rows.start, tokens=QUERIES)
            part = (*shape[:3], rows.stop - rows.start, width)
            assert noise.normal(part, torch.float64, torch.device("cpu")).equal(whole[..., rows, :])


def test_shared_numbers_take_their_turn() -> None:
    """As many streams pass as in one process, so that later layers agree too."""
    a, b = item_noise(), item_noise(first_token=3, tokens=QUERIES)
    cpu, shape = torch.device("cpu"), (1, BATCH, M, CHANNELS)
    assert b.shared_normal(shape, torch.float64, cpu).equal(a.normal(shape, torch.float64, cpu))
    tokens = (1, BATCH, QUERIES, CHANNELS)
    rest = b.normal((1, BATCH, 2, CHANNELS), torch.float64, cpu)
    assert rest.equal(a.normal(tokens, torch.float64, cpu)[:, :, 3:5])


def test_tokens_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"expected first_token in \[0, 4\)"):
        item_noise(first_token=4, tokens=4)
    noise = item_noise(first_token=3, tokens=4)
    with pytest.raises(ValueError, match="at most 1, got 2"):
        noise.normal((1, BATCH, 2, 3), torch.float32, torch.device("cpu"))


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
