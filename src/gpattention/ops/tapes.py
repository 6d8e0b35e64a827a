"""Launch tapes: what the host does for a call, noted once and then repeated without its Python.

The functions behind an operator allocate tensors and launch kernels.  For arguments alike in shapes, strides,
types, alignment and options they always do the same, and most of a short sequence's time goes into working
out sizes, views and arguments.  So the second call of a kind is noted, with the launches left out, and
written down as a Python function: it allocates what is returned, takes all other memory in one piece, and
hands addresses and constants to the compiled kernels.  That call and all later ones of its kind run this
function.

Noted are launches, at the one door to kernels, and by a mode of torch's dispatcher allocations and the few
operations in `_REPEATED`.  A function that does something else, such as to look at a value, runs as it is,
and `Taped.reasons` says why.  So do all functions under another mode of the dispatcher, and while somebody
listens to Triton's hooks.

What a call takes is free again when it ends, nothing earlier; a stream runs its kernels in order.
"""

import linecache
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from gpattention.numerics import failure_counter, failures_are_counted, is_capturing
from gpattention.ops.launching import (
    Ready,
    UnknownLaunchError,
    hooks_of,
    imported_kernels,
    is_listened_to,
    ready_to_launch,
    stand_in,
)

MOST = 256  # tapes of one function: texts of all lengths would have one for each
_SPECIALIZED = 16  # bytes: kernels for pointers that are multiples are others
_ALIGNED = 512  # bytes, as torch's allocator aligns memory on a GPU
_PLAIN = {int, float, bool, str, type(None)}
_SEQUENCES = (list, tuple, torch.Size)

