"""Forward passes of an attached model: rows of samples times items, listened to at every site."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gpattention.adopt.attended import Attended, Listener
from gpattention.adopt.batch_axis import check_batch_first, is_ambiguous
from gpattention.adopt.families import intercepting
from gpattention.adopt.listening import Drawing
from gpattention.adopt.reading import Call, Task, call_model, find_task, read, uncompiled
from gpattention.adopt.settings import Settings
from gpattention.adopt.sites import Site
from gpattention.adopt.variance import MAX_KEYS
from gpattention.gp import ItemNoise
from gpattention.models.rows import Inputs, Rows, count_items, model_device

_SITE_SEEDS = 0x9E3779B1  # sites of one seed lie this far apart


@dataclass(eq=False)
class Runner:
    """A host model, where it attends, and how its output is read."""

    model: nn.Module
    sites: tuple[Site, ...]
    call: Call = call_model
    task: Task | None = None  # None until the first output has been seen
    max_keys: int = MAX_KEYS
    max_log_amplitude: float | None = None
    _batch_first: bool = field(default=False, init=False)  # once it has been seen

    def output(self, inputs: Inputs, listener: Listener | None = None) -> Tensor:
        """What the model answers to one batch on its device, read as the task says."""
        items = count_items(inputs)
        if listener is None:
            told = self.call(self.model, inputs)
        else:
            host = uncompiled(self.model)
            with intercepting(host, self.sites, listener):
                told = self.call(host, inputs)
        if self.task is None:
            self.task = find_task(self.model, told)
        answer = read(told, self.task, inputs)
        if len(answer) != items:
            raise ValueError(
                f"expected one answer for each of {items} inputs, got shape "
                f"{tuple(answer.shape)}: where batches are not the first axis, pass call= to attach"
            )
        if not self._batch_first and is_ambiguous(inputs):
            check_batch_first(self._count, inputs, "attach")
            self._batch_first = True
        return answer

    def _count(self, inputs: Inputs) -> tuple[int, list[int]]:
        """How many answers, and how many sequences each call of a site attends over."""
        seen: list[int] = []

        def listener(site: Site, told: Attended) -> Tensor:
            seen.append(len(told.mean))
            return told.mean

        host = uncompiled(self.model)
        with intercepting(host, self.sites, listener):
            told = self.call(host, inputs)
        assert self.task is not None
        return len(read(told, self.task, inputs)), seen

    def draw(
        self,
        rows: Rows,
        settings: Settings,
        *,
        seed: int,
        keep_variances: bool = False,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """One pass in which every row draws for itself: the answers, and variances where kept.

        Where no site draws it is the host's own pass, fused operations and all.
        """
        if not settings.any_drawn:
            return self.output(rows.inputs), [None] * len(self.sites)
        noise = [
            ItemNoise(seed + (place + 1) * _SITE_SEEDS, rows.numbers, rows.samples)
            for place in range(len(self.sites))
        ]
        drawing = self.drawing(settings, noise, keep_variances=keep_variances)
        answer = self.output(rows.inputs, drawing)
        if not drawing.called:
            raise ValueError(
                f"expected the model to call one of its {len(self.sites)} sites, got a forward pass that "
                "called none: a compiled model must be attached before it is compiled"
            )
        return answer, drawing.variances

    def drawing(
        self, settings: Settings, noise: list[ItemNoise] | None, *, keep_variances: bool = False
    ) -> Drawing:
        """The listener of that name with this host's options; without noise it only tells variances."""
        return Drawing(
            self.sites,
            settings,
            max_keys=self.max_keys,
            max_log_amplitude=self.max_log_amplitude,
            noise=noise,
            keep_variances=keep_variances,
            variances_of_all=noise is None,
        )

    def device(self, inputs: Inputs) -> torch.device:
        """Where the model computes."""
        return model_device(self.model, inputs)
