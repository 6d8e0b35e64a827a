"""Fused forward and backward passes: called as they are, and as operators that compilers keep whole.

A `Fused` is two plain functions that allocate tensors and launch kernels.  Eager code calls them from one
autograd function, past the dispatcher, which would take longer than the launches.  A compiler sees two
operators, `gpattention::<name>` and `gpattention::<name>_backward`, which call the same functions; what it
asks of shapes is answered by these too, with launches left out.

The two operators know no gradient, so that compiled code, which has made its own, reaches their functions
without a detour through autograd.  What is called is `gpattention::<name>_call`, which autograd does know,
and which is the other two by the time that code is generated.

Names tie the two functions together: the backward pass names what it wants of the inputs and of what the
forward pass made, `by_<output>` is the gradient of an output, `<input>_shape` the shape of an input, and
`needed` says of which inputs a gradient is wanted.  Gradients of several inputs of one shape may come as one
tensor, `together`: operators may not return parts of one, and would copy each.  A forward pass that makes
more where a backward pass may follow has a keyword `train`, which says so; callers do not give it.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpattention.numerics import (
    checks_are_deferred,
    counted_failures,
    failures_are_counted,
    refuse_second_derivative,
)
from gpattention.ops.launching import Absent, stand_in
from gpattention.ops.tapes import Result, Taped

Made = dict[str, Tensor | None]

_LIBRARY = torch.library.Library("gpattention", "FRAGMENT")


class Fused:
    """A forward pass on kernels, and its gradient.

    Args:
        name: of the operator.
        forward: of tensors, then options (those with a default are for eager calls alone), and perhaps the
            keyword `train`; what it made, by name.
        outputs: which of these callers get.
        backward: gradients of inputs, by name; None for what has none.
        beside: gradients that are plain operations on those of the outputs, which a compiler had better see.
        together: inputs whose gradients the backward pass may give as one tensor.

    Attributes:
        together: as it was given.
        taped: the functions that run, as they are called by eager code and as operators.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Made],
        outputs: tuple[str, ...],
        backward: Callable[..., Made] | None = None,
        *,
        beside: Callable[..., Made] | None = None,
        together: tuple[str, ...] = (),
    ) -> None:
        self.name, self.forward, self.backward, self.outputs = name, forward, backward, outputs
        parameters = inspect.signature(forward).parameters
        self._asks_to_train = "train" in parameters
        given = {n: p for n, p in parameters.items() if _is_given(p)}
        self._given = list(given)
        self.tensors = [n for n in given if given[n].annotation in (Tensor, Tensor | None)]
        wanted = [] if backward is None else list(inspect.signature(backward).parameters)
        gradients, shapes = [f"by_{n}" for n in outputs], [f"{n}_shape" for n in self.tensors]
        elsewhere = {*given, *gradients, *shapes, "needed"}
        made = [n for n in wanted if n not in elsewhere]
        self._wanted = wanted
        # where among the arguments they are, None for what the forward pass made
        place = {n: i for i, n in enumerate(given)}
        self._kept = {n: place.get(n) for n in wanted if n in (*self.tensors, *outputs, *made)}
        self._options = {n: place[n] for n in wanted if n in given and n not in self.tensors}
        self._shapes = {n: place[n.removesuffix("_shape")] for n in wanted if n in shapes}
        self._asks_for_needed = "needed" in wanted
        self._made = list(dict.fromkeys([*outputs, *made]))
        self._by = [n if n in wanted else None for n in gradients]
        self._beside, self.together = beside, together
        self._gradients = [*self.tensors, "together"] if together else self.tensors
        self._run = Taped(partial(_in_order, forward, self._made), _failures)
        self.taped = [self._run]
        if backward is not None:
            self._run_backward = Taped(partial(_in_order, backward, self._gradients), _failures)
            self.taped.append(self._run_backward)
        self._count = sum(p.default is p.empty for p in given.values())  # those of the operator
        self._register()
        self._operator = getattr(torch.ops.gpattention, f"{name}_call").default

    def __call__(self, *args: Any) -> Any:
        """What the outputs are, or None where one was not made."""
        if torch.compiler.is_compiling():
            made = self._operator(*args[: self._count])
            return tuple(_found(x) for x in made[: len(self.outputs)])
        keywords = self._keywords(
            self._asks_to_train and torch.is_grad_enabled() and _require_gradients(args)
        )
        return _Eager.apply(self, keywords, *args)  # type: ignore[no-untyped-call]

    def _keywords(self, train: bool) -> dict[str, bool]:
        """Keyword arguments of the forward pass, which callers do not give."""
        return {"train": train} if self._asks_to_train else {}

    def remember(self, ctx: Any, args: Sequence[Any], made: Made) -> None:
        """Keep what the backward pass asks for."""
        ctx.save_for_backward(*[made.get(n) if at is None else args[at] for n, at in self._kept.items()])
        # operators lack what is for eager calls alone
        options = {name: args[at] for name, at in self._options.items() if at < len(args)}
        for name, at in self._shapes.items():
            options[name] = () if args[at] is None else args[at].shape
        ctx.options = options
        ctx.set_materialize_grads(False)

    def asked(self, ctx: Any, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> dict[str, Any]:
        """The arguments of the backward pass."""
        asked = dict(zip(self._kept, ctx.saved_tensors, strict=True))
        asked.update(ctx.options)
        for by, grad in zip(self._by, grads, strict=False):
            if by is not None:
                asked[by] = grad
        if self._asks_for_needed:
            asked["needed"] = list(needed[: len(self.tensors)])
        return asked

    def beside(self, grads: Sequence[Tensor | None]) -> Made:
        """The gradients that are plain operations, by name."""
        return {} if self._beside is None else self._beside(*grads[: len(self.outputs)])

    def apart(self, found: Made) -> Made:
        """Gradients by name, with those that came as one tensor."""
        joined = found.pop("together", None)
        return found if joined is None else found | dict(zip(self.together, joined.unbind(), strict=True))

    def eagerly(self, args: Sequence[Any], keywords: dict[str, bool]) -> Made:
        """What the forward pass makes, without the dispatcher."""
        return dict(zip(self._made, self._run(*args, **keywords), strict=True))

    def eagerly_back(self, asked: dict[str, Any]) -> Made:
        """What the backward pass makes, without the dispatcher."""
        return dict(zip(self._gradients, self._run_backward(*(asked[n] for n in self._wanted)), strict=True))

    def _named(self, tensors: Iterable[Tensor]) -> Made:
        return dict(zip(self._made, map(_found, tensors), strict=False))

    def _register(self) -> None:
        forward, taped = _operator(self.name, self.forward, self._made)
        self.taped.append(taped)
        backward = None
        if self.backward is not None:
            backward, taped = _operator(
                f"{self.name}_backward", self.backward, self._gradients, shares_empty=True
            )
            self.taped.append(taped)

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
                tensors = tuple(forward(*args, **self._keywords(True)))
                self.remember(ctx, args, self._named(tensors))
                return tensors

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
                if torch.is_grad_enabled():
                    refuse_second_derivative(f"gpattention::{self.name}_backward")
                assert backward is not None
                asked = self.asked(ctx, grads, ctx.needs_input_grad)
                made = map(_found, backward(*(asked[n] for n in self._wanted if n in asked)))
                found = self.apart(dict(zip(self._gradients, made, strict=True))) | self.beside(grads)
                return tuple(found.get(name) for name in self._given[: self._count])

        def call(*args: Any) -> list[Tensor]:
            if backward is None or not torch.is_grad_enabled() or not _require_gradients(args):
                found: list[Tensor] = forward(*args, **self._keywords(False))
                return found
            return list(Differentiable.apply(*args))  # type: ignore[no-untyped-call]

        _define(f"{self.name}_call", self.forward, keywords=False)
        _LIBRARY.impl(f"{self.name}_call", call, "CompositeImplicitAutograd")


def _require_gradients(args: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in args)


class _Eager(torch.autograd.Function):
    """The two functions of a `Fused`, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, fused: Fused, keywords: dict[str, bool], *args: Any) -> tuple[Tensor | None, ...]:
        ctx.fused, made = fused, fused.eagerly(args, keywords)
        if fused.backward is not None:
            fused.remember(ctx, args, made)
        return tuple(made.get(name) for name in fused.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        fused, needed = ctx.fused, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            refuse_second_derivative(f"the gradient of {fused.name}")
        found = fused.apart(fused.eagerly_back(fused.asked(ctx, grads, needed))) | fused.beside(grads)
        gradients = [found.get(name) for name in fused.tensors]
        return None, None, *gradients, *[None] * (len(needed) - len(gradients))


def _is_given(parameter: inspect.Parameter) -> bool:
    """Whether callers give it."""
    return parameter.kind is not parameter.KEYWORD_ONLY


def _define(name: str, function: Callable[..., Made], *, keywords: bool = True) -> inspect.Signature:
    """Tell torch of `gpattention::<name>`, which takes what the function does but what has a default.

    Without `keywords`, it does not take what callers do not give.
    """
    signature = inspect.signature(function)
    given = [p for p in signature.parameters.values() if p.default is p.empty and (keywords or _is_given(p))]
    signature = signature.replace(parameters=given, return_annotation=list[Tensor])

    def described(*args: Any) -> list[Tensor]:
        raise NotImplementedError

    described.__signature__ = signature  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(described, mutates_args=())
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    return signature


def _in_order(function: Callable[..., Made], names: list[str], *args: Any, **keywords: bool) -> Result:
    made = function(*args, **keywords)
    return [made.get(name) for name in names]


def _failures() -> tuple[bool, bool]:
    """What becomes of failures, which decides what is launched, and whether somebody looks at a value."""
    deferred = checks_are_deferred()
    return deferred, deferred and failures_are_counted()


def _operator(
    name: str, function: Callable[..., Made], made: list[str], *, shares_empty: bool = False
) -> tuple[Any, Taped]:
    """`gpattention::<name>`: a list of what was made, (0,) in place of what was not.

    Its kernels add failures to the counter, which no argument names: nothing in compiled code reads that, and
    an operator that says what it writes would be one more for every layer.
    """

    def run(*args: Any, **keywords: bool) -> list[Tensor]:
        with counted_failures():  # and unraised, as in all compiled code
            found = function(*args, **keywords)
        return _unaliased([found.get(n) for n in made], args)

    def shapes(*args: Any, **keywords: bool) -> list[Tensor]:
        token = stand_in.set(Absent())
        try:
            return run(*args, **keywords)
        finally:
            stand_in.reset(token)

    _define(name, function)
    taped = Taped(run, shares_empty=shares_empty)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, taped.__call__, device)
    torch.library.register_fake(f"gpattention::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.gpattention, name).default, taped


def _found(x: Tensor) -> Tensor | None:
    return None if x.ndim == 1 and x.shape[0] == 0 else x


def _unaliased(tensors: Sequence[Tensor | None], args: Sequence[Any]) -> list[Tensor]:
    """Tensors in memory of their own, as operators have to give them."""
    # no function of its own for memory: every step asks for every tensor
    taken = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
    like = next(x for x in (*args, *tensors) if isinstance(x, Tensor))
    found = []
    for x in tensors:
        if x is None:
            found.append(like.new_empty(0))
            continue
        memory = x.untyped_storage()._cdata
        found.append(x.clone() if memory in taken else x)
        taken.add(memory)
    return found
