"""Changes of shared things for the time of a call, safe beside the calls of other threads.

A prediction needs its model in evaluation mode, some modules answered for, full precision: things that all
threads see.  `borrowed` makes such a change once, counts the calls that need it, and undoes it when the last
of them ends; its lock is held while things are changed, never while a model runs.  What a call makes of a
module is its own: `handling` leaves a function in the module that asks a context variable who handles the
call, so that other threads, which have no handler, get what they always got.

A process that is forked keeps the loans of the thread that lives on, and no others.  Copies and pickles of a
module, made by any thread meanwhile, hold what the module holds without them.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn

Undo: TypeAlias = Callable[[], object]
Handler: TypeAlias = Callable[..., Any]  # handler(own, *args, **kwargs) in place of own(*args, **kwargs)
_MISSING: Any = object()


@dataclass(eq=False)
class _Loan:
    """A change that is in force, and the threads of the calls that need it, one entry for each call."""

    undo: Undo
    threads: list[int] = field(default_factory=list)


_lock = threading.RLock()
_loans: dict[Hashable, _Loan] = {}
_handlers: ContextVar[Mapping[tuple[int, str], Handler]] = ContextVar("gpattention_handlers", default={})  # noqa: B039 never written to


@contextmanager
def borrowed(changes: Mapping[Hashable, Callable[[], Undo | None]]) -> Iterator[None]:
    """Make every change that no other call has made, and undo it after the last call that needs it.

    A key names the change.  A change returns how to undo it, or None where there is nothing to change.
    """
    thread, taken = threading.get_ident(), []
    try:
        with _lock:
            for key, change in changes.items():
                taken.append(key)  # first: whatever interrupts, it is given back
                if key not in _loans:
                    undo = change()
                    if undo is None:
                        continue
                    _loans[key] = _Loan(undo)
                _loans[key].threads.append(thread)
        yield
    finally:
        with _lock:
            for key in reversed(taken):
                _give_back(key, thread)


def _give_back(key: Hashable, thread: int) -> None:
    loan = _loans.get(key)
    if loan is None:
        return
    if thread in loan.threads:
        loan.threads.remove(thread)
    if not loan.threads:
        loan.undo()
        del _loans[key]


def _keep_own_loans() -> None:
    """In a forked process: the threads of all other calls are gone."""
    thread = threading.get_ident()
    for key, loan in list(_loans.items()):
        loan.threads = [each for each in loan.threads if each == thread]
        _give_back(key, -1)
    _lock.release()


if hasattr(os, "register_at_fork"):  # a fork while another thread changes things would copy half a change
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_keep_own_loans
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Replaced:
    """An entry of a dictionary that stands in for another, until it is called."""

    table: dict[str, Any]
    name: str
    before: Any

    def __call__(self) -> None:
        if self.before is _MISSING:
            self.table.pop(self.name, None)
        else:
            self.table[self.name] = self.before


def replacing(
    table: dict[str, Any], name: str, make: Callable[[Any], Any]
) -> tuple[Hashable, Callable[[], Undo]]:
    """A change for `borrowed`: the entry becomes `make` of what it was, which is None where it was not."""

    def change() -> Undo:
        before = table.get(name, _MISSING)
        undo = _Replaced(table, name, before)
        table[name] = make(None if before is _MISSING else before)
        return undo

    return (id(table), name), change


def _attribute(
    module: nn.Module, name: str, make: Callable[[Any], Any]
) -> dict[Hashable, Callable[[], Undo]]:
    """Changes of an attribute of a module that its copies and pickles know nothing of."""
    state = replacing(vars(module), "__getstate__", lambda _: lambda: _state_without_loans(module))
    return dict([state, replacing(vars(module), name, make)])


def _state_without_loans(module: nn.Module) -> Any:
    """What `copy` and `pickle` ask an instance for, and find here before they look at its class."""
    with _lock:
        state = type(module).__getstate__(module)
        if not isinstance(state, dict):
            return state
        state = dict(state)
        for loan in _loans.values():
            if isinstance(loan.undo, _Replaced) and loan.undo.table is vars(module):
                _Replaced(state, loan.undo.name, loan.undo.before)()
        return state


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Every module in evaluation mode, afterwards in its own again; one that is in it already is left alone.

    Other threads see it too: a mode is an attribute of the module.
    """
    with ExitStack() as stack:
        with _lock:  # a mode that is looked at here stays until it is changed
            changes: dict[Hashable, Callable[[], Undo | None]] = {}
            for module in modules:
                changes |= _switched_off(module)
            stack.enter_context(borrowed(changes))
        yield


def _switched_off(module: nn.Module) -> dict[Hashable, Callable[[], Undo | None]]:
    if isinstance(getattr(type(module), "training", None), property):
        return {}  # a wrapper that tells the mode of a module inside
    own = vars(module)
    if "training" in own:
        needed = own["training"] or (id(own), "training") in _loans
        return {**_attribute(module, "training", lambda _: False)} if needed else {}

    def switch() -> Undo | None:  # a scripted module keeps its mode elsewhere
        if not module.training:
            return None
        module.training = False
        return lambda: setattr(module, "training", True)

    return {(id(module), "training"): switch}


@contextmanager
def handling(handlers: Mapping[tuple[nn.Module, str], Handler]) -> Iterator[None]:
    """Inside, and in this thread alone, `module.name(...)` is `handler(own, ...)` for every (module, name).

    `own` is what would have been called.  Of two handlers of one method the inner one is asked.
    """
    changes: dict[Hashable, Callable[[], Undo | None]] = {}
    for module, name in handlers:
        changes |= _attribute(module, name, partial(_asking, module, name))
    with borrowed(changes), handled_by({(id(module), name): h for (module, name), h in handlers.items()}):
        yield


@contextmanager
def handled_by(handlers: Mapping[tuple[int, str], Handler]) -> Iterator[None]:
    """Inside, and in this thread alone, `handler_of` finds these, by the id of their module."""
    token = _handlers.set({**_handlers.get(), **handlers})
    try:
        yield
    finally:
        _handlers.reset(token)


def handler_of(module: nn.Module, name: str) -> Handler | None:
    """Who handles calls of `module.name` in this thread."""
    return _handlers.get().get((id(module), name))


def is_handled(*modules: nn.Module) -> bool:
    """Whether this thread handles the forward pass of one of them; compilers cannot ask."""
    if torch.compiler.is_compiling():
        return False
    handlers = _handlers.get()
    return bool(handlers) and any((id(module), "forward") in handlers for module in modules)


def attribute_without_loans(module: nn.Module, name: str) -> Any:
    """What the instance itself holds under that name, None if nothing, whatever calls do to it meanwhile."""
    with _lock:
        loan = _loans.get((id(vars(module)), name))
        if loan is not None and isinstance(loan.undo, _Replaced):
            return None if loan.undo.before is _MISSING else loan.undo.before
        return vars(module).get(name)


def _asking(module: nn.Module, name: str, before: Any) -> Callable[..., Any]:
    """A method that asks who handles the call."""
    own = MethodType(getattr(type(module), name), module) if before is None else before
    key = (id(module), name)

    @wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        handler = _handlers.get().get(key)
        return own(*args, **kwargs) if handler is None else handler(own, *args, **kwargs)

    return method
