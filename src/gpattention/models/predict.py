"""How predictions are run: samples times items, cut into chunks that fit the memory.

Row r of n items times S samples is sample r % S of item r // S.  Its noise depends only on the seed, the
sample and the item, so that draws do not depend on how the rows are cut.

The samples of an item differ from the first layer that draws on.  Up to that layer's posterior they are one
computation, so that a chunk of a model that takes `samples` is a few items with all their samples instead of
a list of rows: each item is embedded, and moved to the device, once.  On a GPU nothing is read back before
the end; if starting the kernels of a chunk takes longer than running them, it is captured as a CUDA graph.
"""

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, TypeVar, get_args

import torch
from torch import Tensor

from gpattention.attention import DRAWS, Draw
from gpattention.checks import check_choice, check_count, check_whole
from gpattention.concurrency import evaluation_mode
from gpattention.gp import (
    ItemNoise,
    NotPositiveDefiniteError,
    NumericalError,
    check_health,
    deferred_checks,
    health,
)
from gpattention.graphs import capture, why_no_graph
from gpattention.models.prediction import Prediction
from gpattention.numerics import checked_once, checks_are_deferred

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
Progress: TypeAlias = Callable[[int, int], object]
Variances: TypeAlias = tuple[Tensor | None, ...]  # per layer or site [B, H, N], None where it has none
T = TypeVar("T")
_predicting: ContextVar[bool] = ContextVar("gpattention_predicting", default=False)

FEWER = 256  # rows to try if more do not fit the memory
ROWS = {"cpu": 256, "cuda": 2000}  # by kind of device: a GPU needs many
WORTH = 4  # remaining chunks for which a capture pays off
LAUNCH_BOUND = 0.7  # share of a chunk's time for starting its kernels, from which on it is captured
# modules whose threads do not compute on a GPU: progress bars, loaders that pin memory, notebooks
HELPERS = ("tqdm.", "torch.utils.data.", "ipykernel.", "IPython.", "zmq.", "tornado.")
NO_CAPTURE = "expected capture=None or False for a model that cannot be captured, got True: {}"
Average = Literal["probabilities", "logits"]
AVERAGES: tuple[Average, ...] = get_args(Average)


class LayerAnswer(Protocol):
    """The results of one layer in a pass, such as `LayerOutput`."""

    @property
    def variance(self) -> Tensor | None:
        """[B, H, N] or [B, H, N, D] if variances were asked for and the layer has one, else None."""
        ...


class ClassifierAnswer(Protocol):
    """The result of a pass of a `Classifier`, such as `ModelOutput`."""

    @property
    def logits(self) -> Tensor:
        """[B, C]; [S, B, C] of a model that takes `samples`, for S > 1 of them."""
        ...

    @property
    def layers(self) -> Sequence[LayerAnswer]:
        """One for every layer; may be empty unless `need` names "variance"."""
        ...


class Classifier(Protocol):
    """What `predict` needs of your own model: an `nn.Module` that may draw its attention outputs.

    It is called as `model(inputs, draw=..., generator=..., need=...)` and passes `draw` and `generator` on to
    its attention.  `draw` is "none", "independent" or "joint"; `generator` makes the noise of the items of
    the batch, in their order; `need` is ("logits",) or ("logits", "variance").  If its forward pass also
    takes `samples`, it runs that many draws of every item at once.
    """

    @property
    def draws(self) -> bool:
        """Whether any layer can draw; `draw` is "none" where it is False."""
        ...

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """A forward pass: a `ClassifierAnswer`."""
        ...

    def modules(self) -> Iterator[Any]:
        """As of `nn.Module`: they are put into evaluation mode."""
        ...

    def parameters(self) -> Iterator[Any]:
        """As of `nn.Module`: the first says where the model computes."""
        ...


class FeatureClassifier(Classifier, Protocol):
    """What `signals` needs in addition: logits that are `head(features(inputs))`."""

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """From features [B, E] to logits [B, C]."""
        ...

    def features(self, inputs: Any) -> Tensor:
        """The input of the head, from a pass without draws that calls the model's attention.  [B, E]"""
        ...


