"""Rows that run at once: those asked for, those of the device, and fewer where memory does not suffice."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gpattention
from gpattention.adopt.handle import Handle
from gpattention.evaluation import (
    DeepEnsemble,
    GPLastLayer,
    LaplaceLastLayer,
    MCDropout,
    ModelPredictor,
    TemperatureScaling,
)
from gpattention.evaluation.last_layer import extract_features
from gpattention.models import predict, rows_at_once
from gpattention.models.rows_at_once import run_rows
from tests.adopt.hosts import make
from tests.models.stub_models import StubModel, normal

CPU = torch.device("cpu")
PUBLIC: list[Callable[..., Any]] = [
    predict,
    gpattention.predict,
    Handle.predict,
    Handle.variances,
    extract_features,
    TemperatureScaling.fit,
    LaplaceLastLayer.fit,
    GPLastLayer.fit,
    *(cls.predict for cls in (DeepEnsemble, LaplaceLastLayer, MCDropout, ModelPredictor, TemperatureScaling)),
]


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that would take 5 rows and has memory for 2."""
    monkeypatch.setitem(rows_at_once.ROWS, "cpu", 5)
    monkeypatch.setattr(rows_at_once, "FEWER", 2)


def limited(forward: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """The forward pass for at most 2 rows."""

    def limit(x: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError
        return forward(x, *arguments, **options)

    return limit


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__qualname__)
def test_every_public_default_leaves_them_to_the_device(function: Callable[..., Any]) -> None:
    parameter = inspect.signature(function).parameters["batch_size"]
    assert parameter.default is None
    assert parameter.annotation in (int | None, "int | None")


def test_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_rows(lambda rows: rows, None, CPU) == 256
    assert run_rows(lambda rows: rows, None, torch.device("cuda")) == 2000
    assert run_rows(lambda rows: rows, None, torch.device("mps")) == 256
    assert run_rows(lambda rows: rows, 7, torch.device("cuda")) == 7
    with pytest.raises(ValueError, match="expected batch_size to be a whole number >= 1, got 0"):
        run_rows(lambda rows: rows, 0, CPU)


def test_fewer_are_tried_once_and_only_where_nobody_asked() -> None:
    tried = []

    def run(rows: int) -> None:
        tried.append(rows)
        raise torch.OutOfMemoryError

    for batch_size, device, expected in [
        (None, "cuda", [2000, 256]),
        (900, "cuda", [900]),
        (None, "cpu", [256]),
    ]:
        tried.clear()
        with pytest.raises(torch.OutOfMemoryError):
            run_rows(run, batch_size, torch.device(device))
        assert tried == expected


@pytest.mark.usefixtures("small_memory")
class TestMemoryThatDoesNotSuffice:
    def test_of_any_classifier(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x, seen = StubModel(), normal(4, 5), []
        asked = {"samples": 3, "variances": True}
        whole = predict(model, x, batch_size=100, **asked)
        monkeypatch.setattr(model, "forward", limited(model.forward, seen))
        found = predict(model, x, **asked)
        assert seen == [5, *[2] * 6]
        torch.testing.assert_close(found.logits, whole.logits)
        torch.testing.assert_close(found.variances[1], whole.variances[1])
        with pytest.raises(torch.OutOfMemoryError):
            predict(model, x, batch_size=3, **asked)

    @pytest.mark.parametrize("predictor", [MCDropout, LaplaceLastLayer])
    def test_of_competitors(self, monkeypatch: pytest.MonkeyPatch, predictor: type[Any]) -> None:
        model, x, seen = StubModel(p=0.2), normal(8, 5), []
        made = predictor(model)
        if hasattr(made, "fit"):
            made.fit(x, torch.arange(8) % 3)
        whole = made.predict(x, samples=3, batch_size=100)
        monkeypatch.setattr(model, "features", limited(model.features, seen))
        monkeypatch.setattr(
            "gpattention.evaluation.mc_dropout.calls_of_items", lambda *_: [True]
        )  # it looks at batches of its own
        found = made.predict(x, samples=3)
        assert (seen[0], max(seen[1:])) == (5, 2)
        torch.testing.assert_close(found.logits, whole.logits)

    def test_of_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for way in ("attach", "convert"):
            host, seen = make("encoder"), []
            handle = gpattention.attach(host.model) if way == "attach" else None
            model = host.model if handle else gpattention.convert(host.model)
            call = (
                handle.predict if handle else lambda *a, model=model, **o: gpattention.predict(model, *a, **o)
            )
            whole = call(host.inputs, samples=2, variances=True, batch_size=100)
            monkeypatch.setattr(model, "forward", limited(model.forward, seen))
            found = call(host.inputs, samples=2, variances=True)
            assert (seen[0], max(seen[1:])) == (5, 2)
            torch.testing.assert_close(found.logits, whole.logits)
            for mine, theirs in zip(found.variances, whole.variances, strict=True):
                torch.testing.assert_close(mine, theirs)
            if handle:
                for mine, theirs in zip(
                    handle.variances(host.inputs), handle.variances(host.inputs, batch_size=2), strict=True
                ):
                    assert torch.equal(mine, theirs)
