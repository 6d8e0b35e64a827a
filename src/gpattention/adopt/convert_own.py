"""Our own softmax attention with GP attention in its place, and kernel models by their own warm start."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gpattention.adopt.convert_kinds import KeyProjection, ProjectedHeads, is_plain_linear
from gpattention.adopt.convert_layer import ATTRIBUTE, ConvertedAttention, Request, take_place
from gpattention.adopt.sites import Site
from gpattention.attention import (
    Attention,
    AttentionOutput,
    GaussianAttention,
    Heads,
    KernelAttention,
    SoftmaxAttention,
)
from gpattention.gp import LogDensity, NoiseSource, Posterior
from gpattention.gp.concurrency import Handler, handling
from gpattention.gp.precision import compute_dtype
from gpattention.models import AttentionConfig, Transformer, warm_start


class ConvertedOwn(Attention):
    """Takes the place, the call and the projections of a `SoftmaxAttention`; the converted layer answers."""

    def __init__(self, host: SoftmaxAttention, layer: ConvertedAttention) -> None:
        nn.Module.__init__(self)
        self.embed_dim, self.num_heads, self.head_dim = host.embed_dim, host.num_heads, host.head_dim
        self.batch_first, self.regularizer = host.batch_first, layer.attention.regularizer
        for name, module in host.named_children():
            self.add_module(name, module)
        self.add_module(ATTRIBUTE, layer)
        answers = layer.attention
        # of the instance, where other kinds have them of their class
        self.kind, self.draws, self.crosses = answers.kind, answers.draws, answers.crosses  # type: ignore[misc]
        self.training = host.training

    def _projected(self, heads: Heads) -> ProjectedHeads:
        q = self._split(self.query(heads.queries))  # type: ignore[operator]
        k = self._split(self.key(heads.keys))  # type: ignore[operator]
        shrink, dtype = self.head_dim**-0.25, compute_dtype(q.dtype)
        return ProjectedHeads(
            queries=heads.queries, keys=heads.keys, v=heads.v.to(dtype), mask=heads.mask,
            query_mask=heads.query_mask, inducing=None, q=q.to(dtype) * shrink, k=k.to(dtype) * shrink,
        )  # fmt: skip

    @property
    def _answering(self) -> Attention:
        layer = getattr(self, ATTRIBUTE)
        assert isinstance(layer, ConvertedAttention)
        return layer.attention

    def _mean(self, heads: Heads) -> Tensor:
        return self._answering._mean(self._projected(heads))

    def _weights(self, heads: Heads) -> Tensor:
        return self._answering._weights(self._projected(heads))

    def _posterior(self, heads: Heads, *, with_variance: bool = False) -> Posterior:
        return self._answering._posterior(self._projected(heads), with_variance=with_variance)

    def _regularizer(
        self, heads: Heads, posterior: Posterior, generator: Generator | NoiseSource | None
    ) -> Tensor:
        return self._answering._regularizer(self._projected(heads), posterior, generator)

    def _log_density(self, heads: Heads, posterior: Posterior) -> LogDensity | None:
        return self._answering._log_density(self._projected(heads), posterior)

    def _kernel_inputs(self, heads: Heads) -> tuple[Tensor, Tensor]:
        return self._answering._kernel_inputs(self._projected(heads))


@contextmanager
def answering(model: nn.Module, request: Request) -> Iterator[None]:
    """Inside, attention of ours does what a prediction asks, though its host does not call it so."""
    own = [module for module in model.modules() if isinstance(module, ConvertedOwn) and module.draws]
    with handling({(module, "forward"): partial(_answer, module, request) for module in own}):
        yield


def _answer(module: ConvertedOwn, request: Request, own: Handler, *args: Any, **kwargs: Any) -> Any:
    need = (*kwargs.get("need", ("output",)), *(("variance",) if request.variances else ()))
    asked = {"draw": request.draw, "generator": request.generator, "need": tuple(dict.fromkeys(need))}
    told: AttentionOutput = own(*args, **{**kwargs, **asked})
    if request.variances:
        request.told[id(getattr(module, ATTRIBUTE))] = told.variance
    return told


def is_native(site: Site) -> bool:
    """Whether the models have a conversion of their own for it: from kernel attention they do."""
    return isinstance(site.module, KernelAttention)


def convert_natively(model: nn.Module, sites: list[Site], kind: str, options: dict[str, Any]) -> None:
    """Swap kernel attention for `kind` by `warm_start`; the model's own config tells it afterwards."""
    if not isinstance(model, Transformer) or len(sites) != len(model.blocks):
        raise ValueError("expected a whole transformer of ours to convert from kernel attention, got a part")
    if kind not in ("cgp", "direct", "scgp", "sgpa"):
        raise ValueError(f"expected kind to be cgp, direct, scgp or sgpa for kernel attention, got {kind!r}")
    normalize = {getattr(site.module, "normalize", None) for site in sites}.pop()
    given = {"normalize": normalize, **options} if kind != "sgpa" else dict(options)
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


@torch.no_grad()
def _start_at(attention: Attention, prior_scale: float) -> None:
    """s_q times t and V over t leave s_q s_k kappa V as it is and scale the draws."""
    assert isinstance(attention, GaussianAttention)
    attention.scale_q.set(attention.scale_q() * prior_scale)
    for parameter in attention.value.parameters():
        parameter.div_(prior_scale)


def key_projection(site: Site) -> KeyProjection | None:
    """The host's map to keys."""
    key = getattr(site.module, "key", None)
    return KeyProjection(key) if is_plain_linear(key) else None


def place(model: nn.Module, site: Site, layer: ConvertedAttention) -> None:
    """Put the converted module where the old one was."""
    assert isinstance(site.module, SoftmaxAttention)
    take_place(model, site.module, ConvertedOwn(site.module, layer))
