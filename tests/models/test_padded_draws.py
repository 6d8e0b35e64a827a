"""What a sentence is told does not depend on how far its neighbours make it be padded, draws included."""

import pytest
from torch.testing import assert_close

from gpattention.evaluation import MCDropout
from gpattention.models import predict
from tests.models.small_models import DRAWING, sentences, text

SHORT, LONG = (sentences(6, 3, 5, to=length) for length in (6, 9))
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("kind", DRAWING)
def test_draws_do_not_depend_on_padding(kind: str) -> None:
    model = text(kind)
    told = model.predict(SHORT, samples=4)
    assert float(told.logits.std(1).max()) > 1e-3  # they differ from draw to draw
    assert_close(model.predict(LONG, samples=4).logits, told.logits, **CLOSE)


@pytest.mark.parametrize("kind", DRAWING)
def test_nor_do_joint_draws(kind: str) -> None:
    model = text(kind)
    told = predict(model, SHORT, samples=4, draw="joint")
    assert float(told.logits.std(1).max()) > 1e-3
    assert_close(predict(model, LONG, samples=4, draw="joint").logits, told.logits, **CLOSE)


@pytest.mark.parametrize("kind", ["softmax", *DRAWING])
def test_nor_do_dropout_masks(kind: str) -> None:
    predictor = MCDropout(text(kind), p=0.3, draw="none" if kind == "softmax" else "independent")
    told = predictor.predict(SHORT, samples=4, seed=1)
    assert float(told.logits.std(1).max()) > 1e-3
    assert_close(predictor.predict(LONG, samples=4, seed=1).logits, told.logits, **CLOSE)
