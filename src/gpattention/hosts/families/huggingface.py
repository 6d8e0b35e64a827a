"""Models of Hugging Face's transformers, hooked where their forward pass looks up the attention function.

The function is in the `AttentionInterface` of the module's file, or beside it if it is the eager one.  While
any site is hooked, it is wrapped by one that asks whether the current call is hooked; no configuration is
changed.  The wrapped function is called, so that means, dropout and weights are the host's.

A converted module stays in place, and its configuration names our attention function, which receives
projected queries, keys and values.  The tokens, which a latent projection needs, are stored for it by a hook
before the module's own forward.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.concurrency import Handler, Undo, borrowed, handled_by, handler_of, replacing
from gpattention.hosts.conversion import RECORD, Conversion, plain_weights
from gpattention.hosts.families import base
from gpattention.hosts.families.base import AttentionCall, AttentionHook, Family, SavedModel, Site
from gpattention.hosts.families.decoders import Attends, Pasts, causal_call, decoding
from gpattention.models.config import check_finite
from gpattention.models.converted import ATTRIBUTE, ConvertedAttention, real_keys, refused_call
from gpattention.models.projected import KeyProjection, is_plain_linear

IMPLEMENTATION = "gpattention_converted"  # what the config of a converted model calls its attention
# Its name in a folder.  Transformers has no attention of that name and fails, so that no class builds its own
# softmax attention around weights that were trained with ours.
SAVED_IMPLEMENTATION = "that of a converted model, which gpattention.from_pretrained(folder) reads"
_HOOKED = "attention function"  # key of a site's hook
_EAGER = "eager_attention_forward"  # its name in the files of transformers
_TOKENS = "_gpattention_tokens"  # attribute with a module's tokens, while a compiler traces it
_Tokens = tuple[Tensor, Tensor]  # of queries and of keys
_left: ContextVar[Mapping[int, _Tokens]] = ContextVar("gpattention_tokens", default={})  # noqa: B039 never written to
_KEYS = ("key", "k_proj", "k_lin", "to_k", "Wk")
# arguments that cross-attention reads keys from
_OTHER_TOKENS = ("encoder_hidden_states", "key_value_states")


class HuggingFaceFamily(Family):
    """Attention whose forward looks up `AttentionInterface`."""

    name = "huggingface"
    forms = "attention of transformers that asks AttentionInterface"
    scale_attribute = "scaling"
    replaces = False

    def matches(self, module: nn.Module) -> bool:
        """Recognise modules by the names in their forward."""
        return hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in base.forward_code(module).co_names

    def refusal(self, module: nn.Module, around: Sequence[nn.Module]) -> str | None:
        """Refuse by attributes, and by the masks that modules around it create; decoders can be read."""
        reasons = _reasons(module, around)
        return None if decoding(module, reasons) else "; ".join(reasons) or None

    def attends(self, module: nn.Module, around: Sequence[nn.Module]) -> Attends:
        """Which keys a site sees, by the same."""
        return decoding(module, _reasons(module, around)) or "all"

    @contextmanager
    def hooked(self, model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Iterator[None]:
        """Let the attention functions that the sites call ask for hooks."""
        changes, pasts = dict(_change(site) for site in sites), Pasts()
        hooks = {(id(site.module), _HOOKED): partial(_hooked_attention, site, hook, pasts) for site in sites}
        with borrowed(changes), handled_by(hooks):
            yield

    def key_projection(self, site: Site) -> KeyProjection | None:
        """The linear map from tokens to keys, if the module has one and does not change the keys afterwards.

        Modules that merge tokens before they project keys are refused.
        """
        for name, part in site.module.named_modules():
            strided = isinstance(part, nn.modules.conv._ConvNd) and max(part.stride) > 1
            if strided or type(part).__module__ == nn.modules.pooling.__name__:
                expected = f"{site.name}: expected keys of the tokens it is called with"
                raise ValueError(f"{expected}, got keys of fewer tokens, which {name} merges")
        code = base.forward_code(site.module)
        if any("rotary" in name or "norm" in name for name in (*code.co_names, *code.co_varnames)):
            return None
        maps = (getattr(site.module, name, None) for name in _KEYS)
        return next((KeyProjection(x.weight, x.bias) for x in maps if is_plain_linear(x)), None)

    def place(self, model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
        """Give the module its layer."""
        site.module.add_module(ATTRIBUTE, layer)
        site.module.register_forward_pre_hook(_leave_tokens, with_kwargs=True)
        # also if the module failed before they were used
        site.module.register_forward_hook(_clear_tokens, always_call=True)

    def finish(self, model: nn.Module, sites: list[Site], record: Conversion) -> bool:
        """Name our attention function in every configuration that converted modules read."""
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(IMPLEMENTATION, _converted_attention)
        AttentionMaskInterface.register(IMPLEMENTATION, _padding)  # otherwise there would be no mask
        copies: dict[int, Any] = {}  # of configurations, which other models may share
        for module in model.modules():
            if hasattr(module.__dict__.get("config"), "_attn_implementation"):
                module.config = deepcopy(module.config, copies)
        for site in sites:
            config: Any = site.module.config
            # as by set_attn_implementation, which some hosts refuse for implementations they do not list
            config._attn_implementation = IMPLEMENTATION
        if not hasattr(model, "save_pretrained"):
            return False
        config = model.config
        setattr(config, RECORD, record.to_dict())
        # transformers writes it, and sets `_attn_implementation` by it when it reads the config
        config.attn_implementation = SAVED_IMPLEMENTATION
        return True

    def load(self, saved: SavedModel) -> nn.Module | None:
        """Load by transformers itself, with a class that converts itself before its weights are loaded."""
        folder, config, host = saved.folder, saved.config, saved.host
        if not isinstance(config.get(RECORD), dict) or (saved.record and isinstance(host, nn.Module)):
            return None
        if isinstance(host, nn.Module):
            got = f"got a {type(host).__name__}: call gpattention.from_pretrained({str(folder)!r})"
            raise ValueError(f"expected no host for {folder}, whose config.json names it, {got}")
        record = Conversion.from_dict(config[RECORD])
        # the host's own attention first, instead of SAVED_IMPLEMENTATION
        options = {"attn_implementation": None, **saved.options}
        converting = _converting(host or _named_class(saved), saved, record)
        try:
            model, loading = converting.from_pretrained(folder, output_loading_info=True, **options)
            names = ("missing_keys", "unexpected_keys", "mismatched_keys")
            wrong = {name: sorted(map(str, loading[name])) for name in names}
            if any(wrong.values()):
                raise ValueError(f"{folder}: expected weights that fit the model, got {wrong}")
        except ValueError as error:
            raise ValueError(f"{error}{plain_weights(folder, record)}") from error
        loaded: nn.Module = model
        buffers = dict(loaded.named_buffers())
        check_finite(folder, {**dict(loaded.named_parameters()), **buffers}, infinite=buffers)
        return loaded


def _reasons(module: nn.Module, around: Sequence[nn.Module]) -> list[str]:
    return base.attribute_reasons(module) or ([base.CAUSAL] if _masks_causally(around) else [])


def _masks_causally(makers: Sequence[nn.Module]) -> bool:
    """Whether the nearest parent that creates masks creates causal ones only."""
    masks = {"create_bidirectional_mask", "create_causal_mask"}
    found = (masks & set(base.forward_code(maker).co_names) for maker in makers)
    return next(filter(None, found), None) == {"create_causal_mask"}


def _change(site: Site) -> tuple[Hashable, Callable[[], Undo]]:
    """The change by which the site's attention function asks for hooks."""
    named = getattr(getattr(site.module, "config", None), "_attn_implementation", None)
    if named == IMPLEMENTATION:
        expected = "expected a model of which nothing is converted"
        raise ValueError(f"{expected}, got one whose {site.name} alone is not: convert all of it, or none")
    file: dict[str, Any] = inspect.unwrap(type(site.module).forward).__globals__
    if named == "eager" and _EAGER in file:
        return replacing(file, _EAGER, _asking)
    if named != "sdpa":
        expected = f"expected the attention implementation of {site.name} to be sdpa or eager"
        raise ValueError(f"{expected}, got {named!r}: call model.set_attn_implementation('sdpa')")
    interface = file["ALL_ATTENTION_FUNCTIONS"]
    # its own table has priority over that of all interfaces, which other files read too
    return replacing(interface._local_mapping, named, lambda own: _asking(own or interface[named]))


