"""Suite `efficiency`: seconds and memory of training and predicting, by inducing points and length."""

import inspect
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpattention.attention import Draw, attention_class
from gpattention.evaluation.suites.findings import Findings, Subject
from gpattention.gp import ItemNoise
from gpattention.models import AttentionConfig, TextConfig, VisionConfig, predict
from gpattention.models.predict import Inputs, count_items
from gpattention.runs import Record

Config = VisionConfig | TextConfig
Count = Callable[[int, int], object]  # sizes done, all sizes
MEBIBYTE = 1 << 20
METRICS = ("train_epoch_seconds", "predict_seconds", "train_peak_mib", "predict_peak_mib")
REGULARIZER = 0.01  # its weight; all but 0 cost the same


def measure_cost(
    build: Callable[[], Any], inputs: Inputs, labels: Tensor, *, samples: int, draw: Draw = "independent",
    steps: int = 3,
) -> tuple[float, float, float, float]:  # fmt: skip
    """Seconds of an update and of a prediction, and MiB of training and of predicting, with all items.

    `build` makes the model on its device.  Seconds are the median of `steps` after a first one that does not
    count; MiB include everything held at the same time: weights, gradients, the moments of the optimiser and
    the tensors of a step.
    """
    device = labels.device
    model = build()

    def train() -> None:
        step = _training_step(build(), inputs, labels, draw)
        step()  # makes the tensors of the optimiser
        step()

    options: dict[str, Any] = {"samples": samples, "draw": draw}
    return (
        _median_seconds(_training_step(model, inputs, labels, draw), steps, device),
        _median_seconds(lambda: predict(model, inputs, **options), steps, device),
        peak_memory(train, device) / MEBIBYTE,
        peak_memory(lambda: predict(build(), inputs, **options), device) / MEBIBYTE,
    )


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that tensors of `work` take at the same time, without those that existed before.

    On a GPU the allocator knows them.  On a CPU every tensor that an operation returns is counted while it
    lives, but not the memory that operations use inside.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LivingTensors() as living:
        work()
    return living.most


def _training_step(model: Any, inputs: Inputs, labels: Tensor, draw: Draw) -> Callable[[], None]:
    """A function that makes one update of training."""
    drawing: Draw = draw if model.draws else "none"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    items = torch.arange(count_items(inputs), device=labels.device)

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        noise = None if drawing == "none" else ItemNoise(0, items, torch.zeros_like(items))
        out = model(inputs, draw=drawing, generator=noise, need=("logits", "regularizer"))
        loss = cross_entropy(out.logits, labels)
        if out.regularizer is not None:
            loss = loss + REGULARIZER * out.regularizer
        loss.backward()
        optimizer.step()

    return step


