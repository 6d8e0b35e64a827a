"""Samples of an item are one computation up to the first call of attention that draws.

The first pass over some items keeps what was computed before that call: the results of the outermost modules
that hold no attention which draws.  Passes with further samples take those, row for row, in place of calling
the modules, so that what the host does between its modules runs as ever.  A result is taken only where each
of its tensors has one axis of items, which a pass with another number of items shows; where a module changed
what it was given, or somebody changed its result afterwards, it is called again, as in a full pass.

Standard deviations may be kept as well: those of the first call, which are the same for all samples, or
those of every call of a pass without draws (`variance_from="mean"`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gpattention.checks import check_count
from gpattention.concurrency import Handler, handler_of, handling
from gpattention.hosts.families.base import Context
from gpattention.models.predict import (
    Inputs,
    Progress,
    Rows,
    VarianceMeans,
    Variances,
    count_items,
    device_of,
    evaluating,
    model_device,
    run_rows,
    take,
)

VarianceFrom: TypeAlias = Literal["draws", "mean"]
VARIANCES_FROM: tuple[VarianceFrom, ...] = ("draws", "mean")
# numbers of the tokens of a batch: on a CPU what is larger leaves its cache, and takes up to a sixth longer
CACHED = 2**20
FIRST = 8  # items of the first pass on a CPU, which shows how large they are
# per call of a module, one for each tensor of its result: the axis of the items, None where there is none;
# None for all where the result is none of items
Axes: TypeAlias = dict[tuple[nn.Module, int], tuple[int | None, ...] | None]


class _Enough(BaseException):
    """Nothing more of a pass is wanted."""


class _NoTensorsError(Exception):
    """A result whose tensors cannot be told."""


def map_tensors(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    """The same with its tensors changed: tuples, lists, dictionaries and dataclasses of such."""
    if isinstance(x, Tensor):
        return change(x)
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if is_dataclass(x) and not isinstance(x, type):  # results of transformers are dictionaries as well
        return replace(x, **{f.name: map_tensors(change, getattr(x, f.name)) for f in fields(x)})
    if type(x) is dict:
        return {name: map_tensors(change, value) for name, value in x.items()}
    if type(x) in (tuple, list):
        return type(x)(map_tensors(change, each) for each in x)
    raise _NoTensorsError


def tensors_of(x: Any) -> list[Tensor]:
    """All of them; of what `map_tensors` does not know none."""
    found: list[Tensor] = []
    try:
        map_tensors(lambda tensor: found.append(tensor) or tensor, x)  # type: ignore[func-returns-value]
    except (_NoTensorsError, TypeError, ValueError):
        return []
    return found


@dataclass(frozen=True, eq=False)
class _Result:
    """What a call gave, and how often its tensors had been changed by then."""

    value: Any
    tensors: list[Tensor]
    versions: list[int]

    @property
    def untouched(self) -> bool:
        return bool(self.tensors) and self.versions == _versions(self.tensors)


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was changed in place; tensors of inference mode do not count it."""
    return [0 if x.is_inference() else x._version for x in tensors]


def outermost_without(model: nn.Module, drawing: Iterable[nn.Module]) -> list[nn.Module]:
    """The largest modules inside which none of those stands."""
    wanted, found = set(drawing), list[nn.Module]()

    def walk(module: nn.Module) -> None:
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict)  # which nobody calls
        if listed or not wanted.isdisjoint(module.modules()):
            for child in module.children():
                walk(child)
        elif not isinstance(module, torch.jit.ScriptModule):
            found.append(module)

    walk(model)
    return list(dict.fromkeys(found))


