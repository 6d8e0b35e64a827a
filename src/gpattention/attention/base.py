"""The one call all kinds of attention share: tokens and masks, draws, regularisers, and what `need` names.

One normalisation for every regulariser: per head, real token and head dimension.

    sum over batch and heads of (negative log density or KL) / (heads * real tokens in the batch * width)

Under data parallelism gradients are averaged over processes, so the local sum is divided by the *mean*
number of real tokens per process: the average over processes is then the value of the whole batch, however
unevenly the tokens are spread.  Processes that share the tokens of each sequence
(`SCGPAttention.shard_tokens`) count as one, as sum and count are those of all tokens already.

Kinds register themselves by name.  Their options are checked against the annotations of their constructors.
A recipe, or `--set model.options.learn_noise=False`, may pass a text in place of a truth value; without the
check it would silently count as true.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpattention.attention.parameters import Positive, preserve_, projected_together
from gpattention.checks import check_choice, check_count, check_tensor, nearest, plain
from gpattention.gp import LogDensity, Posterior, keep_rows
from gpattention.gp.posterior import Source as Source  # for kinds in other rooms
from gpattention.numerics import autocast_is_on, checked_once
from gpattention.ops.draws import draws_fit

Draw = Literal["none", "independent", "joint"]
DRAWS: tuple[Draw, ...] = ("none", "independent", "joint")
NEEDS = ("output", "variance", "regularizer", "weights", "posterior")
Form = Literal["softmax", "rows", "rbf", "exp_dot"]
# arguments of attention in other libraries, and what to use instead
HABITS = {
    "attn_mask": "to hide keys, use key_padding_mask [B, K] (True = ignore); {causal}; no other masks exist",
    "is_causal": "{causal}",
    "need_weights": "to get weights, use need=('output', 'weights')",
    "average_attn_weights": "weights are those of every head, [B, H, Q, K]; average them by .mean(1)",
    "attention_mask": "use key_padding_mask [B, K] (True = ignore): key_padding_mask=attention_mask == 0",
    "mask": "use key_padding_mask [B, K], True at padding",
    "src_key_padding_mask": "use key_padding_mask",
    "padding_mask": "use key_padding_mask",
}
SIZES = {"dim": "embed_dim", "d_model": "embed_dim", "hidden_size": "embed_dim", "width": "embed_dim"}


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """The output and the results named in `need`; all others are None and were not computed.

    Attributes:
        output: [B, Q, E]; [S, B, Q, E] if more than one sample was drawn.
        variance: [B, H, Q] per head; [B, H, Q, D] for kinds with a variance per channel.
        regularizer: a number to add to a loss.
        weights: [B, H, Q, K], by which the mean multiplies the values.
        posterior: of the outputs of the heads, before the output projection.
        inducing: [H, m, E], the inducing inputs of the call, for kinds that take them from outside.
    """

    output: Tensor
    variance: Tensor | None = None
    regularizer: Tensor | None = None
    weights: Tensor | None = None
    posterior: Posterior | None = None
    inducing: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """The inputs of one call, with values split into heads; masks are True at real tokens.

    Attributes:
        queries: [B, Q, E] the inputs themselves.
        keys: [B, K, E]
        v: [B, H, K, D]
        mask: [B, 1, K]
        query_mask: [B, 1, Q]
        inducing: [H, m, E], for kinds that take inducing inputs from outside.
        ready: projections that were made together, [B, N, E] each.
        one_draw: whether the posterior is to make one independent draw with its moments.
    """

    queries: Tensor
    keys: Tensor
    v: Tensor
    mask: Tensor | None
    query_mask: Tensor | None
    inducing: Tensor | None
    ready: Mapping[str, Tensor] = field(default_factory=dict)
    one_draw: bool = False

    def one_mask(self, kind: str) -> Tensor | None:
        """The common mask of queries and keys, for models with only one.  [B, 1, N]"""
        if self.query_mask is not self.mask:
            expected = "expected a key_padding_mask alone and no other key, got masks that may differ"
            raise ValueError(f"{kind} attention has one mask for queries and keys: {expected}")
        return self.mask


@dataclass(frozen=True, slots=True)
class MeanProcess:
    """The Gaussian process whose mean a kind without a posterior computes.

    Attributes:
        q: [B, H, Q, D]
        k: [B, H, K, D]
        form: the weights are softmax_j(q_i . k_j) for "softmax", softmax_j(-1/2 |q_i - k_j|^2) for "rows",
            and the exponentials themselves times the amplitude for "rbf" and "exp_dot".
        amplitude: [H]; None is 1.
    """

    q: Tensor
    k: Tensor
    form: Form
    amplitude: Tensor | None = None


class Attention(nn.Module):
    """Base of all kinds.  A subclass makes its projections and implements `_mean` or `_posterior`.

    The class attributes declare what a kind can do; the rest of the library reads them and names no kind.

    Args:
        embed_dim: width E of the tokens and of the output.
        num_heads: number H of heads; E must be a multiple.
        bias: whether projections have biases.
        dropout: probability with which entries of the output are dropped, after the output projection.
        regularizer: the regulariser that `need=("regularizer",)` computes, one of the kind's `regularizers`.
        batch_first: whether inputs are [B, N, E] or [N, B, E].
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: the kind does not have an option, or options do not fit together.
    """

    kind: ClassVar[str] = ""
    draws: ClassVar[bool] = False  # whether it has a posterior
    regularizers: ClassVar[tuple[str, ...]] = ("none",)
    default_regularizer: ClassVar[str] = "none"
    normalizes: ClassVar[bool] = False  # whether it takes normalize="rows"
    causal_form: ClassVar[bool] = False  # whether it takes causal=True
    causal: bool = False  # whether token i sees tokens up to i alone
    crosses: ClassVar[bool] = True  # whether keys may differ from queries
    weighs: ClassVar[bool] = True  # whether its mean is a matrix of weights times the values
    sized: ClassVar[bool] = False  # whether it takes `tokens`, their number in a sequence, from the model
    one_length: bool = False  # whether every sequence must have as many tokens
    below: ClassVar[str | None] = None  # kind of all layers but the last in a model with this kind
    projections: ClassVar[tuple[str, ...]] = ("value",)  # its linear maps of the tokens
    converts_from: ClassVar[tuple[str, ...]] = ()  # kinds whose trained weights can start it
    # whether its mean needs no factor of a matrix, which ONNX cannot compute
    exportable: ClassVar[bool] = False
    attachable: ClassVar[bool] = False  # whether it has a `_mean_process`
    has_inducing: ClassVar[bool] = False  # whether its inducing inputs can start at the tokens of an example
    shards: ClassVar[bool] = False  # whether a group of processes may share the tokens: `shard_tokens`
    # options under which the same tensors are another function
    meaning: ClassVar[tuple[str, ...]] = ("kernel", "symmetric", "normalize", "causal", "values")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        regularizer: str | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads = check_count("embed_dim", embed_dim), check_count("num_heads", num_heads)
        dropout = plain(dropout)
        if embed_dim % num_heads:
            raise ValueError(f"expected embed_dim a multiple of num_heads, got {embed_dim} and {num_heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {dropout}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.batch_first = batch_first
        self.regularizer = self.default_regularizer if regularizer is None else regularizer
        check_choice(f"regularizer of {self.kind!r} attention", self.regularizer, self.regularizers)
        self._made_with: dict[str, Any] = {"device": device, "dtype": dtype}
        self._bias = bias
        self.value, self.output = self._linear(), self._linear()
        self.dropout = nn.Dropout(dropout)
        preserve_(self.value)
        preserve_(self.output)

    def forward(
        self,
        query: Tensor,  # [B, Q, E]
        key: Tensor | None = None,  # [B, K, E]; None, or the query itself, is self-attention
        value: Tensor | None = None,  # [B, K, E]; None is the key
        *,
        key_padding_mask: Tensor | None = None,  # [B, K] True = ignore
        query_padding_mask: Tensor | None = None,  # [B, Q] True = ignore
        draw: Draw = "none",
        samples: int = 1,
        generator: Source = None,
        need: tuple[str, ...] = ("output",),
        inducing: Tensor | None = None,  # [H, m, E], of kinds whose inducing inputs are tokens
        finish: bool = True,
        **unknown: Any,
    ) -> AttentionOutput:
        """Attend, and return the output with the results named in `need`.

        Masks are as in `nn.MultiheadAttention`: tokens with True are ignored, whatever they contain.  In
        self-attention, `attention(x)` or `attention(x, x, x)`, the key mask is the query mask too.  Causal
        attention takes as many queries as keys.  `draw` replaces the mean by draws from the posterior, token
        by token ("independent") or correlated ("joint"); one sample has the shape of the mean, several are
        stacked in front.  Unbatched [N, E] inputs give unbatched results, except for the posterior, which
        has a batch of one.  `finish=False` leaves the output projection and its dropout to the caller, who
        may fuse them with later operations, and returns their input.
        """
        if unknown:
            name = next(iter(unknown))
            known = [*inspect.signature(Attention.forward).parameters][1:-1]
            near = nearest(name, known)
            causal = "to hide later tokens, build it with causal=True"
            causal = causal if self.causal_form else f"{causal}, which {', '.join(_causal_kinds())} accept"
            helps = HABITS.get(name, "").format(causal=causal)
            helps = helps or (f"did you mean {near!r}?" if near else f"known: {', '.join(known)}")
            raise ValueError(f"{self.kind!r} attention takes no {name}: {helps}")
        for name, x in {"query": query, "key": key, "value": value}.items():
            if x is not None:
                check_tensor(name, x)
        self._check_request(draw, samples, need)

        def attend() -> AttentionOutput:
            heads, unbatched = self._heads(query, key, value, key_padding_mask, query_padding_mask, inducing)
            return self._answer(heads, unbatched, draw, samples, generator, need, finish)

        if "posterior" in need:  # which checks its results itself, when they are asked for
            return attend()
        return checked_once(attend, query.device, lambda out: (out.output, out.variance, out.regularizer))

    def _answer(
        self,
        heads: Heads,
        unbatched: bool,
        draw: Draw,
        samples: int,
        generator: Source,
        need: tuple[str, ...],
        finish: bool,
    ) -> AttentionOutput:
        wanted = draw != "none" or "variance" in need
        # one operator for both: eager code asks for no operator
        if torch.compiler.is_compiling() and draw == "independent" and samples == 1 and generator is None:
            shape = torch.Size((1, *heads.v.shape[:2], heads.queries.shape[1], self.head_dim))
            heads = replace(heads, one_draw=draws_fit(shape))
        posterior = self._posterior(heads, with_variance=wanted) if self.draws else None
        if posterior is None:
            mean = self._mean(heads)  # [B, H, Q, D]
        elif draw == "none":
            mean = posterior.mean
        else:
            mean = posterior.sample(samples, generator=generator, joint=draw == "joint")
            mean = mean if samples > 1 else mean.squeeze(0)  # the gradient of squeeze is a view
        output = mean.transpose(-3, -2).flatten(-2)  # [..., B, Q, E]
        output = self.dropout(self.output(output)) if finish else output
        variance = posterior.variance if posterior is not None and "variance" in need else None
        weights = self._weights(heads) if "weights" in need else None
        regularizer = None
        if "regularizer" in need:
            regularizer = self._scalar_regularizer(heads, posterior, generator)
        if unbatched:
            output = output.squeeze(-3)
            variance, weights = (None if x is None else x[0] for x in (variance, weights))
        elif not self.batch_first:
            output = output.transpose(-3, -2)
        posterior = posterior if "posterior" in need else None
        return AttentionOutput(output, variance, regularizer, weights, posterior, heads.inducing)

    @classmethod
    def kernel_options(cls, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """Options of the kernel attention from which this kind with `options` gets its warm start.

        None for kinds without a warm start, which are their own first phase of training.
        """
        return None

    def _from_kernel(self, source: Any, latent_from: str) -> dict[str, Tensor]:
        """The initial tensors of this module, by name, from a trained `KernelAttention`."""
        raise NotImplementedError

    def _check_like(self, source: "Attention", *options: str) -> None:
        """Refuse a source with other values of these options; a kind without an option has it off."""
        for option in options:
            ours, theirs = getattr(self, option, False), getattr(source, option, False)
            if ours != theirs:
                raise ValueError(f"expected {option}={ours!r}, got {theirs!r}")

    def inducing_tokens(self) -> Tensor | None:
        """Inducing inputs that are tokens, which a model passes through the layer below.  [H, m, E]"""
        return None

    def _check_request(self, draw: str, samples: int, need: tuple[str, ...]) -> None:
        """Refuse requests that this kind of attention cannot answer, before anything is computed."""
        check_draw(draw, samples)
        check_need(need, NEEDS)
        if not self.weighs and "weights" in need:
            raise ValueError(f"{self.kind!r} attention weighs no values, so need={need!r} cannot be answered")
        if not self.draws and (draw != "none" or "variance" in need or "posterior" in need):
            asked = f"draw={draw!r}" if draw != "none" else f"need={need!r}"
            helps = "use a kind that has one, such as 'cgp' or 'softmax-gp'"
            raise ValueError(
                f"{self.kind!r} attention has no posterior, so {asked} cannot be answered: {helps}"
            )

    def _heads(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding: Tensor | None = None,
        query_padding: Tensor | None = None,
        inducing: Tensor | None = None,
    ) -> tuple[Heads, bool]:
        """Checked tokens and masks with projected values, and whether the tokens are unbatched."""
        # `attention(x)`, or `attention(x, x, x)` as `nn.MultiheadAttention` is called
        to_itself = key is None or key is query
        if not self.crosses and not to_itself:
            raise ValueError(f"{self.kind!r} attention is self-attention: its keys are its queries")
        if value is not None and key is None:
            raise ValueError("a value without a key: pass the key too")
        one_set = to_itself and (query_padding is None or query_padding is key_padding)
        values_are_keys = value is None or value is key
        key = query if key is None else key
        value = key if value is None else value
        self._check_tokens(query=query, key=key, value=value)
        unbatched = query.ndim == 2
        if unbatched:
            query, key, value = query[None], key[None], value[None]
            key_padding = None if key_padding is None else key_padding[None]
            query_padding = None if query_padding is None else query_padding[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        self._check_counts(query, key, value)
        mask = _as_real(key_padding, key, "key_padding_mask")
        if one_set:
            query_mask = mask
        elif query_padding is None and mask is not None:
            # given explicitly, as GP functions take the keys' mask for None if the numbers agree
            query_mask = mask.new_ones(query.shape[0], 1, query.shape[1])
        else:
            query_mask = _as_real(query_padding, query, "query_padding_mask")
        keys = _real_rows(key, mask)
        queries = keys if one_set else _real_rows(query, query_mask)
        ready = self._together(keys) if one_set and values_are_keys else {}
        values = ready.get("value")
        if values is None:
            values = self.value(keys if values_are_keys else _real_rows(value, mask))
        used = self._inducing_inputs(inducing)
        return Heads(queries, keys, self._split(values), mask, query_mask, used, ready), unbatched

    def _check_tokens(self, **tokens: Tensor) -> None:
        axes = 2 if tokens["query"].ndim == 2 else 3
        weight = self.value.weight if type(self.value) is nn.Linear else None
        for name, x in tokens.items():
            check_tokens(name, x, axes, self.embed_dim, None if weight is None else weight.dtype)

    def _check_counts(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if key.shape[0] != query.shape[0] or value.shape[:2] != key.shape[:2]:
            q, k, v = (list(x.shape[:2]) for x in (query, key, value))  # sequences and tokens
            expected = "expected one batch size, and as many values as keys"
            raise ValueError(f"{expected}, got query of {q}, key of {k} and value of {v}")
        if self.causal and query.shape[1] != key.shape[1]:
            # fewer queries could be the first or the last tokens of the key
            expected = (
                "expected query with as many tokens as key, as causal=True lets token i see key up to i"
            )
            raise ValueError(f"{expected}, got query of {query.shape[1]} tokens and key of {key.shape[1]}")

    def _together(self, tokens: Tensor) -> dict[str, Tensor]:
        """All projections of the tokens in one product, or none if that is not possible.  [B, N, E]"""
        names = [name for name in self.projections if getattr(self, name) is not None]
        made = projected_together(tokens, [getattr(self, name) for name in names])
        return {} if made is None else dict(zip(names, made, strict=True))

    def _projection(self, name: str, heads: Heads) -> Tensor:
        """Queries, keys or latent inputs, by the projection with that name.  [B, H, N, D]"""
        if name in heads.ready:
            return self._split(heads.ready[name])
        return self._split(getattr(self, name)(heads.queries if name == "query" else heads.keys))

    def _projected(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Queries and keys.  [B, H, N, D]"""
        return self._projection("query", heads), self._projection("key", heads)

    def _scalar_regularizer(self, heads: Heads, posterior: Posterior | None, generator: Source) -> Tensor:
        if self.regularizer == "none" or posterior is None:
            return heads.v.new_zeros(())
        total = self._regularizer(heads, posterior, generator)
        total = total.expand(heads.queries.shape[0], self.num_heads)  # [B, H]
        tokens: Tensor | int = heads.queries.shape[0] * heads.queries.shape[1]
        if heads.query_mask is not None:
            tokens = heads.query_mask.sum().float()
        return normalised(total, tokens, head_dim=self.head_dim, training=self.training)

    def _weights(self, heads: Heads) -> Tensor:
        """The weights, which are the mean of the identity, as it is linear in the values.  [B, H, Q, K]"""
        eye = torch.eye(heads.v.shape[-2], dtype=heads.v.dtype, device=heads.v.device)
        return self._mean(replace(heads, v=eye.expand(*heads.v.shape[:-1], -1)))

    def _inducing_inputs(self, inducing: Tensor | None) -> Tensor | None:
        if inducing is not None:
            raise ValueError(f"{self.kind!r} attention takes no inducing inputs from outside")
        return None

    def _mean(self, heads: Heads) -> Tensor:
        """The outputs of the heads, implemented by kinds without a posterior.  [B, H, Q, D]"""
        return self._posterior(heads).mean

    def _mean_process(self, heads: Heads) -> MeanProcess:
        """The process behind the mean of an `attachable` kind."""
        raise NotImplementedError

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        """The posterior; `with_variance` announces that its variance will be asked for."""
        raise NotImplementedError

    def _regularizer(self, heads: Heads, posterior: Posterior, generator: Source) -> Tensor:
        """Negative log density or KL of the posterior, per sequence and head.  [B, H]"""
        raise NotImplementedError

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Queries and keys between which kappa of eq. 1 is this kind's kernel.  [B, H, N, D]"""
        return self._projected(heads)

    def _compared(self, heads: Heads) -> tuple[Tensor, Tensor, bool] | None:
        """Queries and keys [B, H, N, D] whose kernel gives the weights, and whether it is exp(q . k).

        Otherwise it is the kernel of eq. 1.  None for kinds that do not compare queries with keys.
        """
        return None

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity | None:
        """The density whose noise floor shows a collapse, if the kind has one."""
        return None

    def _linear(self) -> nn.Linear:
        return nn.Linear(self.embed_dim, self.embed_dim, bias=self._bias, **self._made_with)

    def _per_head(self, name: str, initial: float, learned: bool, *, floor: float = 0.0) -> Positive:
        """A positive number for every head, called `name` in errors.  [H]"""
        options: dict[str, Any] = {"floor": floor, "learned": learned, "name": name}
        return Positive((self.num_heads,), initial, **options, **self._made_with)

    def _split(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, H, N, D]"""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)

    def extra_repr(self) -> str:
        """Kind and regulariser in the module's print-out."""
        return f"kind={self.kind!r}, regularizer={self.regularizer!r}"


