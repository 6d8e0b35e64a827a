"""One optimiser update: where it runs, what it minimises, how its batch reaches the device, and how it runs.

Lightning Fabric drives devices, precision and processes.  One process in plain precision needs none of it,
and importing Fabric takes seconds.  Several are started by `torchrun`, by SLURM, or by
`gpattention train --devices N`; each then calls `fit` with the same arguments, and Fabric finds its place
among them.

A step minimises cross-entropy and alpha times the regulariser; `Schedule` says how alpha and the rate change.
Batches of an update are of one size, so the mean of their cross-entropies is that of all their items.  Their
numbers of real tokens differ where texts are padded: `token_shares` weighs each regulariser by its own.

Updates run in a plain loop or as a captured CUDA graph.  At these sizes a step is hundreds of small kernels,
and starting them one by one takes longer than running them.  `GraphEngine` runs the first steps eagerly
(libraries and optimiser set themselves up there), then one is captured and all others are replays, with
batch, learning rate, alpha and seed copied into the tensors it reads: forward, loss, backward and update in a
single launch.  Every shape of batches has a graph of its own.

A replay cannot raise.  Instead a step whose loss or gradient is not finite sets `broken`, which keeps the
fused optimiser from updating (its `found_inf`) in that step and all later ones; `read` finds it, and the
trainer runs the same step eagerly from the untouched weights to see what failed.
"""

import atexit
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn, optim
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from gpattention.attention.base import mean_over_processes
from gpattention.checks import check_choice
from gpattention.data import Batch
from gpattention.gp import ItemNoise, NotPositiveDefiniteError, NumericalError, check_health, deferred_checks
from gpattention.graphs import WARM_UP, capture
from gpattention.models import Transformer
from gpattention.models.dropout import calls_of_items, find_dropouts, hooked, item_masks
from gpattention.models.predict import Inputs, count_items, cut_lengths, evaluating, shorten, take
from gpattention.numerics import choose_device
from gpattention.runs import Recipe, TrainingData
from gpattention.training.folder import TrainingFailedError, TrainingStoppedError, what_is_left

# Where a run computes

Module = TypeVar("Module", bound=nn.Module)


class SingleProcess:
    """One process, with the interface of Fabric."""

    world_size = 1
    global_rank = 0

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    def setup(self, module: Module, optimizer: optim.Optimizer) -> tuple[Module, optim.Optimizer]:
        """Move the module; there is nothing to wrap."""
        return module.to(self.device), optimizer

    def to_device(self, module: Module) -> Module:
        """The module on the device."""
        return module.to(self.device)

    def backward(self, loss: Tensor) -> None:
        """No scaling, no communication."""
        loss.backward()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """No-op: one process has nothing to synchronise."""
        return nullcontext()

    def barrier(self) -> None:
        """No-op: one process waits for no other."""


PLAIN_PRECISIONS = ("32-true", "tf32", "64-true")  # no autocast
PRECISIONS = (*PLAIN_PRECISIONS, "bf16-mixed")


@dataclass(frozen=True)
class Hardware:
    """What a run may use.  Nothing of it is part of the recipe: it changes the time, not the result.

    Attributes:
        device: cpu, cuda, cuda:1, or auto.
        precision: one of `PRECISIONS`; tf32 is float32, with linear maps in TF32 where a GPU has it.
        strategy: one of Fabric's, for several processes; DDP is the one that is tested.
        graphs: capture the whole step as a CUDA graph where that is possible.
    """

    device: torch.device | str = "auto"
    precision: str = "32-true"
    strategy: Any = "auto"
    graphs: bool = True

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)


