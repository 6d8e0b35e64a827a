"""Converted layers: modules inside a host that attend in its place and hold all parameters that were added.

`convert` gives them to hosts of other libraries; our own encoder layers are built with them.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gpattention.attention import Heads
from gpattention.attention.base import Source, make_attention
from gpattention.gp import NumericalError, Posterior
from gpattention.models.predict import evaluating, is_predicting
from gpattention.models.projected import KINDS, KeyProjection, Projected, ProjectedHeads
from gpattention.numerics import is_capturing, is_mapped

ATTRIBUTE = "gpattention"  # name of the layer in the host's attention module, and in its state_dict
TrainingDraw: TypeAlias = Literal["independent", "none"]
TRAINING_DRAWS: tuple[TrainingDraw, ...] = ("independent", "none")
# hosts add -10,000, -1e9 or the least number of the type to logits of padding: weights below this are 0
MASKED_LOGIT = -9e3
# the mask that was checked last, and how often it had been changed by then
_checked: ContextVar["tuple[weakref.ref[Tensor], int] | None"] = ContextVar("gpattention_mask", default=None)
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Request:
    """What a prediction asks of every layer, in place of the behaviour of its mode."""

    draw: TrainingDraw
    generator: Source
    variances: bool = False
    drawing: Callable[[Tensor], object] = lambda _: None  # called with the queries of each layer that draws
    # of the last call, by the id of the layer
    layer_variances: dict[int, Tensor | None] = field(default_factory=dict)


class ConvertedAttention(nn.Module):
    """GP attention over queries, keys and values that the host has projected.

    In training it draws its output and keeps its regulariser; in evaluation it returns the mean.
    """

    def __init__(self, attention: Projected, *, logit_scale: float, draw: TrainingDraw, name: str) -> None:
        super().__init__()
        self.attention = attention
        self.logit_scale = logit_scale  # the host's softmax is over logit_scale q . k
        self.draw: TrainingDraw = draw
        self.name = name
        self.regularizers: list[Tensor] = []  # of the calls since the last forward pass in training began

    @property
    def kind(self) -> str:
        """The kind of attention."""
        return self.attention.kind

    @property
    def title(self) -> str:
        """Its path at the conversion, for errors; layers of our own encoders have none."""
        return self.name or "self_attn"

    def forward(
        self,
        q: Tensor,  # [B, H, Q, D]
        k: Tensor,  # [B, H, K, D]
        v: Tensor,  # [B, H, K, D]
        *,
        queries: Tensor,  # [B, Q, E] the tokens before projection
        keys: Tensor,  # [B, K, E]
        real: Tensor | None = None,  # [B or 1, K] False = padding
        need_weights: bool = False,
        request: Request | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs of the heads [B, Q, H, D] and, if asked for, weights [B, H, Q, K]."""
        if request is not None and self.attention.draws:
            request.drawing(q)
        heads = self._heads(q, k, v, queries=queries, keys=keys, real=real)
        draw = request.draw if request is not None else self.draw if self.training else "none"
        asked = request is not None and request.variances
        try:
            posterior = None
            if self.attention.draws:
                posterior = self.attention._posterior(heads, with_variance=draw != "none" or asked)
            mean = self.attention._mean(heads) if posterior is None else posterior.mean  # [B, H, Q, D]
            if posterior is not None and draw != "none":
                mean = posterior.sample(1, generator=None if request is None else request.generator)[0]
            if request is None:
                self._remember(heads, posterior)
            elif request.variances:
                request.layer_variances[id(self)] = None if posterior is None else posterior.variance
            weights = self.attention._weights(heads) if need_weights else None
        except NumericalError as error:
            error.add_note(f"in {self.title} ({self.kind}), where matrices are numbered [item, head]")
            raise
        return mean.transpose(1, 2).to(v.dtype), None if weights is None else weights.to(v.dtype)

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, *, queries: Tensor, keys: Tensor, real: Tensor | None
    ) -> ProjectedHeads:
        """Projections as the kernel sees them (eq. 21): q . k is the host's logit."""
        if queries is not keys and not self.attention.crosses:
            raise ValueError(f"{self.kind!r} attention is self-attention: its keys are its queries")
        mask = query_mask = None if real is None else real[:, None]  # [B, 1, K]
        if mask is not None:
            if queries is not keys:
                query_mask = mask.new_ones(queries.shape[0], 1, queries.shape[1])
            # the gradient of a weight is 0 times what is written there
            keys = torch.where(mask[:, 0, :, None], keys, 0.0)
        heads = Heads(queries, keys, v, mask, query_mask, None)
        return ProjectedHeads.scaled(heads, q, k, self.logit_scale**0.5)

    def _remember(self, heads: ProjectedHeads, posterior: Posterior | None) -> None:
        if not self.training:
            return
        value = self.attention._scalar_regularizer(heads, posterior, None)
        # a checkpointed layer runs again in the backward pass, in the same way, but counts once
        if not _in_backward():
            self.regularizers.append(value)

    def __getstate__(self) -> dict[str, Any]:
        """Copies begin without regularisers, as tensors with a graph cannot be copied."""
        return {**self.__dict__, "regularizers": []}

    def _replicate_for_data_parallel(self) -> "ConvertedAttention":
        why = "copies a model for every call, and the regularisers of the copies are lost"
        raise RuntimeError(f"nn.DataParallel {why}: use DistributedDataParallel")

    def extra_repr(self) -> str:
        """How it draws in training."""
        return f"draw={self.draw!r}"


