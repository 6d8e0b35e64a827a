"""Converted and attached models as programs of `torch.export`: named tensors in, one answer out."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from gpattention.adopt.attended import Attended
from gpattention.adopt.families import intercepting
from gpattention.adopt.handle import Handle
from gpattention.adopt.reading import call_model
from gpattention.adopt.sites import Site
from gpattention.adopt.variance import log_stddev
from gpattention.models.rows import Inputs, count_items, evaluating


def export_program(
    model: nn.Module | Handle, example: Inputs, *, dynamic_length: bool = False
) -> ExportedProgram:
    """What `torch.export` makes of a model's mean prediction, for any batch size; `example` may be one item.

    Works for every kind.  The program is called as `program.module()(inputs)` with a mapping of named tensors
    ({"inputs": x} where `example` is one tensor) and gives logits, or the last states of a model without.  Of
    an attached model it gives those and the variances of all sites, [B, H, N] each.

    `torch.export.export(model, ...)` itself works too, but for our own transformers, whose output it does not
    know.

    >>> program = gpattention.export_program(model, {"input_ids": ids, "attention_mask": mask})
    >>> torch.export.save(program, "model.pt2")
    """
    items, inputs = count_items(example), named(example)
    if items == 1:  # torch.export would take a batch of one for a constant
        inputs = {name: x.repeat(2, *[1] * (x.ndim - 1)) for name, x in inputs.items()}
    shapes = {name: dynamic_axes(x, dynamic_length) for name, x in inputs.items()}
    host = model.model if isinstance(model, Handle) else model
    answers = Answers(model, one_tensor=isinstance(example, Tensor))
    with evaluating(host), torch.no_grad():
        answers.train(False)
        return torch.export.export(answers, (inputs,), dynamic_shapes=(shapes,))


class Answers(nn.Module):
    """A host as a function of named tensors to tensors."""

    def __init__(self, model: nn.Module | Handle, *, one_tensor: bool) -> None:
        super().__init__()
        self.model = model.model if isinstance(model, Handle) else model
        self._telling = _Telling(model) if isinstance(model, Handle) else None
        self._one_tensor = one_tensor

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        """Logits, else the last states; of an attached model, the variances of its sites too."""
        given = inputs["inputs"] if self._one_tensor else inputs
        if self._telling is not None:
            return self._telling.answer(given)
        return read_answer(call_model(self.model, given))


class _Telling:
    """Listens, passes the means on and tells the variances; it reads no value of any tensor."""

    def __init__(self, handle: Handle) -> None:
        self._runner, settings = handle._runner, handle.settings
        self._places = {id(site.module): place for place, site in enumerate(handle.sites)}
        # a power that is learned is always used: whether it is 0 would have to be read
        self._priors = [
            replace(prior, power=prior.power.detach().clone().requires_grad_())
            for prior in (settings.prior(place, site.heads) for place, site in enumerate(handle.sites))
        ]
        self._frames = [settings.frame(place) for place in range(len(handle.sites))]

    def answer(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The host's answer and the variances of its sites, [B, H, N] each in the order of their calls."""
        variances: list[Tensor] = []
        with intercepting(self._runner.model, self._runner.sites, partial(self._heard, variances)):
            answer = read_answer(self._runner.call(self._runner.model, inputs))
        return (answer, *variances)

    def _heard(self, variances: list[Tensor], site: Site, told: Attended) -> Tensor:
        place = self._places[id(site.module)]
        log_std = log_stddev(
            told, self._priors[place], self._frames[place], max_keys=self._runner.max_keys,
            max_log_amplitude=self._runner.max_log_amplitude,
        )  # fmt: skip
        variances.append((2 * log_std).exp())
        return told.mean


def read_answer(output: Any) -> Tensor:
    """Logits, else the last states, of whatever a host gives."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(output, Tensor):
        return output
    raise ValueError(f"expected a model that gives a tensor or logits, got {type(output).__name__}")


def named(example: Inputs) -> dict[str, Tensor]:
    """The example as a mapping."""
    return {"inputs": example} if isinstance(example, Tensor) else dict(example)


def dynamic_axes(x: Tensor, length: bool) -> dict[int, Any]:
    """Which axes of an input may be of any size: the batch, and where asked N of [B, N] or [B, N, E]."""
    batch, tokens = torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO  # the second only if the model allows
    return {0: batch, 1: tokens} if length and x.ndim in (2, 3) else {0: batch}
