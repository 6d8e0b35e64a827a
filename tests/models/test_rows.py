"""What is no input at all: every way to predict says what came and what to do with it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpattention
from gpattention.models.rows import count_items
from tests.adopt.hosts import make
from tests.models.small_models import vision

X = torch.randn(4, 3, 8, 8)
NOT_INPUTS: dict[str, tuple[Any, str]] = {
    "an array": (X.numpy(), "got ndarray: torch.from_numpy makes a tensor of it"),
    "a number of numpy": (np.float32(1), "got float32: torch.from_numpy"),
    "a pair": ((X, X), "got tuple of Tensor: give each the name of the model's argument, in a mapping"),
    "texts": (["a b", "c"], "got list of texts: a tokenizer makes tensors of them"),
    "a text": ("a b", "got str of texts: a tokenizer"),
    "a loader": (
        DataLoader(TensorDataset(X)),
        "got DataLoader: pass its batches one by one, first_item= the",
    ),
    "none": (None, "got NoneType$"),
}


@pytest.mark.parametrize("case", NOT_INPUTS)
def test_other_inputs_are_refused(case: str) -> None:
    inputs, message = NOT_INPUTS[case]
    with pytest.raises(
        ValueError, match=f"expected inputs to be a tensor or a mapping of tensors, {message}"
    ):
        count_items(inputs)


@pytest.mark.parametrize("case", NOT_INPUTS)
def test_predictions_refuse_them(case: str) -> None:
    inputs, message = NOT_INPUTS[case]
    model, handle = vision("cgp"), gpattention.attach(make("encoder").model)
    for predict in (model.predict, handle.predict, handle.variances, handle.process_mean):
        with pytest.raises(ValueError, match=message):
            predict(inputs)