def _asking(own: Handler) -> Handler:
    """An attention function that asks for a hook of the module that calls it."""

    @wraps(own)
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handler = handler_of(module, _HOOKED)
        return own(module, *args, **kwargs) if handler is None else handler(own, module, *args, **kwargs)

    return attention


def _check_plain(name: str, arguments: Mapping[str, Any]) -> None:
    if arguments.get("is_causal") or arguments.get("position_bias") is not None:
        raise refused_call(name, "plain attention", "causal attention or a position bias")


def _hooked_attention(
    site: Site,
    hook: AttentionHook,
    pasts: Pasts,
    own: Handler,
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H, K, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function with the signature of transformers."""
    mean, weights = own(module, query, key, value, attention_mask, *args, **kwargs)  # [B, Q, H, D]
    if site.attends == "causal":
        call = causal_call(site, pasts, mean.transpose(1, 2), query, key, value, attention_mask, kwargs)
        return hook(site, call).transpose(1, 2).contiguous(), weights
    _check_plain(site.name, kwargs)
    real = None if attention_mask is None else real_keys(attention_mask, site.title)
    call = AttentionCall.scaled(mean.transpose(1, 2), query, key, value, real, kwargs.get("scaling"))
    return hook(site, call).transpose(1, 2).contiguous(), weights


def _leave_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = getattr(module.config, "_attn_implementation", None)
    if named != IMPLEMENTATION:  # the host's own attention would run silently
        expected = f"expected the attention implementation of a converted host to stay {IMPLEMENTATION!r}"
        raise ValueError(f"{getattr(module, ATTRIBUTE).name}: {expected}, got {named!r}: set it back")
    code = base.forward_code(module)
    names = code.co_varnames[1 : code.co_argcount]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(tokens, Tensor):
        raise ValueError(f"expected {type(module).__name__} to be called with tokens first, got {tokens!r}")
    others = [given[name] for name in _OTHER_TOKENS if given.get(name) is not None]
    left = (tokens, others[0] if others else tokens)
    if torch.compiler.is_compiling():  # compilers cannot follow context variables
        vars(module)[_TOKENS] = left
    else:
        _left.set({**_left.get(), id(module): left})


def _clear_tokens(module: nn.Module, *_: object) -> None:
    _taken_tokens(module)  # without returning it, as the result of a hook replaces the output


def _taken_tokens(module: nn.Module) -> _Tokens | None:
    """Take, once, the tokens that `_leave_tokens` stored in this thread."""
    left: _Tokens | None = vars(module).pop(_TOKENS, None)
    if left is not None or torch.compiler.is_compiling():
        return left
    found = dict(_left.get())
    left = found.pop(id(module), None)
    _left.set(found)
    return left


def _converted_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H, K, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of converted modules: [B, Q, H, D] and, if asked for, weights."""
    layer = getattr(module, ATTRIBUTE, None)
    if not isinstance(layer, ConvertedAttention):  # it shares the configuration but stayed softmax
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None]  # [B, 1, 1, K]
        softmax: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return softmax(module, query, key, value, attention_mask, *args, **kwargs)
    _check_plain(layer.name, kwargs)
    tokens = _taken_tokens(module)
    if tokens is None or tokens[1].shape[1] != key.shape[2]:
        raise ValueError(f"{layer.name}: expected self-attention over the tokens given, got other keys")
    real = None if attention_mask is None else real_keys(attention_mask, layer.name)
    scaling = kwargs.get("scaling")
    if scaling is not None and scaling != layer.logit_scale:  # some hosts scale their queries themselves
        query = query * (scaling / layer.logit_scale)
    weights = bool(kwargs.get("output_attentions"))
    given = {"queries": tokens[0], "keys": tokens[1], "real": real, "need_weights": weights}
    attended: tuple[Tensor, Tensor | None] = layer(query, key, value, **given)
    return attended


