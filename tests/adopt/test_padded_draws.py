"""Draws of attached and converted hosts do not depend on how far a sentence is padded."""

import copy
from typing import Any

import pytest
from torch.nn.functional import pad
from torch.testing import assert_close

import gpattention
from gpattention.models import Prediction
from tests.adopt.hosts import make

CLOSE = {"rtol": 1e-8, "atol": 1e-8}


def longer(inputs: dict[str, Any], by: int = 3) -> dict[str, Any]:
    """The same items with padding behind, as a longer neighbour would bring it."""
    ends = {"input_ids": (0, by), "attention_mask": (0, by), "x": (0, 0, 0, by), "padding": (0, by)}
    values = {"input_ids": 1, "padding": True}  # 1 is what RoBERTa counts positions by
    return {name: pad(x, ends[name], value=values.get(name, 0)) for name, x in inputs.items()}


@pytest.mark.parametrize("host", ["bert", "roberta", "encoder"])
@pytest.mark.parametrize("kind", ["attached", "direct", "cgp", "softmax-gp", "scgp"])
def test_draws_do_not_depend_on_padding(host: str, kind: str) -> None:
    made = make(host)
    model = copy.deepcopy(made.model).double().eval()
    short = {k: x.double() if x.is_floating_point() else x for k, x in made.inputs.items()}
    if kind == "attached":
        handle = gpattention.attach(model)
        told, again = (handle.predict(inputs, samples=3) for inputs in (short, longer(short)))
    else:
        converted = gpattention.convert(model, kind=kind)
        told, again = (gpattention.predict(converted, inputs, samples=3) for inputs in (short, longer(short)))
    assert isinstance(told, Prediction)
    assert isinstance(again, Prediction)
    assert float(told.logits.std(1).max()) > 1e-4  # they differ from draw to draw
    assert_close(again.logits, told.logits, **CLOSE)
