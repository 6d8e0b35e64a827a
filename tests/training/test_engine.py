"""`train_steps` against the loop written out; an update of several batches is that of one with all items."""

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
from gpattention.runs import Recipe, recipe_from_dict
from gpattention.training import build_model, train_steps
from gpattention.training.engine import Controls, EagerEngine, GraphEngine, Objective, SingleProcess
from tests.processes import in_processes
from tests.training.toy import flat, toy_data, toy_recipe


def test_train_steps_is_the_plain_loop() -> None:
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, generator=g) for _ in range(5)]
    ours, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(ours.state_dict())
    kept, optimizer = [], torch.optim.SGD(plain.parameters(), lr=1.0)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        loss = plain(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        kept.append(loss.item())
    found = []
    steps = train_steps(
        ours, lambda batch: ours(batch).square().mean(), batches, torch.optim.SGD(ours.parameters(), lr=1.0),
        lambda step: 0.1 / (step + 1), clip=0.5,
    )  # fmt: skip
    for loss in steps:
        found.append(loss.item())
        assert not loss.requires_grad
        ours.eval()  # as validation between two steps would leave it
    assert found == kept
    assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), plain.parameters(), strict=True))


def test_a_step_trains_a_model_that_was_put_into_evaluation() -> None:
    recipe, data = toy_recipe("kernel"), toy_data()
    model = build_model(recipe, data.facts)
    optimizer, cpu = torch.optim.SGD(model.parameters(), lr=0.1), SingleProcess(torch.device("cpu"))
    engine = EagerEngine(cpu, Objective(model, recipe, "gp"), optimizer, recipe)
    model.eval()
    items = torch.arange(8)
    engine.step([Batch(items, data.train[items], data.train_labels[items])], Controls(0, 0, 0.1, 0.0))
    assert all(module.training for module in model.modules())


# Batches of padded sentences

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


def recipe_of(kind: str = "cgp", regularizer: str = "kl", *, normalised: bool = True) -> Recipe:
    model = {"type": "text", "attention": kind, "options": {"regularizer": regularizer}}
    return recipe_from_dict({"model": model, "regularizer": {"normalised": normalised}})


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
    """Parameters after some steps, and what each step gave; process `share` of `of` has its cut."""
    objective = objective_of(recipe)
    optimizer = optim.Adam(objective.parameters(), lr=1e-2, fused=engine is not EagerEngine)
    runs = engine(fabric or SingleProcess(torch.device("cpu")), objective, optimizer, recipe)
    size, seen = ITEMS // accumulate, []
    own = size // of
    for step in range(STEPS):
        whole = sentences(step)
        starts = range(share * own, ITEMS, size)
        parts = [part(whole, slice(start, start + own)) for start in starts]
        runs.step(parts, Controls(step, step, 1e-2, 0.5))
        runs.read()
        seen.append(runs.last)
    return flat(objective), seen


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("kind", "regularizer"), KINDS)
def test_an_update_does_not_depend_on_how_its_batch_is_cut(
    kind: str, regularizer: str, normalised: bool
) -> None:
    recipe = recipe_of(kind, regularizer, normalised=normalised)
    whole, seen = trained(recipe, 1)
    for accumulate in (2, 4):
        cut, seen_of_cut = trained(recipe, accumulate)
        torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)
        for (loss, value), (loss_of_cut, value_of_cut) in zip(seen, seen_of_cut, strict=True):
            assert loss_of_cut == pytest.approx(loss, rel=1e-6)
            assert value_of_cut == (None if value is None else pytest.approx(value, rel=1e-6))


class _Uncaptured(GraphEngine):
    """What is captured, run as it is."""

    def step(self, batches: list[Batch], controls: Controls) -> None:
        own, _ = self._load(batches, controls)
        self._objective.train()
        for group in self.optimizer.param_groups:
            group["lr"] = controls.learning_rate
        self._run(own.batches)
        self._steps += 1


@pytest.mark.parametrize(("kind", "regularizer"), [("cgp", "kl"), ("scgp", "dtc"), ("sgpa", "kl")])
def test_the_captured_update_does_not_either(
    kind: str, regularizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    recipe = recipe_of(kind, regularizer)
    whole, seen = trained(recipe, 1)
    for accumulate in (1, 2, 4):
        cut, seen_of_cut = trained(recipe, accumulate, _Uncaptured)
        torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)
        assert seen_of_cut == [pytest.approx(each, rel=1e-6) for each in seen]


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
    return trained(recipe_of(), accumulate, fabric=_Two(), share=rank, of=2)[0]


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_nor_do_the_updates_of_two_processes(accumulate: int, tmp_path: Path) -> None:
    whole, _ = trained(recipe_of(), 1)
    for found in in_processes(partial(_in_two, accumulate), 2, tmp_path):
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