def _median_seconds(work: Callable[[], object], steps: int, device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    work()
    times = [now()]
    for _ in range(steps):
        work()
        times.append(now())
    return median(end - start for start, end in pairwise(times))


class _LivingTensors(TorchDispatchMode):
    """Counts the bytes of storages from the operation that returns them until nobody holds them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        for old in _storages((args, kwargs)):  # what was there before is not this work's
            self._sizes.setdefault(old._cdata, 0)
        out = func(*args, **(kwargs or {}))
        for new in _storages(out):
            if new._cdata not in self._sizes:
                self._sizes[new._cdata] = new.nbytes()
                self._now += new.nbytes()
                self.most = max(self.most, self._now)
                # a storage tells us itself when the last tensor on it is gone
                weakref.finalize(new, self._forget, new._cdata).atexit = False
        return out

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]


INDUCING = (8, 16, 32)  # the paper's
LENGTHS = (0.5, 1, 2)  # times the side of an image, or the words of a sentence
CPU_ITEMS = 16  # of a step that is measured on a CPU, at most


@dataclass(frozen=True)
class EfficiencyPlan:
    """What is measured, and the size to which it is scaled.

    Attributes:
        batch: items of an update in training.
        training_items: of an epoch.
        samples: draws of a prediction.
        draw: in training.
        steps: number of measurements, of which the median counts.
        inducing: numbers of inducing points.
        lengths: factors of the side of an image, or of the number of words of a sentence.
    """

    batch: int
    training_items: int
    samples: int
    draw: Draw = "independent"
    steps: int = 3
    inducing: tuple[int, ...] = INDUCING
    lengths: tuple[float, ...] = LENGTHS


def evaluate_efficiency(subject: Subject) -> Findings:
    """Models like that of the run, with the batches and draws of its training."""
    run = subject.run
    plan = EfficiencyPlan(
        run.recipe.optimizer.batch_size, len(subject.sets.train), subject.samples, run.recipe.phases.draw
    )
    count = subject.progress and partial(subject.progress, "efficiency")
    return efficiency_findings(run.model, plan, subject.device, count)


def efficiency_findings(
    model: Any, plan: EfficiencyPlan, device: torch.device, progress: Count | None = None
) -> Findings:
    """Seconds and peak memory of new models like this one, at every size of the plan.

    Args:
        model: its class and config are used.
        plan: what is measured.
        device: where to measure.
        progress: called with the number of sizes done and of all sizes.

    Returns:
        Four records for each size.
    """
    sizes = planned_sizes(model.config, plan)
    items = plan.batch if device.type == "cuda" else min(plan.batch, CPU_ITEMS)
    records: list[Record] = []
    for number, ((inducing, tokens), config) in enumerate(sizes.items()):
        inputs, labels = _random_items(config, items, device)

        def build(config: Config = config) -> Any:
            return type(model)(config).to(device)

        # measuring must not change the caller's random numbers
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            step, predicting, *peaks = measure_cost(
                build, inputs, labels, samples=plan.samples, draw=plan.draw, steps=plan.steps
            )
        values = (step * plan.training_items / items, predicting / items, *peaks)
        detail = {"inducing": inducing, "tokens": tokens, "items": items}
        each = zip(METRICS, values, strict=True)
        records += [Record("train", "model", metric, value, detail) for metric, value in each]
        if progress is not None:
            progress(number + 1, len(sizes))
    return Findings(tuple(records), {}, _notes(plan, items, device))


def planned_sizes(config: Config, plan: EfficiencyPlan) -> dict[tuple[int | None, int], Config]:
    """Configs by numbers of inducing points (None for exact attention) and tokens.

    The size of the model comes first, then other lengths and, if it has inducing points, other numbers of
    them.
    """
    changed = [_longer(config, factor) for factor in plan.lengths]
    if inducing_of(config) is not None:
        changed += [_with_inducing(config, count) for count in plan.inducing]
    return {(inducing_of(each), _tokens(each)): each for each in (config, *changed)}


def inducing_of(config: Config) -> int | None:
    """The number of inducing points of the first layer with any; the first of a pair."""
    first = next(filter(None, map(_inducing, config.layers)), None)
    return first[0] if isinstance(first, tuple) else first


def _inducing(layer: AttentionConfig) -> Any:
    """The number in the layer's options or the default of its kind; None if it has no inducing points."""
    parameter = inspect.signature(attention_class(layer.kind)).parameters.get("num_inducing")
    return parameter and layer.options.get("num_inducing", parameter.default)


def _with_inducing(config: Config, count: int) -> Config:
    def changed(layer: AttentionConfig) -> AttentionConfig:
        return replace(layer, options={**layer.options, "num_inducing": count}) if _inducing(layer) else layer

    return replace(config, attention=tuple(map(changed, config.layers)))


def _longer(config: Config, factor: float) -> Config:
    if isinstance(config, VisionConfig):
        height, width = (max(1, round(side * factor / config.patch)) * config.patch for side in config.sides)
        return replace(config, image_size=(height, width))
    return replace(config, max_length=max(2, round(config.max_length * factor)))


def _tokens(config: Config) -> int:
    return config.tokens if isinstance(config, VisionConfig) else config.max_length


def _random_items(config: Config, items: int, device: torch.device) -> tuple[Inputs, Tensor]:
    """Random items of the right shape, as their content does not change the cost."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(config.classes, (items,), generator=generator).to(device)
    if isinstance(config, VisionConfig):
        return torch.randn(items, config.channels, *config.sides, generator=generator).to(device), labels
    shape = (items, config.max_length)
    inputs = {
        "tokens": torch.randint(1, config.vocabulary, shape, generator=generator).to(device),
        "padding_mask": torch.zeros(shape, dtype=torch.bool, device=device),
    }
    if config.contextual_width:
        vectors = torch.randn(*shape, config.contextual_width, generator=generator)
        inputs["contextual"] = vectors.to(device)
    return inputs, labels


def _notes(plan: EfficiencyPlan, items: int, device: torch.device) -> tuple[str, ...]:
    notes = [
        f"train_epoch_seconds is the median of {plan.steps} steps of {items} items, scaled to "
        f"{plan.training_items} items; predict_seconds is of one item, predicted with {items - 1} others "
        f"and {plan.samples} draws where the model draws",
        "cost is that of fresh weights and random items of full length",
    ]
    if items < plan.batch:
        notes.append(f"reduced: {items} items a step on the CPU, where training has {plan.batch}")
    if device.type == "cpu":
        notes.append("peak memory counts the tensors that operations return, not what they use inside")
    return tuple(notes)
