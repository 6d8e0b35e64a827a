"""Draws of a transformer's predictions, chunk by chunk of items that share all before the first draw.

The samples of an item part at the first layer that draws.  Up to that layer's posterior they are one
computation, so a chunk is a few items with all their samples and not a list of rows: each item is embedded,
and moved to the device, once.  Its noise is that of `ItemNoise` row by row: no way of cutting changes a draw.

On a GPU nothing is read back before the end; where a chunk's kernels take less time than starting them, the
chunk is captured as a CUDA graph and replayed.
"""

import inspect
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpattention.checks import check_count
from gpattention.gp import (
    ItemNoise,
    NotPositiveDefiniteError,
    NumericalError,
    check_health,
    deferred_checks,
    health,
)
from gpattention.gp.precision import checks_are_deferred
from gpattention.models.chunk_graph import ChunkGraph, why_not_captured
from gpattention.models.rows import Inputs, Progress, count_items, device_of

WORTH = 4  # chunks still to run for which a capture pays
LAUNCH_BOUND = 0.7  # share of a chunk's time that went into starting its kernels
# whose threads never compute on a GPU: progress bars, loaders that pin memory, notebooks
HELPERS = ("tqdm.", "torch.utils.data.", "ipykernel.", "IPython.", "zmq.", "tornado.")
NO_CAPTURE = "expected capture=None or False for a model that cannot be captured, got True: {}"


@dataclass(frozen=True)
class Request:
    """What is asked of the model for every chunk."""

    samples: int
    seed: int
    draw: str  # "none" where nothing is drawn
    need: tuple[str, ...]
    first_item: int = 0  # number of the first item, which keys its noise


@dataclass(frozen=True)
class Chunk:
    """Some items, and some of their samples."""

    items: slice
    samples: slice

    @property
    def rows(self) -> int:
        """Items times samples."""
        return self.width * self.depth

    @property
    def width(self) -> int:
        """How many items."""
        return self.items.stop - self.items.start

    @property
    def depth(self) -> int:
        """How many samples of each."""
        return self.samples.stop - self.samples.start


@dataclass(frozen=True)
class Told:
    """What a chunk of I items and S samples gives."""

    logits: Tensor  # [S, I, C]
    variances: tuple[Tensor | None, ...]  # per layer [I, ...], summed over the samples