def start_fabric(hardware: Hardware, *, find_unused: bool = True) -> Any:
    """Start what drives this process: Fabric, which joins the other processes if there are any.

    One process in plain precision has nothing to drive and gets `SingleProcess`.  `find_unused` is for models
    that leave some parameters out of a step.
    """
    device = choose_device(hardware.device)
    # processes that a launcher started; 1 without one
    world = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
    if world == 1 and hardware.precision in PLAIN_PRECISIONS:
        return SingleProcess(device)
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    precision = "32-true" if hardware.precision == "tf32" else hardware.precision
    fabric_class = _fabric_class()
    options: dict[str, Any] = {"devices": 1 if device.index is None else [device.index]}
    if world > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
        ddp = "ddp_find_unused_parameters_true" if find_unused else "ddp"
        strategy = ddp if hardware.strategy == "auto" else hardware.strategy
        options = {"devices": local, "num_nodes": max(world // local, 1), "strategy": strategy}
    fabric = fabric_class(accelerator=accelerator, precision=precision, **options)
    joined_before = dist.is_initialized()
    fabric.launch()
    if dist.is_initialized() and not joined_before:
        # Fabric leaves a gloo group and its threads to the end of the interpreter, where a thread that still
        # has something to do aborts the process.  At exit and not after the run: who trains again in this
        # process goes on with the group, since a second one would meet at the first one's addresses.
        atexit.register(_leave_processes)
    return fabric


def _leave_processes() -> None:
    """Wait for the threads of the process group, and end it."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def matmul_precision(hardware: Hardware) -> Iterator[None]:
    """Products in TF32 if asked for; posteriors and densities still compute in full float32."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    if hardware.precision == "tf32":
        products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def why_no_graph(hardware: Hardware, fabric: Any) -> str | None:
    """The reason why steps run eagerly; None where they are captured."""
    if fabric.device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if not hardware.graphs:
        return "graphs are switched off"
    if fabric.world_size > 1:
        return "steps of several processes are not captured"
    if hardware.precision == "bf16-mixed":
        return "steps under autocast are not captured"
    return None


def _fabric_class() -> Any:
    for package in ("lightning_fabric", "lightning.fabric"):  # the same code, alone or in the larger package
        try:
            found = import_module(package).Fabric
            logging.getLogger(package).setLevel(logging.WARNING)  # not a banner per process
            return found
        except ImportError:
            continue
    raise ImportError("training needs Lightning Fabric: pip install 'gpattention[train]'")


def is_leading() -> bool:
    """Whether this is the first of the processes that a launcher started, the one that writes."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


STOPPED = 130  # exit code of a process that was asked to stop and saved its state


def launch(arguments: Sequence[str], processes: int, folder: Path) -> None:
    """Run `python ARGUMENTS` in several processes of this machine, each of which calls `fit`.

    Args:
        arguments: arguments of Python.
        processes: how many; when one dies the others are stopped.
        folder: folder of the run that they train.

    Raises:
        TrainingFailedError: a process died; the message says which, and what is left.
        TrainingStoppedError: they were asked to stop.
        ValueError: fewer than 2 processes are asked for.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes < 2:
        raise ValueError(f"expected at least 2 processes to launch, got {processes}")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it ourselves
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="gpattention", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stop:
        raise TrainingStoppedError(f"stopped by {stop.sigval.name}; {what_is_left(folder)}") from stop
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode == STOPPED:
            raise TrainingStoppedError(f"stopped; {what_is_left(folder)}") from failure
        code = first.exitcode
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        left = what_is_left(folder)
        raise TrainingFailedError(f"process {rank} of {processes} {ended}; {left}") from failure


# What a step minimises

PhaseName = Literal["kernel", "gp"]
DROPOUT_SEED = 0x5EED  # another stream than the draws of the same step
MASK_STRIDE = 0x5DEECE66D  # between the seeds of neighbouring items; larger than any number of steps


@dataclass(frozen=True)
class Controls:
    """What the schedule says about a step."""

    step: int
    seed: int  # of the step's draws
    learning_rate: float
    alpha: float


@dataclass(frozen=True)
class Schedule:
    """Learning rate, regulariser's weight and phase of every step: optimiser updates, counted from 0.

    Attributes:
        recipe: recipe of the run.
        steps_per_epoch: that its data give.
    """

    recipe: Recipe
    steps_per_epoch: int

    @property
    def kernel_steps(self) -> int:
        """Steps of phase 1."""
        return self.recipe.phases.kernel_epochs * self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """Steps of both phases."""
        return self.recipe.epochs * self.steps_per_epoch

    def phase(self, step: int) -> PhaseName:
        """Phase 1 is kernel attention, phase 2 the model of the recipe."""
        return "kernel" if step < self.kernel_steps else "gp"

    def controls(self, step: int) -> Controls:
        """The controls of a step."""
        seed = self.recipe.seed * 1_000_003 + step
        return Controls(step, seed, self.learning_rate(step), self.alpha(step))

    def learning_rate(self, step: int) -> float:
        """Linear from the first to the last step, over both phases or (restart) over each."""
        first, last = 0, self.total_steps
        if self.recipe.optimizer.restart and 0 < self.kernel_steps < self.total_steps:
            first, last = (0, self.kernel_steps) if step < self.kernel_steps else (self.kernel_steps, last)
        done = (step - first) / max(last - first - 1, 1)
        start, end = self.recipe.optimizer.learning_rate, self.recipe.optimizer.final_learning_rate
        return start + min(done, 1.0) * (end - start)

    def alpha(self, step: int) -> float:
        """The regulariser's weight: nothing in phase 1, then linear over phase 2."""
        if step < self.kernel_steps:
            return 0.0
        length = self.total_steps - self.kernel_steps
        done = (step - self.kernel_steps) / max(length - 1, 1)
        weights = self.recipe.regularizer
        return weights.start + min(done, 1.0) * (weights.end - weights.start)


class Objective(nn.Module):
    """A module with one forward pass, so that processes, precision and capture see nothing else."""

    def __init__(self, model: Transformer, recipe: Recipe, phase: PhaseName) -> None:
        super().__init__()
        self.model = model
        self.draw = recipe.phases.draw if phase == "gp" and model.draws else "none"
        self.need = ("logits", "regularizer") if phase == "gp" else ("logits",)
        self.normalised = recipe.regularizer.normalised
        self._dropouts = find_dropouts(model) if recipe.optimizer.keyed_dropout else {}
        self._own: list[bool] | None = None  # which calls of dropout lead with the batch
        self.seeded_dropout: bool | None = None  # whether the step's seed says what drops; None: on a GPU

    def forward(
        self,
        inputs: Inputs,
        labels: Tensor,  # [B]
        items: Tensor,  # [B] numbers of the items, which key their noise
        seed: Tensor,  # [] of the step
        alpha: Tensor,  # []
        share: Tensor | None = None,  # [] of the batch in the update's regulariser; 1 without it
    ) -> tuple[Tensor, Tensor | None]:
        """What is minimised, and the regulariser alone where there is one.  [], []"""
        noise = ItemNoise(seed, items, torch.zeros_like(items)) if self.draw != "none" else None
        own = {"dropout_seed": _mask_seed(seed, items)} if self._seeds_dropout(items.device) else {}
        with self._dropping(inputs, items, seed):
            out = self.model(inputs, draw=self.draw, generator=noise, need=self.need, **own)
        loss = cross_entropy(out.logits.float() if out.logits.dtype.itemsize < 4 else out.logits, labels)
        if out.regularizer is None:
            return loss, None
        regularizer = out.regularizer if self.normalised else self._per_sequence(out.regularizer, inputs)
        if share is not None:
            regularizer = regularizer * share.to(regularizer.dtype)
        return loss + alpha.to(loss.dtype) * regularizer, regularizer.detach()

    def token_shares(self, batches: Sequence[Inputs]) -> Sequence[Tensor | None]:
        """Real tokens of each batch of an update over their mean: what its regulariser counts for.  [] each

        A normalised regulariser is per real token of its batch; weighed so, the mean over the batches is per
        real token of them all, in all processes.  A sequence's sum needs no weight, nor does one batch.
        """
        if len(batches) == 1 or not self.normalised or "regularizer" not in self.need:
            return [None] * len(batches)
        tokens = torch.stack([self.model.real_tokens(inputs).sum() for inputs in batches]).double()
        tokens = mean_over_processes(tokens)
        return (tokens / tokens.mean().clamp_min(1e-9)).unbind()  # no token at all: nothing to weigh

    def train(self, mode: bool = True) -> Self:
        """Dropouts whose masks are keyed to items are done by hooks, not by themselves."""
        super().train(mode)
        for dropout in self._dropouts.values():
            dropout.module.training = False
        return self

    def _seeds_dropout(self, device: torch.device) -> bool:
        """Whether masks come from the seed: a captured step then drops anew at every replay, the same again
        when a run is resumed, and the same whether kernels are fused or not.  The plain reference of such
        masks is slow, so other precisions, which never run fused, keep torch's own.
        """
        if self._dropouts or not self.training:
            return False
        if self.seeded_dropout is not None:
            return self.seeded_dropout
        single = self.model.head.weight.dtype == torch.float32
        return device.type == "cuda" and single and not torch.is_autocast_enabled("cuda")

    def _dropping(self, inputs: Inputs, items: Tensor, seed: Tensor) -> "hooked | nullcontext[None]":  # type: ignore[valid-type]
        if not self._dropouts or not self.training:
            return nullcontext()
        if self._own is None:
            with evaluating(self.model):
                self._own = calls_of_items(self.model, self.model, self._dropouts, inputs)
        noise = ItemNoise(seed, items, torch.full_like(items, DROPOUT_SEED))
        return hooked(self.model, self._dropouts, item_masks(noise, self._own))

    def _per_sequence(self, regularizer: Tensor, inputs: Inputs) -> Tensor:
        """The sum over heads, tokens and dimensions, mean over the batch: the paper's own scale."""
        tokens = self.model.real_tokens(inputs)  # [B]
        whole = mean_over_processes(tokens.sum().float())
        return regularizer * (self.model.config.width * whole / len(tokens))


def _mask_seed(seed: Tensor, items: Tensor) -> Tensor:
    """The seed of dropout masks: another one for every step, batch and process, as their items differ.  []"""
    return torch.add(seed, items[0], alpha=MASK_STRIDE)


Item = TypeVar("Item")


def train_steps(
    module: nn.Module,
    loss: Callable[[Item], Tensor],
    batches: Iterable[Item],
    optimizer: optim.Optimizer,
    learning_rate: Callable[[int], float],
    *,
    clip: float | None = None,
    defer_checks: bool = False,
) -> Iterator[Tensor]:
    """Train a module, one optimiser update for each batch: the loop of everything that is not a run.

    It is a generator, so that its caller validates, reports and stops between two steps:

    >>> for step, loss in enumerate(train_steps(model, loss_of, batches, optimizer, schedule), 1):
    ...     progress(step, total)

    Args:
        module: what is trained; it is in training mode at every step, whatever the caller did in between.
        loss: from a batch to what is minimised.  []
        batches: anything that `loss` takes, one for each step.
        optimizer: optimizer of the module's parameters.
        learning_rate: from the number of the step, counted from 0, to its learning rate.
        clip: largest norm of the gradient; None leaves it as it is.
        defer_checks: collect numerical failures for `gpattention.gp.check_health` instead of raising them,
            so that no step waits for a GPU.

    Yields:
        The loss of each step, detached and still on its device, after the update.
    """
    for step, batch in enumerate(batches):
        module.train()
        set_learning_rate(optimizer, learning_rate(step))
        optimizer.zero_grad()
        with deferred_checks() if defer_checks else nullcontext():
            minimised = loss(batch)
            minimised.backward()
        if clip is not None:
            clip_gradients(module.parameters(), clip)
        optimizer.step()
        yield minimised.detach()


def set_learning_rate(optimizer: optim.Optimizer, rate: float | Tensor) -> None:
    """Set the same rate for all groups of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Clip gradients where there is a limit; returns their norm before.  []"""
    owners = [p for p in parameters if p.grad is not None]
    if limit is not None:
        return nn.utils.clip_grad_norm_(owners, limit)
    return nn.utils.get_total_norm([p.grad for p in owners if p.grad is not None])


def is_broken(*values: Tensor) -> Tensor:
    """1 where any of these single numbers, or their sum, is not finite, else 0.  []

    In few launches: 0 times a number is 0 unless it is infinite or NaN.
    """
    total = values[0].detach().float()
    for value in values[1:]:
        total = total + value.detach()
    return (total * 0 != 0).float()


@dataclass(frozen=True)
class Sums:
    """Sums of losses and regularisers over the steps of this process."""

    loss: float = 0.0
    regularizer: float = 0.0
    steps: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.loss + other.loss, self.regularizer + other.regularizer, self.steps + other.steps)

    def over_processes(self, fabric: Any) -> "Sums":
        """The mean over all processes, which make this call together."""
        if fabric.world_size == 1:
            return self
        sums = torch.tensor([self.loss, self.regularizer], dtype=torch.float64, device=fabric.device)
        loss, regularizer = fabric.all_reduce(sums, reduce_op="mean").tolist()
        return Sums(loss, regularizer, self.steps)

    def means(self, fabric: Any) -> tuple[float, float]:
        """Loss and regulariser of a step, over all processes."""
        sums = self.over_processes(fabric)
        return sums.loss / self.steps, sums.regularizer / self.steps


class StepFailedError(RuntimeError):
    """A step whose numbers broke; the weights are those before it."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step, self.reason = step, reason


class CaptureFailedError(RuntimeError):
    """A step that cannot be captured as a graph; nothing of it was run."""


class EagerEngine:
    """Plain calls, under Fabric's precision and in as many processes as it has."""

    def __init__(self, fabric: Any, objective: Objective, optimizer: optim.Optimizer, recipe: Recipe) -> None:
        self._fabric, self._recipe, self._objective = fabric, recipe, objective
        self._module, self.optimizer = fabric.setup(objective, optimizer)
        self._module.train()
        self._sums = Sums()
        self.last: tuple[float, float | None] = (math.nan, None)

    def step(self, batches: Sequence[Batch], controls: Controls) -> None:
        """One update; its values are added up until `read`, and `last` has those of the last step."""
        set_learning_rate(self.optimizer, controls.learning_rate)
        if not self._objective.model.training:  # calling every module in every step takes half a millisecond
            self._module.train()
        self.optimizer.zero_grad()
        seed = torch.tensor(controls.seed, device=self._fabric.device)
        alpha = torch.tensor(controls.alpha, device=self._fabric.device)
        losses, regularizers = [], []
        try:
            shares = self._objective.token_shares([batch.inputs for batch in batches])
            for index, (batch, share) in enumerate(zip(batches, shares, strict=True)):
                # gradients are averaged over processes once an update, with its last batch
                waiting = index + 1 < len(batches) and self._fabric.world_size > 1
                with self._fabric.no_backward_sync(self._module, enabled=waiting):
                    total, regularizer = self._module(
                        batch.inputs, batch.labels, batch.items, seed, alpha, share
                    )
                    self._fabric.backward(total / len(batches))
                losses.append(float(total.detach()))
                if regularizer is not None:
                    regularizers.append(float(regularizer))
        except NumericalError as error:
            reason = " ".join([str(error), *getattr(error, "__notes__", [])])
            raise StepFailedError(controls.step, reason) from error
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss):
            raise StepFailedError(controls.step, f"the loss is {loss}")
        norm = float(clip_gradients(self._objective.parameters(), self._recipe.optimizer.clip))
        if not math.isfinite(norm):
            raise StepFailedError(controls.step, f"the norm of the gradient is {norm}")
        self.optimizer.step()
        mean = sum(regularizers) / len(regularizers) if regularizers else None
        self.last = (loss, mean)
        self._sums = self._sums + Sums(loss, mean or 0.0, 1)

    def read(self) -> Sums:
        """Sums since the last reading."""
        sums, self._sums = self._sums, Sums()
        return sums


