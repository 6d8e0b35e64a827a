"""Whole models with fused blocks under Triton's interpreter: what plain ones give, or a reason why not."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpattention import gp
from gpattention.attention import attention_class
from gpattention.attention.projections import projected_together
from gpattention.models import TextTransformer, VisionTransformer
from gpattention.models.fused.switch import why_not_fused_blocks
from gpattention.models.item_dropout import find_dropouts, hooked
from tests.models.small_models import KINDS, layer, text, vision

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs test_gpu.py")
SEED = torch.tensor(77)


def images(count: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, 8, 8, generator=torch.Generator().manual_seed(1))


def words() -> dict[str, Tensor]:
    tokens = torch.tensor([[3, 4, 5, 6, 0], [7, 8, 0, 0, 0]])
    return {"tokens": tokens, "padding_mask": tokens == 0}


@contextmanager
def counted() -> Iterator[list[str]]:
    """Which of the package's kernels around the attention were started."""
    from gpattention.attention import column_sums_kernels
    from gpattention.models.fused import kernels

    seen: list[str] = []
    found = [
        (module, name)
        for module in (kernels, column_sums_kernels)
        for name in vars(module)
        if "kernel" in name
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in found:
            patch.setattr(module, name, _Counting(getattr(module, name), name, seen))
        yield seen


class _Counting:
    def __init__(self, kernel: Any, name: str, seen: list[str]) -> None:
        self.kernel, self.name, self.seen = kernel, name, seen

    def __getitem__(self, grid: Any) -> Any:
        self.seen.append(self.name)
        return self.kernel[grid]


def results(model: nn.Module, inputs: Any, mode: str, **options: Any) -> list[Tensor]:
    """Logits, regulariser and all gradients."""
    model.zero_grad()
    with gp.fused_kernels(mode):  # type: ignore[arg-type]
        out = model(inputs, need=("logits", "regularizer"), **options)
        loss = out.logits.square().sum()
        loss = loss if out.regularizer is None else loss + out.regularizer
        loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.logits.detach(), loss.detach(), *(g.clone() for g in grads)]


def exact(model: nn.Module, inputs: Any, **options: Any) -> list[Tensor]:
    """What plain operations give in float64."""
    inputs = inputs.double() if isinstance(inputs, Tensor) else inputs
    return results(copy.deepcopy(model).double(), inputs, "off", **options)


def errors(found: list[Tensor], reference: list[Tensor]) -> list[float]:
    """Of each of the results, relative."""
    largest = max(float(x.norm()) for x in reference[2:])
    return [
        float((a - b).norm()) / max(float(b.norm()), 1e-2 * largest if place > 1 else 1e-6)
        for place, (a, b) in enumerate(zip(found, reference, strict=True))
    ]


def assert_same(found: list[Tensor], reference: list[Tensor], limit: float = 2e-5) -> None:
    for place, error in enumerate(errors(found, reference)):
        assert error < limit, f"{place}: {error:.1e}"


SLOW = ("cgp", "direct", "sgpa", "softmax-gp")  # their own kernels take long under the interpreter


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def test_training_with_a_seed_is_that_of_plain_operations(kind: str) -> None:
    model = vision(kind, dtype=torch.float32, dropout=0.3).train()
    draw = "independent" if attention_class(kind).draws else "none"
    noise = [gp.ItemNoise(0, torch.arange(2), torch.zeros(2)) for _ in range(3)]
    plain = exact(model, images(), dropout_seed=SEED, draw=draw, generator=noise[0])
    with counted() as seen:
        fused = results(model, images(), "on", dropout_seed=SEED, draw=draw, generator=noise[1])
    single = results(model, images(), "off", dropout_seed=SEED, draw=draw, generator=noise[2])
    # how well a float32 gradient of the sparse model is conditioned, and so what any path loses, is the
    # processor's: plain operations in float32 say how much that is
    for place, (error, alone) in enumerate(zip(errors(fused, plain), errors(single, plain), strict=True)):
        assert error < max(2e-5, 2 * alone), f"{place}: {error:.1e}, by plain operations {alone:.1e}"
    assert seen.count("residual_norm_kernel") >= 5  # two LayerNorms in each of two blocks, one after them
    assert seen.count("residual_norm_backward_kernel") == seen.count("residual_norm_kernel")
    assert seen.count("gather_kernel") == 2


