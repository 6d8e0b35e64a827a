"""timm's own vision transformers, where timm is installed: attached to, detached from and converted."""

import copy

import pytest
import torch
from torch import nn

import gpattention

timm = pytest.importorskip("timm", reason="needs timm, which needs torchvision")

NAMES = ["vit_tiny_patch16_224", "deit_tiny_patch16_224"]
CLASSES, DEPTH = 5, 2


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, img_size=64, num_classes=CLASSES, depth=DEPTH)
    return model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_attached_and_detached(name: str) -> None:
    model, images = made(name), torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        own = model(images)
    handle = gpattention.attach(model)
    assert len(handle.sites) == DEPTH
    assert torch.equal(handle.predict(images, samples=0).logits[0], own)
    torch.testing.assert_close(handle.process_mean(images), own, rtol=0, atol=1e-5)
    drawn = handle.predict(images, samples=3)
    assert drawn.logits.shape == (3, 3, CLASSES)
    assert bool((drawn.logits.std(0) > 0).all())
    handle.detach()
    with torch.no_grad():
        assert torch.equal(model(images), own)


@pytest.mark.parametrize("kind", ["direct", "cgp", "scgp"])
def test_converted(kind: str) -> None:
    images = torch.randn(3, 3, 64, 64)
    model = gpattention.convert(copy.deepcopy(made(NAMES[0])), kind=kind).train()
    loss = model(images).square().mean() + 0.01 * gpattention.regularizer(model)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.blocks.parameters())
    assert gpattention.predict(model, images, samples=2).probs.shape == (3, CLASSES)
