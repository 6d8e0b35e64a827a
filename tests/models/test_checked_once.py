"""Where looking at a value waits for a device, a call looks once: at its results."""

import pytest
import torch

from gpattention import gp, numerics
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> VisionTransformer:
    """A model on a machine that takes its CPU for a GPU."""
    monkeypatch.setattr(numerics, "_waits", lambda device: True)
    torch.manual_seed(0)
    config = VisionConfig(image_size=8, width=8, heads=2, depth=2, attention=AttentionConfig("cgp"))
    return VisionTransformer(config)


def test_a_call_looks_once_and_gives_the_same(
    model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.eval()
    looks, kept = [], torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: looks.append(x) or kept(x))
    fast = model(IMAGES, need=("logits", "regularizer"))
    assert len(looks) == 1
    monkeypatch.undo()
    slow = model(IMAGES, need=("logits", "regularizer"))
    assert torch.allclose(fast.logits, slow.logits, atol=1e-6)
    assert torch.allclose(fast.regularizer, slow.regularizer)  # type: ignore[arg-type]


def test_what_failed_is_named_as_everywhere_else_and_counted_nowhere(model: VisionTransformer) -> None:
    attention = model.blocks[1].attention
    with torch.no_grad():
        attention.latent.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(gp.NonFiniteError, match="o holds") as caught:
        model(IMAGES)
    assert any("in layer 1" in note for note in caught.value.__notes__)
    with pytest.raises(gp.NonFiniteError, match="o holds"):
        attention(torch.zeros(1, 4, 8))  # type: ignore[operator]
    assert sum(gp.health().values()) == 0


def test_a_posterior_is_looked_at_when_it_is_asked(model: VisionTransformer) -> None:
    attention = model.blocks[0].attention
    seen = []

    def look(*_: object) -> None:
        seen.append(numerics.checks_are_deferred())

    attention.value.register_forward_pre_hook(look)  # type: ignore[union-attr]
    model(IMAGES)
    model(IMAGES, need=("logits", "posterior"))
    with gp.deferred_checks():
        model(IMAGES)
    assert seen == [True, False, True]
