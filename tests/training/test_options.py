"""What a run may be given: streamed data, prepared batches, precision, the paper's own scale, TensorBoard."""

import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpattention.data import CropAndFlip
from gpattention.models import TextConfig, TextTransformer
from gpattention.numerics import choose_device
from gpattention.runs import TrainingData, read_events
from gpattention.training import (
    Hardware,
    TrainingFailedError,
    TrainingStep,
    TrainingStoppedError,
    build_model,
    fit,
)
from gpattention.training.engine import (
    WARM_UP,
    CaptureFailedError,
    Controls,
    EagerEngine,
    Feed,
    GraphEngine,
    Objective,
    SingleProcess,
    cast,
    start_fabric,
    why_no_graph,
)
from tests.training.toy import WORDS, flat, text_recipe, toy_data, toy_recipe, toy_texts


def feed(world: int = 1, rank: int = 0, data: TrainingData | None = None, **changes: object) -> Feed:
    data = toy_data() if data is None else data
    return Feed(toy_recipe(**changes), data, torch.device("cpu"), torch.float32, rank, world)


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_are_the_resident_ones(workers: int, tmp_path: Path) -> None:
    resident = fit(toy_recipe(), toy_data(), tmp_path / "resident")
    recipe = toy_recipe(data__stream=True, data__workers=workers)
    streamed = fit(recipe, toy_data(), tmp_path / "streamed")
    assert torch.equal(flat(resident.model), flat(streamed.model))


@pytest.mark.parametrize("stream", [False, True])
def test_every_epoch_is_a_permutation_that_the_processes_share(stream: bool) -> None:
    whole = feed(data__stream=stream, data__workers=0).updates(0)
    parts = [feed(2, rank, data__stream=stream, data__workers=0).updates(0) for rank in (0, 1)]
    epoch: list[int] = []
    for _ in range(8):
        (batch,) = next(whole)
        shares = [next(part)[0] for part in parts]
        assert torch.equal(batch.items, torch.cat([share.items for share in shares]))
        assert torch.equal(batch.labels, toy_data().train_labels[batch.items])
        assert torch.equal(batch.inputs, toy_data().train[batch.items])
        epoch += batch.items.tolist()
    assert sorted(epoch[:32]) == sorted(epoch[32:]) == list(range(32))
    assert epoch[:32] != epoch[32:]


@pytest.mark.parametrize("first", [1, 5, 7])
def test_a_feed_starts_at_any_step(first: int) -> None:
    whole = feed(optimizer__batch_size=4, optimizer__accumulate=2).updates(0)
    later = feed(optimizer__batch_size=4, optimizer__accumulate=2).updates(first)
    for _ in range(first):
        next(whole)
    for mine, other in zip(next(later), next(whole), strict=True):
        assert torch.equal(mine.items, other.items)


