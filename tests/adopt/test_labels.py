"""Labels that a model cannot be fitted to are refused before anything runs."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gpattention
from gpattention.adopt.labels import IGNORED, check_labels
from tests.adopt.hosts import CLASSES, Encoder

X = torch.randn(20, 5, 16)
Y = torch.arange(20) % CLASSES
QUICK: dict[str, Any] = {"steps": 1, "samples": 2, "levels": ("global",)}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y.float(), "expected labels to be whole numbers.*got torch.float32"),
        (Y > 0, "expected labels to be whole numbers.*got torch.bool"),
        (nn.functional.one_hot(Y), r"expected labels of shape \[B\], .*got shape \(20, 3\)"),
        (Y - 1, "expected labels from 0 to 2, or -100 .*got -1"),
        (Y + 5, "expected labels from 0 to 2, or -100 .*got 5"),
        (Y.tolist(), "expected labels to be a tensor .*got list"),
        (torch.tensor(1), r"expected labels to be a tensor .*got a tensor of shape \(\)"),
    ],
)
def test_labels_of_classes(labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpattention.attach(Encoder()).fit(X, labels, **QUICK)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_any_whole_numbers_do(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    handle, again = (gpattention.attach(model) for model in [Encoder()] * 2)
    found, expected = handle.fit(X, Y.to(dtype), **QUICK), again.fit(X, Y, **QUICK)
    assert found.candidates[0].nll == expected.candidates[0].nll


def test_labels_of_tokens() -> None:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30,
        num_labels=CLASSES,
    )  # fmt: skip
    handle = gpattention.attach(transformers.BertForTokenClassification(config))
    inputs = {"input_ids": torch.randint(0, 30, (20, 4))}
    with pytest.raises(ValueError, match=r"expected labels of shape \[B, N\], .*got shape \(20,\)"):
        handle.fit(inputs, Y, **QUICK)
    with pytest.raises(ValueError, match="expected labels of 4 tokens like the answers, got 3"):
        handle.fit(inputs, torch.zeros(20, 3, dtype=torch.long), **QUICK)


def test_labels_of_values() -> None:
    check_labels(torch.randn(4), (1,), "regression")
    check_labels(torch.zeros(4, 1, dtype=torch.long), (1,), "regression")
    check_labels(torch.randn(4, 2), (2,), "regression")
    for labels, width, message in (
        (torch.randn(4, 2), 1, r"\[B\] or \[B, 1\], .*got \(4, 2\)"),
        (torch.randn(4), 2, r"\[B, 2\], .*got \(4,\)"),
        (torch.tensor([1.0, torch.nan]), 1, "finite numbers, got 1 that are not"),
    ):
        with pytest.raises(ValueError, match=message):
            check_labels(labels, (width,), "regression")


def test_ignored_labels_pass() -> None:
    check_labels(torch.tensor([0, IGNORED, 2]), (3,), "classification")
