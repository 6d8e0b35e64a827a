"""Swap the softmax attention of a trained model for Gaussian-process attention, to be fine-tuned.

>>> model = gpattention.convert(model, kind="cgp")
>>> loss = cross_entropy(model(x), y) + 0.01 * gpattention.regularizer(model)
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar

import torch
from torch import nn

from gpattention.adopt import convert_huggingface, convert_own, convert_timm, convert_torch
from gpattention.adopt.conversion import RECORD, SAVED_IMPLEMENTATION, Conversion
from gpattention.adopt.convert_inducing import Placing
from gpattention.adopt.convert_kinds import KINDS
from gpattention.adopt.convert_layer import ConvertedAttention, Passes, TrainingDraw, converted_layers
from gpattention.adopt.reading import call_model
from gpattention.adopt.refusals import FOUND_FORMS
from gpattention.adopt.regularizer import remember_output
from gpattention.adopt.sites import Site, find_sites
from gpattention.adopt.storage import add_saving
from gpattention.attention.registry import make_attention
from gpattention.models import Transformer
from gpattention.models.rows import Inputs, count_items, evaluating

M = TypeVar("M", bound=nn.Module)
_PLACES: dict[str, Any] = {
    "torch": convert_torch,
    "huggingface": convert_huggingface,
    "timm": convert_timm,
    "gpattention": convert_own,
}
_NOTE = "_gpattention_conversion"  # where a converted model keeps its record


def convert(
    model: M,
    kind: str = "cgp",
    *,
    draw: TrainingDraw = "independent",
    layers: Iterable[str] | None = None,
    example: Inputs | None = None,
    seed: int = 0,
    **options: Any,
) -> M:
    """Swap attention for a GP kind, in place, and return the model.

    Every projection keeps its weights; what is new (noise, prior scale, latent projection, inducing inputs)
    is a parameter of the host under `gpattention`, so that its optimiser, `state_dict` and `.to` see it: make
    the optimiser afterwards.  The host's dropout of attention weights is gone: the draws take its place.

    Args:
        model: holds `nn.MultiheadAttention` or `nn.TransformerEncoder`, attention of Hugging Face's
            transformers or timm, or is one of our own softmax or kernel transformers.
        kind: "cgp", "direct", "scgp", "softmax-gp", "kernel" or "sgpa".
        draw: whether a layer draws its output in training ("independent") or gives its mean ("none").
        layers: names of the attention modules to convert, as `find_sites` tells them; None is all.
        example: a batch of inputs, for scgp and sgpa: their inducing inputs start at its tokens.  Without it
            they start at random, and attention may be switched off until they have been learned.
        seed: of the start of inducing inputs.
        **options: of the kind: `noise`, `prior_scale`, `regularizer`, `num_inducing`, ...  For cgp, direct
            and scgp `normalize` is "softmax" by default, which starts as the host (eq. 21); "rows" (eq. 25)
            and "none" are those of the library's own modules.  `prior_scale` says how much is drawn and
            leaves the mean as it is.

    >>> convert(model, kind="direct", layers=["encoder.layer.11.attention.self"])
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be an nn.Module, got {type(model).__name__}")
    if conversion_of(model) is not None:
        raise ValueError("expected a model that is not converted yet, got one that is")
    record = Conversion(kind, draw=draw, seed=seed, options=options)
    seed = record.seed
    found = find_sites(model)
    sites = _chosen(found.sites, layers)
    if not sites:
        raise ValueError(
            f"expected a model with softmax attention, got none to convert:\n{found}\n"
            f"what would be found: {FOUND_FORMS}"
        )
    kept = [(site.name, "not chosen") for site in found.sites if site not in sites]
    record = Conversion(
        kind,
        layers=tuple(site.name for site in sites),
        draw=draw,
        seed=seed,
        options=options,
        left_alone=tuple(kept + [(alone.name, alone.why) for alone in found.left_alone]),
    )
    if example is not None:
        count_items(example)
        with evaluating(model):  # an example that the host does not take leaves it as it was
            call_model(model, example)
    with _all_or_nothing(model), _seeded(sites, seed):
        if any(convert_own.is_native(site) for site in sites):
            convert_own.convert_natively(model, sites, kind, options)
        else:
            _swap(model, sites, record)
            _keep_record(model, sites, record)
        model.__dict__[_NOTE] = record
        if isinstance(model, Transformer):
            model.register_forward_hook(remember_output)
        if example is not None:
            _place_inducing(model, example, seed)
    return model


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """What fails inside leaves every module as it was.

    A conversion writes no weight of the host: it changes attributes, and the tables of modules, parameters
    and hooks.  Those are filled again, not replaced: whoever registered a hook holds on to its table.
    """
    tables = [name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)]
    before = [
        (module, own, {name: copy(own[name]) for name in tables if name in own})
        for module in model.modules()
        for own in [dict(module.__dict__)]
    ]
    try:
        yield
    except BaseException:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in contents.items():
                table = module.__dict__[name]
                table.clear()
                table.update(content)
        raise


