"""Host families: each is an adapter for the attention modules of one library.

`Family` is the protocol.  `find_sites`, `attach`, `convert`, `regularizer`, `predict` and `from_pretrained`
use all families without naming one.  A family recognises its modules, refuses those that cannot be read,
passes every call of a site to a hook, and inserts converted attention.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor, nn

from gpattention.attention.base import Form
from gpattention.concurrency import Handler, attribute_without_loans, handling

if TYPE_CHECKING:
    from gpattention.hosts.conversion import Conversion
    from gpattention.hosts.families.decoders import Attends, Past
    from gpattention.models.converted import ConvertedAttention, Request
    from gpattention.models.projected import KeyProjection

CAUSAL = "causal attention: every query sees other keys, and one posterior per head does not hold"
GROUPED = "grouped-query attention: query heads share keys, so the heads of queries and keys do not pair up"
RELATIVE = "relative-position attention: its weights depend on more than queries and keys"
ALIBI = "ALiBi attention: a bias of the distance is added to its dot products"
SLIDING = "sliding-window attention: every query sees other keys"
CROSS = "cross-attention of a decoder"
CAPPED = "soft-capped attention: its logits are not dot products"
SINKS = "attention with sinks: its weights do not sum to one"
IN_CACHE = 2**18  # pairs of tokens whose matrices fit the cache of a CPU


@dataclass(frozen=True, eq=False)
class Site:
    """One attention module that can be read as a Gaussian-process mean.

    Attributes:
        name: its path in the model, "" for the model itself.
        module: the attention module.
        family: name of its host family.
        heads: number of heads.
        head_dim: width of a head.
        embed_dim: width of the tokens it reads.
        parent: the module that holds it, None for the model itself.
        index: its number among the sites of the model.
        attends: to "all" keys of its own tokens, "causal" to those up to the query's, or "cross" to all of
            another sequence.
    """

    name: str
    module: nn.Module
    family: str
    heads: int
    head_dim: int
    embed_dim: int
    parent: nn.Module | None
    index: int
    attends: "Attends" = "all"

    @property
    def kind(self) -> str:
        """The class of the module."""
        return type(self.module).__name__

    @property
    def title(self) -> str:
        """Its path, for messages."""
        return self.name or "the model"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of one site, scaled so that its weights are a function of q and k only.

    The weights of `form` "softmax" are softmax_j(q_i . k_j), of "rows" softmax_j(-1/2 |q_i - k_j|^2), of
    "rbf" exp(-1/2 |q_i - k_j|^2) and of "exp_dot" exp(q_i . k_j), the last two not normalised.
    """

    mean: Tensor  # [B, H, Q, D] the host's own, before its output projection
    q: Tensor  # [B, H, Q, C]
    k: Tensor  # [B, H, K, C], of causal attention [B, H / groups, K, C]
    v: Tensor  # [B, H, K, D], likewise
    mask: Tensor | None = None  # [B, 1, K] True = real
    form: Form = "softmax"
    amplitude: Tensor | None = None  # [H] a factor of the weights of "rbf" and "exp_dot", None is 1
    past: "Past | None" = None  # of causal attention: which keys every row sees
    groups: int = 1  # heads of queries that share one of keys
    window: int | None = None  # keys that a row sees at most, where the host says so
    sink: Tensor | None = None  # [H] a logit without a value
    cap: float | None = None  # c of logits c tanh(q . k / c)

    @classmethod
    def scaled(
        cls, mean: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scale: float | None = None
    ) -> "AttentionCall":
        """Softmax over `scale` q . k, 1 / sqrt(D) if None; `real` [B, K] are the keys that are no padding."""
        shrink = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        found = object.__new__(_Scaled)
        mask = None if real is None else real[:, None]
        vars(found).update(mean=mean, v=v, mask=mask, unscaled={"q": q, "k": k}, shrink=shrink)
        return found

    def per_query_head(self, x: Tensor) -> Tensor:
        """Repeat values of the heads of keys [B, H / groups, ...] for the heads of queries.  [B, H, ...]"""
        return x if self.groups == 1 else x.repeat_interleave(self.groups, 1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "AttentionCall":
        """The same call with queries, keys and values changed."""
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v))

    def in_cache(self) -> list["AttentionCall"]:
        """The call in parts of its items whose matrices fit the cache of a CPU; items do not interact."""
        items, heads, queries = self.mean.shape[:3]
        if self.mean.device.type != "cpu" or self.past is not None:
            return [self]
        most = max(1, IN_CACHE // max(heads * queries * self.k.shape[-2], 1))

        def part(chosen: slice) -> "AttentionCall":
            mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[chosen]
            return replace(self.map(lambda x: x[chosen]), mean=self.mean[chosen], mask=mask)

        return [part(slice(start, start + most)) for start in range(0, items, most)]


class _Scaled(AttentionCall):
    """Scales queries and keys when they are first asked for: where deviations are known nobody does."""

    unscaled: dict[str, Tensor]
    shrink: float

    def __getattr__(self, name: str) -> Tensor:
        if name not in ("q", "k"):
            raise AttributeError(name)
        made = vars(self)[name] = self.unscaled[name] * self.shrink
        return made


# returns the output that the host goes on with, [B, H, Q, D]
AttentionHook: TypeAlias = Callable[[Site, AttentionCall], Tensor]
Context: TypeAlias = AbstractContextManager[None]
Host: TypeAlias = nn.Module | type[nn.Module]  # a model, or the class that builds it
Handlers: TypeAlias = dict[tuple[nn.Module, str], Handler]


@dataclass(frozen=True, eq=False)
class SavedModel:
    """The folder of a saved converted model, and how to load it.

    Attributes:
        folder: its path.
        config: the host's `config.json`, empty if there is none.
        record: of `conversion.json`, None if there is none.
        convert: `convert(model, record, file)` repeats a conversion, recorded in `file`, on a plain host.
        host: the plain model or its class, if the caller passed one.
        options: for the host's own loading.
    """

    folder: Path
    config: dict[str, Any]
    record: "Conversion | None"
    convert: Callable[[nn.Module, "Conversion", Path], None]
    host: Host | None
    options: dict[str, Any]


class Family:
    """Adapter of one host family; most families need only a few methods beyond the first ones.

    Attributes:
        name: the value of `Site.family`.
        forms: the modules that are found, for errors.
        replaces: whether a new module replaces the converted one, which then needs a parent.
        scale_attribute: attribute of modules by which q . k is multiplied, else 1 / sqrt(head_dim).
        remembers: whether converted layers keep the regularisers of the last pass in training.
    """

    name: ClassVar[str]
    forms: ClassVar[str]
    replaces: ClassVar[bool] = True
    scale_attribute: ClassVar[str] = ""
    remembers: ClassVar[bool] = True

    def matches(self, module: nn.Module) -> bool:
        """Whether a module is attention of this family, whether a site or not."""
        raise NotImplementedError

    def refusal(self, module: nn.Module, around: Sequence[nn.Module]) -> str | None:
        """Why a module is not a site, None if it is one; `around` are its parents, inner ones first."""
        raise NotImplementedError

    def attends(self, module: nn.Module, around: Sequence[nn.Module]) -> "Attends":
        """Which keys a site sees."""
        return "all"

    def handlers(self, model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Handlers:
        """Handlers of methods of modules, by which the hook sees each call of a site."""
        raise NotImplementedError

    def hooked(self, model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Context:
        """Within the block, and in this thread only, the host goes on with the results of the hook."""
        return handling(self.handlers(model, sites, hook))

    def place(self, model: nn.Module, site: Site, layer: "ConvertedAttention") -> None:
        """Let the layer attend at the site.  Only attributes and tables of modules may be changed."""
        raise NotImplementedError

    def key_projection(self, site: Site) -> "KeyProjection | None":
        """The host's projection from tokens to keys; None if a layer cannot start from it.

        Raises:
            ValueError: the module cannot be converted at all.
        """
        return None

    def logit_scale(self, site: Site) -> float:
        """The factor of q . k in the host."""
        scale = getattr(site.module, self.scale_attribute, None)
        return float(scale) if isinstance(scale, float | int) else site.head_dim**-0.5

    def convert_whole(self, model: nn.Module, sites: list[Site], kind: str, options: dict[str, Any]) -> bool:
        """Convert the model as a whole and return True; False to convert it site by site."""
        return False

    def finish(self, model: nn.Module, sites: list[Site], record: "Conversion") -> bool:
        """Last step of a conversion; returns whether the host's own files will hold the record."""
        return False

    def requested(self, model: nn.Module, request: "Request") -> Handlers:
        """Handlers of converted attention that does not receive requests otherwise."""
        return {}

    def regularizer(self, model: nn.Module) -> Tensor | None:
        """The regulariser of models that keep it themselves; None to sum those of the layers."""
        return None

    def load(self, saved: SavedModel) -> nn.Module | None:
        """The converted model of a complete folder; None if it is not complete."""
        return None

    def new_host(self, saved: SavedModel) -> nn.Module | None:
        """The model as before its conversion, without weights; None if the folder does not describe it."""
        return None


_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_HEAD_DIM = ("attention_head_size", "head_dim", "head_size", "attn_head_dim")
_PROJECTIONS = ("query", "q_proj", "q_lin", "qkv", "to_q", "qkv_proj", "Wqkv", "Wq", "key", "k_proj", "k_lin")
_RELATIVE_ATTRIBUTES = (
    "relative_attention_bias", "relative_position_bias", "relative_position_bias_table",
    "relative_position_embeddings", "relative_attn", "rel_pos", "rel_pos_h", "rel_pos_bias", "pos_bias_u",
)  # fmt: skip
_RELATIVE_SETTINGS = (
    "has_relative_attention_bias", "relative_attention", "use_relative_position_bias",
    "use_shared_relative_position_bias",
)  # fmt: skip
_NO_CODE = (lambda: None).__code__  # names nothing
_RELATIVE_ARGUMENTS = ("position_bias", "relative_position_bias", "rel_pos", "shared_rel_pos_bias")


def heads_of(module: nn.Module) -> tuple[int, int, int] | None:
    """Number of heads, width of a head and of the tokens; None if no known attribute has them."""
    config = getattr(module, "config", None)
    heads = _first_number(module, _HEADS) or _first_number(config, _HEADS)
    linears = (getattr(module, name, None) for name in _PROJECTIONS)
    widths = (linear.in_features for linear in linears if isinstance(linear, nn.Linear))
    embed_dim = _first_number(module, ("embed_dim",)) or next(widths, None)
    embed_dim = embed_dim or _first_number(config, ("hidden_size", "dim", "d_model"))
    if heads is None or embed_dim is None:
        return None
    head_dim = _first_number(module, _HEAD_DIM)
    if head_dim is None and embed_dim % heads == 0:
        head_dim = embed_dim // heads
    return None if head_dim is None else (heads, head_dim, embed_dim)


def _first_number(holder: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def forward_code(module: nn.Module) -> CodeType:
    """The code of the class's forward, without decorators; empty for built-in functions."""
    code: CodeType = getattr(inspect.unwrap(type(module).forward), "__code__", _NO_CODE)
    return code


def is_patched(module: nn.Module) -> bool:
    """Whether the instance has a different forward than its class."""
    own = attribute_without_loans(module, "forward")
    return own is not None and own != MethodType(type(module).forward, module)


def is_set(holder: object, name: str) -> bool:
    """Whether an attribute is the value True."""
    return getattr(holder, name, False) is True


def attribute_reasons(module: nn.Module) -> list[str]:
    """Reasons to refuse a module that its attributes or its configuration show."""
    config = getattr(module, "config", None)
    numbers = (getattr(module, name, None) for name in ("attn_logit_softcapping", "softcap", "logit_cap"))
    shape, shared = heads_of(module), _first_number(module, ("num_key_value_heads",))
    grouped = shape is not None and shared is not None and shared != shape[0]
    found = {
        CAUSAL: is_set(module, "is_causal") or is_set(module, "is_decoder") or is_set(config, "is_decoder"),
        GROUPED: grouped or (_first_number(module, ("num_key_value_groups",)) or 1) > 1,
        **dict.fromkeys(bias_reasons(module), True),
        SLIDING: isinstance(getattr(module, "sliding_window", None), int),
        CAPPED: any(isinstance(x, int | float) and not isinstance(x, bool) and x for x in numbers),
        SINKS: hasattr(module, "sinks"),
        CROSS: is_set(module, "is_cross_attention") or "CrossAttention" in type(module).__name__,
    }
    return [why for why, holds in found.items() if holds]


def bias_reasons(module: nn.Module) -> list[str]:
    """Reasons to refuse a module for terms beside the dot product, by its attributes and arguments."""
    arguments, config = forward_code(module).co_varnames, getattr(module, "config", None)
    if "alibi" in arguments or type(module).__name__.startswith("Mpt"):  # MPT hands it on as a position bias
        return [ALIBI]
    held = any(getattr(module, name, None) is not None for name in _RELATIVE_ATTRIBUTES)
    switched = any(is_set(holder, name) for holder in (module, config) for name in _RELATIVE_SETTINGS)
    return [RELATIVE] if held or switched or not set(_RELATIVE_ARGUMENTS).isdisjoint(arguments) else []