_ALLOCATIONS = {"empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
# neither random nor looking at values; what autocast makes of products is in the kind of a call
_REPEATED = {
    "zero_", "zeros_like", "new_zeros", "clone", "copy_", "sum.dim_IntList", "sub.Tensor", "neg",
    "div_.Scalar", "div_.Tensor", "mm",
}  # fmt: skip
_VIEWS = {"_unsafe_view", "_reshape_alias"}  # by what they do, not by their schema

Result = list[Any]  # of tensors, and None where there is none
Key = tuple[Any, ...]


_taped: "WeakSet[Taped]" = WeakSet()


def forget_tapes() -> None:
    """Throw all tapes away: for whoever changes what functions depend on beside arguments and settings.

    The launch options of `ops.layout` are such a thing.
    """
    for taped in _taped:
        taped.forget()


class Tape(NamedTuple):
    """A call written down.

    Attributes:
        play: it, of the same arguments.
        hooks: lists of those who want to be called before its kernels.
    """

    play: Callable[..., Result]
    hooks: tuple[list[Any], ...]


class Taped:
    """A function of tensors and options whose calls run from tapes where they can.

    Args:
        function: gives tensors, and None where there is none.
        setting: what else it depends on.
        shares_empty: whether what holds no number may be one tensor for all calls.

    Attributes:
        tapes: by the kind of call.
        reasons: why a kind has no tape.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        setting: Callable[[], Any] = lambda: None,
        *,
        shares_empty: bool = False,
    ) -> None:
        self._function, self._setting, self._shares_empty = function, setting, shares_empty
        self._met: set[Key] = set()
        self.tapes: dict[Key, Tape] = {}
        self.reasons: dict[Key, str] = {}
        _taped.add(self)

    def __call__(self, *args: Any, **keywords: Any) -> Result:
        """What the function gives."""
        if torch._C._len_torch_dispatch_stack():
            return self._function(*args, **keywords)
        key = kind_of(args, (self._setting(), *keywords.values()))
        tape = self.tapes.get(key) or self._new_tape(key, args, keywords)  # type: ignore[arg-type]
        if tape is None or is_listened_to() or any(tape.hooks):
            return self._function(*args, **keywords)
        return tape.play(*args)

    def forget(self) -> None:
        """Throw its tapes away, and what else it knows of kinds of calls."""
        self._met.clear()
        self.tapes.clear()
        self.reasons.clear()

    def _new_tape(self, key: Key | None, args: tuple[Any, ...], keywords: dict[str, Any]) -> Tape | None:
        """Of the second call of a kind: many kinds have but one."""
        if key is None or key in self.reasons or is_capturing() or len(self.tapes) >= MOST:
            return None
        if key not in self._met:
            for book in (self._met, self.reasons):
                if len(book) >= 4 * MOST:
                    book.clear()
            self._met.add(key)
            return None
        try:
            recorder = _Recorder(args)
            made = recorder.watch(self._function, keywords)
            tape = _Writer(recorder, made, self._shares_empty).tape()
        except UnknownLaunchError:  # by now: the next call may find it compiled
            return None
        except CannotBeNotedError as error:
            self.reasons[key] = str(error)
            return None
        return self.tapes.setdefault(key, tape)


class CannotBeNotedError(Exception):
    """A function does what no tape repeats."""


def kind_of(args: Sequence[Any], settings: tuple[Any, ...]) -> Key | None:
    """What calls have in common for which a function does the same; None if nobody knows.

    Args:
        args: of the function.
        settings: what else it depends on.

    Returns:
        A key.
    """
    key: list[Any] = []
    first = None
    for x in args:  # every operator of every layer comes here
        kind = x.__class__
        if kind is Tensor or kind is Parameter:  # what other classes hold may be no memory
            if first is None:
                first = x
            key += x.dtype, x.get_device(), x.data_ptr() % _SPECIALIZED, x.shape, x.stride()
        elif x is None:
            key.append(None)
        elif kind in _PLAIN:
            key += kind, x  # 1, 1.0 and True are equal, and other constants
        elif kind in _SEQUENCES and _PLAIN.issuperset(map(type, x)):
            key.append(tuple(x))
        else:
            return None
    if first is None:
        return None
    # kernels are launched where the thread is, allocations are made where the tensors are
    key += first.device, torch._C._cuda_getDevice() if first.is_cuda else None
    key += torch._C._is_any_autocast_enabled(), settings
    return tuple(key)


@dataclass(eq=False)
class _Memory:
    """A storage that a function is given or makes, and the tensor by which a tape knows it."""

    tensor: Tensor
    name: str  # in the tape
    given: bool
    by_operation: bool = False  # made by one that is repeated
    whole: bool = False  # a tensor of its own in the tape, not a place in the common memory
    place: int = 0  # there

    @property
    def address(self) -> int:
        """Of an argument where it begins, which is where its storage does of all else."""
        return self.tensor.data_ptr() if self.given else self.tensor.untyped_storage().data_ptr()


@dataclass
class _Launch:
    ready: Ready
    args: tuple[Any, ...]


@dataclass
class _Operation:
    call: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    made: _Memory | None


class _Recorder(TorchDispatchMode):
    """Notes what a function does with arguments like these: allocations, operations, launches.

    Storages tell what is a view of what, so that arguments which share one, as views of one product do, are
    here apart from each other.  Nothing is launched, and arguments are only read.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        shared = Counter(_storage(x) for x in args if isinstance(x, Tensor))
        self.args = [_apart(x) if isinstance(x, Tensor) and shared[_storage(x)] > 1 else x for x in args]
        self.device = next(x.device for x in args if isinstance(x, Tensor))
        self.memory: dict[int, _Memory] = {}
        self.steps: list[_Launch | _Operation] = []
        self.hooks: dict[int, list[Any]] = {}
        for i, x in enumerate(self.args):
            if isinstance(x, Tensor):
                self.memory[_storage(x)] = _Memory(x, f"a{i}", given=True, whole=True)

    def watch(self, function: Callable[..., Result], keywords: dict[str, Any]) -> Result:
        """What the function gives for the arguments here, while all it does is noted."""
        token = stand_in.set(self)
        try:
            with torch.no_grad(), self:
                return function(*self.args, **keywords)
        finally:
            stand_in.reset(token)

    # of a stand-in

    def kernels(self, op: str) -> Any:
        """Kernels that are noted instead of launched."""
        return _Noting(self, imported_kernels(op))

    def counter(self, device: torch.device) -> tuple[Tensor, int]:
        """The real one, which is where it is for ever."""
        return failure_counter(device), int(failures_are_counted())

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Any) -> None:
        """Note a launch."""
        self.steps.append(_Launch(ready_to_launch(kernel, grid, args, constants), args))
        hooks = hooks_of(kernel)
        self.hooks[id(hooks)] = hooks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, and note it unless it only looks at memory in another way."""
        keywords = kwargs or {}
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if func.is_view or name in _VIEWS:
            return func(*args, **keywords)
        if name not in _ALLOCATIONS and name not in _REPEATED:
            raise CannotBeNotedError(f"it calls {func}")
        if func._schema.is_mutable and self._is_from_outside(args[0]):
            raise CannotBeNotedError(f"it writes to what it is given ({func})")
        found = func(*args, **keywords)
        if found.device != self.device:
            raise CannotBeNotedError(f"it allocates on {found.device}")
        made = None
        if _storage(found) not in self.memory:
            made = _Memory(found, f"m{len(self.memory)}", given=False)
            self.memory[_storage(found)] = made  # kept with its tensor: no other storage gets its place
        if name in _REPEATED:
            if made is not None:
                made.by_operation = made.whole = True
            for x in (*args, *keywords.values()):
                if isinstance(x, Tensor) and (memory := self.memory.get(_storage(x))):
                    memory.whole = True
            self.steps.append(_Operation(func, args, keywords, made))
        return found

    def _is_from_outside(self, x: Tensor) -> bool:
        memory = self.memory.get(_storage(x))
        return memory is None or memory.given


class _Noting:
    """Kernels by name, or one of them, or one with a grid: calls of it are noted."""

    def __init__(self, recorder: _Recorder, kernels: Any) -> None:
        self._recorder, self._kernels = recorder, kernels

    def __getattr__(self, name: str) -> "_Noting":
        return _Noting(self._recorder, getattr(self._kernels, name))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self._recorder.launch(self._kernels, grid, args, constants)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _apart(x: Tensor) -> Tensor:
    """A tensor like another for a function that does the same, in memory of its own."""
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    offset, rest = divmod(x.data_ptr() % _SPECIALIZED, x.element_size())
    if rest:
        raise CannotBeNotedError("a number of an argument lies across a boundary")
    memory = torch.empty(extent + offset, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, x.stride(), offset)


_numbers = count()  # of tapes in this process


class _Writer:
    """Writes a tape as a Python function, in which every name is a local one or holds a constant."""

    def __init__(self, recorder: _Recorder, made: Result, shares_empty: bool) -> None:
        self._recorder, self._made, self._shares_empty = recorder, made, shares_empty
        self._names: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}  # lines that ask for those of tensors, by name of these

    def tape(self) -> Tape:
        """The function."""
        own = [x for x in self._recorder.memory.values() if not x.given and not x.by_operation]
        self._give_outputs_their_form()
        allocations, end = [], 0
        allocate = self._allocator()
        for memory in own:
            if memory.whole:
                x = memory.tensor
                form = f"{tuple(x.shape)}, {x.stride()}, {self._constant(x.dtype)}"
                allocations.append(f"{memory.name} = {allocate}({form})")
            else:
                memory.place = end
                end += -(-memory.tensor.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
        if end:
            allocations.append(f"room = {allocate}(({end},), (1,), {self._constant(torch.uint8)})")
            allocations.append("r = room.data_ptr()")
        launches = [step.ready for step in self._recorder.steps if isinstance(step, _Launch)]
        if launches and launches[0].stream is not None:  # that of all: they are on one device
            allocations.append(f"stream = {self._constant(launches[0].stream)}({launches[0].device})")
        lines: list[str] = []
        for step in self._recorder.steps:
            line = self._launch(step) if isinstance(step, _Launch) else self._operation(step)
            lines += [*self._addresses.values(), line]
            self._addresses = dict.fromkeys(self._addresses, "")
        results = ", ".join(map(self._value, self._made))
        lines = [*allocations, *filter(None, lines), f"return [{results}]"]
        return self._compiled(lines)

    def _compiled(self, lines: list[str]) -> Tape:
        parameters = ", ".join(f"a{i}" for i in range(len(self._recorder.args)))
        source = "\n    ".join([f"def play({parameters}):", *lines]) + "\n"
        name = f"<launch tape {next(_numbers)}>"
        exec(compile(source, name, "exec"), self._names)
        linecache.cache[name] = len(source), None, source.splitlines(True), name  # for tracebacks
        return Tape(self._names["play"], tuple(self._recorder.hooks.values()))

    def _allocator(self) -> str:
        """What makes an empty tensor of a shape, strides and a type, in the least time there is."""
        device = self._recorder.device
        quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
        if quick is None or (device.type == "cuda" and device.index != torch._C._cuda_getDevice()):
            return self._constant(
                lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)
            )
        return self._constant(quick)

    def _give_outputs_their_form(self) -> None:
        """Memory that is returned is a tensor of its own, like the first that is returned of it."""
        for x in self._made:
            memory = None if x is None else self._recorder.memory.get(_storage(x))
            if x is None or memory is None or memory.whole or self._is_shared(x):
                continue
            memory.whole = True
            if x.storage_offset() == 0 and x.numel() * x.element_size() == x.untyped_storage().nbytes():
                memory.tensor = x

    def _launch(self, step: _Launch) -> str:
        ready = step.ready
        stream = [] if ready.stream is None else ["stream"]
        first, last = ([self._constant(x) for x in some] for some in (ready.first, ready.last))
        grid = [self._constant(n) for n in ready.grid]
        args = [self._argument(x) for x in step.args]
        return f"{self._constant(ready.call)}({', '.join([*grid, *stream, *first, *args, *last])})"

    def _operation(self, step: _Operation) -> str:
        args = [self._value(x) for x in step.args]
        args += [f"{name}={self._value(x)}" for name, x in step.keywords.items()]
        made = "" if step.made is None else f"{step.made.name} = "
        return f"{made}{self._constant(step.call)}({', '.join(args)})"

    def _argument(self, x: Any) -> str:
        """Of a kernel: tensors are addresses."""
        if isinstance(x, Tensor):
            return self._address(x)
        if isinstance(x, tuple) and any(isinstance(part, Tensor | tuple) for part in x):
            return f"({''.join(f'{self._argument(part)}, ' for part in x)})"
        return self._constant(x)

    def _address(self, x: Tensor) -> str:
        if not x.numel():
            return "0"
        memory = self._recorder.memory.get(_storage(x))
        if memory is None:  # from outside, and kept by a name
            self._constant(x)
            return str(x.data_ptr())
        offset = x.data_ptr() - memory.address
        if not memory.whole:
            return f"r + {memory.place + offset}"
        name = f"{memory.name}_at"
        self._addresses.setdefault(name, f"{name} = {memory.name}.data_ptr()")
        return f"{name} + {offset}" if offset else name

    def _value(self, x: Any) -> str:
        return self._tensor(x) if isinstance(x, Tensor) else self._constant(x)

    def _tensor(self, x: Tensor) -> str:
        memory = self._recorder.memory.get(_storage(x))
        if memory is None or self._is_shared(x):
            return self._constant(x)
        like = memory.tensor
        if x.dtype != like.dtype:
            raise CannotBeNotedError(f"it looks at {like.dtype} as {x.dtype}")
        offset = x.storage_offset() - like.storage_offset()
        if (x.shape, x.stride(), offset) == (like.shape, like.stride(), 0):
            return memory.name
        start = f"{memory.name}.storage_offset() + {offset}"
        return f"{memory.name}.as_strided({tuple(x.shape)}, {x.stride()}, {start})"

    def _is_shared(self, x: Tensor) -> bool:
        return self._shares_empty and x.shape == (0,)

    def _constant(self, x: Any) -> str:
        """A literal, or a name for it."""
        if type(x) in (int, bool, type(None)):
            return repr(x)
        name = f"c{len(self._names)}"
        self._names[name] = x
        return name