def repeat_step(
    fabric: Any, objective: Objective, recipe: Recipe, batches: Sequence[Batch], controls: Controls
) -> str | None:
    """Run a step without moving the weights, and say how it fails; None if it does not."""
    still = optim.SGD(objective.parameters(), lr=0.0)
    try:
        EagerEngine(fabric, objective, still, recipe).step(batches, replace(controls, learning_rate=0.0))
    except StepFailedError as failure:
        return failure.reason
    return None


@dataclass
class _Captured:
    """What a graph reads, and the graph itself once there is one."""

    batches: list[Batch]
    graph: torch.cuda.CUDAGraph | None = None


class GraphEngine:
    """Replays of a captured step, one for each shape of batches; for one process, on a CUDA device."""

    def __init__(self, fabric: Any, objective: Objective, optimizer: optim.Optimizer, recipe: Recipe) -> None:
        self._objective = fabric.to_device(objective)
        self.optimizer, self._recipe, self._device = optimizer, recipe, fabric.device
        self._captured: dict[Any, _Captured] = {}  # by the shapes of the batches
        self._eager_steps = 0
        self._stream = torch.cuda.Stream(self._device)
        self._seed = torch.zeros((), dtype=torch.int64, device=self._device)
        self._number = torch.zeros((), dtype=torch.int64, device=self._device)
        self._alpha = torch.zeros((), device=self._device)
        self._rate = torch.zeros((), device=self._device)
        self._values = torch.zeros(2, dtype=torch.float64, device=self._device)  # loss, regulariser: sums
        self._latest = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._nothing = torch.zeros((), device=self._device)
        self._broken = torch.zeros((), device=self._device)
        self._broken_at = torch.full((), -1, dtype=torch.int64, device=self._device)
        self._steps, self._regularized = 0, False
        self.last: tuple[float, float | None] = (math.nan, None)
        optimizer.found_inf = self._broken  # type: ignore[attr-defined]  # fused optimisers skip their update then
        optimizer.grad_scale = None  # type: ignore[attr-defined]

    def step(self, batches: Sequence[Batch], controls: Controls) -> None:
        """Copy what the step reads, then replay it."""
        own, new = self._load(batches, controls)
        if own.graph is not None:
            own.graph.replay()
            self._steps += 1
            return
        self._objective.train()
        set_learning_rate(self.optimizer, self._rate)  # loading a state may have put a copy in its place
        if new or self._eager_steps < WARM_UP:  # kernels of a new shape may have to be compiled
            self._eager_steps += 1
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._run(own.batches)
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        else:
            self._capture(own)
        self._steps += 1

    def read(self) -> Sums:
        """Wait for the device, which is slow, and take the sums; `StepFailedError` if a step broke."""
        state = torch.cat([self._values, self._latest, self._broken_at[None].double()]).tolist()
        loss, regularizer, last_loss, last_regularizer, broken_at = state
        self._values.zero_()
        sums, self._steps = Sums(loss, regularizer, self._steps), 0
        self.last = (last_loss, last_regularizer if self._regularized else None)
        if broken_at >= 0:
            with suppress(NotPositiveDefiniteError):
                check_health()  # this error says it; the counter starts anew
            raise StepFailedError(int(broken_at), "the loss or its gradient is not finite")
        return sums

    def _load(self, batches: Sequence[Batch], controls: Controls) -> tuple[_Captured, bool]:
        """Copy what the step reads; gives what such batches have, and whether these are the first of them."""
        shapes = tuple(x.shape for batch in batches for x in batch.tensors)
        found = self._captured.get(shapes)
        new = found is None
        if found is None:
            found = self._captured[shapes] = _Captured([batch.map(torch.clone) for batch in batches])
        else:  # into the tensors that the graph reads: a replay knows addresses, not names
            for own, given in zip(found.batches, batches, strict=True):
                for mine, x in zip(own.tensors, given.tensors, strict=True):
                    mine.copy_(x)
        self._seed.fill_(controls.seed)
        self._number.fill_(controls.step)
        self._alpha.fill_(controls.alpha)
        self._rate.fill_(controls.learning_rate)
        return found, new

    def _capture(self, own: _Captured) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # gradients then live in the graph's own memory
        _free_workspaces()
        try:
            beside = next((each.graph for each in self._captured.values() if each.graph is not None), None)
            own.graph, _ = capture(lambda: self._run(own.batches, clear=False), beside=beside)
        except RuntimeError as error:  # an operation that waits for the device, as third-party kinds may have
            raise CaptureFailedError(str(error).partition("\n")[0]) from error
        own.graph.replay()  # capturing ran nothing

    def _run(self, batches: Sequence[Batch], *, clear: bool = True) -> None:
        """The whole update; no call in it waits for the device."""
        if clear:
            self.optimizer.zero_grad(set_to_none=True)
        count, values = len(batches), []
        with deferred_checks():
            shares = self._objective.token_shares([batch.inputs for batch in batches])
            for batch, share in zip(batches, shares, strict=True):
                total, regularizer = self._objective(
                    batch.inputs, batch.labels, batch.items, self._seed, self._alpha, share
                )
                (total if count == 1 else total / count).backward()
                self._regularized = regularizer is not None
                second = self._nothing if regularizer is None else regularizer
                values.append(torch.stack([total.detach(), second.to(total.dtype)]))
        norm = clip_gradients(self._objective.parameters(), self._recipe.optimizer.clip)
        means = values[0] if count == 1 else torch.stack(values).mean(0)
        broken = is_broken(norm, means[0])
        torch.where(broken > self._broken, self._number, self._broken_at, out=self._broken_at)
        torch.maximum(self._broken, broken, out=self._broken)
        self.optimizer.step()
        self._latest.copy_(means)
        self._values.add_(self._latest)