# by `hasattr`, as `isinstance` does not see the modules of a module
def is_classifier(model: object) -> TypeGuard[Classifier]:
    """Whether a module has the attributes of a `Classifier`."""
    return all(hasattr(model, name) for name in ("draws", "modules", "parameters"))


def has_features(model: object) -> TypeGuard[FeatureClassifier]:
    """Whether a module has the attributes of a `FeatureClassifier`."""
    return is_classifier(model) and hasattr(model, "features") and hasattr(model, "head")


@dataclass(frozen=True)
class Rows:
    """A chunk of rows, on the model's device."""

    inputs: Inputs  # [R, ...] each
    items: Tensor  # [R] position of each row's item in the inputs, on their device
    numbers: Tensor  # [R] number of the item, by which its noise is made
    samples: Tensor  # [R] number of the sample
    seed: int

    @cached_property
    def noise(self) -> ItemNoise:
        """Of the R rows."""
        return ItemNoise(self.seed, self.numbers, self.samples)


# from rows to the model's answers [R, ...] and, if asked for, the variances of its layers
Answer: TypeAlias = Callable[[Rows], tuple[Tensor, Sequence[Tensor | None]]]


def count_items(inputs: Inputs) -> int:
    """The number of items of the inputs, the first axis of all tensors."""
    counts = {name: len(x) for name, x in _named(inputs).items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"expected inputs with one number of items, got {counts}")
    if 0 in counts.values():
        raise ValueError("expected inputs with at least one item, got 0")
    return next(iter(counts.values()))