def make_layer(
    kind: str,
    module: nn.Module,
    heads: int,
    head_dim: int,
    *,
    keys: KeyProjection | None,
    scale: float,
    draw: TrainingDraw,
    name: str,
    options: Mapping[str, Any],
) -> ConvertedAttention:
    """A layer of a kind for a module that attends by softmax over `scale` q . k; it is not inserted yet."""
    parameter = next(module.parameters(), None)
    where = f"{name}: " if name else ""
    if parameter is None:
        raise ValueError(f"{where}expected attention with parameters to train, got none (quantised?)")
    made = {"device": parameter.device, "dtype": parameter.dtype, **options}
    attention = make_attention(KINDS[kind], kind, heads * head_dim, heads, made)
    assert isinstance(attention, Projected)
    try:
        attention.start(keys, scale**0.5)
    except ValueError as error:
        raise ValueError(f"{where}{error}, and it has none or changes them afterwards") from None
    layer = ConvertedAttention(attention, logit_scale=scale, draw=draw, name=name)
    return layer.train(module.training)


def hint_at_example(kind: str, options: Mapping[str, Any], stacklevel: int = 3) -> None:
    """Warn, at the caller's line, that inducing inputs start at random without an example."""
    if KINDS[kind].has_inducing and options.get("inducing") != "pooled":
        why = "start at random, where attention may be switched off until they are learned"
        helps = "example=, a batch of inputs, starts them at its tokens"
        warnings.warn(f"inducing inputs of {kind!r} attention {why}: {helps}", stacklevel=stacklevel)


def hint_at_warm_start(model: nn.Module, stacklevel: int = 3) -> None:
    """Warn once, at the caller's line, that encoder layers of ours are trained from scratch."""
    fresh: list[Any] = [module for module in model.modules() if getattr(module, "from_scratch", False)]
    for layer in fresh:
        layer.from_scratch = False
    if fresh:
        what = f"{len(fresh)} layers of {fresh[0].kind!r} attention are trained from scratch; recipes start"
        how = f"kind='softmax' first, then Encoder.from_torch(encoder, kind={fresh[0].kind!r})"
        warnings.warn(f"{what} from attention that was trained without draws: {how}", stacklevel=stacklevel)


def place_inducing(model: nn.Module, run: Callable[[], object], seed: int) -> None:
    """Run an example in evaluation mode, in which every layer places its inducing inputs at its tokens."""
    kinds = [layer.attention for layer in converted_layers(model)]
    generator = torch.Generator().manual_seed(seed)
    for attention in kinds:
        attention.placing = generator
    with evaluating(model):  # if it fails, the layers are discarded
        run()
    for attention in kinds:
        attention.placing = None


def converted_layers(model: nn.Module) -> list[ConvertedAttention]:
    """All converted layers, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, ConvertedAttention)]


def layer_names(model: nn.Module) -> dict[ConvertedAttention, str]:
    """All converted layers and their names: their paths at the conversion, or else their own."""
    named = {m: name for name, m in model.named_modules() if isinstance(m, ConvertedAttention)}
    return {layer: layer.name or name.rpartition(".")[0] or "the model" for layer, name in named.items()}


def take_place(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace `old` by `new` everywhere in the model, under all its names, and keep its hooks."""
    for holder in list(model.modules()):
        for name, module in list(holder._modules.items()):
            if module is old:
                setattr(holder, name, new)
    for table in _HOOKS:  # the same objects, so that handles can still remove their hooks
        new.__dict__[table] = old.__dict__[table]


