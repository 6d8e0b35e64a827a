"""Predictions of a converted model: several passes in evaluation mode whose attention outputs are drawn."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.adopt.batch_axis import check_batch_first, is_ambiguous
from gpattention.adopt.convert_layer import (
    ConvertedAttention,
    Request,
    converted_layers,
    requesting,
)
from gpattention.adopt.convert_own import answering
from gpattention.adopt.reading import TASKS, Call, Task, call_model, find_task, read, real_tokens, uncompiled
from gpattention.adopt.results import TokenPrediction, Values
from gpattention.checks import check_count, check_whole
from gpattention.gp.concurrency import Handler, handling
from gpattention.models import Prediction, Transformer
from gpattention.models.rows import (
    Inputs,
    Progress,
    count_items,
    device_of,
    evaluating,
    iterate_rows,
    model_device,
)
from gpattention.models.rows_at_once import run_rows
from gpattention.models.variance_means import VarianceMeans


def predict(
    model: nn.Module,
    inputs: Inputs,
    samples: int = 10,
    seed: int = 0,
    *,
    task: Task | None = None,
    call: Call | None = None,
    batch_size: int | None = None,
    variances: bool = False,
    first_item: int = 0,
    progress: Progress | None = None,
) -> Prediction | TokenPrediction | Values:
    """What a converted model predicts, with uncertainty: as the handle of `attach` does.

    A `Prediction` of classes, a `TokenPrediction` of a class per token, or `Values` with a variance, by
    `task` ("classification", "tokens", "regression", "embedding"; seen from the output if not given).  The
    model runs in evaluation mode and without gradients.  `samples=0` is the mean.  The draws of item i depend
    on `seed` and `first_item` + i alone.  `variances=True` adds the layers' variances, averaged over the
    samples, to a `Prediction`.  `call(model, inputs)` runs models whose output is read in another way.
    `batch_size` bounds the rows (items times samples) that run at once: if not given 256, or 2000 on a GPU
    whose memory suffices.

    >>> gpattention.predict(model, tokenizer(sentences, padding=True, return_tensors="pt"), samples=10)
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be an nn.Module, got {type(model).__name__}{_hint(model)}")
    if isinstance(model, Transformer):
        return model.predict(
            inputs, samples, seed, batch_size=batch_size, variances=variances, first_item=first_item,
            progress=progress,
        )  # fmt: skip
    model = uncompiled(model)
    layers = converted_layers(model)
    if not layers:
        raise ValueError("expected a converted model, got one without a converted layer: call convert first")
    if task is not None and task not in TASKS:
        raise ValueError(f"expected task to be one of {', '.join(TASKS)}, got {task!r}")
    samples = check_count("samples", samples, least=0)
    seed = check_whole("seed", seed)
    drawing = samples > 0 and any(layer.attention.draws for layer in layers)
    count = samples if drawing else 1
    device, asked = model_device(model, inputs), task

    def run(rows_at_once: int) -> tuple[Tensor, Task, tuple[Tensor | None, ...] | None]:
        task: Task | None = asked
        parts: list[Tensor] = []
        told = VarianceMeans(count_items(inputs), count, device_of(inputs)) if variances else None
        for rows in iterate_rows(
            inputs, samples=count, seed=seed, batch_size=rows_at_once, device=device,
            first_item=first_item, progress=progress,
        ):  # fmt: skip
            request = Request("independent" if drawing else "none", rows.noise, variances)
            with requesting(layers, request), answering(model, request):
                output = (call or call_model)(model, rows.inputs)
            if told is not None:
                told.add(rows.items, [request.told.get(id(layer)) for layer in layers])
            task = find_task(model, output) if task is None else task
            answer = read(output, task, rows.inputs)
            if len(answer) != len(rows.items):
                raise ValueError(
                    f"expected one answer for each of {len(rows.items)} inputs, got shape "
                    f"{tuple(answer.shape)}: where batches are not the first axis, pass call= to predict"
                )
            if not parts and is_ambiguous(rows.inputs):
                check_batch_first(partial(_count, model, layers, task, call), rows.inputs, "predict")
            parts.append(answer.to(device_of(inputs)))
        means = None if told is None else told.means()
        return torch.cat(parts), task or "classification", means

    with evaluating(model):
        answers, found, means = run_rows(run, batch_size, device)
    answers = answers.unflatten(0, (-1, count)).transpose(0, 1).contiguous()  # [S, B, ...]
    return _result(answers, found, inputs, means, drawn=drawing)


def _hint(model: object) -> str:
    return ": call its own predict" if hasattr(model, "predict") else ""


def _count(
    model: nn.Module, layers: list[ConvertedAttention], task: Task, call: Call | None, inputs: Inputs
) -> tuple[int, list[int]]:
    """How many answers, and how many sequences each call of a layer attends over."""
    seen: list[int] = []

    def listen(own: Handler, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(args[0]))  # queries [B, H, Q, D]
        return own(*args, **kwargs)

    with handling({(layer, "forward"): listen for layer in layers}):
        return len(read((call or call_model)(model, inputs), task, inputs)), seen


def _result(
    answers: Tensor,  # [S, B, ...]
    task: Task,
    inputs: Inputs,
    variances: tuple[Tensor | None, ...] | None,
    *,
    drawn: bool,
) -> Prediction | TokenPrediction | Values:
    if task == "classification":
        return Prediction.from_logits(answers, variances, drawn=drawn)
    if task == "tokens":
        flat = Prediction.from_logits(answers.flatten(1, 2), drawn=drawn)
        return TokenPrediction(flat, real_tokens(inputs, tuple(answers.shape[1:3])))
    return Values.from_draws(answers, drawn=drawn)