def _keep_record(model: nn.Module, sites: list[Site], record: Conversion) -> None:
    """Have it saved with the model: in a Hugging Face config, else beside the weights."""
    config: Any = getattr(model, "config", None)
    if any(site.family == "huggingface" for site in sites) and hasattr(model, "save_pretrained"):
        setattr(config, RECORD, record.to_dict())
        # written as it is, and what transformers sets `_attn_implementation` from when it reads it
        config.attn_implementation = SAVED_IMPLEMENTATION
    else:
        add_saving(model, record)


def conversion_of(model: nn.Module) -> Conversion | None:
    """The record of a converted model, None for any other; print it to see what was left alone."""
    record = model.__dict__.get(_NOTE)
    return record if isinstance(record, Conversion) else None


def _place_inducing(model: nn.Module, example: Inputs, seed: int) -> None:
    """Run an example in evaluation mode; every layer places its inducing inputs when it comes to it."""
    layers = converted_layers(model)
    generator = torch.Generator().manual_seed(seed)
    try:
        for layer in layers:
            layer.attention.placing = Placing(generator)
        with evaluating(model):
            call_model(model, example)
    finally:
        for layer in layers:
            layer.attention.placing = None


def _chosen(sites: tuple[Site, ...], layers: Iterable[str] | None) -> list[Site]:
    if layers is None:
        return list(sites)
    if isinstance(layers, str):
        raise ValueError(f"expected layers to be several names, got one string {layers!r}")
    names = list(layers)
    known = [site.name for site in sites]
    unknown = [name for name in names if name not in known]
    if unknown:
        expected = (
            f"layers among {', '.join(known)}" if known else "no layers of a model without softmax attention"
        )
        raise ValueError(f"expected {expected}, got {unknown[0]!r}")
    return [site for site in sites if site.name in names]


@contextmanager
def _seeded(sites: list[Site], seed: int) -> Iterator[None]:
    """Modules that are made inside draw their parameters from the seed; generators are put back."""
    devices = sorted({p.device.index for site in sites for p in site.module.parameters() if p.is_cuda})
    # modules draw from the process's generators; torch.manual_seed would leave those of other GPUs changed
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def _swap(model: nn.Module, sites: list[Site], record: Conversion) -> None:
    if any(site.parent is None and site.family in ("torch", "timm", "gpattention") for site in sites):
        raise ValueError("expected a model that holds attention, got attention itself: wrap it in a module")
    made = [(site, _layer(site, record)) for site in sites]  # all, before any is placed
    for site, layer in made:
        _PLACES[site.family].place(model, site, layer)
    # attention of ours tells its regulariser where it is called, and remembers none
    Passes().watch(model, [layer for site, layer in made if site.family != "gpattention"])
    transformers = [site for site in sites if site.family == "huggingface"]
    if transformers:
        convert_huggingface.finish(model, transformers)


def _layer(site: Site, record: Conversion) -> ConvertedAttention:
    family = _PLACES[site.family]
    parameter = next(site.module.parameters(), None)
    if parameter is None:
        raise ValueError(f"{site.name}: expected attention with parameters to train, got none (quantised?)")
    options = {"device": parameter.device, "dtype": parameter.dtype, **record.options}
    width = site.heads * site.head_dim
    attention = make_attention(KINDS[record.kind], record.kind, width, site.heads, options)
    keys = family.key_projection(site)
    scale = family.logit_scale(site) if hasattr(family, "logit_scale") else site.head_dim**-0.5
    try:
        attention.start(keys, scale**0.5)
    except ValueError as error:
        raise ValueError(f"{site.name}: {error}, and it has none or changes them afterwards") from None
    layer = ConvertedAttention(attention, logit_scale=scale, draw=record.draw, name=site.name or "the model")
    return layer.train(site.module.training)
