"""An update of several batches is that of one batch with all their items, however texts are padded."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from gpattention.attention import attention_class
from gpattention.data import Batch
from gpattention.models import AttentionConfig, TextConfig, TextTransformer
from gpattention.training import Recipe, recipe_from_dict
from gpattention.training.engine import EagerEngine
from gpattention.training.graphs import GraphEngine
from gpattention.training.objective import Objective
from gpattention.training.schedule import Controls
from gpattention.training.single import SingleProcess
from tests.processes import in_processes

ITEMS, WORDS, STEPS = 8, 7, 3
KINDS = [
    (kind, regularizer)
    for kind in ("cgp", "scgp", "sgpa", "direct", "kernel", "softmax", "softmax-gp")
    for regularizer in attention_class(kind).regularizers
]


def sentences(step: int) -> Batch:
    """Short ones first, so that parts of the batch differ in their real words by a lot."""
    g = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, 20, (ITEMS, WORDS), generator=g)
    lengths = 1 + (torch.arange(ITEMS) * WORDS) // ITEMS
    tokens[torch.arange(WORDS) >= lengths[:, None]] = 0
    padded = {"tokens": tokens, "padding_mask": tokens == 0}
    return Batch(torch.arange(ITEMS) + ITEMS * step, padded, torch.arange(ITEMS) % 2)


def part(batch: Batch, items: slice) -> Batch:
    inputs = {name: x[items] for name, x in batch.inputs.items()}
    return Batch(batch.items[items], inputs, batch.labels[items])


def recipe_of(kind: str, regularizer: str, *, normalised: bool) -> Recipe:
    return recipe_from_dict(
        {
            "model": {"type": "text", "attention": kind, "options": {"regularizer": regularizer}},
            "regularizer": {"normalised": normalised},
        }
    )


def objective_of(recipe: Recipe) -> Objective:
    torch.manual_seed(0)
    options = dict(recipe.model.options)
    if recipe.model.attention == "scgp":
        options["num_inducing"] = 3
    config = TextConfig(
        vocabulary=20, embedding_width=8, contextual_width=0, width=8, heads=2, depth=2, dropout=0.0,
        max_length=WORDS, attention=AttentionConfig(recipe.model.attention, options),
    )  # fmt: skip
    return Objective(TextTransformer(config).double(), recipe, "gp")


def trained(
    recipe: Recipe,
    accumulate: int,
    engine: type = EagerEngine,
    fabric: object = None,
    share: int = 0,
    of: int = 1,
) -> tuple[Tensor, list[tuple[float, float | None]]]:
    """Parameters after some steps, and what each step told; process `share` of `of` has its cut."""
    objective = objective_of(recipe)
    optimizer = optim.Adam(objective.parameters(), lr=1e-2, fused=engine is not EagerEngine)
    runs = engine(fabric or SingleProcess(torch.device("cpu")), objective, optimizer, recipe)
    size, told = ITEMS // accumulate, []
    own = size // of
    for step in range(STEPS):
        whole = sentences(step)
        starts = range(share * own, ITEMS, size)
        parts = [part(whole, slice(start, start + own)) for start in starts]
        runs.step(parts, Controls(step, step, 1e-2, 0.5))
        runs.read()
        told.append(runs.last)
    return torch.cat([p.detach().flatten() for p in objective.parameters()]), told


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("kind", "regularizer"), KINDS)
def test_an_update_does_not_depend_on_how_its_batch_is_cut(
    kind: str, regularizer: str, normalised: bool
) -> None:
    recipe = recipe_of(kind, regularizer, normalised=normalised)
    whole, told = trained(recipe, 1)
    for accumulate in (2, 4):
        cut, told_of_cut = trained(recipe, accumulate)
        torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)
        for (loss, value), (loss_of_cut, value_of_cut) in zip(told, told_of_cut, strict=True):
            assert loss_of_cut == pytest.approx(loss, rel=1e-6)
            assert value_of_cut == (None if value is None else pytest.approx(value, rel=1e-6))


class _Uncaptured(GraphEngine):
    """What is captured, run as it is."""

    def step(self, batches: list[Batch], controls: Controls) -> None:
        self._load(batches, controls)
        self._objective.train()
        for group in self.optimizer.param_groups:
            group["lr"] = controls.learning_rate
        self._run()
        self._steps += 1


@pytest.mark.parametrize(("kind", "regularizer"), [("cgp", "kl"), ("scgp", "dtc"), ("sgpa", "kl")])
def test_the_captured_update_does_not_either(
    kind: str, regularizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    recipe = recipe_of(kind, regularizer, normalised=True)
    whole, told = trained(recipe, 1)
    for accumulate in (1, 2, 4):
        cut, told_of_cut = trained(recipe, accumulate, _Uncaptured)
        torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)
        assert told_of_cut == [pytest.approx(each, rel=1e-6) for each in told]


class _Two:
    """What an engine asks of Fabric in two processes that average their gradients."""

    world_size, device = 2, torch.device("cpu")

    def setup(self, module: nn.Module, optimizer: optim.Optimizer) -> tuple[nn.Module, optim.Optimizer]:
        return DistributedDataParallel(module, find_unused_parameters=True), optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        assert isinstance(module, DistributedDataParallel)
        return module.no_sync() if enabled else nullcontext()


def _in_two(accumulate: int, rank: int) -> Tensor:
    recipe = recipe_of("cgp", "kl", normalised=True)
    return trained(recipe, accumulate, fabric=_Two(), share=rank, of=2)[0]


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_nor_do_the_updates_of_two_processes(accumulate: int, tmp_path: Path) -> None:
    whole, _ = trained(recipe_of("cgp", "kl", normalised=True), 1)
    for found in in_processes(partial(_in_two, accumulate), 2, tmp_path):
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