def _named(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors by name; `ValueError` for anything but tensors with the items first."""
    if not isinstance(inputs, Tensor) and (not isinstance(inputs, Mapping) or not inputs):
        got = "an empty mapping" if isinstance(inputs, Mapping) else type(inputs).__name__
        raise ValueError(f"expected inputs to be a tensor or a mapping of tensors, got {got}")
    named = {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.ndim == 0:
            found = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"expected {name} to be a tensor with the batch first, got {found}")
        if name.endswith("input_ids") and x.is_floating_point():
            raise ValueError(f"expected {name} to be whole numbers, got {x.dtype}: pass {name}.long()")
    return named


def device_of(inputs: Inputs) -> torch.device:
    """The device of the inputs."""
    return next(iter(_named(inputs).values())).device


def model_device(model: Any, inputs: Inputs) -> torch.device:
    """The device of the model; that of its inputs if it has no parameters, or fetches them when needed."""
    home = device_of(inputs)  # first, as it refuses wrong inputs
    parameter = next(iter(model.parameters()), None)
    return home if parameter is None or parameter.is_meta else parameter.device


def take(inputs: Inputs, items: Tensor | slice, device: torch.device) -> Inputs:
    """The inputs of those items.  [R, ...]"""

    def taken(x: Tensor) -> Tensor:
        return x[items.to(x.device) if isinstance(items, Tensor) else items].to(device)

    return taken(inputs) if isinstance(inputs, Tensor) else {name: taken(x) for name, x in inputs.items()}


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has its own mode again.

    If several threads have such blocks for the same modules, modes are restored when the last one ends.
    """
    token = _predicting.set(True)
    try:
        with evaluation_mode(model.modules()), torch.no_grad():
            yield
    finally:
        _predicting.reset(token)


def is_predicting() -> bool:
    """Whether this thread is inside an `evaluating` block; False for compilers, which cannot ask."""
    return not torch.compiler.is_compiling() and _predicting.get()


@dataclass(frozen=True)
class Arranged:
    """Items in the order in which they run: the longest texts first, so that a chunk has little padding."""

    inputs: Inputs  # [B, ...] each, in this order
    numbers: Tensor  # [B] number of each item, by which its noise is made
    place: Tensor | None = None  # [B] where the caller's items are in this order; None if it is the caller's
    lengths: tuple[int, ...] | None = None  # to which inputs may be cut from each item on; None if to none
    tokens: int = 0  # of the caller's inputs, where they are cut

    def chunk(self, first: int, items: Tensor | slice, device: torch.device) -> Inputs:
        """The inputs of these items, the first of which is number `first`, cut to its length.  [R, ...]"""
        inputs = self.inputs if self.lengths is None else shorten(self.inputs, self.lengths[first])
        return take(inputs, items, device)

    def restored(self, x: Tensor, axis: int = 0) -> Tensor:
        """The caller's order of the items along an axis."""
        return x if self.place is None else x.index_select(axis, self.place.to(x.device))

    def restored_variances(self, variances: Variances) -> Variances:
        """Variances [B, H, N] or [B, H, N, D] of the caller's items and tokens, 0 at padding."""
        if self.place is None:
            return variances
        return tuple(x if x is None else self._padded(self.restored(x)) for x in variances)

    def _padded(self, x: Tensor) -> Tensor:
        whole = x.new_zeros(*x.shape[:2], self.tokens, *x.shape[3:])
        whole[:, :, : x.shape[2]] = x
        return whole


LENGTHS = 64  # texts are cut to multiples of this many tokens: few shapes, which a captured graph needs


def cut_lengths(lengths: Tensor, inputs: Inputs) -> Tensor:
    """The numbers of tokens to which texts of these lengths may be cut.  [B]"""
    whole = next(iter(_named(inputs).values())).shape[1]
    return (-(lengths.clamp_min(1) // -LENGTHS) * LENGTHS).clamp_max(whole)


def shorten(inputs: Inputs, tokens: int) -> Inputs:
    """The first tokens of every item.  [B, tokens, ...]"""
    if isinstance(inputs, Tensor):
        return inputs[:, :tokens]
    return {name: x[:, :tokens] for name, x in inputs.items()}


def arrange(model: Any, inputs: Inputs, first_item: int = 0) -> Arranged:
    """The longest texts first, for models that say how long each is; else the items as they are.

    `first_item` is the number of the first item, for callers that pass the items in parts.
    """
    first_item = check_count("first_item", first_item, least=0)
    numbers = torch.arange(count_items(inputs), device=device_of(inputs)) + first_item
    lengths = model.text_lengths(inputs) if hasattr(model, "text_lengths") else None
    if lengths is None:
        return Arranged(inputs, numbers)
    whole = next(iter(_named(inputs).values())).shape[1]
    ordered, order = cut_lengths(lengths, inputs).sort(descending=True, stable=True)
    if int(ordered[-1]) == whole:
        return Arranged(inputs, numbers)
    arranged = take(inputs, order, device_of(inputs))
    return Arranged(arranged, numbers[order], order.argsort(), tuple(ordered.tolist()), whole)


def iterate_rows(
    inputs: Inputs | Arranged, *, samples: int, seed: int, batch_size: int, device: torch.device,
    first_item: int = 0, progress: Progress | None = None,
) -> Iterator[Rows]:  # fmt: skip
    """All rows in chunks of at most `batch_size`, moved to `device`.

    `first_item` is the number of the first item, for callers that pass the items in parts and have not
    arranged them; `progress(done, total)` is called after every chunk with numbers of rows.
    """
    given = inputs if isinstance(inputs, Arranged) else arrange(None, inputs, first_item)
    total = len(given.numbers) * samples
    for start in range(0, total, batch_size):
        # item by item, so that the samples of an item are neighbours
        row = torch.arange(start, min(start + batch_size, total), device=given.numbers.device)  # [R]
        items = row // samples  # [R]
        numbers, sample = given.numbers[items].to(device), (row % samples).to(device)  # [R], [R]
        yield Rows(given.chunk(start // samples, items, device), items, numbers, sample, seed)
        if progress is not None:
            progress(min(start + batch_size, total), total)


def run_rows(
    run: Callable[[int], T],
    batch_size: int | None,
    device: torch.device,
    results: Callable[[T], Iterable[Tensor | None]] | None = None,
) -> T:
    """`run(rows)` with the given number of rows, else with that of the device, and fewer if memory is short.

    `run` may be called several times, and must start again with every call.  Failures are looked for in the
    `results` alone where these are named, as in `checked_once`.
    """
    if results is not None:
        unchecked = run

        def run(rows: int) -> T:
            return checked_once(partial(unchecked, rows), device, results)

    if batch_size is not None:
        return run(check_count("batch_size", batch_size, least=1))
    rows = ROWS.get(device.type, FEWER)
    while rows > 1:
        with suppress(torch.OutOfMemoryError):
            return run(rows)
        # outside of the handler, whose error keeps the tensors of the failed run
        torch.cuda.empty_cache()
        rows = FEWER if rows > FEWER else rows // 2
    return run(rows)


def run_samples(
    model: Any, answer: Answer, inputs: Inputs, *, samples: int, batch_size: int | None = None, **options: Any
) -> tuple[Tensor, Variances]:
    """All rows of `iterate_rows` in evaluation mode, as many at once as fit the device.

    Answers [S, B, ...], and variances averaged over the samples, on the device of the inputs.
    """
    device, home = model_device(model, inputs), device_of(inputs)
    given = arrange(model, inputs, options.pop("first_item", 0))

    def run(most: int) -> tuple[Tensor, Variances]:
        parts, means = [], VarianceMeans(len(given.numbers), samples, home)
        for rows in iterate_rows(given, samples=samples, batch_size=most, device=device, **options):
            out, variances = answer(rows)  # [R, ...]
            if out.ndim < 2 or len(out) != len(rows.items):
                wanted, got = f"[{len(rows.items)}, ...], one row per input", f"shape {tuple(out.shape)}"
                raise ValueError(f"expected the model to give {wanted}, got {got}")
            parts.append(out.to(home))
            means.add(rows.items, variances)
        answers = given.restored(torch.cat(parts).unflatten(0, (-1, samples)))  # [B, S, ...]
        return answers.transpose(0, 1).contiguous(), given.restored_variances(means.means())

    with evaluating(model):
        return run_rows(run, batch_size, device, lambda found: (found[0], *found[1]))


def predict_rows(model: Any, forward: Callable[[Rows], Tensor], inputs: Inputs, **options: Any) -> Tensor:
    """`run_samples` without variances.  [S, B, C]"""
    return run_samples(model, lambda rows: (forward(rows), ()), inputs, **options)[0]


class VarianceMeans:
    """Means of the variances of every layer over the samples of each item, accumulated on `device`."""

    def __init__(self, items: int, samples: int, device: torch.device) -> None:
        self._items, self._samples, self._device = items, samples, device
        self._sums: list[Tensor | None] = []

    def add(self, items: Tensor, variances: Sequence[Tensor | None]) -> None:
        """Add rows [R, ...] of every layer, None without a variance, which belong to these items.

        Tokens are the third axis, and the first call has most of them.
        """
        self._sums = self._sums or [None] * len(variances)
        for place, (total, variance) in enumerate(zip(self._sums, variances, strict=True)):
            if variance is None:
                continue
            if len(variance) != len(items):
                got = f"shape {tuple(variance.shape)}: are batches the first axis of the inputs?"
                raise ValueError(f"expected the variances of {len(items)} rows, got {got}")
            # a sum of 300 ones is 256 in bfloat16
            variance = variance.to(self._device, torch.promote_types(variance.dtype, torch.float32))
            if total is None:
                total = self._sums[place] = variance.new_zeros(self._items, *variance.shape[1:])
            # later texts are shorter
            here = total if variance.ndim < 3 else total[:, :, : variance.shape[2]]
            here.index_add_(0, items, variance)

    def means(self) -> Variances:
        """[B, ...] for each layer, None without variances."""
        return tuple(total if total is None else total / self._samples for total in self._sums)


def predict(
    model: Classifier, inputs: Inputs, *, samples: int = 10, seed: int = 0, draw: Draw = "independent",
    batch_size: int | None = None, variances: bool = False, first_item: int = 0, capture: bool | None = None,
    progress: Progress | None = None, average: Average = "probabilities",
) -> Prediction:  # fmt: skip
    """Class probabilities from `samples` forward passes with drawn attention outputs.

    Items and samples run together in batches, in evaluation mode and without gradients; only logits and, if
    asked for, variances are kept, on the device of the inputs.  The draws of item i depend only on `seed` and
    `first_item` + i: not on `batch_size`, other items, or padding.  The first draws of a larger number are
    those of a smaller number.

    If the model's forward pass takes `samples`, as our transformers' does, everything before the first draw
    is computed once for all samples of an item.

    Args:
        model: a classifier; if its layers cannot draw, it gives its mean prediction.
        inputs: a tensor, or a mapping of tensors, with the items first.
        samples: number S of draws of every item; 0 is the mean prediction, with S = 1.
        seed: of the noise.
        draw: "independent" or "joint" over tokens; "none" is the mean prediction.
        batch_size: most rows that run at once; 256, or 2000 on a GPU with enough memory, if not given.
        variances: whether to keep the variance of every layer, averaged over the draws.
        first_item: number of the first item, for callers that pass the items in parts.
        capture: whether to replay batches from a CUDA graph on a GPU, for models that take `samples`.  None
            does so if starting kernels takes most of the time and the process has no other threads than
            those of progress bars, loaders and notebooks: PyTorch cannot capture while another one uses the
            GPU.  True fails with the reason if nothing can be captured.  The first two batches are never
            replays.
        progress: called with (done, total) rows after every batch.
        average: what to average over the draws.  "logits", used by the authors of some methods, is more
            certain where draws disagree, and leaves one sample, without disagreement.

    Returns:
        Probabilities, labels and uncertainty of all items.

    Raises:
        ValueError: numbers or inputs are wrong, or variances are asked of a model that has none.

    >>> predict(model, images, samples=10).probs  # [B, C]
    """
    samples = check_count("samples", samples, least=0)
    seed, first_item = check_whole("seed", seed), check_count("first_item", first_item, least=0)
    check_choice("draw", draw, DRAWS)
    check_choice("average", average, AVERAGES)
    drawn = samples > 0 and draw != "none" and model.draws
    count = samples if drawn else 1
    draw, need = draw if drawn else "none", ("logits", "variance") if variances else ("logits",)
    device = model_device(model, inputs)

    def answer(rows: Rows) -> tuple[Tensor, Sequence[Tensor | None]]:
        output = model(rows.inputs, draw=draw, generator=rows.noise if drawn else None, need=need)
        return output.logits, [layer.variance for layer in output.layers] if variances else ()

    if not shares_samples(model):
        if capture:
            raise ValueError(NO_CAPTURE.format("its forward pass does not take samples"))
        rows: dict[str, Any] = {"samples": count, "seed": seed, "first_item": first_item}
        logits, means = run_samples(model, answer, inputs, batch_size=batch_size, progress=progress, **rows)
    else:
        given = arrange(model, inputs, first_item)
        chunks = partial(Chunks, model, given, device, count, seed, draw, need, capture)
        with evaluating(model):  # each number of rows has new chunks
            logits, means = run_rows(lambda rows: chunks().run(rows, progress), batch_size, device)
    if variances and all(variance is None for variance in means):
        raise ValueError(f"variances=True, but none of the model's {len(means)} layers has a variance")
    logits = logits.mean(0, keepdim=True) if average == "logits" else logits  # [1 or S, B, C]
    return Prediction.from_logits(logits, means if variances else None, drawn=drawn)


def shares_samples(model: Any) -> bool:
    """Whether a model's forward pass takes `samples`, as our transformers' does."""
    return "samples" in inspect.signature(getattr(model, "forward", model)).parameters


Chunk: TypeAlias = tuple[range, range]  # some items, and some of their samples
# logits [S, I, C] of a chunk, and per layer its variances [I, ...] summed over the samples
ChunkOutput: TypeAlias = tuple[Tensor, list[Tensor | None]]


def cut(items: int, samples: int, batch_size: int) -> list[Chunk]:
    """Chunks of at most `batch_size` rows, which keep the samples of an item together if they fit."""
    wide, deep = max(batch_size // samples, 1), min(samples, batch_size)
    return [
        (range(start, min(start + wide, items)), range(first, min(first + deep, samples)))
        for start in range(0, items, wide)
        for first in range(0, samples, deep)
    ]


class SharedNoise:
    """The noise of `ItemNoise` for samples times items, sample by sample, in the shape of a layer.

    The first layer that draws asks for [S, I, ...], those above it for [1, S * I, ...].
    """

    def __init__(self, seed: int, numbers: Tensor, samples: Tensor) -> None:
        rows = samples[:, None].expand(-1, len(numbers)).reshape(-1)  # [S * I]
        self._rows = ItemNoise(seed, numbers.expand(len(samples), -1).reshape(-1), rows)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal numbers."""
        draws, batch, *rest = shape
        return self._rows.normal((1, draws * batch, *rest), dtype, device).reshape(shape)


@dataclass(eq=False)
class Chunks:
    """Runs a model that takes `samples` chunk by chunk, by calls or as replays of a CUDA graph.

    The model must be in evaluation mode, and gradients off.
    """

    model: Any
    given: Arranged
    device: torch.device
    samples: int
    seed: int
    draw: str  # "none" where nothing is drawn
    need: tuple[str, ...]
    capture: bool | None
    full_rows: int | None = None  # rows of the chunks that may be captured; None if none may
    _graph: Any = None
    _read: Any = None  # read by replays: inputs, numbers of items, numbers of samples
    _given: Any = None  # written by replays: a `ChunkOutput`
    _runs: int = 0

    def run(self, batch_size: int, progress: Progress | None) -> tuple[Tensor, Variances]:
        """Logits [S, B, C] of all samples, and each layer's variances [B, ...] averaged over them."""
        count, home = len(self.given.numbers), self.given.numbers.device
        chunks = cut(count, self.samples, batch_size)
        refusal = why_not_captured(self.model, self.device)
        if self.capture and refusal is not None:
            raise ValueError(NO_CAPTURE.format(refusal))
        if refusal is None and (_is_alone() if self.capture is None else self.capture):
            self.full_rows = max(len(items) * len(samples) for items, samples in chunks)
        # checks take no time on a CPU, which can report at once which matrix failed
        deferred = _defers_checks(self.device)
        counted = sum(health().values()) if deferred else 0
        logits, means, done = torch.empty(0), VarianceMeans(count, self.samples, self.device), 0
        with deferred_checks() if deferred else nullcontext():
            for index, (items, samples) in enumerate(chunks):
                given, sums = self._run(items, samples, left=len(chunks) - index)
                if index == 0:
                    logits = given.new_empty(self.samples, count, given.shape[-1])
                # the last chunk may fill a replay only in part
                logits[samples.start : samples.stop, items.start : items.stop] = given[:, : len(items)]
                places = torch.arange(items.start, items.stop, device=self.device)
                means.add(places, [x if x is None else x[: len(items)] for x in sums])
                done += len(items) * len(samples)
                if progress is not None:
                    progress(done, count * self.samples)
        if deferred:
            self._explain_failure(chunks, logits, clear=counted == 0)
        means_of_all = self.given.restored_variances(means.means())
        logits = self.given.restored(logits, axis=1)
        return logits.to(home), tuple(x if x is None else x.to(home) for x in means_of_all)

    def _run(self, items: range, samples: range, left: int) -> ChunkOutput:
        """Run one chunk; `left` chunks remain, with this one."""
        given = self._arguments(items, samples)
        if self._graph is not None and self._fits(given[0], samples):
            return self._replay(*given)
        full = len(items) * len(samples) == self.full_rows
        self._runs += full
        # the first call initialises libraries, so that the second one is timed
        if not full or self._runs != 2 or not (self.capture or left > WORTH):
            return self._forward(*given)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        found = self._forward(*given)
        launched = time.perf_counter()
        torch.cuda.synchronize(self.device)
        if self.capture or launched - start > LAUNCH_BOUND * (time.perf_counter() - start):
            self._capture(*given)
        return found

    def _fits(self, inputs: Inputs, samples: range) -> bool:
        """Whether the graph is of as many samples, which sums are over, and as many tokens."""
        own = _named(self._read[0])
        return len(samples) == len(self._read[2]) and all(
            own[name].shape[1:] == x.shape[1:] for name, x in _named(inputs).items()
        )

    def _capture(self, inputs: Inputs, numbers: Tensor, samples: Tensor) -> None:
        """Capture a chunk; a model that waits for the device runs eagerly, unless `capture` is True."""
        own = inputs.clone() if isinstance(inputs, Tensor) else {n: x.clone() for n, x in inputs.items()}
        self._read = (own, numbers, samples)
        try:
            # other threads, such as one that pins memory for a loader, may go on
            self._graph, self._given = capture(lambda: self._forward(*self._read), error_mode="thread_local")
        except (torch.OutOfMemoryError, NumericalError):  # eager calls would fail too
            raise
        except RuntimeError as error:
            if self.capture:
                raise RuntimeError(NO_CAPTURE.format(str(error).partition("\n")[0])) from error
            self.full_rows = None

    def _replay(self, inputs: Inputs, numbers: Tensor, samples: Tensor) -> ChunkOutput:
        """Replay a chunk of the same number of samples, and no more items."""
        own = _named(self._read[0])
        for name, x in _named(inputs).items():
            own[name][: len(x)].copy_(x)
        self._read[1][: len(numbers)].copy_(numbers)
        self._read[2].copy_(samples)
        self._graph.replay()
        given: ChunkOutput = self._given
        return given

    def _arguments(self, items: range, samples: range) -> tuple[Inputs, Tensor, Tensor]:
        some = slice(items.start, items.stop)
        which = torch.arange(samples.start, samples.stop, device=self.device)
        inputs = self.given.chunk(items.start, some, self.device)
        return inputs, self.given.numbers[some].to(self.device), which

    def _forward(self, inputs: Inputs, numbers: Tensor, samples: Tensor) -> ChunkOutput:
        count, drawing = len(samples), {}
        if self.draw != "none":
            noise = SharedNoise(self.seed, numbers, samples)
            drawing = {"draw": self.draw, "samples": count, "generator": noise}
        out = self.model(inputs, need=self.need, **drawing)
        layers = out.layers if "variance" in self.need else ()
        sums = [_summed(layer.variance, len(numbers), count) for layer in layers]
        return out.logits if count > 1 else out.logits[None], sums

    def _explain_failure(self, chunks: list[Chunk], logits: Tensor, *, clear: bool) -> None:
        """If logits are not finite, run their chunk again with checks, which report what failed and where."""
        fine = logits.isfinite().all(-1)  # [S, B]
        if bool(fine.all()):
            return
        if clear:  # reset the counter, as the failure is reported below
            with suppress(NotPositiveDefiniteError):
                check_health()
        for items, samples in chunks:
            if not bool(fine[samples.start : samples.stop, items.start : items.stop].all()):
                self._forward(*self._arguments(items, samples))
                return


def _summed(variance: Tensor | None, items: int, samples: int) -> Tensor | None:
    """The sum over samples, which may share one variance.  [I, ...]"""
    if variance is None:
        return None
    variance = variance.to(torch.promote_types(variance.dtype, torch.float32))
    if len(variance) == items:
        return samples * variance
    return variance.unflatten(0, (samples, items)).sum(0)


def why_not_captured(model: Any, device: torch.device) -> str | None:
    """Why replays would differ from calls; None if they would not."""
    reason = why_no_graph(device)
    if reason is not None:
        return reason
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on, which keeps its own copies of weights"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has forward hooks, which a replay does not call"
    return None


def _is_alone() -> bool:
    """Whether no other thread may use the GPU.

    That would abort a capture, and drawing random numbers there would fail meanwhile.
    """
    own = threading.current_thread()
    return all(_made_by(thread).startswith(HELPERS) for thread in threading.enumerate() if thread is not own)


def _made_by(thread: threading.Thread) -> str:
    """The module of the function that a thread runs."""
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", None) or type(thread).__module__)


def _defers_checks(device: torch.device) -> bool:
    return device.type == "cuda" and not checks_are_deferred()