@pytest.mark.parametrize("batches", [1, 3, 4, 100])
def test_batches_are_prepared_for_their_items_and_epoch(monkeypatch, batches: int) -> None:
    """However many of them are prepared at once."""
    calls, crop, data = [], CropAndFlip(seed=0, padding=1, flip=True), toy_data()

    def prepare(images, items, epoch):
        calls.append((len(items), epoch))
        return crop(images, items, epoch)

    monkeypatch.setattr("gpattention.training.engine.AHEAD", batches * 8 * 4 * data.train[0].numel())
    found = feed(data=replace(data, prepare=prepare)).updates(1)
    for step in range(1, 12):
        (batch,) = next(found)
        assert len(batch.items) == 8
        assert batch.inputs.equal(crop(data.train[batch.items], batch.items, step // 4))
        assert batch.labels.equal(data.train_labels[batch.items])
    whole_epoch = {1: [8, 8, 8, 8], 3: [24, 8]}.get(batches, [32])
    assert [size for size, epoch in calls if epoch == 1] == whole_epoch


def test_what_is_prepared_is_trained_on(tmp_path: Path) -> None:
    data = toy_data()
    moved = replace(data, prepare=CropAndFlip(seed=0, padding=1, flip=True))
    found = [fit(toy_recipe(), each, tmp_path / str(i)) for i, each in enumerate((data, moved))]
    assert not torch.equal(*(flat(result.model) for result in found))


# Texts in batches of similar length


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are multiples of 3, and pools have 4 batches."""
    monkeypatch.setattr(sys.modules["gpattention.models.predict"], "LENGTHS", 3)
    monkeypatch.setattr("gpattention.training.engine.POOL", 4)


def texts_feed(world: int = 1, rank: int = 0, **changes: object) -> Feed:
    recipe = text_recipe(data__group_by_length=True, **changes)
    return Feed(recipe, toy_texts(), torch.device("cpu"), torch.float32, rank, world)


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("stream", [False, True])
def test_batches_of_similar_length_are_cut_to_it(stream: bool) -> None:
    data = toy_texts()
    whole = texts_feed(data__stream=stream, data__workers=0).updates(0)
    parts = [texts_feed(2, rank).updates(0) for rank in (0, 1)]
    epochs, seen = [], []
    for _ in range(16):
        (batch,) = next(whole)
        lengths = data.lengths[batch.items]
        tokens = batch.inputs["tokens"]
        assert tokens.shape[1] == min(-(-int(lengths.max()) // 3) * 3, WORDS)
        assert torch.equal(tokens, data.train["tokens"][batch.items, : tokens.shape[1]])
        assert torch.equal(batch.items, torch.cat([next(part)[0].items for part in parts]))
        seen.append(tokens.shape[1])
        epochs += batch.items.tolist()
    assert sorted(epochs[:64]) == sorted(epochs[64:]) == list(range(64))
    assert epochs[:64] != epochs[64:]
    assert set(seen) == {3, 6, 9}
    assert seen[:8] != sorted(seen[:8])  # neither the short ones first nor the long ones
    assert seen[:8] != sorted(seen[:8], reverse=True)
    cut = texts_feed(optimizer__batch_size=4, optimizer__accumulate=2).updates(0)
    parts_of_it = [next(cut) for _ in range(8)]  # the same updates, of one length each
    assert [item for update in parts_of_it for part in update for item in part.items.tolist()] == epochs[:64]
    assert [[part.inputs["tokens"].shape[1] for part in update] for update in parts_of_it] == [
        [n, n] for n in seen[:8]
    ]
    later = texts_feed().updates(9)
    assert next(later)[0].items.tolist() == epochs[72:80]


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("kind", ["softmax", "kernel", "cgp", "scgp", "sgpa", "direct", "kep-svgp"])
def test_a_step_does_not_see_the_padding_that_is_cut(kind: str) -> None:
    recipe = text_recipe(kind, data__group_by_length=True)
    objective = Objective(build_model(recipe, toy_texts().facts).double(), recipe, "gp")
    for (batch,) in (next(texts_feed().updates(step)) for step in range(8)):
        found = []
        for inputs in (batch.inputs, {"tokens": toy_texts().train["tokens"][batch.items]}):
            objective.zero_grad()
            objective(inputs, batch.labels, batch.items, torch.tensor(3), torch.tensor(0.1))[0].backward()
            found.append([p.grad for p in objective.parameters() if p.grad is not None])
        for cut, whole in zip(*found, strict=True):
            torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-9)


class _Replayed:
    """A captured step on the CPU: a replay runs it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run, self.replays = run, 0

    def replay(self) -> None:
        self.replays += 1
        self.run()


@pytest.mark.usefixtures("short_steps")
def test_every_shape_has_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[_Replayed] = []

    def capture(run: Callable[[], None], *, beside: _Replayed | None) -> tuple[_Replayed, None]:
        assert beside is (made[0] if made else None)  # they share memory
        made.append(_Replayed(lambda: (engine.optimizer.zero_grad(), run())[1]))
        return made[-1], None

    here = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr("gpattention.training.engine.capture", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: here)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    recipe, data = text_recipe("kernel", data__group_by_length=True), toy_texts()
    found = []
    for make in (GraphEngine, EagerEngine):
        torch.manual_seed(0)
        model = build_model(recipe, data.facts)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
        engine = make(SingleProcess(torch.device("cpu")), Objective(model, recipe, "gp"), optimizer, recipe)
        updates = texts_feed().updates(0)
        for step in range(24):
            engine.step(next(updates), Controls(step, step, 5e-3, 0.0))
        found.append((flat(model), engine.read().loss))
    # of 24 steps, three run eagerly at first, and the first one of each further length
    assert len(made) == 3
    assert 24 - WARM_UP - 2 <= sum(graph.replays for graph in made) <= 24 - WARM_UP
    torch.testing.assert_close(*found)


def test_items_without_lengths_are_not_grouped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group_by_length to be false for items that have no lengths, as im"):
        feed(data__group_by_length=True)
    recipe = text_recipe("kep-svgp", model__options={"merge": "cat"}, data__group_by_length=True)
    with pytest.raises(ValueError, match="as this attention takes sequences of one length, got true"):
        build_model(recipe, toy_texts().facts)


def test_a_run_on_texts_of_similar_length_learns_and_resumes(tmp_path: Path) -> None:
    recipe = text_recipe("scgp", data__group_by_length=True, phases__epochs=4)
    whole = fit(recipe, toy_texts(), tmp_path / "whole")
    assert whole.rows[-1]["validation_accuracy"] > 0.9
    asked = []

    def stop(step: TrainingStep) -> None:
        if step.step == 21:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(TrainingStoppedError):
        fit(recipe, toy_texts(), tmp_path / "run", progress=stop)
    resumed = fit(recipe, toy_texts(), tmp_path / "run", resume=True)
    assert len(asked) == 1
    assert torch.equal(flat(resumed.model), flat(whole.model))


def test_processes_must_divide_the_batch_and_fill_it() -> None:
    with pytest.raises(ValueError, match="multiple of the 3 processes, got 8"):
        feed(3)
    with pytest.raises(ValueError, match="at least 64 training items, got 32"):
        feed(optimizer__batch_size=64)


def test_inputs_are_cast_where_they_are_numbers_with_fractions() -> None:
    found = cast({"tokens": torch.ones(2, dtype=torch.long), "contextual": torch.ones(2)}, torch.float64)
    assert (found["tokens"].dtype, found["contextual"].dtype) == (torch.int64, torch.float64)


def test_double_precision_agrees_with_single(tmp_path: Path) -> None:
    recipe = toy_recipe(model__config={"width": 16, "heads": 2, "depth": 2, "dropout": 0.0})
    single = fit(recipe, toy_data(), tmp_path / "single")
    double = fit(recipe, toy_data(), tmp_path / "double", precision="64-true")
    assert {p.dtype for p in double.model.parameters()} == {torch.float64}
    assert single.rows[-1]["train_loss"] == pytest.approx(double.rows[-1]["train_loss"], rel=1e-3)


def test_autocast_trains_through_fabric(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    recipe = toy_recipe("kernel", phases__epochs=4, phases__kernel_epochs=4)
    result = fit(recipe, toy_data(96), tmp_path / "run", precision="bf16-mixed")
    assert result.rows[-1]["validation_accuracy"] > 0.9
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}


def test_tf32_is_for_the_run_alone(tmp_path: Path) -> None:
    """On a CPU nothing but the setting changes: the same numbers, and the setting is back afterwards."""
    products, seen, rows = torch.backends.cuda.matmul, [], []
    before, recipe = products.fp32_precision, toy_recipe()
    for precision in ("32-true", "tf32"):
        result = fit(
            recipe, toy_data(), tmp_path / precision, precision=precision,
            progress=lambda progress: seen.append(products.fp32_precision),
        )  # fmt: skip
        rows.append(result.rows)
    assert seen == [before] * 16 + ["tf32"] * 16
    assert rows[0] == rows[1]
    assert '"precision": "tf32"' in (tmp_path / "tf32" / "events.jsonl").read_text()
    with pytest.raises(FileExistsError, match="holds a run already"):
        fit(recipe, toy_data(), tmp_path / "tf32", precision="tf32")
    assert products.fp32_precision == before


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("fast", "got 'fast'"), ("meta", "got 'meta'"),
        ("mps", "device to be auto, cpu, cuda or cuda:N, got 'mps'"),
        ("cuda:2", "device of this machine, got 'cuda:2', and it has 2 CUDA GPUs"),
    ],
)  # fmt: skip
def test_hardware_is_checked(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert choose_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="no CUDA GPU"):
            choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match=message):
        choose_device(device)
    with pytest.raises(ValueError, match=r"precision to be one of .* got '8-bit'"):
        Hardware(precision="8-bit")
    assert isinstance(start_fabric(Hardware("cpu")), SingleProcess)


