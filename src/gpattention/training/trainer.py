"""The paper's recipe: kernel attention first, then the Gaussian process from its weights, with draws.

A run is a folder: `recipe.json`, `metrics.csv`, `events.jsonl`, `checkpoints/`, and `model/` with the weights
chosen.  It can be killed at any time and goes on from its last checkpoint to the same numbers.
"""

import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss

from gpattention.gp import ItemNoise, NumericalError
from gpattention.models import warm_start
from gpattention.models.rows import count_items, take
from gpattention.models.storage import write_atomically
from gpattention.training.build import build_kernel_model, build_model, needs_warm_start
from gpattention.training.checkpoint import (
    CheckpointError,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from gpattention.training.recipe import Recipe
from gpattention.training.records import append_event, write_metrics
from gpattention.training.results import (
    Progress,
    TrainingData,
    TrainingFailedError,
    TrainingResult,
    TrainingStoppedError,
)
from gpattention.training.schedule import PhaseName, Schedule
from gpattention.training.signals import StopRequest
from gpattention.training.state import pack, unpack

HEALTH_ITEMS = 64  # validation items the floor is watched on


def fit(
    recipe: Recipe,
    data: TrainingData,
    folder: str | Path,
    *,
    resume: bool = False,
    device: torch.device | str = "cpu",
    progress: Callable[[Progress], object] | None = None,
) -> TrainingResult:
    """Train to the end, or go on from the last checkpoint when `resume` is set."""
    return _Run(recipe, data, Path(folder), torch.device(device), progress).run(resume=resume)


class _Run:
    """One run in progress."""

    def __init__(
        self,
        recipe: Recipe,
        data: TrainingData,
        folder: Path,
        device: torch.device,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        self.recipe, self.data, self.folder, self.device, self.report = recipe, data, folder, device, progress
        self.items = count_items(data.train)
        per_update = recipe.optimizer.batch_size * recipe.optimizer.accumulate
        if self.items < per_update:
            raise ValueError(
                f"expected at least {per_update} training items for one update, got {self.items}"
            )
        self.schedule = Schedule(recipe, self.items // per_update)
        build_kernel_model(recipe, data.facts)  # mistakes in a recipe show before a folder is made
        build_model(recipe, data.facts)
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.best = -math.inf
        self.sums = {"loss": 0.0, "regularizer": 0.0}

    def run(self, *, resume: bool) -> TrainingResult:
        self._open_folder(resume=resume)
        torch.manual_seed(self.recipe.seed)
        self._enter(self.schedule.phase(0))
        if resume:
            self._resume()
        with StopRequest() as stop:
            while self.step < self.schedule.total_steps:
                if self.step == self.schedule.kernel_steps and self.phase == "kernel":
                    self._start_gp()
                self._train_step()
                epoch, within = divmod(self.step, self.schedule.steps_per_epoch)
                if within == 0 and (epoch % self.recipe.checkpoint.every == 0 or epoch == self.recipe.epochs):
                    self._validate(epoch)
                    self._save()
                elif stop.asked:
                    self._save()
                if stop.asked and self.step < self.schedule.total_steps:
                    append_event(self.folder, "stopped", step=self.step, signal=stop.asked)
                    raise TrainingStoppedError(
                        f"stopped by {stop.asked} at step {self.step}; resume to go on"
                    )
        if self.recipe.checkpoint.select == "last":
            self.model.save_pretrained(self.folder / "model")
        append_event(self.folder, "finished", step=self.step)
        chosen = type(self.model).from_pretrained(self.folder / "model")
        return TrainingResult(self.folder, chosen, tuple(self.rows))

    def _open_folder(self, *, resume: bool) -> None:
        described = json.dumps(self.recipe.to_dict(), indent=2) + "\n"
        written = self.folder / "recipe.json"
        if resume:
            if not written.is_file():
                raise CheckpointError(f"nothing to resume in {self.folder}: no recipe.json")
            if written.read_text() != described:
                raise CheckpointError(f"{written} describes another run than the one to resume")
            return
        if written.exists():
            raise FileExistsError(f"{self.folder} holds a run already: resume it, or choose another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(written, described.encode())

    def _enter(self, phase: PhaseName) -> None:
        build = build_kernel_model if phase == "kernel" else build_model
        self.phase: PhaseName = phase
        self.model = build(self.recipe, self.data.facts).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.recipe.optimizer.learning_rate)

    def _start_gp(self) -> None:
        """Phase 2: the model of the recipe, from the weights of phase 1 where it is another one."""
        kernel = self.model
        if not needs_warm_start(self.recipe):
            self.phase = "gp"
            return
        self._enter("gp")
        inputs = take(self.data.train, torch.arange(min(self.items, HEALTH_ITEMS)), self.device)
        report = warm_start(self.model, kernel, inputs=inputs)
        append_event(
            self.folder, "warm start", copied=len(report.copied), initialised=list(report.initialised),
            gap=report.gap,
        )  # fmt: skip

    def _train_step(self) -> None:
        start = time.perf_counter()
        rate, alpha = self.schedule.learning_rate(self.step), self.schedule.alpha(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        self.optimizer.zero_grad()
        parts = [self._backward(items, alpha) for items in self._updates_items()]
        loss = sum(p[0] for p in parts) / len(parts)
        regularizers = [p[1] for p in parts if p[1] is not None]
        regularizer = sum(regularizers) / len(regularizers) if regularizers else None
        if not math.isfinite(loss):
            self._fail(f"the loss is {loss}")
        if self.recipe.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip)
        self.optimizer.step()
        self.step += 1
        self.sums["loss"] += loss
        self.sums["regularizer"] += regularizer or 0.0
        if self.report is not None:
            seconds = max(time.perf_counter() - start, 1e-9)
            count = self.recipe.optimizer.batch_size * self.recipe.optimizer.accumulate
            accuracy = self.rows[-1]["validation_accuracy"] if self.rows else None
            epoch = (self.step - 1) // self.schedule.steps_per_epoch
            self.report(
                Progress(
                    self.step, self.schedule.total_steps, epoch, self.phase, loss, accuracy, alpha,
                    regularizer, count / seconds,
                )
            )  # fmt: skip

    def _updates_items(self) -> list[Tensor]:
        """The batches of this update: a permutation of the items by seed and epoch, cut in order."""
        epoch, within = divmod(self.step, self.schedule.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + epoch)
        order = torch.randperm(self.items, generator=generator)
        size, batches = self.recipe.optimizer.batch_size, self.recipe.optimizer.accumulate
        first = within * batches
        return [order[(first + b) * size : (first + b + 1) * size] for b in range(batches)]

    def _backward(self, items: Tensor, alpha: float) -> tuple[float, float | None]:
        """Loss and regulariser of one batch, its gradient added."""
        inputs = take(self.data.train, items, self.device)
        labels = self.data.train_labels[items].to(self.device)
        drawing = self.phase == "gp" and self.recipe.phases.draw != "none" and self.model.draws
        # keyed to step and item: the same numbers however the batch is cut or spread
        noise = ItemNoise(self.recipe.seed * 1_000_003 + self.step, items, torch.zeros_like(items))
        try:
            out = self.model(
                inputs,
                draw=self.recipe.phases.draw if drawing else "none",
                generator=noise if drawing else None,
                need=("logits", "regularizer") if self.phase == "gp" else ("logits",),
            )
            loss = cross_entropy(out.logits, labels)
            total = loss if out.regularizer is None else loss + alpha * out.regularizer
            (total / self.recipe.optimizer.accumulate).backward()
        except NumericalError as error:
            self._fail(" ".join([str(error), *getattr(error, "__notes__", [])]), cause=error)
        value = None if out.regularizer is None else float(out.regularizer.detach())
        return float(total.detach()), value

    def _fail(self, reason: str, cause: Exception | None = None) -> None:
        counters = {**self._counters(), "reason": reason}
        path = write_checkpoint(
            self.folder / "post-mortem", self.step, pack(self.model, self.optimizer, counters), keep=1
        )
        append_event(self.folder, "failed", step=self.step, reason=reason)
        raise TrainingFailedError(
            f"step {self.step} ({self.phase} phase) of {self.folder}: {reason}. The state is in {path}. "
            "Try a larger noise, a smaller learning rate, clipping, or float64."
        ) from cause

    @torch.no_grad()
    def _validate(self, epoch: int) -> None:
        prediction = self.model.predict(
            self.data.validation, samples=0, batch_size=self.recipe.optimizer.batch_size
        )
        labels = self.data.validation_labels.to(prediction.label.device)
        accuracy = float((prediction.label == labels).double().mean())
        nll = float(nll_loss(prediction.probs.double().clamp_min(1e-12).log(), labels))
        share = self._floor_share() if self.phase == "gp" else None
        steps = self.step - (self.rows[-1]["step"] if self.rows else 0)
        last = self.step - 1
        self.rows.append(
            {
                "epoch": epoch,
                "step": self.step,
                "phase": self.phase,
                "learning_rate": self.schedule.learning_rate(last),
                "alpha": self.schedule.alpha(last),
                "train_loss": self.sums["loss"] / steps,
                "train_regularizer": self.sums["regularizer"] / steps,
                "validation_accuracy": accuracy,
                "validation_nll": nll,
                "floor_share": share,
            }
        )
        self.sums = {"loss": 0.0, "regularizer": 0.0}
        write_metrics(self.folder, self.rows)
        append_event(self.folder, "validated", **self.rows[-1])
        final_phase = self.phase == "gp" or self.recipe.phases.epochs == 0
        if final_phase and accuracy > self.best:
            self.best = accuracy
            if self.recipe.checkpoint.select == "best":
                self.model.save_pretrained(self.folder / "model")

    def _floor_share(self) -> float | None:
        """How near the density of the layers' outputs is to its floor; warns of a collapse."""
        count = min(count_items(self.data.validation), HEALTH_ITEMS)
        health = self.model.health(take(self.data.validation, torch.arange(count), self.device))
        shares = [layer.floor_share for layer in health.layers if layer.floor_share is not None]
        if not shares:
            return None
        if max(shares) > self.recipe.regularizer.floor_warning:
            warnings.warn(
                f"a layer reaches {max(shares):.2f} of its noise floor at step {self.step}: the regulariser "
                "is collapsing the model, lower regularizer.end",
                RuntimeWarning,
                stacklevel=2,
            )
        return max(shares)

    def _counters(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "phase": self.phase,
            "best": None if self.best == -math.inf else self.best,
            "rows": self.rows,
            "sums": self.sums,
        }

    def _save(self) -> None:
        checkpoint = pack(self.model, self.optimizer, self._counters())
        folder = self.folder / "checkpoints"
        write_checkpoint(folder, self.step, checkpoint, keep=self.recipe.checkpoint.keep)

    def _resume(self) -> None:
        found = list_checkpoints(self.folder / "checkpoints")
        if not found:
            append_event(self.folder, "resumed", step=0)
            return
        checkpoint = read_checkpoint(found[-1])
        state = checkpoint.state
        if state["phase"] != self.phase:
            self._enter(state["phase"])
        unpack(checkpoint, self.model, self.optimizer)
        self.step, self.rows, self.sums = state["step"], state["rows"], state["sums"]
        self.best = -math.inf if state["best"] is None else state["best"]
        write_metrics(self.folder, self.rows)
        append_event(self.folder, "resumed", step=self.step)
