"""Uncertainty for a model that exists already: its attention read as Gaussian-process posteriors."""

from torch import nn

from gpattention.adopt.handle import Handle
from gpattention.adopt.reading import TASKS, Call, Task, call_model
from gpattention.adopt.refusals import FOUND_FORMS
from gpattention.adopt.running import Runner
from gpattention.adopt.sites import find_sites
from gpattention.adopt.variance import MAX_KEYS
from gpattention.checks import check_count

MAX_LOG_AMPLITUDE = 3.0


def attach(
    model: nn.Module,
    *,
    task: Task | None = None,
    call: Call | None = None,
    max_keys: int = MAX_KEYS,
    max_log_amplitude: float | None = MAX_LOG_AMPLITUDE,
) -> Handle:
    """Give the softmax attention of `model` its Gaussian-process variance, without changing its predictions.

    `nn.MultiheadAttention` (also inside `nn.TransformerEncoder`), encoders of Hugging Face transformers,
    timm's vision transformers, and our own softmax and kernel models.  Causal, grouped-query,
    relative-position and ALiBi attention is left alone by name; a model with nothing else is refused.

    Args:
        model: any module; it stays what it is.
        task: "classification", "tokens", "regression" or "embedding"; seen from the output if not given.
        call: how to run the model: `call(model, inputs)` gives its output with the batch first.
        max_keys: longer sequences condition on this many of their keys, evenly spaced (the sparse form).
        max_log_amplitude: cap of the tempered log amplitude over its mean.

    >>> handle = gpattention.attach(model)
    >>> handle.fit(validation_loader)
    >>> handle.predict(inputs, samples=10).confidence
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be an nn.Module, got {type(model).__name__}")
    if task is not None and task not in TASKS:
        raise ValueError(f"expected task to be one of {', '.join(TASKS)}, got {task!r}")
    if call is not None and not callable(call):
        raise ValueError(f"expected call to be a function of model and inputs, got {call!r}")
    if max_log_amplitude is not None and not max_log_amplitude >= 0:
        raise ValueError(f"expected max_log_amplitude >= 0 or None, got {max_log_amplitude}")
    max_keys = check_count("max_keys", max_keys, least=1)
    found = find_sites(model)
    if not found.sites:
        reasons = "".join(f"\n  {a.name or '(the model)'} ({a.kind}): {a.why}" for a in found.left_alone)
        raise ValueError(
            f"expected a model with softmax attention that has a Gaussian process behind it, got "
            f"{type(model).__name__} with none{':' if reasons else ''}{reasons}\n"
            f"what would be found: {FOUND_FORMS}"
        )
    runner = Runner(
        model, found.sites, call or call_model, task, max_keys=max_keys, max_log_amplitude=max_log_amplitude
    )
    return Handle(runner, found)