@pytest.mark.parametrize(
    ("device", "processes", "hardware", "reason"),
    [
        ("cpu", 1, Hardware(), "CUDA graphs need a CUDA device"),
        ("cuda", 1, Hardware(graphs=False), "graphs are switched off"),
        ("cuda", 2, Hardware(), "steps of several processes are not captured"),
        ("cuda", 1, Hardware(precision="bf16-mixed"), "steps under autocast are not captured"),
        ("cuda", 1, Hardware(), None),
    ],
)
def test_why_a_step_is_not_captured(
    device: str, processes: int, hardware: Hardware, reason: str | None
) -> None:
    fabric = SimpleNamespace(device=torch.device(device), world_size=processes)
    assert why_no_graph(hardware, fabric) == reason


def test_the_papers_scale_is_a_sum_over_a_sequence() -> None:
    """Normalised times heads, width of a head and real tokens of the batch, over its items."""
    recipe = toy_recipe("cgp", regularizer__normalised=False)
    model = build_model(recipe, toy_data().facts).eval()
    images, labels, items = toy_data().train[:6], toy_data().train_labels[:6], torch.arange(6)
    seed, alpha = torch.tensor(3), torch.tensor(0.5)
    seen = {}
    for normalised in (True, False):
        objective = Objective(model, toy_recipe("cgp", regularizer__normalised=normalised), "gp").eval()
        total, regularizer = objective(images, labels, items, seed, alpha)
        seen[normalised] = (float(total.detach()), float(regularizer))
    tokens = 4  # patches of 4 in 8 x 8
    assert seen[False][1] == pytest.approx(seen[True][1] * 16 * tokens, rel=1e-5)
    entropy = seen[True][0] - 0.5 * seen[True][1]
    assert seen[False][0] == pytest.approx(entropy + 0.5 * seen[False][1], rel=1e-5)


