"""Our own softmax and kernel attention, alone or in our transformers; hooks replace its method `_mean`.

Softmax attention is converted like that of other hosts.  Transformers with kernel attention are converted by
`warm_start`, and then have a config of the new kind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.attention import (
    Attention,
    AttentionOutput,
    GaussianAttention,
    Heads,
    SoftmaxAttention,
    attention_class,
    list_attention,
)
from gpattention.concurrency import Handler
from gpattention.gp import keep_rows
from gpattention.hosts.conversion import Conversion
from gpattention.hosts.families import base
from gpattention.hosts.families.base import AttentionCall, AttentionHook, Family, Handlers, SavedModel, Site
from gpattention.models import (
    AttentionConfig,
    ModelOutput,
    TextTransformer,
    Transformer,
    VisionTransformer,
    converted,
    warm_start,
)
from gpattention.models.config import load_config
from gpattention.models.converted import ATTRIBUTE, ConvertedAttention, Request
from gpattention.models.predict import is_predicting
from gpattention.models.projected import KeyProjection, ProjectedHeads, is_plain_linear

_MODELS: dict[str, type[Transformer]] = {
    "VisionTransformer": VisionTransformer, "TextTransformer": TextTransformer,
}  # fmt: skip
_REMEMBERED = "_gpattention_regularizer"  # attribute of our transformers with that of the last output


class OwnFamily(Family):
    """Modules of `gpattention.attention`."""

    name = "gpattention"
    forms = "and our own softmax and kernel attention"
    remembers = False  # our attention returns its regulariser when it is called

    def matches(self, module: nn.Module) -> bool:
        """All kinds."""
        return isinstance(module, Attention)

    def refusal(self, module: nn.Module, around: Sequence[nn.Module]) -> str | None:
        """Refuse kinds with a posterior, kinds without a process, and causal attention."""
        assert isinstance(module, Attention)
        if module.draws:
            return f"{module.kind!r} attention has a posterior of its own"
        if not module.attachable:
            return f"{module.kind!r} attention has no Gaussian process behind its mean"
        return base.CAUSAL if module.causal else None

    def handlers(self, model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Handlers:
        """Call the hook with the means of our attention modules."""
        return {(site.module, "_mean"): partial(_mean, site, hook) for site in sites}

    def key_projection(self, site: Site) -> KeyProjection | None:
        """The host's projection to keys."""
        key = getattr(site.module, "key", None)
        return KeyProjection(key.weight, key.bias) if is_plain_linear(key) else None

    def place(self, model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
        """Replace the module by a converted one."""
        assert isinstance(site.module, SoftmaxAttention)
        converted.take_place(model, site.module, ConvertedOwn(site.module, layer))

    def convert_whole(self, model: nn.Module, sites: list[Site], kind: str, options: dict[str, Any]) -> bool:
        """Replace kernel attention by `kind` with `warm_start`, and change the model's config."""
        own = {site.module.kind for site in sites if isinstance(site.module, Attention)}
        if not (own := own - {"softmax"}):
            return False
        source = own.pop()
        if not isinstance(model, Transformer) or len(sites) != len(model.blocks):
            raise ValueError(f"expected a whole transformer to convert from {source} attention, got a part")
        classes = {name: attention_class(name) for name in list_attention()}
        fits = [name for name, cls in classes.items() if source in cls.converts_from]
        if kind not in fits:
            raise ValueError(f"expected kind among {', '.join(fits)} for {source} attention, got {kind!r}")
        given = dict(options)
        if kind != "sgpa":  # which divides no rows
            given = {"normalize": getattr(sites[0].module, "normalize", None), **given}
        prior_scale = given.pop("prior_scale", 1.0) if given.get("normalize") == "none" else 1.0
        if not prior_scale > 0:
            raise ValueError(f"expected prior_scale > 0, got {prior_scale}")
        layers = (AttentionConfig(kind, given),) * len(sites)
        target = type(model)(replace(model.config, attention=layers))
        target.to(next(model.parameters()))
        warm_start(target, model)
        for ours, new in zip(model._blocks(), target._blocks(), strict=True):
            if prior_scale != 1:
                _start_at(new.attention, prior_scale)
            ours.attention = new.attention.train(ours.attention.training)
        model.config = target.config
        _watch_outputs(model)
        return True

    def finish(self, model: nn.Module, sites: list[Site], record: Conversion) -> bool:
        """Let a transformer keep the regulariser of its last output."""
        _watch_outputs(model)
        return False

    def requested(self, model: nn.Module, request: Request) -> Handlers:
        """Let converted attention of ours follow a prediction's request, although its host does not."""
        own = [module for module in model.modules() if isinstance(module, ConvertedOwn) and module.draws]
        return {(module, "forward"): partial(_answer, module, request) for module in own}

    def regularizer(self, model: nn.Module) -> Tensor | None:
        """The regularisers of our transformers' last outputs; attention outside of them keeps none."""
        ours = [module for module in model.modules() if isinstance(module, Transformer)]
        values = [vars(module)[_REMEMBERED].regularizer for module in ours if _REMEMBERED in vars(module)]
        if any(value is not None for value in values):
            return torch.stack([value for value in values if value is not None]).sum()
        if ours:
            how = "model(x, draw='independent', need=('logits', 'regularizer')) of a converted transformer"
            raise ValueError(f"expected a forward pass asked for the regulariser, got none: call {how}")
        own = any(isinstance(module, ConvertedOwn) for module in model.modules())
        if own and not any(layer.regularizers for layer in converted.converted_layers(model)):
            how = "attention(x, draw='independent', need=('output', 'regularizer'))"
            got = f"attention of gpattention, which gives it where it is called: {how}"
            raise ValueError(f"expected converted layers that remember their regulariser, got {got}")
        return None

    def load(self, saved: SavedModel) -> nn.Module | None:
        """A transformer converted from kernel attention, whose config is complete."""
        cls = _model_class(saved)
        whole = cls is not None and saved.record is None and not saved.options
        return cls.from_pretrained(saved.folder) if cls is not None and whole else None

    def new_host(self, saved: SavedModel) -> nn.Module | None:
        """A transformer of ours as before its conversion."""
        if (cls := _model_class(saved)) is None:
            return None
        return cls(cls.config_class.from_dict(load_config(saved.folder, cls.__name__)))


def _model_class(saved: SavedModel) -> type[Transformer] | None:
    name = saved.config.get("model")
    return _MODELS.get(name) if isinstance(name, str) else None


def _mean(site: Site, hook: AttentionHook, own: Handler, heads: Heads) -> Tensor:
    module: Any = site.module
    mean, process = own(heads), module._mean_process(heads)
    call = AttentionCall(mean, process.q, process.k, heads.v, heads.mask, process.form, process.amplitude)
    return keep_rows(hook(site, call), heads.query_mask)


def _of_layer(name: str) -> Callable[..., Any]:
    """A method that the converted layer answers, with the queries and keys of its host."""

    def method(self: "ConvertedOwn", heads: Heads, *args: Any, **options: Any) -> Any:
        attention = getattr(self, ATTRIBUTE).attention
        return getattr(attention, name)(self._host_heads(heads), *args, **options)

    return method


class ConvertedOwn(Attention):
    """Replaces a `SoftmaxAttention`, with its projections; the converted layer answers its calls."""

    def __init__(self, host: SoftmaxAttention, layer: ConvertedAttention) -> None:
        nn.Module.__init__(self)
        converted.inherit(self, host, layer, "embed_dim", "num_heads", "head_dim", "batch_first")
        # attributes of the instance, most of which belong to the class in other kinds
        for name in ("kind", "draws", "crosses", "exportable", "regularizer"):
            setattr(self, name, getattr(layer.attention, name))

    def _host_heads(self, heads: Heads) -> ProjectedHeads:
        q = self._split(self.query(heads.queries))  # type: ignore[operator]
        k = self._split(self.key(heads.keys))  # type: ignore[operator]
        return ProjectedHeads.scaled(heads, q, k, self.head_dim**-0.25)

    _mean = _of_layer("_mean")
    _weights = _of_layer("_weights")
    _posterior = _of_layer("_posterior")
    _regularizer = _of_layer("_regularizer")
    _log_density = _of_layer("_log_density")
    _kernel_inputs = _of_layer("_kernel_inputs")


def _answer(
    module: ConvertedOwn, request: Request, own: Handler, query: Tensor, *args: Any, **kwargs: Any
) -> Any:
    need = (*kwargs.get("need", ("output",)), *(("variance",) if request.variances else ()))
    request.drawing(query)
    asked = {"draw": request.draw, "generator": request.generator, "need": tuple(dict.fromkeys(need))}
    output: AttentionOutput = own(query, *args, **{**kwargs, **asked})
    if request.variances:
        request.layer_variances[id(getattr(module, ATTRIBUTE))] = output.variance
    return output


@torch.no_grad()
def _start_at(module: Attention, prior_scale: float) -> None:
    """Multiply s_q by t and divide V by t, which keeps s_q s_k kappa V and scales the draws."""
    assert isinstance(module, GaussianAttention)
    module.scale_q.set(module.scale_q() * prior_scale)
    for parameter in module.value.parameters():
        parameter.div_(prior_scale)


@dataclass(eq=False)
class _Remembered:
    """The regulariser of a model's last pass; copies of the model have none, as graphs are not copied."""

    regularizer: Tensor | None = None

    def __reduce__(self) -> tuple[type["_Remembered"], tuple[()]]:
        return _Remembered, ()


def _watch_outputs(model: nn.Module) -> None:
    if isinstance(model, Transformer):
        model.register_forward_hook(_remember_output)


def _remember_output(model: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of our transformers; predictions have no regulariser and change nothing."""
    if is_predicting():
        return
    value = output.regularizer if isinstance(output, ModelOutput) else None
    if value is not None:
        model.__dict__[_REMEMBERED] = _Remembered(value)
    else:  # removed, as threads that only predict leave no attribute
        model.__dict__.pop(_REMEMBERED, None)