@dataclass(eq=False)
class Shared:
    """What the samples of some items have in common, and the pass that runs.

    Attributes:
        modules: whose results are kept until the first call that draws.
        every: whether the deviations of all calls that draw are kept, not of the first alone.
        stop_after: calls that draw, after which a pass that keeps has all it is for.
        index: which item each row of the pass is; None in the pass that keeps.
        calls: that drew in this pass so far.
        numbers: in the tokens of an item, once a pass has shown them.
    """

    modules: Sequence[nn.Module]
    every: bool = False
    stop_after: int | None = None
    index: Tensor | None = None
    calls: int = 0
    numbers: int = 0
    spreads: list[Tensor] = field(default_factory=list)
    _kept: dict[nn.Module, list[_Result]] = field(default_factory=dict)
    _made: dict[nn.Module, int] = field(default_factory=dict)  # calls in this pass
    _axes: Axes = field(default_factory=dict)

    @contextmanager
    def within(self, context: Context) -> Iterator[None]:
        """A pass: inside, the modules are answered for, beside what `context` does."""
        self.calls, self._made = 0, {}
        keeping = self.index is None
        answer, modules = (self._keep, self.modules) if keeping else (self._take, list(self._kept))
        with context:
            handlers = {(m, "forward"): partial(answer, m, handler_of(m, "forward")) for m in modules}
            with handling(handlers):
                yield

    def spread(self, tokens: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Deviations of a call that draws, whose mean is `tokens`; `make` computes unknown ones.  [R, ...]"""
        number, self.calls = self.calls, self.calls + 1
        if self.index is not None:
            known = number < len(self.spreads)
            return self.spreads[number].index_select(0, self.index) if known else make()
        found = make()
        self.numbers = tokens[0].numel()
        if self.every or number == 0:
            self.spreads.append(found)
        if self.calls == self.stop_after:
            raise _Enough
        return found

    def draws(self, tokens: Tensor) -> None:
        """Attention over `tokens` [R, ...] draws, by deviations that it keeps to itself."""
        self.calls, self.numbers = self.calls + 1, tokens[0].numel()
        if self.index is None and self.calls == self.stop_after:
            raise _Enough

    def learn(self, axes: Axes, beside: "Shared | None" = None, items: int = 0, others: int = 0) -> bool:
        """Whether all axes of items are known; `beside` kept another number of items, and shows them."""
        self._axes, calls = axes, [(m, n) for m, results in self._kept.items() for n in range(len(results))]
        if beside is not None:
            for module, number in calls:
                own, other = (_shapes(x._kept.get(module, []), number) for x in (self, beside))
                axes.setdefault((module, number), item_axes(own, other, items, others))
        return all(call in axes for call in calls)

    @property
    def kept(self) -> int:
        """How many results of calls there are."""
        return sum(map(len, self._kept.values()))

    @property
    def taken(self) -> int:
        """How many calls of modules are made once for all samples."""
        found = ((m, n, r) for m, results in self._kept.items() for n, r in enumerate(results))
        return sum(self._axes.get((m, n)) is not None and r.untouched for m, n, r in found)

    def _keep(self, module: nn.Module, outer: Handler | None, own: Handler, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        before = _versions(given)
        value = own(*args, **kwargs) if outer is None else outer(own, *args, **kwargs)
        if self.calls == 0:
            tensors = tensors_of(value) if before == _versions(given) else []
            self._kept.setdefault(module, []).append(_Result(value, tensors, _versions(tensors)))
        return value

    def _take(self, module: nn.Module, outer: Handler | None, own: Handler, *args: Any, **kwargs: Any) -> Any:
        number = self._made.get(module, 0)
        self._made[module] = number + 1
        results, axes, index = self._kept[module], self._axes.get((module, number)), self.index
        if number >= len(results) or axes is None or not results[number].untouched:
            return own(*args, **kwargs) if outer is None else outer(own, *args, **kwargs)
        assert index is not None
        left = iter(axes)

        def rows(x: Tensor) -> Tensor:  # copies: the host may write to them
            axis = next(left)
            return x.clone() if axis is None else x.index_select(axis, index)

        return map_tensors(rows, results[number].value)


def _shapes(results: Sequence[_Result], number: int) -> list[torch.Size]:
    return [x.shape for x in results[number].tensors] if number < len(results) else []


def item_axes(
    shapes: Sequence[torch.Size], beside: Sequence[torch.Size], items: int, others: int
) -> tuple[int | None, ...] | None:
    """For each tensor the axis that has as many entries as there are items; None where that is not so."""
    if len(shapes) != len(beside):
        return None
    axes: list[int | None] = []
    for shape, other in zip(shapes, beside, strict=True):
        if len(shape) != len(other):
            return None
        differ = [axis for axis, size in enumerate(shape) if size != other[axis]]
        if len(differ) > 1 or any((shape[axis], other[axis]) != (items, others) for axis in differ):
            return None
        axes.append(differ[0] if differ else None)
    return tuple(axes) if any(axis is not None for axis in axes) else None


@dataclass(eq=False)
class Known:
    """What passes of a host have shown; kept with it, as it does not change."""

    axes: Axes = field(default_factory=dict)
    calls: dict[tuple[nn.Module, ...], int] = field(default_factory=dict)  # that draw in a pass
    # whether a pass that ends at the first draw leaves something that others take
    worth: dict[tuple[nn.Module, ...], bool] = field(default_factory=dict)
    note: str = "nothing was drawn yet"


@dataclass(frozen=True, eq=False)
class Sharing:
    """How to run a host whose samples share what is before their draws.

    Attributes:
        model: the host.
        drawing: modules that hold the attention which draws.
        answer: a pass over rows: what it says [R, ...], and variances of the layers where they are kept.
        known: of the host; more is learnt.
        mean: a pass without draws, which shows every deviation; None where each draw has its own.
        share: whether anything is shared.
    """

    model: nn.Module
    drawing: Sequence[nn.Module]
    answer: Callable[[Rows, Shared], tuple[Tensor, Sequence[Tensor | None]]]
    known: Known
    mean: Callable[[Inputs, Shared], object] | None = None
    share: bool = True

    def run(
        self, inputs: Inputs, *, samples: int, seed: int, batch_size: int | None = None, first_item: int = 0,
        progress: Progress | None = None,
    ) -> tuple[Tensor, Variances]:  # fmt: skip
        """Answers [S, B, ...], and variances averaged over the samples, where the inputs lie."""
        device, home, count = model_device(self.model, inputs), device_of(inputs), count_items(inputs)
        first_item = check_count("first_item", first_item, least=0)
        # the cache of a CPU, not its memory, says how many rows are fast
        small = batch_size is None and device.type == "cpu"
        several = self.share and (samples > 1 or self.mean is not None)
        modules = outermost_without(self.model, self.drawing) if several else []

        def run(most: int) -> tuple[Tensor, Variances]:
            answers, means = None, VarianceMeans(count, samples, home)
            start, rows = 0, min(most, FIRST) if small else most
            while start < count:
                wide, done = min(count - start, rows), 0
                part = take(inputs, slice(start, start + wide), device)
                shared = Shared(modules, every=self.mean is not None)
                # where all samples fit at once, a first one of its own would start everything twice
                fits = several and samples * wide <= rows
                apart = self.mean is not None or (fits and self.known.worth.get(tuple(self.drawing), False))
                if apart:
                    self._keep(part, shared, wide)
                while done < samples:
                    keeping = not apart and done == 0
                    some = 1 if keeping else min(samples - done, max(1, rows // wide))
                    chunk = _rows(part, start + first_item, range(done, done + some), seed)
                    shared.index = None if keeping else chunk.items
                    out, variances = self.answer(chunk, shared)  # [some x wide, ...]
                    if keeping and samples > 1:  # which leaves behind what the other samples take
                        self._learn(part, shared, wide)
                    if answers is None:
                        answers = out.new_empty((samples, count, *out.shape[1:]), device=home)
                    answers[done : done + some, start : start + wide] = out.unflatten(0, (some, wide)).to(
                        home
                    )
                    means.add(chunk.items.to(home) + start, variances)
                    done += some
                    if progress is not None:
                        progress(start * samples + wide * done, count * samples)
                start += wide
                if small and shared.numbers:
                    rows = min(most, max(CACHED // shared.numbers, 1))
            assert answers is not None
            return answers, means.means()

        with evaluating(self.model):
            return run_rows(run, batch_size, device, lambda found: (found[0], *found[1]))

    def _keep(self, part: Inputs, shared: Shared, items: int) -> None:
        """A pass for what is shared alone: it ends at the first call that draws, or at the last one.

        How many draw in a pass without draws, the first of these shows.
        """
        drawing = tuple(self.drawing)
        shared.stop_after = self.known.calls.get(drawing) if shared.every else 1
        with suppress(_Enough):
            if self.mean is None:
                self.answer(_rows(part, 0, range(1), 0), shared)
            else:
                self.mean(part, shared)
                self.known.calls[drawing] = shared.calls
        self._learn(part, shared, items)

    def _learn(self, part: Inputs, shared: Shared, items: int) -> None:
        """Where items are in what was kept; where nobody knows yet, a pass of another number shows it."""
        if not shared.learn(self.known.axes):
            others = 1 if items > 1 else 2
            few = take(part, torch.zeros(others, dtype=torch.long, device=device_of(part)), device_of(part))
            beside = Shared(shared.modules, stop_after=1)
            with suppress(_Enough):
                self.answer(_rows(few, 0, range(1), 0), beside)
            shared.learn(self.known.axes, beside, items, others)
        self.known.worth[tuple(self.drawing)] = shared.taken > 0 or shared.kept == 0
        self.known.note = (
            f"{shared.taken} calls of modules before the first draw run once for all samples"
            if shared.taken
            else "every sample is a full pass: nothing before the first draw is told apart by items"
        )


def _rows(part: Inputs, first_item: int, samples: range, seed: int) -> Rows:
    """Some samples of all items of a part, sample by sample."""
    device, count = device_of(part), count_items(part)
    items = torch.arange(count, device=device).repeat(len(samples))  # [R]
    which = torch.arange(samples.start, samples.stop, device=device).repeat_interleave(count)  # [R]
    rows = part if len(samples) == 1 else take(part, items, device)
    numbers = items + first_item
    return Rows(rows, items, numbers, which, seed)
