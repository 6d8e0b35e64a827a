"""Suite `oversmoothing`: cosine similarities by loops over pairs of tokens."""

import numpy as np
import pytest
import torch

from gpattention.evaluation.predictions import ItemSet
from gpattention.evaluation.suites import oversmoothing, oversmoothing_findings
from tests.models.small_models import images, sentences, text, vision

CPU = torch.device("cpu")


def similarity(tokens: torch.Tensor, lengths: list[int]) -> float:
    """Mean over sequences of two words or more of the mean over their pairs."""
    means = []
    for x, n in zip(tokens.detach().double().numpy(), lengths, strict=True):
        unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
        cosines = [unit[i] @ unit[j] for i in range(n) for j in range(n) if i != j]
        means += [np.mean(cosines)] if cosines else []
    return float(np.mean(means))


@pytest.mark.parametrize("chunk", [2, 5, 250])
def test_images(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oversmoothing, "CHUNK", chunk)
    model, x = vision("cgp"), images(5)
    found = oversmoothing_findings(model, ItemSet("test", x), CPU)
    layers = model(x, need=("logits", "tokens")).layers
    values = {(r.detail["after"], r.detail["layer"]): r.value for r in found.records}
    for number, layer in enumerate(layers):
        assert values["attention", number] == pytest.approx(similarity(layer.attended, [4] * 5))
        assert values["block", number] == pytest.approx(similarity(layer.tokens, [4] * 5))
    assert found.curves["similarity"]["attention"] == [values["attention", i] for i in range(2)]
    assert found.curves["similarity"]["block"] == [values["block", i] for i in range(2)]
    assert found.curves["similarity"]["embedded"] == pytest.approx(similarity(model.embed(x)[0], [4] * 5))


def test_padding_and_single_words_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oversmoothing, "CHUNK", 2)
    model, x = text("cgp"), sentences(1, 1, 3, 5, 2, 1)  # the first chunk has nothing to compare
    found = oversmoothing_findings(model, ItemSet("test", {"tokens": x}), CPU)
    last = model(x, need=("logits", "tokens")).layers[-1]
    expected = similarity(last.tokens, [1, 1, 3, 5, 2, 1])
    assert found.curves["similarity"]["block"][-1] == pytest.approx(expected)


def test_nothing_to_compare() -> None:
    found = oversmoothing_findings(text("cgp"), ItemSet("test", {"tokens": sentences(1, 1)}), CPU)
    assert found.records == ()
    assert found.notes == ("no sequence of test has two tokens to compare",)
    patch = vision("cgp", image_size=4)  # one token
    assert oversmoothing_findings(patch, ItemSet("test", images(2, 4)), CPU).records == ()


def test_only_so_many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oversmoothing, "ITEMS", 3)
    model, x = vision("softmax"), images(5)
    found = oversmoothing_findings(model, ItemSet("test", x), CPU)
    first = oversmoothing_findings(model, ItemSet("test", x[:3]), CPU)
    assert found.records == first.records
    assert "reduced: similarity of tokens is that of the first 3 of 5 items" in found.notes
