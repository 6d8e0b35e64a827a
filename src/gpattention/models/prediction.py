"""What a classifier predicts and how sure it is: class probabilities from draws of its logits.

The spread between draws splits the uncertainty in two: the entropy of the mean prediction is what the
draws expect of their own entropy plus how much they disagree, the mutual information.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from gpattention.attention.output import DRAWS, Draw
from gpattention.checks import check_count, check_whole
from gpattention.gp import ItemNoise, NonFiniteError
from gpattention.models.rows import (
    Inputs,
    Network,
    Progress,
    Rows,
    collect,
    count_items,
    device_of,
    evaluating,
    model_device,
)
from gpattention.models.rows_at_once import run_rows
from gpattention.models.sample_chunks import NO_CAPTURE, Request, run_chunks, shares_samples
from gpattention.models.variance_means import VarianceMeans


class LayerOutput(Protocol):
    """What one attention layer tells."""

    @property
    def variance(self) -> Tensor | None:
        """Its predictive variance, [B, H, N] or [B, H, N, D], where it has one."""
        ...


class ModelOutput(Protocol):
    """What a forward pass returns."""

    @property
    def logits(self) -> Tensor:
        """[B, C]"""
        ...

    @property
    def layers(self) -> Sequence[LayerOutput]:
        """One for every attention layer."""
        ...


class Classifier(Network, Protocol):
    """A model that classifies and may draw its attention outputs."""

    @property
    def draws(self) -> bool:
        """Whether any layer can draw."""
        ...

    def __call__(
        self,
        inputs: Any,
        *,
        draw: Draw = ...,
        generator: Generator | ItemNoise | None = ...,
        need: tuple[str, ...] = ...,
    ) -> ModelOutput:
        """Logits, and of each layer what `need` asks for."""
        ...


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predicted classes of B items from S draws of their logits; made by `from_logits`.

    Entropies are in nats.  Indexing with a slice, a mask or item numbers gives the prediction of those
    items; a single number gives a prediction of one item.

    `drawn` says whether the logits are draws: of attention outputs, of dropout masks, of the weights of a
    last layer, or the members of an ensemble, whose disagreement is as real.  Where it is False the samples
    are copies of one another, and a mutual information of 0 tells nothing.
    """

    logits: Tensor  # [S, B, C]
    probs: Tensor  # [B, C] mean of the draws' softmax
    label: Tensor  # [B] the most probable class
    confidence: Tensor  # [B] its probability
    entropy: Tensor  # [B] of `probs`: the whole uncertainty
    expected_entropy: Tensor  # [B] mean entropy of the draws: what more data of the same kind keep
    # per layer [B, H, N] or [B, H, N, D], mean over the draws; None for a layer that has no variance
    variances: tuple[Tensor | None, ...] | None = None
    drawn: bool = True

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        variances: tuple[Tensor | None, ...] | None = None,
        *,
        drawn: bool | None = None,
    ) -> "Prediction":
        """From draws [S, B, C]; a prediction without draws has S = 1.

        `drawn` says whether they are draws; None sees it: several that are not all the same.
        """
        check_logits(logits)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        each = logits.softmax(-1)  # [S, B, C]
        probs = each.mean(0)  # [B, C]
        confidence, label = probs.max(-1)  # [B], [B]
        entropy = torch.special.entr(probs).sum(-1)  # [B]
        expected = torch.special.entr(each).sum(-1).mean(0)  # [B]
        drawn = differ(logits) if drawn is None else drawn
        return cls(logits, probs, label, confidence, entropy, expected, variances, drawn)

    @property
    def mutual_information(self) -> Tensor:
        """How much the draws disagree, `entropy` - `expected_entropy`, >= 0.  [B]

        Without two draws it is 0 and says nothing: reading it then warns, by default once for every line of
        code that does.
        """
        return self.disagreement(stacklevel=3)

    def disagreement(self, stacklevel: int = 2) -> Tensor:
        """The mutual information; a warning points to the caller so many calls up."""
        warn_undrawn("mutual_information", self.samples, self.drawn, stacklevel)
        if not self.drawn:
            return torch.zeros_like(self.entropy)
        return (self.entropy - self.expected_entropy).clamp(min=0)  # negative only by rounding

    @property
    def log_probs(self) -> Tensor:
        """log of `probs`, without underflow.  [B, C]"""
        return self.logits.log_softmax(-1).logsumexp(0) - math.log(self.samples)

    @property
    def samples(self) -> int:
        """Number of draws S."""
        return self.logits.shape[0]

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return self.logits.shape[-1]

    def __len__(self) -> int:
        return self.logits.shape[1]

    def __getitem__(self, index: int | slice | Tensor | Sequence[int]) -> "Prediction":
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"expected an item below {len(self)}, got {index}")
            index = slice(index, index + 1 or None)
        where = index if isinstance(index, slice) else _places(index, len(self))
        told = {name: getattr(self, name)[where] for name in _PER_ITEM}
        variances = self.variances and tuple(v if v is None else v[where] for v in self.variances)
        return Prediction(logits=self.logits[:, where], variances=variances, drawn=self.drawn, **told)

    @classmethod
    def cat(cls, parts: Sequence["Prediction"]) -> "Prediction":
        """The items of all parts, in order; the parts have one number of samples and of classes."""
        if not parts:
            raise ValueError("expected at least one prediction, got none")
        sizes = sorted({(part.samples, part.classes) for part in parts})
        if len(sizes) > 1:
            raise ValueError(f"expected predictions of one (samples, classes), got {sizes}")
        told = {name: torch.cat([getattr(part, name) for part in parts]) for name in _PER_ITEM}
        logits = torch.cat([part.logits for part in parts], 1)
        variances, drawn = _cat_variances([part.variances for part in parts]), all(p.drawn for p in parts)
        return cls(logits=logits, variances=variances, drawn=drawn, **told)

    def to(self, device: torch.device | str) -> "Prediction":
        """The same on another device."""
        told = {name: getattr(self, name).to(device) for name in _PER_ITEM}
        variances = self.variances and tuple(v if v is None else v.to(device) for v in self.variances)
        return Prediction(logits=self.logits.to(device), variances=variances, drawn=self.drawn, **told)