def inherit(new: nn.Module, host: nn.Module, layer: ConvertedAttention, *names: str) -> None:
    """Give a converted module its layer, and all parameters and modules of the host it replaces."""
    for name in names:
        setattr(new, name, getattr(host, name))
    new._parameters.update(host._parameters)
    new._modules.update(host._modules)
    new.add_module(ATTRIBUTE, layer)
    new.training = host.training


class Passes:
    """Hooks that separate the forward passes of a converted model, so that layers keep values of one only.

    They watch every module that holds a converted layer.  The outermost call of such a module is a pass, of
    the whole model or of a part of it: when it begins, the layers inside forget the previous pass.
    """

    _outermost: nn.Module | None = None

    def watch(self, model: nn.Module, layers: Iterable[ConvertedAttention]) -> None:
        """Watch all modules that hold one of these layers."""
        remembering = set(layers)
        for module in model.modules():
            if module not in remembering and not remembering.isdisjoint(module.modules()):
                module.register_forward_pre_hook(self.begin)
                module.register_forward_hook(self.end, always_call=True)

    def begin(self, module: nn.Module, *_: object) -> None:
        """Predictions do not count as passes, nor do calls that a checkpoint repeats."""
        if is_predicting() or _in_backward():
            return
        if self._outermost is None or self._outermost is module:  # as an interrupt may have left it
            self._outermost = module
            for layer in converted_layers(module):
                if layer.regularizers:
                    layer.regularizers = []

    def end(self, module: nn.Module, *_: object) -> None:
        """The end of a call, also of one that failed."""
        if self._outermost is module and not is_predicting() and not _in_backward():
            self._outermost = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model is in no pass."""
        return {"_outermost": None}


def _in_backward() -> bool:
    """Whether a backward pass runs; False for compilers, which cannot ask."""
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)


def real_keys(mask: Tensor, name: str) -> Tensor:
    """Keys that are not padding [B or 1, K], from a mask in any of the forms that hosts use.

    Args:
        mask: [B, K] or pairs [B or 1, 1 or H, Q or 1, K]; True = attend if it is bool, else added to logits
            (0 or very negative).  It is checked at the first layer that it is handed to, and not while a
            model is exported, captured or mapped by `torch.func.vmap`, as its values cannot be read then.
        name: of the site, for errors.

    Raises:
        ValueError: the mask hides more than padding.
    """
    attend = mask if mask.dtype == torch.bool else mask == 0
    while attend.ndim not in (2, 4):
        attend = attend[None]
    keys = attend[:, :1, :1] if attend.ndim == 4 else attend  # [B, 1, 1, K] or [B, K]
    if not (torch.compiler.is_compiling() or is_mapped() or is_capturing() or _is_checked(mask)):
        least = MASKED_LOGIT if mask.is_floating_point() else 0
        if mask.dtype != torch.bool and bool(((mask != 0) & (mask > least)).any()):
            raise _refused_mask(name, "one that adds numbers to the logits")
        if attend.ndim == 4 and bool((attend != keys).any()):
            raise _refused_mask(name, "one that differs between queries or heads (causal or windowed?)")
        if not mask.is_inference():  # which says not when it changes
            _checked.set((weakref.ref(mask), mask._version))
    return keys[:, 0, 0] if attend.ndim == 4 else keys


def _is_checked(mask: Tensor) -> bool:
    """Whether it is the last one that was looked at, unchanged: hosts hand one mask to all layers."""
    last = _checked.get()
    return last is not None and last[0]() is mask and last[1] == mask._version


def _refused_mask(name: str, found: str) -> Exception:
    return refused_call(name, "a mask of padding, the same for every query and head", found)


def refused_call(name: str, expected: str, found: str) -> ValueError:
    """The error for a call in which queries of a head see different keys."""
    why = "every query would need its own posterior"
    helps = f"{why} (for causal masks there is causal=True)"
    return ValueError(f"{name}: expected {expected}, got {found}: {helps}")