class SharedNoise:
    """The noise of `ItemNoise` for samples times items, sample by sample, however a layer asks for it.

    The layer at which the samples part asks for [S, I, ...], those above it for [1, S * I, ...].
    """

    def __init__(self, seed: int, numbers: Tensor, samples: Tensor) -> None:
        rows = samples[:, None].expand(-1, len(numbers)).reshape(-1)  # [S * I]
        self._rows = ItemNoise(seed, numbers.expand(len(samples), -1).reshape(-1), rows)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal numbers."""
        draws, batch, *rest = shape
        return self._rows.normal((1, draws * batch, *rest), dtype, device).reshape(shape)


def shares_samples(model: Any) -> bool:
    """Whether a model's forward pass takes `samples`, as the transformers' does."""
    return "samples" in inspect.signature(getattr(model, "forward", model)).parameters


def cut(items: int, samples: int, batch_size: int) -> Iterator[Chunk]:
    """Chunks of at most `batch_size` rows; an item's samples are parted only where they do not fit."""
    wide = max(batch_size // samples, 1)
    deep = min(samples, batch_size)
    for start in range(0, items, wide):
        for first in range(0, samples, deep):
            yield Chunk(
                slice(start, min(start + wide, items)), slice(first, min(first + deep, samples))
            )  # fmt: skip


def run_chunks(
    model: Any,
    inputs: Inputs,
    request: Request,
    *,
    batch_size: int,
    device: torch.device,
    capture: bool | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Logits [S, B, C] of all samples, and each layer's variances [B, ...] summed over them.

    The model is in evaluation mode and gradients are off.  `capture` says whether to replay chunks as a CUDA
    graph, those after the second, and fails where that is impossible; None leaves it to a measurement of the
    second chunk, and to whether another thread may use the GPU.
    """
    batch_size = check_count("batch_size", batch_size, least=1)
    request = replace(request, first_item=check_count("first_item", request.first_item, least=0))
    items = count_items(inputs)
    chunks = list(cut(items, request.samples, batch_size))
    full = max(chunk.rows for chunk in chunks)
    refusal = why_not_captured(model, device)
    if capture and refusal is not None:
        raise ValueError(NO_CAPTURE.format(refusal))
    capturing = refusal is None and (_is_alone() if capture is None else capture)
    runner = _Runner(model, inputs, request, device, full_rows=full if capturing else None)
    result = _Result(items, request.samples, device)
    own_checks = _defers_checks(device)
    counted = sum(health().values()) if own_checks else 0
    done = 0
    with deferred_checks() if own_checks else nullcontext():
        for index, chunk in enumerate(chunks):
            left = len(chunks) - index
            result.put(chunk, runner.run(chunk, left, forced=bool(capture)))
            done += chunk.rows
            if progress is not None:
                progress(done, items * request.samples)
    if own_checks:
        _explain_failure(runner, chunks, result, clear=counted == 0)
    return result.moved(device_of(inputs))


class _Runner:
    """Runs chunks: as plain calls, or as replays of one that was captured."""

    def __init__(
        self,
        model: Any,
        inputs: Inputs,
        request: Request,
        device: torch.device,
        *,
        full_rows: int | None,  # of the chunks that may be captured; None where none may
    ) -> None:
        self._model, self._inputs, self._request, self._device = model, inputs, request, device
        self._full_rows = full_rows
        self._graph: ChunkGraph[Told] | None = None
        self._depth = 0  # samples of the captured chunk
        self._runs = 0

    def run(self, chunk: Chunk, left: int, *, forced: bool = False) -> Told:
        """One chunk, where `left` are still to run with it."""
        if self._graph is not None and chunk.depth == self._depth:  # sums over samples hold all of them
            return self._graph.replay(*self._arguments(chunk))
        if chunk.rows != self._full_rows:
            return self.eagerly(chunk)
        self._runs += 1
        if self._runs == 2 and (forced or left > WORTH):  # the first set libraries up
            return self._measured(chunk, forced=forced)
        return self.eagerly(chunk)

    def eagerly(self, chunk: Chunk) -> Told:
        """Plain calls."""
        return self._forward(*self._arguments(chunk))

    def _measured(self, chunk: Chunk, *, forced: bool) -> Told:
        """Run a chunk; capture those after it if starting its kernels took most of the time."""
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        told = self.eagerly(chunk)
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        bound = launched - start > LAUNCH_BOUND * (time.perf_counter() - start)
        if forced or bound:
            self._capture(chunk, forced=forced)
        return told

    def _capture(self, chunk: Chunk, *, forced: bool) -> None:
        """Unless it is forced, a model with an operation that waits for the device runs eagerly."""
        try:
            self._graph = ChunkGraph(self._forward, *self._arguments(chunk))
            self._depth = chunk.depth
        except (torch.OutOfMemoryError, NumericalError):  # fewer rows may help, or nothing: not plain calls
            raise
        except RuntimeError as error:
            if forced:
                raise RuntimeError(NO_CAPTURE.format(str(error).partition("\n")[0])) from error
            self._full_rows = None

    def _arguments(self, chunk: Chunk) -> tuple[Inputs, Tensor, Tensor]:
        request = self._request
        first = request.first_item
        numbers = torch.arange(chunk.items.start + first, chunk.items.stop + first, device=self._device)
        samples = torch.arange(chunk.samples.start, chunk.samples.stop, device=self._device)
        return _part(self._inputs, chunk.items, self._device), numbers, samples

    def _forward(self, inputs: Inputs, numbers: Tensor, samples: Tensor) -> Told:
        request, count = self._request, len(samples)
        if request.draw == "none":
            out = self._model(inputs, need=request.need)
        else:
            noise = SharedNoise(request.seed, numbers, samples)
            out = self._model(
                inputs, draw=request.draw, samples=count, generator=noise, need=request.need
            )  # fmt: skip
        logits = out.logits if count > 1 else out.logits[None]
        told = (layer.variance for layer in out.layers) if "variance" in request.need else ()
        return Told(logits, tuple(_summed(variance, len(numbers), count) for variance in told))


class _Result:
    """All samples of all items, filled chunk by chunk on the device."""

    def __init__(self, items: int, samples: int, device: torch.device) -> None:
        self._items, self._samples, self._device = items, samples, device
        self.logits: Tensor | None = None  # [S, B, C]
        self._sums: list[Tensor | None] = []

    def put(self, chunk: Chunk, told: Told) -> None:
        if self.logits is None:
            self.logits = told.logits.new_empty(self._samples, self._items, told.logits.shape[-1])
            self._sums = [self._zeros(variance) for variance in told.variances]
        self.logits[chunk.samples, chunk.items] = told.logits[:, : chunk.width]
        for total, variance in zip(self._sums, told.variances, strict=True):
            if total is not None and variance is not None:
                total[chunk.items] += variance[: chunk.width]

    def moved(self, device: torch.device) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        assert self.logits is not None
        return self.logits.to(device), tuple(x if x is None else x.to(device) for x in self._sums)

    def _zeros(self, like: Tensor | None) -> Tensor | None:
        return None if like is None else like.new_zeros(self._items, *like.shape[1:])


def _is_alone() -> bool:
    """Whether no other thread may use the GPU.

    It would break off a capture, and random numbers that it drew meanwhile would fail.
    """
    own = threading.current_thread()
    return all(_made_by(thread).startswith(HELPERS) for thread in threading.enumerate() if thread is not own)


def _made_by(thread: threading.Thread) -> str:
    """The module of what it runs."""
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", None) or type(thread).__module__)


def _defers_checks(device: torch.device) -> bool:
    """A CPU reads its results for nothing, and can say at once which matrix failed."""
    return device.type == "cuda" and not checks_are_deferred()


def _explain_failure(runner: _Runner, chunks: list[Chunk], result: _Result, *, clear: bool) -> None:
    """Where logits are not finite, run their chunk again with checks, which say what failed and where."""
    assert result.logits is not None
    fine = result.logits.isfinite().all(-1)  # [S, B]
    if bool(fine.all()):
        return
    if clear:  # it is told below; the counter starts anew
        with suppress(NotPositiveDefiniteError):
            check_health()
    bad = next(chunk for chunk in chunks if not bool(fine[chunk.samples, chunk.items].all()))
    runner.eagerly(bad)


def _summed(variance: Tensor | None, items: int, samples: int) -> Tensor | None:
    """Over the samples; before they part there is one for all.  [I, ...]"""
    if variance is None:
        return None
    variance = variance.to(torch.promote_types(variance.dtype, torch.float32))
    if len(variance) == items:
        return samples * variance
    return variance.unflatten(0, (samples, items)).sum(0)


def _part(inputs: Inputs, items: slice, device: torch.device) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[items].to(device)
    return {name: x[items].to(device) for name, x in inputs.items()}
