"""Seconds and memory of a training step and of a prediction, on either kind of device."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpattention.attention.output import Draw
from gpattention.gp import ItemNoise
from gpattention.models.prediction import predict
from gpattention.models.rows import Inputs, count_items

MEBIBYTE = 1 << 20
REGULARIZER = 0.01  # its weight; any but 0 costs the same


@dataclass(frozen=True)
class Cost:
    """Of one size of model."""

    step_seconds: float  # of one update with all items
    predict_seconds: float  # of predicting all items
    train_peak_mib: float  # everything that training holds at once: weights, gradients, optimiser, step
    predict_peak_mib: float  # everything that predicting holds at once


def measure_cost(
    build: Callable[[], Any],  # a model on its device
    inputs: Inputs,
    labels: Tensor,
    *,
    samples: int,
    draw: Draw = "independent",
    steps: int = 3,
) -> Cost:
    """Median times of `steps` steps and predictions after one that does not count."""
    device = labels.device
    model = build()
    stepping = _median_seconds(_Trainer(model, inputs, labels, draw), steps, device)
    predicting = _median_seconds(lambda: _predict(model, inputs, samples, draw), steps, device)

    def train() -> None:
        again = _Trainer(build(), inputs, labels, draw)
        again()  # the optimiser's tensors come with the first step
        again()

    return Cost(
        stepping,
        predicting,
        peak_memory(train, device) / MEBIBYTE,
        peak_memory(lambda: _predict(build(), inputs, samples, draw), device) / MEBIBYTE,
    )


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes of the tensors that `work` holds at its fullest, beside those that were there before.

    On a GPU the allocator tells.  On a CPU every tensor that an operation returns is counted while it lives,
    not what operations use inside.
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


class _Trainer:
    """One update a call, as training makes it."""

    def __init__(self, model: Any, inputs: Inputs, labels: Tensor, draw: Draw) -> None:
        self.model, self.inputs, self.labels = model, inputs, labels
        self.draw: Draw = draw if model.draws else "none"
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
        self.items = torch.arange(count_items(inputs), device=labels.device)

    def __call__(self) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        noise = ItemNoise(0, self.items, torch.zeros_like(self.items))
        out = self.model(
            self.inputs,
            draw=self.draw,
            generator=None if self.draw == "none" else noise,
            need=("logits", "regularizer"),
        )
        loss = cross_entropy(out.logits, self.labels)
        if out.regularizer is not None:
            loss = loss + REGULARIZER * out.regularizer
        loss.backward()
        self.optimizer.step()


def _predict(model: Any, inputs: Inputs, samples: int, draw: Draw) -> None:
    predict(model, inputs, samples=samples, draw=draw)


def _median_seconds(work: Callable[[], object], steps: int, device: torch.device) -> float:
    work()
    spent = []
    for _ in range(steps):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        spent.append(time.perf_counter() - start)
    return median(spent)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _LivingTensors(TorchDispatchMode):
    """Counts the bytes of storages from the operation that returns them until nobody holds them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._sizes: dict[int, int] = {}
        self._over = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for old in tree_leaves((args, kwargs)):  # what was there before is not this work's
            if isinstance(old, Tensor):
                self._sizes.setdefault(old.untyped_storage()._cdata, 0)
        out = func(*args, **(kwargs or {}))
        for new in tree_leaves(out):
            if isinstance(new, Tensor):
                self._see(new.untyped_storage())
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key, 0)
        if not self._over:
            self._now -= size
