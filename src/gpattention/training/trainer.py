"""The paper's recipe: kernel attention first, then the Gaussian process from its weights, with draws.

A run is a folder: `recipe.json`, `metrics.csv`, `events.jsonl`, `checkpoints/`, and `model/` with the weights
chosen.  It can be killed at any time and goes on from its last checkpoint to the same numbers.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from gpattention.data import Batch
from gpattention.models import warm_start
from gpattention.training.build import build_kernel_model, build_model, may_leave_unused, needs_warm_start
from gpattention.training.checkpoint import CheckpointError
from gpattention.training.engine import (
    CaptureFailedError,
    EagerEngine,
    Engine,
    StepFailedError,
    Sums,
    repeat_step,
)
from gpattention.training.feeding import Feed, cast
from gpattention.training.folder import RunFolder
from gpattention.training.graphs import GraphEngine
from gpattention.training.hardware import Hardware, matmul_precision, start_fabric, why_no_graph
from gpattention.training.objective import Objective
from gpattention.training.recipe import Recipe
from gpattention.training.results import (
    Progress,
    TrainingData,
    TrainingFailedError,
    TrainingResult,
    TrainingStoppedError,
)
from gpattention.training.schedule import PhaseName, Schedule
from gpattention.training.signals import StopRequest, asked_together
from gpattention.training.state import pack, random_states, unpack
from gpattention.training.tensorboard import Board
from gpattention.training.validation import HEALTH_ITEMS, floor_share, validate

LISTEN_EVERY = 20  # steps between two looks at the device, and at what other processes were asked


def fit(
    recipe: Recipe,
    data: TrainingData,
    folder: str | Path,
    *,
    resume: bool = False,
    device: torch.device | str = "cpu",
    precision: str = "32-true",
    strategy: Any = "auto",
    graphs: bool = True,
    tensorboard: bool = False,
    progress: Callable[[Progress], object] | None = None,
    on_validation: Callable[[Mapping[str, Any]], object] | None = None,
) -> TrainingResult:
    """Train to the end, or go on from the last checkpoint when `resume` is set.

    Under `torchrun` or SLURM every process makes this call; together they train on the same batches as one
    process would.  `graphs` captures the step on a CUDA device; `tensorboard` logs beside `metrics.csv`.
    Where rank 0 runs, `progress` is called at every step and `on_validation` with every row of `metrics.csv`.
    """
    hardware = Hardware(device, precision, strategy, graphs)
    build_kernel_model(recipe, data.facts)  # mistakes in a recipe show before anything is made
    build_model(recipe, data.facts)
    run = _Run(recipe, data, Path(folder), hardware, progress, on_validation)
    with matmul_precision(hardware), Board(Path(folder), wanted=tensorboard and run.leads) as board:
        return run.run(board, resume=resume)


class _Run:
    """One run in progress, in one of its processes."""

    def __init__(
        self,
        recipe: Recipe,
        data: TrainingData,
        folder: Path,
        hardware: Hardware,
        progress: Callable[[Progress], object] | None,
        on_validation: Callable[[Mapping[str, Any]], object] | None,
    ) -> None:
        self.recipe, self.hardware = recipe, hardware
        self.fabric = start_fabric(hardware, find_unused=may_leave_unused(recipe))
        self.leads = self.fabric.global_rank == 0
        self.report, self.on_validation = (progress, on_validation) if self.leads else (None, None)
        self.dtype = torch.float64 if hardware.precision == "64-true" else torch.float32
        self.data = replace(data, validation=cast(data.validation, self.dtype))
        self.feed = Feed(
            recipe, data, self.fabric.device, self.dtype, self.fabric.global_rank, self.fabric.world_size
        )
        self.schedule = Schedule(recipe, self.feed.steps_per_epoch)
        self.folder = RunFolder(folder, writes=self.leads)
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.best = -math.inf
        self.sums = Sums()
        self.refusal: str | None = None  # why steps that could be captured are not

    def run(self, board: Board, *, resume: bool) -> TrainingResult:
        with self.folder.opened(self.recipe, resume=resume):
            self._to_the_end(board, resume=resume)
        chosen = type(self.model).from_pretrained(self.folder.path / "model")
        return TrainingResult(self.folder.path, chosen, tuple(self.rows))

    def _to_the_end(self, board: Board, *, resume: bool) -> None:
        torch.manual_seed(self.recipe.seed)
        self._enter(self.schedule.phase(0))
        if self.fabric.world_size > 1:  # dropout differs between processes, the first weights do not
            torch.manual_seed(self.recipe.seed * 1_000_003 + self.fabric.global_rank)
        if resume:
            self._resume()
        with StopRequest() as stop:
            self._train(stop, board)
        if self.recipe.checkpoint.select == "last":
            self.folder.save_model(self.model)
        self.folder.event("finished", step=self.step)
        self.fabric.barrier()

    def _train(self, stop: StopRequest, board: Board) -> None:
        start, updates = time.perf_counter(), self.feed.updates(self.step)
        while self.step < self.schedule.total_steps:
            if self.step == self.schedule.kernel_steps and self.phase == "kernel":
                self._start_gp()
            self._update(next(updates))
            self._tell(time.perf_counter() - start)
            start = time.perf_counter()
            epoch, within = divmod(self.step, self.schedule.steps_per_epoch)
            stopping = self._stopping(stop)
            if within == 0 and (epoch % self.recipe.checkpoint.every == 0 or epoch == self.recipe.epochs):
                self._validate(epoch, board)
                self._save()
            elif stopping:
                self._save()
            if stopping and self.step < self.schedule.total_steps:
                self.folder.event("stopped", step=self.step, signal=stop.asked)
                raise TrainingStoppedError(f"stopped by {stop.asked} at step {self.step}; resume to go on")

    def _enter(self, phase: PhaseName) -> None:
        build = build_kernel_model if phase == "kernel" else build_model
        self.model = build(self.recipe, self.data.facts).to(self.fabric.device, self.dtype)
        self._set_up(phase)

    def _set_up(self, phase: PhaseName) -> None:
        """A fresh optimiser, and the engine that runs its steps."""
        self.phase: PhaseName = phase
        reason = self.refusal or why_no_graph(self.hardware, self.fabric)
        captured = reason is None
        optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=self.recipe.optimizer.learning_rate,
            fused=captured or None,
            capturable=captured,
        )
        objective = Objective(self.model, self.recipe, phase)
        make = GraphEngine if captured else EagerEngine
        self.engine: Engine = make(self.fabric, objective, optimizer, self.recipe)
        self.folder.event(
            "phase", phase=phase, step=self.step, device=str(self.fabric.device),
            processes=self.fabric.world_size, engine="graph" if captured else "eager", reason=reason,
            precision=self.hardware.precision,
        )  # fmt: skip

    def _start_gp(self) -> None:
        """Phase 2: the model of the recipe, from the weights of phase 1 where it is another one."""
        self._collect()
        self.sums = Sums()  # a row is of one phase: what phase 1 minimised has another scale
        if not needs_warm_start(self.recipe):
            self._keep_training("gp")
            return
        self._save(first_phase=True)
        kernel = self.model
        self._enter("gp")
        report = warm_start(self.model, kernel, inputs=self.feed.first(HEALTH_ITEMS))
        self.folder.event(
            "warm start", copied=len(report.copied), initialised=list(report.initialised), gap=report.gap
        )

    def _run_eagerly(self, reason: str) -> None:
        """From here on; what the captured engine has added up is kept."""
        self._collect()
        self.refusal = reason
        self._keep_training(self.phase)

    def _keep_training(self, phase: PhaseName) -> None:
        """The same model goes on with its optimiser's state; only the engine or what it minimises changes."""
        before = self.engine.optimizer.state_dict()["state"]
        self._set_up(phase)
        groups = self.engine.optimizer.state_dict()["param_groups"]
        self.engine.optimizer.load_state_dict({"state": before, "param_groups": groups})

    def _update(self, batches: Sequence[Batch]) -> None:
        controls = self.schedule.controls(self.step)
        try:
            try:
                self.engine.step(batches, controls)
            except CaptureFailedError as refusal:
                self._run_eagerly(f"the step cannot be captured: {refusal}")
                self.engine.step(batches, controls)
            self.step += 1
            if self.step % LISTEN_EVERY == 0:
                self._collect()
        except StepFailedError as failure:
            self._fail(failure)

    def _collect(self) -> None:
        try:
            self.sums = self.sums + self.engine.read()
        except StepFailedError as failure:
            self._fail(failure)

    def _tell(self, seconds: float) -> None:
        if self.report is None:
            return
        loss, regularizer = self.engine.last
        count = self.recipe.optimizer.batch_size * self.recipe.optimizer.accumulate
        accuracy = self.rows[-1]["validation_accuracy"] if self.rows else None
        epoch = (self.step - 1) // self.schedule.steps_per_epoch
        self.report(
            Progress(
                self.step, self.schedule.total_steps, epoch, self.phase, loss, accuracy,
                self.schedule.alpha(self.step - 1), regularizer, count / max(seconds, 1e-9),
            )
        )  # fmt: skip

    def _stopping(self, stop: StopRequest) -> bool:
        """Whether to stop now; asking other processes waits for the device."""
        rarely = self.fabric.world_size > 1 and self.fabric.device.type == "cuda"
        if rarely and self.step % LISTEN_EVERY and self.step % self.schedule.steps_per_epoch:
            return False
        return asked_together(stop, self.fabric)

    def _reason(self, failure: StepFailedError) -> str:
        """A captured step cannot say what failed: run it once more, eagerly, from the same weights."""
        if isinstance(self.engine, EagerEngine):
            return failure.reason
        controls, batches = self.schedule.controls(failure.step), next(self.feed.updates(failure.step))
        objective = Objective(self.model, self.recipe, self.phase)
        again = repeat_step(self.fabric, objective, self.recipe, batches, controls)
        return again or f"{failure.reason} (not so when the step was repeated)"

    def _fail(self, failure: StepFailedError) -> NoReturn:
        reason = self._reason(failure)
        counters = {**self._counters(), "step": failure.step, "reason": reason}
        random = random_states(self.fabric.device, 1)  # the other processes may be gone
        path = self.folder.post_mortem(
            failure.step, pack(self.model, self.engine.optimizer, counters, random)
        )
        self.folder.event("failed", step=failure.step, reason=reason)
        raise TrainingFailedError(
            f"step {failure.step} ({self.phase} phase) of {self.folder.path}: {reason}. "
            f"The state is in {path}. Try a larger noise, a smaller learning rate, clipping, or float64."
        ) from failure

    def _validate(self, epoch: int, board: Board) -> None:
        self._collect()
        found = validate(self.fabric, self.model, self.data)
        limit = self.recipe.regularizer.floor_warning
        share = floor_share(self.model, self.data, self.step, limit) if self.phase == "gp" else None
        loss, regularizer = self.sums.means(self.fabric)
        row = {
            "epoch": epoch, "step": self.step, "phase": self.phase,
            "learning_rate": self.schedule.learning_rate(self.step - 1),
            "alpha": self.schedule.alpha(self.step - 1),
            "train_loss": loss, "train_regularizer": regularizer,
            "validation_accuracy": found.accuracy, "validation_nll": found.nll, "floor_share": share,
        }  # fmt: skip
        self.rows.append(row)
        self.sums = Sums()
        self.folder.metrics(self.rows)
        self.folder.event("validated", **row)
        board.row(row)
        if self.on_validation is not None:
            self.on_validation(row)
        score = -found.nll if self.recipe.checkpoint.select == "best-nll" else found.accuracy
        if (self.phase == "gp" or self.recipe.phases.epochs == 0) and score > self.best:
            self.best = score
            if self.recipe.checkpoint.select != "last":
                self.folder.save_model(self.model)

    def _counters(self) -> dict[str, Any]:
        best = None if self.best == -math.inf else self.best
        sums = asdict(self.sums)
        return {"step": self.step, "phase": self.phase, "best": best, "rows": self.rows, "sums": sums}

    def _save(self, *, first_phase: bool = False) -> None:
        self._collect()
        self.sums = self.sums.over_processes(self.fabric)  # one checkpoint serves them all
        random = random_states(self.fabric.device, self.fabric.world_size)
        checkpoint = pack(self.model, self.engine.optimizer, self._counters(), random)
        keep = None if first_phase else self.recipe.checkpoint.keep
        self.folder.checkpoint(self.step, checkpoint, keep=keep)
        self.fabric.barrier()

    def _resume(self) -> None:
        checkpoint = self.folder.last_checkpoint()
        if checkpoint is None:
            self.folder.event("resumed", step=0)
            return
        state = checkpoint.state
        try:
            self.step, self.rows, self.sums = state["step"], state["rows"], Sums(**state["sums"])
            phase, best = state["phase"], state["best"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the last checkpoint of {self.folder.path} lacks {error}") from error
        if phase != self.phase:
            self._enter(phase)
        unpack(checkpoint, self.model, self.engine.optimizer, self.fabric.global_rank)
        self.best = -math.inf if best is None else best
        self.folder.metrics(self.rows)
        self.folder.event("resumed", step=self.step)