def check_tokens(
    name: str, x: Tensor, axes: int, width: int, dtype: torch.dtype | None, owner: str = "attention"
) -> None:
    """Refuse ids, tokens of another shape or width, and, outside autocast, another type than the weights'."""
    if not x.is_floating_point():
        helps = "ids are embedded first, as by nn.Embedding"
        raise ValueError(f"expected {name} to be floating-point tokens, got {x.dtype}: {helps}")
    if x.ndim != axes or x.shape[-1] != width:
        shape = f"[B, N, {width}] (or all unbatched)"
        raise ValueError(f"expected {name} of shape {shape}, got {tuple(x.shape)}")
    if dtype is not None and x.dtype != dtype and not autocast_is_on(x.device):
        expected = f"expected {name} of {dtype}, as the weights are, got {x.dtype}"
        raise ValueError(f"{expected}: {name}.to({dtype}), or {owner}.to({x.dtype})")


def check_draw(draw: str, samples: int) -> None:
    """Refuse an unknown way to draw, no samples, and several samples of one mean."""
    check_choice("draw", draw, DRAWS)
    if check_count("samples", samples) > 1 and draw == "none":
        raise ValueError(f"samples={samples} without a draw: pass draw='independent' or draw='joint'")


def check_need(need: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuse unknown names, and a single name without a comma, which is a text and not a tuple."""
    if isinstance(need, str):
        raise ValueError(f"expected need to be a tuple of names, got the text {need!r}: write ({need!r},)")
    unknown = [name for name in need if name not in known]
    if unknown:
        raise ValueError(f"expected need to name {', '.join(known)}, got {', '.join(map(repr, unknown))}")


def normalised(total: Tensor, tokens: Tensor | int, *, head_dim: int, training: bool) -> Tensor:
    """`total` [B, H] per sequence and head as one number, normalised by the number of real tokens.  []"""
    if training and processes() > 1:
        if not isinstance(tokens, Tensor):  # the number may differ between processes
            tokens = torch.full((), float(tokens), device=total.device)  # no copy, which graphs do not allow
        tokens = mean_over_processes(tokens)
    count = tokens.clamp_min(1) if isinstance(tokens, Tensor) else max(tokens, 1)
    return total.sum() / (total.shape[-1] * head_dim * count)


def mean_over_processes(count: Tensor) -> Tensor:
    """The mean of a count over the processes of a run; itself in a single one.  []"""
    if processes() == 1:
        return count
    count = count.clone()
    dist.all_reduce(count)
    return count / dist.get_world_size()


def processes() -> int:
    """How many processes share a batch; 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _as_real(padding: Tensor | None, tokens: Tensor, name: str) -> Tensor | None:
    """True = ignore [B, N] becomes True = real [B, 1, N]."""
    if padding is None:
        return None
    if padding.dtype != torch.bool or padding.shape != tokens.shape[:2]:
        expected = f"expected {name} to be bool (True = ignore) of shape {list(tokens.shape[:2])}"
        helps = "" if padding.dtype == torch.bool else ": of a mask that is 1 at real tokens, pass mask == 0"
        raise ValueError(f"{expected}, got shape {tuple(padding.shape)} and {padding.dtype}{helps}")
    return ~padding[:, None]


def _real_rows(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens with padding set to 0, as gradients of weights contain 0 times its content, perhaps NaN."""
    return tokens if mask is None else keep_rows(tokens, mask[:, 0])


MAX_PARAMETERS = 10**10  # of a module or a model: more is a mistake, or an attack on the memory
A = TypeVar("A", bound=Attention)
_KINDS: dict[str, type[Attention]] = {}
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


def register_attention(name: str) -> Callable[[type[Attention]], type[Attention]]:
    """Class decorator: make a kind available to `build_attention` and to the models' configs.

    Args:
        name: of the kind.

    Returns:
        The decorator, which gives the class its `kind`.

    Raises:
        TypeError: the class is not a subclass of `Attention`.
        ValueError: the name belongs to another class.

    >>> @register_attention("mine")
    ... class MyAttention(Attention): ...
    """

    def register(cls: type[Attention]) -> type[Attention]:
        if not isinstance(cls, type) or not issubclass(cls, Attention):
            raise TypeError(f"expected a subclass of Attention to register as {name!r}, got {cls!r}")
        if _KINDS.get(name, cls) is not cls:
            raise ValueError(f"attention kind {name!r} is taken by {_KINDS[name].__name__}")
        cls.kind = name
        _KINDS[name] = cls
        return cls

    return register


def list_attention() -> tuple[str, ...]:
    """Names of all kinds.

    Returns:
        The names, sorted.
    """
    return tuple(sorted(_KINDS))


def attention_class(kind: str) -> type[Attention]:
    """The class behind a name, whose attributes say what the kind can do.

    Args:
        kind: one of `list_attention()`.

    Returns:
        A subclass of `Attention`.

    Raises:
        ValueError: the name is not registered.
    """
    check_choice("kind", kind, list_attention())
    return _KINDS[kind]


def build_attention(
    kind: str, embed_dim: int | None = None, num_heads: int | None = None, **options: Any
) -> Attention:
    """An attention module by name.

    Args:
        kind: one of `list_attention()`.
        embed_dim: width E of the tokens and of the output; required.
        num_heads: number H of heads; E must be a multiple; required.
        **options: keyword arguments of the kind's constructor.

    Returns:
        The module.

    Raises:
        ValueError: the kind is unknown, does not take an option, or a size is missing.

    >>> attention = build_attention("cgp", embed_dim=128, num_heads=4, dropout=0.1)
    >>> attention(x, need=("output", "variance"))
    """
    cls = attention_class(kind)
    if embed_dim is None or num_heads is None:
        # a size under another name, or an option that matters more
        _refuse_unknown(kind, option_annotations(cls), options)
        example = f"build_attention({kind!r}, embed_dim=128, num_heads=4)"
        missing = [
            name for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads)) if size is None
        ]
        raise ValueError(f"expected {' and '.join(missing)} to be given, as in {example}, got None")
    return make_attention(cls, kind, embed_dim, num_heads, options)


def make_attention(cls: type[A], kind: str, embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> A:
    """Call the constructor; options that it does not take are refused, and its own errors pass."""
    known = option_annotations(cls)
    try:
        inspect.signature(cls).bind(embed_dim, num_heads, **options)
    except TypeError as error:
        _refuse_unknown(kind, known, options, error)
        raise ValueError(f"{kind!r} attention does not take these options: {error}") from None
    _check_option_types(known, options)
    embed_dim, num_heads = check_count("embed_dim", embed_dim), check_count("num_heads", num_heads)
    options = {name: plain(x) for name, x in options.items()}  # small integers of NumPy would overflow
    if most_parameters(embed_dim, num_heads, options) > MAX_PARAMETERS:
        check_parameters(count_parameters(cls, embed_dim, num_heads, options), f"{kind!r} attention")
    try:
        return cls(embed_dim, num_heads, **options)
    except TypeError as error:
        # either a constructor above refused a name of **options, or this one failed
        _refuse_unknown(kind, known, options, error)
        raise


def _refuse_unknown(
    kind: str, known: Collection[str], options: Collection[str], cause: TypeError | None = None
) -> None:
    """Refuse names of options that a kind does not have."""
    if unknown := sorted(set(options) - set(known)):
        named = ", ".join(f"{name!r}{_instead(name, known)}" for name in unknown)
        refusal = f"{kind!r} attention does not take these options: "
        raise ValueError(f"{refusal}unknown {named}; known: {', '.join(sorted(known))}") from cause


def _instead(option: str, known: Collection[str]) -> str:
    """A hint, in brackets, for an option that a kind does not have."""
    if option == "causal":
        return f" (kinds that have a causal form: {', '.join(_causal_kinds())})"
    near = SIZES.get(option) or nearest(option, [*known, "embed_dim", "num_heads"])
    return "" if near is None else f" (did you mean {near!r}?)"


def _causal_kinds() -> list[str]:
    return [kind for kind in list_attention() if _KINDS[kind].causal_form]


def option_annotations(cls: type) -> dict[str, Any]:
    """Keyword arguments of the constructor and, if it passes **options on, of those above it."""
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        constructor = vars(owner).get("__init__")
        if constructor is None:
            continue
        try:
            signature = inspect.signature(constructor, eval_str=True)
        except Exception:  # annotations of a third-party kind may exist only for type checkers
            signature = inspect.signature(constructor)
        _, *parameters = signature.parameters.values()
        for p in parameters:
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
                found.setdefault(p.name, p.annotation)
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return {name: kind for name, kind in found.items() if name not in ("embed_dim", "num_heads")}


def _check_option_types(annotations: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse values that should be truth values or numbers; constructors check all others themselves."""
    for name, value in options.items():
        wanted = annotations.get(name)
        kinds = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
        known = all(kind in (*_EXPECTED, NoneType) for kind in kinds)
        if known and not any(_fits(value, kind) for kind in kinds):
            expected = " or ".join(_EXPECTED[kind] for kind in kinds if kind is not NoneType)
            raise ValueError(f"expected {name} to be {expected}, got {value!r}")


def _fits(value: Any, kind: type) -> bool:
    value = value if isinstance(value, Tensor) and value.is_floating_point() else plain(value)
    if kind is bool or isinstance(value, bool):
        return isinstance(value, kind) and kind in (bool, NoneType)
    if kind is NoneType:
        return value is None
    return isinstance(value, Integral if kind is int else (Real, Tensor))


def most_parameters(embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> int:
    """More parameters than any kind has: some maps of the width, and the cube of the largest option."""
    values = (y for x in options.values() for y in (x if isinstance(x, tuple | list) else (x,)))
    count = max((abs(x) for x in values if isinstance(x, int)), default=1)  # for example inducing points
    return embed_dim * (16 * embed_dim + 2 * (num_heads + 1) * count + count**3)


def count_parameters(cls: type[Attention], embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> int:
    """The number of parameters of a module, from its shapes on the meta device, which has no memory."""
    most = most_parameters(embed_dim, num_heads, options)
    if most > 2**60:  # torch itself cannot count so many bytes
        return most
    given = {**options, **({"device": "meta"} if "device" in options else {})}
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in cls(embed_dim, num_heads, **given).parameters())


def check_parameters(count: int, what: str) -> None:
    """Refuse more than `MAX_PARAMETERS`."""
    if count > MAX_PARAMETERS:
        raise ValueError(f"expected {what} of at most {MAX_PARAMETERS:.0e} parameters, got {count:.1e}")
