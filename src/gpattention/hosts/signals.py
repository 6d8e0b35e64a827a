"""Signals of models of other libraries: of attached ones by their handle, of converted ones by `signals`.

Features are what the head reads; the head is the linear map that a first pass calls last.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpattention.attention import Attention
from gpattention.concurrency import Handler, handling
from gpattention.gp import attention_entropy
from gpattention.hosts.families.base import AttentionCall, Context, Site
from gpattention.hosts.predict import NOT_CONVERTED, Call, Reader, Task, call_model, uncompiled
from gpattention.hosts.settings import Settings
from gpattention.hosts.sites import hooked
from gpattention.hosts.variance import query_mask
from gpattention.models import Signals, Transformer, Watch, measure_signals, watched
from gpattention.models.converted import layer_names
from gpattention.models.predict import Inputs, has_features
from gpattention.models.signals import model_signals

if TYPE_CHECKING:
    from gpattention.hosts.attach import Runner

BLOCK = 2**18  # pairs of tokens at once on a CPU


@dataclass(eq=False)
class Head:
    """The linear map that a model answers with, once it was found."""

    module: nn.Linear | None = None

    def answer(self, reader: Reader, inputs: Inputs, watching: Context) -> tuple[Tensor, Tensor]:
        """One pass: logits, and what the head read.  An embedding is read by no head."""
        host = uncompiled(reader.model)
        seen: list[tuple[nn.Linear, Tensor, Tensor]] = []  # the last call alone

        def see(module: nn.Linear, own: Handler, x: Tensor) -> Tensor:
            seen[:] = [(module, x, own(x))]
            return seen[0][2]

        linears = [self.module] if self.module else [m for m in host.modules() if isinstance(m, nn.Linear)]

        @contextmanager
        def both() -> Iterator[None]:  # around this pass alone: the reader may run others to look at shapes
            with watching, handling({(linear, "forward"): partial(see, linear) for linear in linears}):
                yield

        answer = reader.read(host, inputs, both())
        if reader.task == "embedding":
            return answer[:, :0], answer
        outputs, wanted = [y.shape[-1] for _, _, y in seen], answer.shape[-1]
        if outputs != [wanted]:
            expected = f"expected the head, the last linear map, to have {wanted} outputs, got {outputs}"
            raise ValueError(f"{expected}: pass task='embedding' and a call= that gives the features")
        self.module = seen[0][0]
        return answer, seen[0][1]


def in_cache(call: AttentionCall) -> list[AttentionCall]:
    """On a CPU, parts of the items whose matrices stay in its cache; items know nothing of each other."""
    items, heads, queries = call.mean.shape[:3]
    if call.q.device.type != "cpu" or call.past is not None:
        return [call]
    most = max(1, BLOCK // max(heads * queries * call.k.shape[-2], 1))

    def part(chosen: slice) -> AttentionCall:
        mask = call.mask if call.mask is None or len(call.mask) == 1 else call.mask[chosen]
        return replace(call.map(lambda x: x[chosen]), mean=call.mean[chosen], mask=mask)

    return [part(slice(start, start + most)) for start in range(0, items, most)]


def attached_signals(
    runner: "Runner", head: Head, settings: Settings, inputs: Inputs | Iterable[Any], **options: Any
) -> Signals:
    """Signals of a model that a handle holds; variances are in units of t^2.

    A fit that finds no draws worth having makes t = 0, which says nothing about the input.
    """
    ones = replace(settings, scale=torch.ones_like(settings.scale))
    moved: dict[torch.device, Settings] = {}

    def answer(batch: Inputs, watch: Watch) -> tuple[Tensor, Tensor]:
        device = runner.device(batch)
        own = moved.setdefault(device, ones.to(device))

        def hook(site: Site, call: AttentionCall) -> Tensor:
            log_variance = None
            if watch.wants_variance:
                parts = [runner.log_std(site, part, own) for part in in_cache(call)]  # [b, H, Q] each
                log_variance = 2 * torch.cat(parts)
            if call.past is not None:
                entropy = call.past.entropy(call)  # [B, H, Q]
            else:
                dot = call.form in ("softmax", "exp_dot")
                entropy = attention_entropy(call.q, call.k, dot=dot, mask=call.mask)
            watch.see(site.title, log_variance, entropy, call.mean[:, 0], query_mask(call))
            return call.mean

        return head.answer(runner, batch, hooked(uncompiled(runner.model), runner.sites, hook))

    return measure_signals(runner.model, answer, inputs, **options)


def signals(
    model: nn.Module,
    inputs: Inputs | Iterable[Any],
    *,
    task: Task | None = None,
    call: Call | None = None,
    **options: Any,
) -> Signals:
    """What one pass of a converted model, without draws, says about every item, as of the handle of `attach`.

    Args:
        model: what `convert` returned, one that is built of `gpattention.models.EncoderLayer`, one of our own
            transformers, or a `gpattention.models.FeatureClassifier` of your own.
        inputs: a tensor or a mapping of tensors, with the batch first, or a loader of such.
        task: "classification", "tokens", "regression", "embedding" or "causal"; seen from the output if not
            given.
        call: how to run the model: `call(model, inputs)` gives its output with the batch first.
        **options: `variance`, `per_token` and `batch_size`, as of `Handle.signals`.

    Returns:
        Logits, features, and profiles of variance and attention entropy, where the inputs lie; of a loader
        on the CPU.

    Raises:
        ValueError: for models that are not converted, and outputs that cannot be read.

    >>> gpattention.signals(model, validation_loader).variance  # [B, sites x heads]
    """
    if isinstance(model, Transformer):
        return model.signals(inputs, **options)
    sites: dict[Attention, str] = {
        layer.attention: name for layer, name in layer_names(uncompiled(model)).items()
    }
    if not sites and task is None and call is None and has_features(model):
        return model_signals(model, inputs, **options)
    if not sites:
        raise ValueError(NOT_CONVERTED)
    reader, head = Reader(uncompiled(model), call or call_model, task, "signals"), Head()

    def answer(batch: Inputs, watch: Watch) -> tuple[Tensor, Tensor]:
        return head.answer(reader, batch, watched(sites, watch))

    return measure_signals(reader.model, answer, inputs, **options)
