"""Converted and attached models as programs of `torch.export`, and as ONNX files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from gpattention.attention import Attention, attention_class, list_attention
from gpattention.checks import require
from gpattention.hosts.attach import Handle
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.predict import call_model, check_module
from gpattention.hosts.sites import hooked
from gpattention.models.predict import Inputs, count_items, evaluating
from gpattention.ops import fused_kernels


def export_program(
    model: nn.Module | Handle, example: Inputs, *, dynamic_length: bool = False, fused: bool = False
) -> ExportedProgram:
    """Export a model's mean prediction with `torch.export`, for any batch size and every kind.

    `torch.export.export(model, ...)` works too, except for our own transformers, whose outputs it does not
    support.

    Args:
        model: plain, converted or attached; it runs in evaluation mode.
        example: a batch of inputs, which may be one item.
        dynamic_length: second axes of inputs [B, N] and [B, N, E] may have any length, if the model allows.
        fused: keep fused kernels as operators, for a model and an example on a GPU; the program then needs
            gpattention and Triton to run.

    Returns:
        A program to be called as `program.module()(inputs)` with a mapping of named tensors ({"inputs": x}
        if `example` is one tensor), which returns logits, or the last states of a model without logits.  For
        an attached model it also returns the variances of all sites, [B, H, N] each.

    Raises:
        ValueError: inputs are not tensors, or outputs have none.
        RuntimeError: fused kernels cannot run here.

    >>> program = gpattention.export_program(model, {"input_ids": ids, "attention_mask": mask})
    >>> torch.export.save(program, "model.pt2")
    """
    items, (inputs, shapes) = count_items(example), _described(example, dynamic_length)
    if items == 1:  # torch.export would treat a batch of one as a constant
        inputs = {name: x.repeat(2, *[1] * (x.ndim - 1)) for name, x in inputs.items()}
    answers = _Answers(model, one_tensor=isinstance(example, Tensor))
    with evaluating(answers.model), torch.no_grad(), fused_kernels("on" if fused else "off"):
        answers.train(False)
        return torch.export.export(answers, (inputs,), dynamic_shapes=(shapes,))


def export_onnx(
    model: nn.Module, path: str | Path, example: Inputs, *, dynamic_length: bool = True, opset: int = 20
) -> Path:
    """Write the model's mean prediction as an ONNX file.

    It works for plain and converted hosts and for our own transformers, if the mean of their attention needs
    no linear solve: softmax, softmax-gp, kernel and direct.  The other kinds factor a matrix for every head,
    for which ONNX has no operation, and are refused.

    Args:
        model: runs in evaluation mode; a mapping as `example` becomes keyword arguments and named inputs.
        path: of the file to write.
        example: a batch of at least 2 items; the file takes batches of any size.
        dynamic_length: second axes of inputs [B, N] and [B, N, E] may also have any length.
        opset: version of ONNX's operations.

    Returns:
        The path.

    Raises:
        ImportError: the extra "onnx" is not installed.
        ValueError: a kind of attention needs a linear solve, or an argument is wrong.

    >>> gpattention.export_onnx(model, "model.onnx", {"input_ids": ids, "attention_mask": mask})
    """
    for module in ("onnx", "onnxscript"):
        require(module, extra="onnx", user="export_onnx")
    check_module(model, ": export its host")
    _check_kinds(model)
    if count_items(example) < 2:
        raise ValueError("expected an example of at least 2 items, got 1: its batch size would become fixed")
    path, (inputs, shapes) = Path(path), _described(example, dynamic_length)
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = _Answers(model, one_tensor=isinstance(example, Tensor))
    with evaluating(model), fused_kernels("off"):
        answers.train(False)
        torch.onnx.export(
            # by keyword: a mapping at the end of the positional arguments would be taken for keywords
            answers, (), str(path), kwargs={"inputs": inputs}, input_names=list(inputs),
            output_names=["output"], dynamic_shapes={"inputs": shapes}, dynamo=True, opset_version=opset,
            external_data=False, verbose=False,
        )  # fmt: skip
    return path


class _Answers(nn.Module):
    """A host as a function from named tensors to tensors."""

    def __init__(self, model: nn.Module | Handle, *, one_tensor: bool) -> None:
        super().__init__()
        self.model = model.model if isinstance(model, Handle) else model
        self._answer = _measuring(model) if isinstance(model, Handle) else self._plain
        self._one_tensor = one_tensor

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        """Logits, else the last states; for an attached model also the variances of its sites."""
        return self._answer(inputs["inputs"] if self._one_tensor else inputs)

    def _plain(self, inputs: Inputs) -> Tensor:
        return read_answer(call_model(self.model, inputs))


def _measuring(handle: Handle) -> Callable[[Inputs], tuple[Tensor, ...]]:
    """A function to a host's answer and the variances of its sites, [B, H, N] each, in order of the calls.

    It reads no values of tensors.
    """
    runner, settings = handle._runner, handle.settings
    if handle.found.writes:
        expected = "expected an attached model without causal attention, whose rows have factors of their own"
        raise ValueError(f"{expected}, got {type(handle.model).__name__}: export the model itself")

    def answer(inputs: Inputs) -> tuple[Tensor, ...]:
        variances: list[Tensor] = []

        def hook(site: Site, call: AttentionCall) -> Tensor:
            variances.append((2 * runner.log_std(site, call, settings)).exp())
            return call.mean

        with hooked(runner.model, runner.sites, hook):
            return (read_answer(runner.call(runner.model, inputs)), *variances)

    return answer


def read_answer(output: Any) -> Tensor:
    """Logits, else the last states, of a host's output."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(output, name, output), Tensor):
            return found
    raise ValueError(f"expected a model that gives a tensor or logits, got {type(output).__name__}")


def _described(example: Inputs, length: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The example as a mapping, and the axes of each tensor that may have any size.

    They are the batch and, if asked for, N of [B, N] or [B, N, E].
    """
    inputs = {"inputs": example} if isinstance(example, Tensor) else dict(example)
    batch, tokens = torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO  # the second only if the model allows
    free = {0: batch, 1: tokens}
    return inputs, {n: free if length and x.ndim in (2, 3) else {0: batch} for n, x in inputs.items()}


def _check_kinds(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Attention) and not module.exportable:
            known = ", ".join(kind for kind in list_attention() if attention_class(kind).exportable)
            helps = "ONNX cannot factor a matrix, export_program can"
            raise ValueError(f"expected kinds {known} for ONNX, got {module.kind!r} in {name}: {helps}")