def _padding(*, kv_length: int, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
    """A mask function with the signature of transformers: padding [B, K] (True = real), or pairs of tokens.

    Causal and windowed masks are for attention of the same configuration that was left alone; converted
    layers refuse them.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function

    if others.get("mask_function") is not bidirectional_mask_function:
        # never skipped, as attention without a mask may look everywhere
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        pairs: Callable[..., Tensor] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        return pairs(kv_length=kv_length, attention_mask=attention_mask, **others)
    return None if attention_mask is None else attention_mask[:, -kv_length:].to(torch.bool)


def _named_class(saved: SavedModel) -> Any:
    """The class named by the folder's configuration."""
    import transformers

    names = saved.config.get("architectures") or []
    if names and hasattr(transformers, names[0]):
        return getattr(transformers, names[0])
    expected = f"{saved.folder / 'config.json'}: expected architectures to name a class of transformers"
    raise ValueError(f"{expected}, got {names}: gpattention.from_pretrained(folder, Class) names another")


def _converting(cls: Any, saved: SavedModel, record: Conversion) -> Any:
    """A subclass whose objects convert themselves when they are built, and then are of the class itself."""
    import transformers

    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        expected = f"a class of transformers' models, such as {saved.config.get('architectures')}"
        raise ValueError(f"expected the host of {saved.folder} to be {expected}, got {cls!r}")
    source: Path = saved.folder / "config.json"

    class Converting(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.__class__ = cls  # the subclass is needed for this constructor only
            saved.convert(self, record, source)

    for name in ("__name__", "__qualname__", "__module__"):  # transformers reads them
        setattr(Converting, name, getattr(cls, name))
    return Converting
