"""Replace the softmax attention of a trained model by Gaussian-process attention, which is then fine-tuned.

>>> model = gpattention.convert(model, kind="cgp")
>>> loss = cross_entropy(model(x), y) + 0.01 * gpattention.regularizer(model)
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gpattention.checks import did_you_mean
from gpattention.hosts import conversion
from gpattention.hosts.families import FAMILIES
from gpattention.hosts.families.base import Host, SavedModel, Site
from gpattention.hosts.predict import NOT_CONVERTED, call_model, check_module
from gpattention.hosts.sites import FOUND_FORMS, find_sites
from gpattention.models import EncoderLayer, converted
from gpattention.models.config import CONVERSION_FILE, load_weights
from gpattention.models.converted import ConvertedAttention, TrainingDraw, converted_layers
from gpattention.models.predict import Inputs, count_items, evaluating

M = TypeVar("M", bound=nn.Module)
_RECORD = "_gpattention_conversion"  # where a converted model keeps its record


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
    """Replace softmax attention by a Gaussian-process kind, in place.

    All projections keep their weights.  New parameters (noise, prior scale, latent projection, inducing
    inputs) belong to the host under the name `gpattention`, so that optimisers, `state_dict` and `.to`
    include them: create the optimiser afterwards.  Draws replace the host's dropout of attention weights.

    Args:
        model: holds `nn.MultiheadAttention` or `nn.TransformerEncoder`, attention of Hugging Face's
            transformers or timm, or is one of our own softmax or kernel transformers.
        kind: "cgp", "direct", "scgp", "softmax-gp", "kernel" or "sgpa".
        draw: whether a layer draws its output in training ("independent") or gives its mean ("none").
        layers: names of the attention modules to convert, as `find_sites` lists them; None converts all.
        example: a batch of inputs, for scgp and sgpa, whose inducing inputs start at its tokens.  Without it
            they start at random, and attention may be off until they have been learned, as a warning says.
        seed: of the initial inducing inputs.
        **options: of the kind: `noise`, `prior_scale`, `regularizer`, `num_inducing`, ...  For cgp, direct
            and scgp `normalize` is "softmax" by default, which starts as the host (eq. 21); "rows" (eq. 25)
            and "none" are those of the library's own modules.  `prior_scale` scales the draws and not the
            mean.

    Returns:
        The model itself.

    Raises:
        ValueError: the model has no such attention or is converted already, or options are wrong; the model
            is then unchanged.

    >>> convert(model, kind="direct", layers=["encoder.layer.11.attention.self"])
    """
    check_module(model)
    record = conversion.Conversion(kind, draw=draw, seed=seed, options=options)
    _convert(model, record, layers, example)
    if example is None and converted_layers(model):
        converted.hint_at_example(kind, options)
    return model


def _convert(
    model: nn.Module,
    record: conversion.Conversion,
    layers: Iterable[str] | None,
    example: Inputs | None = None,
) -> None:
    """Convert a model completely or not at all, and keep the record."""
    if conversion_of(model) is not None:
        raise ValueError("expected a model that is not converted yet, got one that is")
    found = find_sites(model).convertible()
    sites = _chosen(found.sites, layers)
    if not sites:
        got = f"got none to convert:\n{found}\nwhat would be found: {FOUND_FORMS}"
        raise ValueError(f"expected a model with softmax attention, {got}")
    others = [(site.name, "not chosen") for site in found.sites if site not in sites]
    others += [(alone.name, alone.why) for alone in found.left_alone]
    record = replace(record, layers=tuple(s.name for s in sites), left_alone=tuple(others))
    if example is not None:
        count_items(example)
        with evaluating(model):  # fails, before anything is changed, if the host does not take it
            call_model(model, example)
    with _all_or_nothing(model), _seeded(sites, record.seed):
        if not any(
            family.convert_whole(model, sites, record.kind, dict(record.options))
            for family in FAMILIES.values()
        ):
            _swap(model, sites, record)
        model.__dict__[_RECORD] = record
        if example is not None:
            converted.place_inducing(model, partial(call_model, model, example), record.seed)


def conversion_of(model: nn.Module) -> conversion.Conversion | None:
    """The record of a conversion.

    Args:
        model: any module.

    Returns:
        What `convert` did to it; None if it was not converted.
    """
    record = model.__dict__.get(_RECORD)
    return record if isinstance(record, conversion.Conversion) else None


def regularizer(model: nn.Module) -> Tensor:
    """The regulariser to add to the loss: the sum over layers in the last forward pass in training mode.

    It is per real token, head and head dimension, as everywhere in the library; a layer that ran several
    times in that pass counts as often.  Give it a small weight, such as 0.01 to begin with.  It works with
    DistributedDataParallel, and with gradient checkpointing if `use_reentrant=False`; `nn.DataParallel` is
    refused.

    Args:
        model: a converted model, or a module that holds one.

    Returns:
        A scalar with gradients.

    Raises:
        ValueError: the model is not converted, or had no forward pass in training with gradients.

    >>> loss = cross_entropy(model(x), y) + 0.01 * regularizer(model)
    """
    converted.hint_at_warm_start(model)
    for family in FAMILIES.values():
        own = family.regularizer(model)
        if own is not None:
            return own
    layers = converted_layers(model)
    if not layers and (plain := next((m for m in model.modules() if isinstance(m, EncoderLayer)), None)):
        return plain.norm1.weight.new_zeros(())  # of kind softmax
    if not layers:
        raise ValueError(NOT_CONVERTED)
    values = [value for layer in layers for value in layer.regularizers]
    if not values:
        raise ValueError("expected a forward pass in training mode before, got none")
    learning = [x for layer in layers if layer.attention.regularizer != "none" for x in layer.regularizers]
    trainable = any(p.requires_grad for layer in layers for p in layer.parameters())
    lost = learning and not any(value.requires_grad for value in learning)
    if lost and trainable and torch.is_grad_enabled():
        helps = "gradient checkpointing needs use_reentrant=False"
        raise ValueError(f"expected regularisers with gradients, got a forward pass without: {helps}")
    return torch.stack([value.float() for value in values]).sum()


def from_pretrained(folder: str | Path, host: Host | None = None, **options: Any) -> nn.Module:
    """Load the converted model a folder holds: build its host, repeat the conversion, load every weight.

    Args:
        folder: what `save_pretrained` of a converted model wrote.
        host: not needed for Hugging Face hosts and our own transformers, whose folders are complete; for
            others, the model as it was built before the conversion, which is converted in place.  For classes
            of your own that derive from a Hugging Face host, pass the class.
        **options: passed on to the `from_pretrained` of a Hugging Face host (`dtype`, `device_map`).

    Returns:
        The model, in evaluation mode.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder has no record, the host does not fit it, or weights are missing, unexpected or
            not finite.

    >>> model.save_pretrained("folder")
    >>> model = gpattention.from_pretrained("folder")
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    saved = SavedModel(
        folder, conversion.read_config(folder), conversion.read_record(folder), _convert_again, host, options
    )
    for family in FAMILIES.values():
        if (whole := family.load(saved)) is not None:
            return whole.eval()
    if options:
        raise ValueError(f"expected no options for this folder, got {', '.join(options)}")
    if saved.record is None:
        wanted = f"expected {folder} to hold {CONVERSION_FILE}, or {conversion.RECORD!r} in config.json"
        helps = "a plain model is read by its own class, and converted by gpattention.convert"
        raise ValueError(f"{wanted}, got no record of a conversion: {helps}")
    built = (family.new_host(saved) for family in FAMILIES.values())
    model = host if isinstance(host, nn.Module) else next((x for x in built if x is not None), None)
    if model is None:
        expected = f"expected the host of {folder}, built as before the conversion, got {host!r}"
        raise ValueError(f"{expected}: gpattention.from_pretrained(folder, host)")
    _convert_again(model, saved.record, folder / CONVERSION_FILE)
    try:
        load_weights(model, folder / conversion.WEIGHTS_FILE)
    except ValueError as error:
        raise ValueError(f"{error}{conversion.plain_weights(folder, saved.record)}") from error
    return model.eval()


