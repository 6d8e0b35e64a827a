"""ONNX files of models whose attention needs no solve."""

from pathlib import Path

import torch
from torch import Tensor, nn

from gpattention.adopt.convert_layer import ConvertedAttention
from gpattention.adopt.export import Answers, dynamic_axes, named
from gpattention.attention import Attention
from gpattention.models.rows import Inputs, count_items, evaluating

EXPORTABLE = ("softmax", "softmax-gp", "kernel", "direct")


def export_onnx(
    model: nn.Module, path: str | Path, example: Inputs, *, dynamic_length: bool = True, opset: int = 20
) -> Path:
    """Write the model's mean prediction as an ONNX file; returns its path.

    Works for plain and converted hosts and for our own transformers, when the mean of their attention needs
    no solve: softmax, softmax-gp, kernel and direct.  The others factor a matrix for every head, which ONNX
    has no operation for, and are refused by name.

    Args:
        model: runs in evaluation mode; a mapping as `example` becomes keyword arguments and named inputs.
        path: of the file to write.
        example: a batch of at least 2 items; the file takes batches of any size.
        dynamic_length: second axes of inputs [B, N] and [B, N, E] may be of any length too.
        opset: version of ONNX's operations.

    >>> gpattention.export_onnx(model, "model.onnx", {"input_ids": ids, "attention_mask": mask})
    """
    _check_installed()
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be an nn.Module, got {type(model).__name__}: export its host")
    _check_kinds(model)
    if count_items(example) < 2:
        raise ValueError("expected an example of at least 2 items, got 1: its batch size would become fixed")
    path, inputs = Path(path), named(example)
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes = {name: dynamic_axes(x, dynamic_length) for name, x in inputs.items()}
    answers = Answers(model, one_tensor=isinstance(example, Tensor))
    with evaluating(model):
        answers.train(False)
        torch.onnx.export(
            # by keyword: a mapping at the end of the positional arguments would be taken for keywords
            answers, (), str(path), kwargs={"inputs": inputs}, input_names=list(inputs),
            output_names=["output"], dynamic_shapes={"inputs": shapes}, dynamo=True, opset_version=opset,
            external_data=False, verbose=False,
        )  # fmt: skip
    return path


def _check_kinds(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = module.kind if isinstance(module, Attention | ConvertedAttention) else None
        if kind is not None and kind not in EXPORTABLE:
            raise ValueError(
                f"expected attention of kinds {', '.join(EXPORTABLE)} for ONNX, got {kind!r} in {name}: its "
                "mean needs the factor of a matrix, which ONNX cannot compute; export_program can"
            )


def _check_installed() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX files need the extra 'onnx': pip install 'gpattention[onnx]'") from error