def test_sgpas_inducing_inputs_pass_through_the_layer_below() -> None:
    """They meet dropout too, at sites of their own."""
    model = vision(layer("softmax"), layer("sgpa"), dtype=torch.float32, dropout=0.3).train()
    plain = exact(model, images(1), dropout_seed=SEED)
    assert_same(results(model, images(1), "on", dropout_seed=SEED), plain)


def test_another_seed_drops_other_entries() -> None:
    model = vision("softmax", dtype=torch.float32, dropout=0.3).train()
    for mode in ("off", "on"):
        with gp.fused_kernels(mode):  # type: ignore[arg-type]
            one, two = (model(images(), dropout_seed=torch.tensor(s)).logits for s in (1, 2))
        assert not torch.allclose(one, two, rtol=1e-3)


@pytest.mark.parametrize("kind", ["softmax", "scgp"])
def test_text_with_padding(kind: str) -> None:
    model = text(kind, dtype=torch.float32, dropout=0.2).train()
    plain = exact(model, words(), dropout_seed=SEED)
    assert_same(results(model, words(), "on", dropout_seed=SEED), plain)


def test_samples_part_inside_a_fused_model() -> None:
    model = vision(layer("softmax"), layer("cgp"), dtype=torch.float32)
    logits = []
    for mode in ("off", "on"):
        noise = gp.ItemNoise(0, torch.arange(2), torch.zeros(2))
        with gp.fused_kernels(mode):  # type: ignore[arg-type]
            logits.append(model(images(), draw="independent", samples=3, generator=noise).logits)
    assert logits[1].shape == (3, 2, 3)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


def test_without_a_seed_masks_come_from_torchs_generator() -> None:
    model = vision("softmax", dtype=torch.float32, dropout=0.5).train()
    found = []
    for start in (0, 0, 1):
        torch.manual_seed(start)
        with gp.fused_kernels("on"):
            found.append(model(images()).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], rtol=1e-3)


def test_a_dropout_module_left_in_training_drops() -> None:
    model = vision("softmax", dtype=torch.float32, dropout=0.5)
    with gp.fused_kernels("on"):
        still = model(images()).logits
        model.blocks[1].feed_forward.dropout.train()
        assert not torch.allclose(model(images()).logits, still, rtol=1e-3)


def test_in_evaluation_a_seed_changes_nothing() -> None:
    model = vision("softmax", dtype=torch.float32, dropout=0.5)
    for mode in ("off", "on"):
        with gp.fused_kernels(mode):  # type: ignore[arg-type]
            assert torch.equal(model(images(), dropout_seed=SEED).logits, model(images()).logits)