def _convert_again(model: nn.Module, record: conversion.Conversion, source: Path) -> None:
    """Repeat a recorded conversion on a host of the same build; `source` is the file of the record."""
    if conversion_of(model) is not None:
        raise ValueError("expected a host as before the conversion, got one that is converted")
    try:
        _convert(model, replace(record, layers=(), left_alone=()), record.layers)
    except ValueError as error:
        expected = f"expected the record of a conversion of this {type(model).__name__}"
        raise ValueError(f"{source}: {expected}, got one that it does not take: {error}") from error


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Restore every module if the block fails.

    A conversion changes no weights of the host, but attributes, and the tables of modules, parameters and
    hooks.  The tables are refilled, not replaced, as the handles of hooks refer to them.
    """
    tables = [name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)]
    before: list[tuple[Any, Any]] = []  # dictionaries and sets, and what was in them
    for own in [vars(module) for module in model.modules()]:
        before += [(own, dict(own)), *((own[name], copy(own[name])) for name in tables if name in own)]
    try:
        yield
    except BaseException:
        for table, content in before:
            table.clear()
            table.update(content)
        raise


@contextmanager
def _seeded(sites: list[Site], seed: int) -> Iterator[None]:
    """Modules made in the block draw their parameters by this seed; generators are restored afterwards."""
    devices = sorted({p.device.index for site in sites for p in site.module.parameters() if p.is_cuda})
    # modules draw from the process's generators; torch.manual_seed would leave those of other GPUs changed
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def _chosen(sites: tuple[Site, ...], layers: Iterable[str] | None) -> list[Site]:
    if layers is None:
        return list(sites)
    if isinstance(layers, str):
        raise ValueError(f"expected layers to be several names, got one string {layers!r}")
    names, known = list(layers), [site.name for site in sites]
    for name in names:
        if name not in known:
            among = f"expected layers among {', '.join(known) or 'none'}"
            raise ValueError(f"{among}, got {name!r}{did_you_mean(name, known)}")
    return [site for site in sites if site.name in names]


def _swap(model: nn.Module, sites: list[Site], record: conversion.Conversion) -> None:
    """Convert site by site, and add the record to what the model saves."""
    if any(site.parent is None and FAMILIES[site.family].replaces for site in sites):
        raise ValueError("expected a model that holds attention, got attention itself: wrap it in a module")

    def layer_for(site: Site) -> ConvertedAttention:
        family = FAMILIES[site.family]
        return converted.make_layer(
            record.kind, site.module, site.heads, site.head_dim, keys=family.key_projection(site),
            scale=family.logit_scale(site), draw=record.draw, name=site.title, options=record.options,
        )  # fmt: skip

    layers = [layer_for(site) for site in sites]  # all of them, before any is placed
    for site, layer in zip(sites, layers, strict=True):
        FAMILIES[site.family].place(model, site, layer)
    remember = [FAMILIES[site.family].remembers for site in sites]
    converted.Passes().watch(model, compress(layers, remember))
    by_family = {name: [site for site in sites if site.family == name] for name in FAMILIES}
    stored = [FAMILIES[name].finish(model, chosen, record) for name, chosen in by_family.items() if chosen]
    if not any(stored):
        model.__dict__["save_pretrained"] = partial(conversion.save_converted, model, record)
