"""Strangeness and an adaptive temperature of attached hosts: fitted along, saved, refused where missing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention.hosts.usual import _drawn_logits
from gpattention.strangeness import AdaptiveTemperature, Strangeness
from tests.hosts import hosts
from tests.hosts.hosts import CLASSES, TOKENS, Encoder
from tests.threads import at_once

ITEMS = 120
FAST: dict[str, Any] = {"steps": 1, "samples": 2, "levels": ("global",), "select": False}


def some_items(count: int = ITEMS, seed: int = 0, *, shift: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, TOKENS, 16, generator=generator)
    return {"x": x + shift * torch.randn(x.shape, generator=generator)}


def made() -> tuple[Any, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    model, inputs = Encoder().eval(), some_items()
    with torch.no_grad():
        labels = model(**inputs).argmax(-1)
    labels[::4] = torch.randint(CLASSES, (ITEMS // 4,))  # not all of them right
    return gpattention.attach(model), inputs, labels


SHIFTED = {name: {"x": scale * some_items()["x"]} for name, scale in (("large", 3.0), ("small", 0.2))}


def test_fitted_along_and_saved(tmp_path: Path) -> None:
    handle, inputs, labels = made()
    with torch.no_grad():
        before = handle.model(**inputs)
    with pytest.raises(ValueError, match=r"call handle\.fit"):
        handle.flag(inputs)
    handle.fit([({"x": x}, y) for x, y in zip(inputs["x"].split(50), labels.split(50), strict=True)], **FAST)
    strange, new = {"x": 5 * some_items(40, 1)["x"]}, some_items(200, 2)
    found = handle.strangeness(strange)
    expected = Strangeness.fit(handle.signals(inputs), labels, head=_head(handle.model))
    assert torch.allclose(found.score, expected.score(handle.signals(strange)), atol=1e-6)
    assert float(handle.strangeness(new).p_value.mean()) > 0.3
    assert float(handle.flag(strange, rate=0.05).float().mean()) > 0.9
    assert float(handle.flag(new, rate=0.05).float().mean()) < 0.15
    with pytest.raises(ValueError, match="expected rate"):
        handle.flag(new, rate=0.001)
    assert torch.equal(handle.flag([new, strange], rate=0.1)[200:], handle.flag(strange, rate=0.1))
    with torch.no_grad():
        assert torch.equal(handle.predict(inputs, samples=0).logits[0], handle._runner.answer(inputs))
        assert torch.allclose(handle.predict(inputs, samples=0).logits[0], before, atol=1e-6)
    handle.save(tmp_path)
    again = gpattention.attach(handle.model)
    again.load(tmp_path)
    assert torch.equal(again.strangeness(strange).score, found.score)
    again.settings = again.settings  # signals by other settings are others
    with pytest.raises(ValueError, match=r"call handle\.fit"):
        again.strangeness(strange)
    again.save(tmp_path)
    assert not (tmp_path / "strangeness.json").exists()


def _head(model: Any) -> tuple[Tensor, Tensor]:
    return model.head.weight.detach(), model.head.bias.detach()


def test_shifts_and_an_adaptive_temperature(tmp_path: Path) -> None:
    handle, inputs, labels = made()
    handle.fit(inputs, labels, shifted=SHIFTED, temperature="adaptive", **FAST)
    usual = handle._usual
    assert set(usual.fitted().judged) == {"large", "small"}
    draws, signals = _drawn_logits(handle, [inputs], 2, 0), handle.signals(inputs)
    changed = {n: (_drawn_logits(handle, [x], 2, 0), handle.signals(x), labels) for n, x in SHIFTED.items()}
    expected = AdaptiveTemperature.fit(draws, signals, labels, shifted=changed)
    found = handle.predict(inputs, samples=2, seed=0)
    T = expected.temperature(draws, signals)  # [B]
    assert torch.allclose(found.logits, (draws / T[:, None]).to(found.logits), atol=1e-5)
    with torch.no_grad():
        assert torch.equal(handle.predict(inputs, samples=0).logits[0], handle._runner.answer(inputs))
    handle.save(tmp_path)
    again = gpattention.attach(handle.model)
    again.load(tmp_path)
    assert torch.equal(again.predict(inputs, samples=2, seed=0).logits, found.logits)
    together = at_once([lambda: handle.flag(inputs, rate=0.1)] * 4)
    assert all(torch.equal(each, together[0]) for each in together)


def test_refusals() -> None:
    handle, inputs, labels = made()
    with pytest.raises(ValueError, match="expected shifted= items"):
        handle.fit(inputs, labels, temperature="adaptive", **FAST)
    with pytest.raises(ValueError, match="expected shifted 'few' to be the 120 held-out items"):
        handle.fit(inputs, labels, shifted={**SHIFTED, "few": some_items(7)}, **FAST)
    assert not handle.settings.fitted  # nothing of a fit that failed is kept


class Headless(nn.Module):
    """Logits by no linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = Encoder().encoder, nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.encoder(x)
        return states[:, 0, :CLASSES] * self.scale


def test_a_host_without_a_head_is_fitted_and_says_so() -> None:
    torch.manual_seed(0)
    handle = gpattention.attach(Headless().eval())
    handle.fit(some_items()["x"], torch.randint(CLASSES, (ITEMS,)), **FAST)
    with pytest.raises(ValueError, match=r"whose fit found none: .*last linear map"):
        handle.flag(some_items()["x"])


@pytest.mark.parametrize("name", ["bert", "vit", "timm", "own text"])
def test_few_items_and_other_hosts(name: str) -> None:
    """Hosts of every family are fitted; as few items as these have no strangeness, which flags say."""
    host = hosts.make(name)
    handle = gpattention.attach(host.model.eval(), call=host.call)
    handle.fit(host.inputs, torch.tensor([0, 1, 2, 0, 1]), **FAST)
    with pytest.raises(ValueError, match="at least 10 items"):
        handle.flag(host.inputs)