def differ(draws: Tensor) -> bool:
    """Whether there are several draws, not all the same; of no items several are enough.  [S, ...]"""
    return len(draws) > 1 and (draws.numel() == 0 or bool((draws[1:] != draws[:1]).any()))


def warn_undrawn(name: str, samples: int, drawn: bool, stacklevel: int) -> None:
    """Say that a spread of 0 is no certainty, where there are not two draws to differ."""
    if drawn and samples > 1:
        return
    why = (
        "one draw cannot differ from itself: predict with samples >= 2"
        if drawn
        else "nothing was drawn (samples=0, attention without a variance, or a fit that chose no draws)"
    )
    told = f"{name} is 0 because there are not two draws, which is not certainty: {why}"
    warnings.warn(told, stacklevel=stacklevel + 1)


def check_logits(logits: Tensor) -> None:
    """Finite draws of the logits of any number of items.  [S, B, C]"""
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"expected logits to be a tensor, got {type(logits).__name__}: torch.as_tensor makes one of it"
        )
    if logits.ndim != 3 or not logits.is_floating_point() or 0 in (logits.shape[0], logits.shape[2]):
        raise ValueError(
            f"expected logits to be floating-point [samples, items, classes] with at least one sample "
            f"and class, got shape {tuple(logits.shape)} and {logits.dtype}"
        )
    finite = logits.isfinite()
    if not bool(finite.all()):
        raise NonFiniteError(f"logits hold {int((~finite).sum())} non-finite numbers")


def _places(index: Tensor | Sequence[int], items: int) -> Tensor:
    """Item numbers [n], or a mask [B] that is told from them by its type alone: True is no item 1."""
    where = torch.as_tensor(index)
    if where.ndim == 1 and len(where) == 0 and not isinstance(index, Tensor):
        where = where.long()  # an empty list has no type of its own
    mask = where.dtype == torch.bool
    if where.is_floating_point() or where.ndim > 1 or (mask and where.shape != (items,)):
        raise IndexError(
            f"expected item numbers or a mask of {items} items, "
            f"got shape {tuple(where.shape)} and {where.dtype}"
        )
    # a lone number gives a prediction of one item; torch would read bytes as a mask
    return where if mask else where.reshape(-1).long()


_PER_ITEM = [field.name for field in fields(Prediction) if field.name not in ("logits", "variances", "drawn")]