def test_padding_does_not_count_as_tokens() -> None:
    model = TextTransformer(TextConfig(vocabulary=9, width=16, heads=2, depth=1, max_length=5))
    tokens = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 6]])
    assert model.real_tokens(tokens).tolist() == [2, 4]
    mask = torch.tensor([[False, True, True, True], [False] * 4])
    assert model.real_tokens({"tokens": tokens, "padding_mask": mask}).tolist() == [1, 4]


def test_keyed_dropout_drops_by_item_and_not_by_batch() -> None:
    recipe = toy_recipe("cgp", optimizer__keyed_dropout=True)
    model = build_model(recipe, toy_data().facts)
    objective = Objective(model, recipe, "gp").train()
    alpha = torch.tensor(0.0)

    def loss(items: list[int], step: int = 1) -> float:
        index = torch.tensor(items)
        data = toy_data()
        total, _ = objective(data.train[index], data.train_labels[index], index, torch.tensor(step), alpha)
        return float(total.detach())

    together = loss([0, 1, 2, 3])
    assert together == pytest.approx((loss([0, 1]) + loss([2, 3])) / 2, rel=1e-5)
    assert together != pytest.approx(loss([0, 1, 2, 3], step=2), rel=1e-3)
    objective.eval()
    assert loss([0, 1]) == loss([0, 1])


def test_tensorboard_holds_the_columns_of_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fit(toy_recipe(), toy_data(), tmp_path / "run", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert "validation_accuracy" in events.Tags()["scalars"]
    losses = events.Scalars("train_loss")
    assert [point.step for point in losses] == [row["step"] for row in result.rows]
    assert [point.value for point in losses] == pytest.approx([row["train_loss"] for row in result.rows])


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Objective.forward
    monkeypatch.setattr(Objective, "forward", lambda self, *a: (_Broken.apply(forward(self, *a)[0]), None))
    with pytest.raises(TrainingFailedError, match="the norm of the gradient is nan"):
        fit(toy_recipe("kernel"), toy_data(), tmp_path / "run")


class _Refusing(EagerEngine):
    """A captured engine whose capture fails after three eager steps, as one with a waiting operation does."""

    steps = 0

    def step(self, batches, controls) -> None:
        if self.steps == 3:
            raise CaptureFailedError("operation not permitted when stream is capturing")
        self.steps += 1
        super().step(batches, controls)


def test_a_step_that_cannot_be_captured_runs_eagerly_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fit(toy_recipe(), toy_data(), tmp_path / "plain")
    module = sys.modules["gpattention.training.fit"]  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "why_no_graph", lambda hardware, fabric: None)
    monkeypatch.setattr(module, "GraphEngine", _Refusing)
    result = fit(toy_recipe(), toy_data(), tmp_path / "run")
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "phase"]
    phases = [(event["engine"], event["reason"]) for event in events]
    reason = "the step cannot be captured: operation not permitted when stream is capturing"
    assert phases == [("graph", None), ("eager", reason), ("eager", reason)]
    # fused Adam of the first three steps rounds otherwise
    torch.testing.assert_close(flat(result.model), flat(plain.model), rtol=1e-3, atol=1e-4)
    assert result.rows[0]["train_loss"] == pytest.approx(plain.rows[0]["train_loss"], rel=1e-4)