class Doubled(nn.LayerNorm):
    """Not the LayerNorm the kernels know."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def refused(model: VisionTransformer | TextTransformer, need: tuple[str, ...] = ("logits",)) -> str:
    blocks, norm = list(model.blocks), model.norm
    told = why_not_fused_blocks(blocks, norm, need)  # type: ignore[arg-type]
    assert told is not None
    with gp.fused_kernels("on"), counted() as seen:
        model(images(), need=need)
    assert not [name for name in seen if name.startswith(("residual", "gelu"))]
    return told


def test_reasons() -> None:
    with gp.fused_kernels("on"):
        model = vision("softmax", dtype=torch.float32)
        assert why_not_fused_blocks(list(model.blocks), model.norm, ("logits",)) is None  # type: ignore[arg-type]
        assert "tokens" in refused(model, ("logits", "tokens"))
        dropouts = find_dropouts(model)
        with hooked(model, dropouts, lambda *told: None):
            assert "hooks" in refused(model)
        handle = nn.modules.module.register_module_forward_pre_hook(lambda *told: None)
        assert "watched" in refused(model)
        handle.remove()
        model.blocks[1].feed_forward.norm = Doubled(16)
        assert "replaced" in refused(model)
        model = vision("softmax", dtype=torch.float32)
        model.norm = nn.LayerNorm(16, bias=False)
        assert "replaced" in refused(model)
        model = vision("softmax", dtype=torch.float32)
        model.blocks[0].attention.dropout.p = 1.0
        assert "replaced" in refused(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert "float32" in refused(vision("softmax", dtype=torch.float32))
        assert "float32" in str(why_not_fused_blocks([], vision("softmax").norm, ("logits",)))
        assert "width" in str(why_not_fused_blocks([], nn.LayerNorm(1025), ("logits",)))
    with gp.fused_kernels("off"):
        assert "off" in refused_where_off()


def refused_where_off() -> str:
    return str(why_not_fused_blocks([], nn.LayerNorm(4), ("logits",)))


class OwnTokens(VisionTransformer):
    """Embeds in its own way."""

    def embed(self, inputs: Any) -> tuple[Tensor, Tensor | None]:
        tokens, padding = super().embed(inputs)
        return -tokens, padding


def test_an_embedding_of_ones_own_is_used() -> None:
    plain = vision("softmax", dtype=torch.float32)
    model = OwnTokens(plain.vision)
    model.load_state_dict(plain.state_dict())
    for mode in ("off", "on"):
        with gp.fused_kernels(mode):  # type: ignore[arg-type]
            logits = model.eval()(images(), dropout_seed=SEED).logits
        assert not torch.allclose(logits, plain(images()).logits, rtol=1e-3)


def test_a_convolution_that_is_no_cut_is_called() -> None:
    model = vision("softmax", dtype=torch.float32)
    model.patches = nn.Conv2d(3, 16, 3, stride=4, padding=1)
    with gp.fused_kernels("off"):
        plain = model(images()).logits
    with gp.fused_kernels("on"):
        torch.testing.assert_close(model(images()).logits, plain, rtol=1e-4, atol=1e-5)


class TestProjections:
    def maps(self, count: int = 3, **options: Any) -> list[nn.Linear]:
        torch.manual_seed(0)
        return [nn.Linear(6, 5, **options) for _ in range(count)]

    @pytest.mark.parametrize(("count", "bias"), [(2, True), (3, False), (4, True)])
    def test_they_are_the_maps(self, count: int, bias: bool) -> None:
        maps, x = self.maps(count, bias=bias), torch.randn(2, 7, 6, requires_grad=True)
        weights = torch.randn(count, 2, 7, 5)
        leaves = [x, *(p for m in maps for p in m.parameters())]
        with gp.fused_kernels("on"):
            made = projected_together(x, maps)
            assert made is not None
            found = torch.autograd.grad(
                sum((y * w).sum() for y, w in zip(made, weights, strict=True)), leaves
            )
        apart = [m(x) for m in maps]
        exact = torch.autograd.grad(sum((y * w).sum() for y, w in zip(apart, weights, strict=True)), leaves)
        torch.testing.assert_close((*made, *found), (*apart, *exact), rtol=1e-5, atol=1e-5)

    def test_frozen_maps_and_inputs(self) -> None:
        maps, x = self.maps(), torch.randn(3, 6)
        for m in maps:
            m.weight.requires_grad_(False)
        with gp.fused_kernels("on"):
            made = projected_together(x, maps)
            assert made is not None
            sum(y.sum() for y in made).backward()  # type: ignore[union-attr]
        for m in maps:
            assert m.weight.grad is None
            torch.testing.assert_close(m.bias.grad, torch.full((5,), 3.0))

    def test_what_is_not_plain_is_called(self) -> None:
        x = torch.randn(3, 6)
        with gp.fused_kernels("on"):
            assert projected_together(x, self.maps()) is not None
            assert projected_together(x.double(), [m.double() for m in self.maps()]) is None
            assert projected_together(x, [m.double() for m in self.maps()]) is None
            assert projected_together(x, self.maps(1)) is None
            assert projected_together(x, [*self.maps(2), nn.Linear(6, 4)]) is None
            assert projected_together(x, [*self.maps(2), nn.Linear(6, 5, bias=False)]) is None
            assert projected_together(x, [*self.maps(2), nn.Sequential(nn.Linear(6, 5))]) is None
            assert projected_together(x[:0], self.maps()) is None
            maps = self.maps()
            maps[1].register_forward_hook(lambda *told: None)
            assert projected_together(x, maps) is None
            with torch.autocast("cpu", torch.bfloat16):
                assert projected_together(x, self.maps()) is None
        with gp.fused_kernels("off"):
            assert projected_together(x, self.maps()) is None
