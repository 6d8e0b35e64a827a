"""MC dropout (Gal and Ghahramani 2016): dropout stays on at prediction, and every mask is a draw."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from gpattention.gp import ItemNoise
from gpattention.metrics.checks import check_choice
from gpattention.models.prediction import BATCH_SIZE, DRAWS, Classifier, Draw, Prediction, predict
from gpattention.models.rows import (
    Inputs,
    Progress,
    Rows,
    check_count,
    collect,
    count_items,
    device_of,
    evaluating,
    model_device,
    take,
)

Hook: TypeAlias = Callable[[str, float, nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]
_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # drop whole channels of [B, C, ...]


@dataclass(frozen=True)
class Dropout:
    """A dropout module that drops, and its rate."""

    module: nn.Module
    rate: float


class MCDropout:
    """A predictor whose samples are forward passes with drawn dropout masks.

    Every dropout module with a rate above 0 drops, at its own rate or at `p` if given; the rest of the
    model is in evaluation mode.  Masks belong to items, so that `batch_size` changes nothing.  Two kinds
    of dropout stay off: what is no module (`F.dropout`, the attention dropout of
    `nn.MultiheadAttention`), and calls on what all items share, such as SGPA's inducing inputs.  `draw`
    says whether layers that can draw their attention outputs do so too.  `samples=0` is the prediction
    without dropout.
    """

    def __init__(self, model: Classifier, *, p: float | None = None, draw: Draw = "none") -> None:
        if p is not None and not 0 < p <= 1:
            raise ValueError(f"expected p in (0, 1], got {p}")
        check_choice("draw", draw, DRAWS)
        self._model, self._p, self._draw = model, p, draw
        self._dropouts()  # a model without dropout is refused at once

    def predict(
        self,
        inputs: Inputs,
        *,
        samples: int = 10,
        seed: int = 0,
        batch_size: int = BATCH_SIZE,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> Prediction:
        """`samples` masks for every item; the model is left as it was."""
        check_count("samples", samples, least=0)
        model = self._model
        if samples == 0:
            return predict(model, inputs, samples=0, batch_size=batch_size, progress=progress)
        dropouts = self._dropouts()
        drawing: Draw = self._draw if model.draws else "none"

        def forward(rows: Rows) -> Tensor:
            noise = rows.noise
            with _hooked(dropouts, _masks(noise, own)):
                generator = None if drawing == "none" else noise
                return model(rows.inputs, draw=drawing, generator=generator, need=("logits",)).logits

        with evaluating(model):
            own = _calls_of_items(model, dropouts, inputs)
            logits = collect(
                forward,
                inputs,
                samples=samples,
                seed=seed,
                batch_size=batch_size,
                device=model_device(model, inputs),
                first_item=first_item,
                progress=progress,
            )
        return Prediction.from_logits(logits)

    def _dropouts(self) -> dict[str, Dropout]:
        """Read anew at every prediction: rates may be set at any time."""
        found: dict[str, Dropout] = {}
        for name, module in self._model.named_modules():
            if not isinstance(module, _DropoutNd):
                continue
            rate = module.p if self._p is None else self._p
            if rate > 0 and not isinstance(module, (nn.Dropout, *_CHANNELS)):
                raise ValueError(
                    f"expected nn.Dropout as {name!r}, got {type(module).__name__} with p={rate}"
                )
            if rate > 0:
                found[name] = Dropout(module, rate)
        if not found:
            raise ValueError(
                f"expected a model with dropout modules of p > 0, got none in {type(self._model).__name__}: "
                "MC dropout would draw nothing"
            )
        return found


@contextmanager
def _hooked(dropouts: Mapping[str, Dropout], hook: Hook) -> Iterator[None]:
    """Run the hook after every dropout; the modules themselves stay untouched."""
    with ExitStack() as stack:
        for name, dropout in dropouts.items():
            handle = dropout.module.register_forward_hook(partial(hook, name, dropout.rate))
            stack.callback(handle.remove)
        yield


def _calls_of_items(model: Classifier, dropouts: Mapping[str, Dropout], inputs: Inputs) -> list[bool]:
    """For every call of a dropout in a forward pass, in order: does its input lead with the batch?

    One shape cannot tell: a batch of 4 rows looks like 4 heads.  So two batch sizes are tried.
    """
    count_items(inputs)
    passes: list[list[tuple[str, int]]] = []
    for rows in (2, 3):
        calls: list[tuple[str, int]] = []

        def note(name: str, rate: float, module: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> None:
            calls.append((name, len(x) if x.ndim else 0))  # noqa: B023 called in this turn of the loop

        first = torch.zeros(rows, dtype=torch.int64, device=device_of(inputs))  # [R] the first item
        with _hooked(dropouts, note):
            model(
                take(inputs, first, model_device(model, inputs)),
                draw="none",
                generator=None,
                need=("logits",),
            )
        passes.append(calls)
    own = []
    for (name, two), (_, three) in zip(*passes, strict=True):
        if two != three and (two, three) != (2, 3):
            raise ValueError(
                f"expected the input of dropout {name!r} to lead with the batch, so that each item has "
                f"its own mask, got {two} rows for a batch of 2 and {three} for 3"
            )
        own.append(two != three)
    if not any(own):
        raise ValueError(
            "expected dropout on the items, got a forward pass that calls none: nothing would drop"
        )
    return own


def _masks(noise: ItemNoise, own: list[bool]) -> Hook:
    """A hook that gives what dropout gives in training, with the items' own masks."""
    calls = iter(own)

    def drop(name: str, rate: float, module: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor | None:
        if not next(calls):
            return None
        whole = isinstance(module, _CHANNELS)
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if whole else tuple(x.shape)
        keep = noise.uniform(shape, torch.float32, x.device) >= rate  # [R, ...]
        return torch.where(keep, x / (1 - rate), 0.0) if rate < 1 else torch.zeros_like(x)

    return drop