Engine = EagerEngine | GraphEngine


def _free_workspaces() -> None:
    """Let go of what cuBLAS holds for the streams of eager steps, 32 MiB each on a recent GPU.

    The captured step takes a workspace of its own, in the graph's memory.  The call is not public: where it
    is missing, both are held.
    """
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        torch.cuda.synchronize()
        free()


RESIDENT_SHARE = 0.25  # of the device's memory that training data may take
AHEAD = 2**26  # bytes of inputs, as float32, that are prepared at once
POOL = 50  # updates whose items are grouped by length: enough for little padding, few enough to stay random


@dataclass
class Feed:
    """The batches of each update, in an order that seed and epoch decide, for one of several processes.

    Small data live on the device; batches of large ones, or where the recipe says so, come from the host.
    """

    recipe: Recipe
    data: TrainingData
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        self.items = count_items(self.data.train)
        optimizer = self.recipe.optimizer
        per_update = optimizer.batch_size * optimizer.accumulate
        if self.items < per_update:
            raise ValueError(f"expected at least {per_update} training items, got {self.items}")
        if optimizer.batch_size % self.world_size:
            expected = f"expected optimizer.batch_size to be a multiple of the {self.world_size} processes"
            raise ValueError(f"{expected}, got {optimizer.batch_size}")
        self.steps_per_epoch = self.items // per_update  # what is left over at the end is not used
        self._lengths: Tensor | None = None  # [items], to which batches are cut
        if self.recipe.data.group_by_length:
            if self.data.lengths is None:
                wanted = "expected data.group_by_length to be false for items that have no lengths"
                raise ValueError(f"{wanted}, as images, got true")
            self._lengths = cut_lengths(self.data.lengths.cpu(), self.data.train)
        tensors = [self.data.train] if isinstance(self.data.train, Tensor) else [*self.data.train.values()]
        self.streams = self.recipe.data.stream
        if self.device.type == "cuda" and not self.streams:
            memory = torch.cuda.get_device_properties(self.device).total_memory
            self.streams = sum(x.numel() * x.element_size() for x in tensors) > RESIDENT_SHARE * memory
        self._stored = self.data
        if not self.streams:
            moves = tensors[0].device != self.device  # else nothing is copied
            whole, labels = self.data.train, self.data.train_labels.to(self.device)
            whole = take(whole, torch.arange(self.items), self.device) if moves else whole
            self._stored = replace(self.data, train=whole, train_labels=labels)

    def updates(self, first_step: int) -> Iterator[list[Batch]]:
        """The batches of every update from a step on, without end."""
        epoch, within = divmod(first_step, self.steps_per_epoch)
        while True:
            batches = self._batches(epoch, within)
            while update := list(islice(batches, self.recipe.optimizer.accumulate)):
                yield update
            epoch, within = epoch + 1, 0

    def first(self, count: int) -> Inputs:
        """At most so many items, those that are stored first, as the first epoch gives them to the model."""
        items = torch.arange(min(self.items, count), device=self._stored.train_labels.device)
        return self._ready(self._cut(items).to(self.device), 0, None).inputs

    def _batches(self, epoch: int, within: int) -> Iterator[Batch]:
        """This process's share of every batch of an epoch from update `within` on, ready for the model."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + epoch)
        order = torch.randperm(self.items, generator=generator)
        size, accumulate = self.recipe.optimizer.batch_size, self.recipe.optimizer.accumulate
        used = self._grouped(order[: self.steps_per_epoch * accumulate * size], generator)
        shares = used.view(-1, self.world_size, size // self.world_size)[within * accumulate :, self.rank]
        tokens: Sequence[int | None] = [None] * len(shares)
        if self._lengths is not None:
            longest = self._lengths[shares].view(-1, accumulate * shares.shape[1]).amax(-1)  # of an update
            tokens = longest.repeat_interleave(accumulate).tolist()
        if not self.streams:
            together = 1 if self._lengths is not None else self._together(shares.shape[1])
            for start in range(0, len(shares), together):
                several = shares[start : start + together].to(self.device)  # [n, share]
                ready = self._ready(self._cut(several.flatten()), epoch, tokens[start])
                for first in range(0, several.numel(), shares.shape[1]):
                    own = slice(first, first + shares.shape[1])
                    yield ready.map(lambda x, own=own: x[own])  # type: ignore[misc]
            return
        cut: Any = self._cut  # typed for lists of elements, but here an element is a whole batch
        loader: DataLoader[Any] = DataLoader(
            list(shares),  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=cut,
            num_workers=self.recipe.data.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # its own: a loader would take a number from the run's
        )
        for batch, most in zip(loader, tokens, strict=True):
            yield self._ready(Batch(*batch).to(self.device, non_blocking=True), epoch, most)

    def _together(self, share: int) -> int:
        """How many batches are prepared at once: augmenting one starts as many kernels as training on it."""
        train = self._stored.train
        tensors = [train] if isinstance(train, Tensor) else [*train.values()]
        return max(1, AHEAD // (4 * share * sum(x[0].numel() for x in tensors)))

    def _grouped(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """The items in updates of similar length, in random order; as they are if lengths do not count."""
        if self._lengths is None:
            return order
        size = self.recipe.optimizer.batch_size * self.recipe.optimizer.accumulate
        pools = order.split(POOL * size)
        by_length = torch.cat([pool[self._lengths[pool].argsort(stable=True)] for pool in pools])
        updates = by_length.view(-1, size)
        return updates[torch.randperm(len(updates), generator=generator)].flatten()

    def _cut(self, items: Tensor) -> Batch:
        """The stored data of items, on the device of the items' numbers."""
        return Batch(items, take(self._stored.train, items, items.device), self._stored.train_labels[items])

    def _ready(self, batch: Batch, epoch: int, tokens: int | None) -> Batch:
        prepare = self.data.prepare
        inputs = batch.inputs if prepare is None else prepare(batch.inputs, batch.items, epoch)
        inputs = inputs if tokens is None else shorten(inputs, tokens)
        return Batch(batch.items, cast(inputs, self.dtype), batch.labels)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point inputs in the model's type."""
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