def predict(
    model: Classifier,
    inputs: Inputs,
    *,
    samples: int = 10,
    seed: int = 0,
    draw: Draw = "independent",
    batch_size: int | None = None,
    variances: bool = False,
    first_item: int = 0,
    capture: bool | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """Class probabilities from `samples` forward passes with drawn attention outputs.

    Items and samples run together in batches of at most `batch_size` rows, in evaluation mode and
    without gradients; only logits (and asked variances) are kept, where the inputs lie.  The draws of
    item i depend on `seed` and on `first_item` + i alone: not on `batch_size`, nor on the other items, nor
    on padding behind it.  The first samples of a larger number are those of a smaller one.

    `samples=0` and `draw="none"` give the mean prediction, with S = 1.  So does a model whose layers
    cannot draw: S identical passes would tell nothing more.

    A model whose forward pass takes `samples`, as the transformers' does, computes what is before the first
    draw once for all samples of an item.  On a GPU batches of such a model may be replays of a captured one:
    `capture` insists on it or forbids it, None captures where starting kernels takes most of the time and
    the process has no other thread but those of progress bars, loaders and notebooks: PyTorch cannot capture
    while another one uses the GPU.  True fails with the reason where nothing can be captured; two batches
    come first, so fewer are not replays.
    If `batch_size` is not given it is 256, or 2000 on a GPU whose memory suffices.

    >>> predict(model, images, samples=10).probs  # [B, C]
    """
    samples = check_count("samples", samples, least=0)
    seed, first_item = check_whole("seed", seed), check_count("first_item", first_item, least=0)
    if draw not in DRAWS:
        raise ValueError(f"expected draw to be one of {', '.join(DRAWS)}, got {draw!r}")
    drawing = samples > 0 and draw != "none" and model.draws
    count = samples if drawing else 1
    need = ("logits", "variance") if variances else ("logits",)
    device = model_device(model, inputs)
    with evaluating(model):
        if shares_samples(model):
            request = Request(count, seed, draw if drawing else "none", need, first_item)
            return _from_chunks(model, inputs, request, batch_size, device, capture, progress)
        if capture:
            raise ValueError(NO_CAPTURE.format("its forward pass does not take samples"))

        def run(rows_at_once: int) -> Prediction:
            told = VarianceMeans(count_items(inputs), count, device_of(inputs)) if variances else None

            def forward(rows: Rows) -> Tensor:
                noise = rows.noise if drawing else None
                output = model(rows.inputs, draw=draw if drawing else "none", generator=noise, need=need)
                if told is not None:
                    told.add(rows.items, [layer.variance for layer in output.layers])
                return output.logits

            logits = collect(
                forward,
                inputs,
                samples=count,
                seed=seed,
                batch_size=rows_at_once,
                device=device,
                first_item=first_item,
                progress=progress,
            )
            means = None if told is None else _some(told.means())
            return Prediction.from_logits(logits, means, drawn=drawing)

        return run_rows(run, batch_size, device)


def _from_chunks(
    model: Classifier,
    inputs: Inputs,
    request: Request,
    batch_size: int | None,
    device: torch.device,
    capture: bool | None,
    progress: Progress | None,
) -> Prediction:
    """A prediction whose samples share what is before the first draw."""
    logits, sums = run_rows(
        lambda rows: run_chunks(
            model, inputs, request, batch_size=rows, device=device, capture=capture, progress=progress
        ),
        batch_size,
        device,
    )
    drawn = request.draw != "none"
    if "variance" not in request.need:
        return Prediction.from_logits(logits, drawn=drawn)
    means = tuple(None if total is None else total / request.samples for total in sums)
    return Prediction.from_logits(logits, _some(means), drawn=drawn)


def _some(variances: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """They were asked for: at least one layer must have one."""
    if all(variance is None for variance in variances):
        raise ValueError(f"variances=True, but none of the model's {len(variances)} layers has a variance")
    return variances


def _cat_variances(parts: Sequence[tuple[Tensor | None, ...] | None]) -> tuple[Tensor | None, ...] | None:
    """Layer by layer; all parts tell variances of the same layers, or none does."""
    if all(part is None for part in parts):
        return None
    present = [part and [v is not None for v in part] for part in parts]  # which layers tell a variance
    if any(layers != present[0] for layers in present):
        raise ValueError(f"expected predictions that tell variances of the same layers, got {present}")
    layers = zip(*(part for part in parts if part is not None), strict=True)
    return tuple(None if layer[0] is None else torch.cat(layer) for layer in layers)
