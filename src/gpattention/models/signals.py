"""Signals of every item from one pass without draws: logits, features, and how every head attended.

The profiles are two numbers per head of every attention site, means over an item's real tokens i:

    variance           mean_i log s_i^2             s_i^2 the posterior variance at token i
    attention_entropy  mean_i -sum_j w_ij log w_ij  w_ij = kappa(q_i, k_j) / sum_j kappa(q_i, k_j)

Detectors of strange inputs are fitted to them.

Every attention module is watched while the model runs.  The numbers of a layer are averaged over real tokens
at once, so that those of one layer at a time are in memory.  Other threads do not see who watches
(`concurrency`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from gpattention.attention import Attention, Heads
from gpattention.checks import check_tensor
from gpattention.concurrency import Handler, handling
from gpattention.gp import Posterior, attention_entropy
from gpattention.models.predict import (
    FeatureClassifier,
    Inputs,
    arrange,
    count_items,
    device_of,
    evaluating,
    model_device,
    run_rows,
)
from gpattention.models.prediction import Items


@dataclass(frozen=True, eq=False)
class Signals(Items):
    """Signals of B items; indexing with a slice, a mask or item numbers gives those of these items.

    Attributes:
        logits: [B, C] values in regression, means over the real tokens in token tasks; C = 0 for models that
            only embed.
        features: [B, E] what the head reads.
        variance: [B, P] log posterior variance, mean over real tokens; None where nothing has a variance.
        attention_entropy: [B, P'] of the normalised kernel, mean over real tokens; None where there is none.
        tokens: [B] number of real tokens, int64.
        sites: P names, "SITE head K", of the columns of `variance`.
        entropy_sites: P' names of the columns of `attention_entropy`; if not given, those of `sites`.
        token_mask: [B, N] True at real tokens; None unless asked for per token, like the next two.
        token_variance: [B, N, P] 0 at padding.
        token_attention_entropy: [B, N, P'] 0 at padding.
    """

    logits: Tensor
    features: Tensor
    variance: Tensor | None
    attention_entropy: Tensor | None
    tokens: Tensor
    sites: tuple[str, ...] = ()
    entropy_sites: tuple[str, ...] = ()
    token_mask: Tensor | None = None
    token_variance: Tensor | None = None
    token_attention_entropy: Tensor | None = None
    _padded = ("token_mask", "token_variance", "token_attention_entropy")

    def __post_init__(self) -> None:
        names = tuple(self.entropy_sites) or (() if self.attention_entropy is None else tuple(self.sites))
        object.__setattr__(self, "sites", tuple(self.sites))
        object.__setattr__(self, "entropy_sites", names)
        check_tensor("tokens", self.tokens)
        items, length = self.tokens.shape[:1], None if self.token_mask is None else self.token_mask.shape[-1]
        sizes: dict[str, tuple[int | None, ...]] = {  # of an item; None is any
            "tokens": (), "logits": (None,), "features": (None,), "variance": (len(self.sites),),
            "attention_entropy": (len(names),), "token_mask": (length,),
            "token_variance": (length, len(self.sites)), "token_attention_entropy": (length, len(names)),
        }  # fmt: skip
        for name, size in sizes.items():
            if (value := getattr(self, name)) is not None or name in ("logits", "features"):
                _check_shape(name, value, (*items, *size))
                if name.startswith("token_") and length is None:
                    raise ValueError(f"expected token_mask to be given beside {name}, got None")

    def __len__(self) -> int:
        return len(self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name: `Signals(**signals.to_dict())` makes the same again."""
        return dict(vars(self))


def _check_shape(name: str, value: Any, shape: tuple[int | None, ...]) -> None:
    check_tensor(name, value)
    kind = {"tokens": torch.int64, "token_mask": torch.bool}.get(name)
    fits = value.ndim == len(shape) and all(b in (None, a) for a, b in zip(value.shape, shape, strict=True))
    if not fits or not (value.is_floating_point() if kind is None else value.dtype == kind):
        expected = f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
        got = f"{tuple(value.shape)} and {value.dtype}"
        raise ValueError(f"expected {name} to be {kind or 'floating-point'} of shape {expected}, got {got}")


# How they are measured

LEAST = math.log(torch.finfo(torch.float32).tiny)  # a log variance: that of no variance would be no number


@dataclass(eq=False)
class Profile:
    """One kind of signal of all heads, in the order in which attention was called."""

    names: list[str] = field(default_factory=list)  # P
    means: list[Tensor] = field(default_factory=list)  # [B, H] each
    tokens: list[Tensor] = field(default_factory=list)  # [B, H, N] each, where they are kept

    def add(self, title: str, found: Tensor, real: Tensor, *, keep: bool) -> None:
        """Numbers [B, H, N] of one call, of which those at `real` tokens [B, N] count."""
        found = found.to(torch.promote_types(found.dtype, torch.float32)).clamp_min(LEAST)
        found = torch.where(real[:, None], found, 0.0)
        self.names += [f"{title} head {head}" for head in range(found.shape[1])]
        self.means.append(found.sum(-1) / real.sum(-1, keepdim=True).clamp_min(1))
        self.tokens += [found] if keep else []

    def joined(self) -> tuple[Tensor | None, Tensor | None]:
        """Means [B, P] and numbers of every token [B, N, P]; None where there are none."""
        lengths = sorted({x.shape[-1] for x in self.tokens})
        if len(lengths) > 1:
            raise ValueError(f"expected sites of one number of tokens for per_token=True, got {lengths}")
        means = torch.cat(self.means, 1) if self.means else None
        return means, torch.cat(self.tokens, 1).mT.contiguous() if self.tokens else None


@dataclass(eq=False)
class Watch:
    """Measures the attention of one pass.

    Attributes:
        wants_variance: whether variances are measured.
        per_token: whether the numbers of every token are kept.
        real: [B, N] real tokens of the first call.
    """

    wants_variance: bool
    per_token: bool
    real: Tensor | None = None
    _variance: Profile = field(default_factory=Profile)
    _entropy: Profile = field(default_factory=Profile)
    _calls: Counter[str] = field(default_factory=Counter)

    def see(
        self,
        name: str,
        log_variance: Tensor | None,  # [B, H, N]
        entropy: Tensor | None,  # [B, H, N]
        tokens: Tensor,  # [B, N, ...] that attend
        mask: Tensor | None,  # [B or 1, 1, N] which of them are real
    ) -> None:
        """Note a call of the attention module of that name.

        Modules that are called several times, such as shared ones, have columns for every call.
        """
        real = tokens.new_ones(tokens.shape[:2], dtype=torch.bool)  # [B, N]
        real = real if mask is None else mask[:, 0].expand_as(real)
        self._calls[name] += 1
        title = name if self._calls[name] == 1 else f"{name} call {self._calls[name]}"
        self.real = real if self.real is None else self.real
        for profile, found in ((self._variance, log_variance), (self._entropy, entropy)):
            if found is not None:
                profile.add(title, found, real, keep=self.per_token)

    def signals(self, logits: Tensor, features: Tensor) -> Signals:
        """The signals of a pass; answers for every token are averaged."""
        if self.real is None:
            got = "got a pass that called none: a compiled model must be attached before it is compiled"
            raise ValueError(f"expected the model to call attention that is watched, {got}")
        for x in (features, *self._variance.means, *self._entropy.means):
            if len(x) != len(logits):
                got = f"got shape {tuple(x.shape)}: are batches the first axis of the inputs?"
                raise ValueError(f"expected signals of {len(logits)} items, {got}")
        logits, features = (self._over_tokens(x) for x in (logits, features))
        (variance, of_tokens), (entropy, spread) = self._variance.joined(), self._entropy.joined()
        return Signals(
            logits, features, variance, entropy, self.real.sum(-1),
            tuple(self._variance.names), tuple(self._entropy.names),
            self.real if self.per_token else None, of_tokens, spread,
        )  # fmt: skip

    def _over_tokens(self, x: Tensor) -> Tensor:
        """Means over the real tokens where x is [B, N, C].  [B, C]"""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if x.ndim < 3:
            return x
        if self.real is None or self.real.shape != x.shape[:2]:
            return x.flatten(1, -2).mean(1)
        real = self.real[..., None]  # [B, N, 1]
        return torch.where(real, x, 0.0).sum(1) / real.sum(1).clamp_min(1)


# from a batch to logits and features, of items or of tokens, in a pass that is watched
Answer: TypeAlias = Callable[[Inputs, Watch], tuple[Tensor, Tensor]]


def attention_sites(model: nn.Module) -> dict[Attention, str]:
    """Attention of ours inside a model by its path; of one inside another, the inner by the outer's."""
    found: dict[Attention, str] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module not in inside:
            inside.update(module.modules())
            found[[inner for inner in module.modules() if isinstance(inner, Attention)][-1]] = name
    return found


def watched(sites: Mapping[Attention, str], watch: Watch) -> AbstractContextManager[None]:
    """Watch all calls of attention modules of ours in this thread, within the block.

    Args:
        sites: the modules, with the names of their columns.
        watch: sees the calls.

    Returns:
        A context.
    """
    handlers: dict[tuple[nn.Module, str], Handler] = {}
    for module, name in sites.items():
        method = "_posterior" if module.draws else "_mean"
        handlers[module, method] = partial(_see, watch, module, name)
        handlers[module, "_weights"] = partial(_unseen, module, method)
    return handling(handlers)


def _see(watch: Watch, module: Attention, name: str, own: Handler, heads: Heads, **options: Any) -> Any:
    options = {**options, "with_variance": watch.wants_variance} if module.draws else options
    answer, compared = own(heads, **options), module._compared(heads)
    log_variance = entropy = None
    if isinstance(answer, Posterior) and watch.wants_variance:
        log_variance = answer.log_variance  # [B, H, Q] or [B, H, Q, D]
        # SGPA has one for every channel
        log_variance = log_variance.mean(-1) if log_variance.ndim == 4 else log_variance
    if compared is not None:
        q, k, dot = compared
        entropy = attention_entropy(q, k, dot=dot, mask=heads.mask, causal=module.causal)  # [B, H, Q]
    watch.see(name, log_variance, entropy, heads.queries, heads.query_mask)
    return answer


def _unseen(module: Attention, method: str, own: Handler, heads: Heads) -> Any:
    """Do not count the calls that weights are computed by."""
    with handling({(module, method): lambda mean, *args, **kwargs: mean(*args, **kwargs)}):
        return own(heads)


@torch.no_grad()
def measure_signals(
    model: Any,
    answer: Answer,
    inputs: Inputs | Iterable[Any],
    *,
    variance: bool = True,
    per_token: bool = False,
    batch_size: int | None = None,
) -> Signals:
    """Signals of all items, in evaluation mode and without gradients.

    Args:
        model: what answers.
        answer: runs a batch, watched, and returns logits [B, C] and features [B, E], or those of every token,
            [B, N, C] and [B, N, E], which are averaged over real tokens.
        inputs: a tensor or a mapping of tensors with the items first, or a loader: an iterable of those, or
            of pairs or mappings with labels, which are ignored.
        variance: whether to measure variances, which takes most of the time.
        per_token: whether to keep the numbers of every head and token, too.
        batch_size: most items that run at once; 256, or 2000 on a GPU with enough memory, if not given.

    Returns:
        Signals on the device of the inputs; of a loader on the CPU.

    Raises:
        ValueError: inputs of another form, or answers without the items first.
    """
    if not isinstance(inputs, Tensor | Mapping):
        options: dict[str, Any] = {"variance": variance, "per_token": per_token, "batch_size": batch_size}
        batches = input_batches(inputs)
        return Signals.cat([measure_signals(model, answer, b, **options).to("cpu") for b in batches])
    count, home, device = count_items(inputs), device_of(inputs), model_device(model, inputs)
    given = arrange(None if per_token else model, inputs)  # numbers of tokens keep their places

    def chunk(start: int, rows: int) -> Signals:
        watch = Watch(variance, per_token)
        logits, features = answer(given.chunk(start, slice(start, start + rows), device), watch)
        return watch.signals(logits, features).to(home)

    def run(rows: int) -> Signals:
        return Signals.cat([chunk(start, rows) for start in range(0, count, rows)])

    with evaluating(model):
        found = run_rows(run, batch_size, device, lambda found: (found.logits, found.variance))
    return found if given.place is None else found[given.place]


def model_signals(model: FeatureClassifier, inputs: Inputs | Iterable[Any], **options: Any) -> Signals:
    """Signals of every item by a model with attention modules of ours, from one pass without draws.

    Args:
        model: one of our transformers, or a model of your own.
        inputs: a batch, or a loader of batches, whose signals are on the CPU.
        **options: `variance`, `per_token` and `batch_size` of `measure_signals`.

    Returns:
        Logits, features, and profiles of variance and attention entropy.
    """
    sites = attention_sites(cast(nn.Module, model))

    def answer(batch: Inputs, watch: Watch) -> tuple[Tensor, Tensor]:
        with watched(sites, watch):
            features = model.features(batch)  # [B, E]
        return model.head(features), features

    return measure_signals(model, answer, inputs, **options)


def input_batches(loader: Iterable[Any]) -> Iterator[Inputs]:
    """The batches of a loader, without their labels."""
    if isinstance(loader, str) or not isinstance(loader, Iterable):
        expected = "expected inputs to be a tensor, a mapping of tensors or a loader of them"
        raise ValueError(f"{expected}, got {type(loader).__name__}")
    for batch in loader:
        if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor | Mapping):
            batch = batch[0]
        if not isinstance(batch, Tensor | Mapping):
            raise ValueError(f"expected batches of tensors or mappings of them, got {type(batch).__name__}")
        yield batch if isinstance(batch, Tensor) else {n: x for n, x in batch.items() if n != "labels"}
