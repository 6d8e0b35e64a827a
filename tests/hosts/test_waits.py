"""How often predictions wait for a device: not once for every layer, and not at all within a CUDA graph."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification

import gpattention
from gpattention import numerics
from gpattention.gp import NotPositiveDefiniteError, fused_kernels
from gpattention.graphs import WARM_UP
from gpattention.hosts import Handle
from tests.hosts.hosts import Encoder

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IDS = torch.arange(12).view(2, 6)
WAYS: dict[str, dict[str, Any]] = {
    "draws": {"samples": 3},
    "mean": {"samples": 3, "variance_from": "mean"},
    "moments": {"method": "moments"},
}


class Reads(TorchDispatchMode):
    """Counts values that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__ in ("_local_scalar_dense.default", "nonzero.default", "equal.default")
        return func(*args, **(kwargs or {}))


def bert(layers: int) -> Handle:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=8
    )
    return gpattention.attach(BertForSequenceClassification(config).eval())


def predicting(handle: Handle, device: str, **options: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Logits of a batch on that device, and the batch."""
    handle.model.to(device)
    handle.settings = handle.settings.to(device)
    given = [torch.randn(2, 5, 16)] if isinstance(handle.model, Encoder) else [IDS, (IDS % 6 < 4).long()]

    def logits(*given: Tensor) -> Tensor:
        inputs = dict(zip(("input_ids", "attention_mask"), given, strict=False))
        found: Any = handle.predict(given[0] if len(given) == 1 else inputs, batch_size=99, **options)
        return found.logits

    return logits, [x.to(device) for x in given]


@pytest.mark.parametrize("way", ["draws", "mean"])
def test_waits_do_not_grow_with_the_layers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(numerics, "_waits", lambda device: True)  # as of a GPU
    counts = []
    for layers in (1, 3):
        handle = bert(layers)
        logits, given = predicting(handle, "cpu", **WAYS[way])
        vars(handle.settings)["_known"] = handle.settings._used()  # as of settings on a GPU
        with fused_kernels("on"):
            logits(*given)
            with Reads() as reads:
                found = logits(*given)
        counts.append(reads.count)
        with fused_kernels("off"):
            torch.testing.assert_close(found, logits(*given), rtol=1e-5, atol=1e-6)
    assert counts[0] == counts[1] <= 10


@pytest.mark.parametrize("way", [*WAYS, "variances", "signals"])
def test_failures_are_named_all_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_waits", lambda device: True)
    handle = gpattention.attach(Encoder().eval())
    settings = handle.settings
    handle.settings = replace(settings, noise=torch.full_like(settings.noise, 1e-12))
    x = torch.ones(2, 5, 16)  # keys that are equal
    call = partial(handle.predict, **WAYS[way]) if way in WAYS else getattr(handle, way)
    with pytest.raises(NotPositiveDefiniteError, match="noise I"):
        call(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_a_gpu)])
def test_a_prediction_as_a_graph(way: str, device: str) -> None:
    handle = gpattention.attach(Encoder().eval()) if way == "moments" else bert(3)
    logits, given = predicting(handle, device, **WAYS[way])
    step = gpattention.graphed(logits, *given)
    found = [step(*given) for _ in range(WARM_UP + 2)]
    assert step.captured, step.reason
    torch.testing.assert_close(found[-1], logits(*given), rtol=1e-5, atol=1e-5)
