"""One optimiser update as a captured CUDA graph: forward, loss, backward and Adam in a single launch.

At these sizes a step is hundreds of small kernels, and starting them one by one takes longer than running
them.  The first steps run eagerly (libraries and optimiser set themselves up there), then one is captured
and all others are replays, with batch, learning rate, alpha and seed copied into the tensors it reads.

A replay cannot raise.  Instead a step whose loss or gradient is not finite sets `broken`, which keeps Adam
from updating (its `found_inf`) in that step and all later ones; `read` finds it, and the trainer runs the
same step eagerly from the untouched weights to see what failed.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, optim

from gpattention import gp
from gpattention.data import Batch
from gpattention.training.engine import CaptureFailedError, StepFailedError, Sums
from gpattention.training.gradients import clip_gradients, is_broken
from gpattention.training.objective import Objective
from gpattention.training.recipe import Recipe
from gpattention.training.schedule import Controls

WARM_UP = 3  # eager steps before the capture


class GraphEngine:
    """Replays of one captured step; for one process, on a CUDA device, with batches of one shape."""

    def __init__(self, fabric: Any, objective: Objective, optimizer: optim.Optimizer, recipe: Recipe) -> None:
        self._objective = fabric.to_device(objective)
        self.optimizer, self._recipe, self._device = optimizer, recipe, fabric.device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_steps = 0
        self._stream = torch.cuda.Stream(self._device)
        self._batches: list[Batch] = []
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
        optimizer.found_inf = self._broken  # type: ignore[attr-defined]  # fused Adam skips its update
        optimizer.grad_scale = None  # type: ignore[attr-defined]

    def step(self, batches: Sequence[Batch], controls: Controls) -> None:
        """Copy what the step reads, then replay it."""
        self._load(batches, controls)
        if self._graph is not None:
            self._graph.replay()
            self._steps += 1
            return
        self._objective.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate  # loading a state may have put a copy in its place
        if self._eager_steps < WARM_UP:
            self._eager_steps += 1
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._run()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        else:
            self._capture()
        self._steps += 1

    def read(self) -> Sums:
        """Wait for the device and take the sums."""
        told = torch.cat([self._values, self._latest, self._broken_at[None].double()]).tolist()
        self._values.zero_()
        sums = Sums(told[0], told[1], self._steps)
        self._steps = 0
        self.last = (told[2], told[3] if self._regularized else None)
        if told[4] >= 0:
            with suppress(gp.NotPositiveDefiniteError):
                gp.check_health()  # it is told here; the counter starts anew
            raise StepFailedError(int(told[4]), "the loss or its gradient is not finite")
        return sums

    def _load(self, batches: Sequence[Batch], controls: Controls) -> None:
        if not self._batches:
            self._batches = [Batch(b.items.clone(), _like(b.inputs), b.labels.clone()) for b in batches]
        for own, new in zip(self._batches, batches, strict=True):
            own.items.copy_(new.items)
            own.labels.copy_(new.labels)
            if isinstance(own.inputs, Tensor):
                own.inputs.copy_(new.inputs)  # type: ignore[arg-type]
            else:
                for name, x in own.inputs.items():
                    x.copy_(new.inputs[name])  # type: ignore[index]
        self._seed.fill_(controls.seed)
        self._number.fill_(controls.step)
        self._alpha.fill_(controls.alpha)
        self._rate.fill_(controls.learning_rate)

    def _capture(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # gradients then live in the graph's own memory
        _free_workspaces()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._run(clear=False)
        except RuntimeError as error:  # an operation that waits for the device, as kinds of others may have
            raise CaptureFailedError(str(error).partition("\n")[0]) from error
        graph.replay()  # capturing ran nothing
        self._graph = graph

    def _run(self, *, clear: bool = True) -> None:
        """The whole update; no call in it waits for the device."""
        if clear:
            self.optimizer.zero_grad(set_to_none=True)
        count, values = len(self._batches), []
        with gp.deferred_checks():
            shares = self._objective.token_shares([batch.inputs for batch in self._batches])
            for batch, share in zip(self._batches, shares, strict=True):
                total, regularizer = self._objective(
                    batch.inputs, batch.labels, batch.items, self._seed, self._alpha, share
                )
                (total if count == 1 else total / count).backward()
                self._regularized = regularizer is not None
                second = self._nothing if regularizer is None else regularizer
                values.append(torch.stack([total.detach(), second.to(total.dtype)]))
        norm = clip_gradients(self._objective.parameters(), self._recipe.optimizer.clip)
        told = values[0] if count == 1 else torch.stack(values).mean(0)
        broken = is_broken(norm, told[0])
        torch.where(broken > self._broken, self._number, self._broken_at, out=self._broken_at)
        torch.maximum(self._broken, broken, out=self._broken)
        self.optimizer.step()
        self._latest.copy_(told)
        self._values.add_(self._latest)


def _like(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.clone()
    return {name: x.clone() for name, x in inputs.items()}


def _free_workspaces() -> None:
    """Let go of what cuBLAS holds for the streams of eager steps, 32 MiB each on a recent GPU.

    The captured step takes a workspace of its own, in the graph's memory.  The call is not public: where it
    is missing, both are held.
    """
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        torch.cuda.synchronize()
        free()
