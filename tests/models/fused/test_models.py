"""Whole models with fused blocks under Triton's interpreter: what plain ones give, or a reason why not."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpattention import gp
from gpattention.attention import attention_class
from gpattention.models import VisionTransformer
from gpattention.models.dropout import find_dropouts, hooked
from gpattention.models.transformer import are_fused
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
    from gpattention.ops.layers import kernels

    seen: list[str] = []
    found = [(kernels, name) for name in vars(kernels) if "kernel" in name]
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
    if not attention_class(kind).weighs:  # its map of the heads is no plain one: the model runs plain
        return
    assert seen.count("residual_norm_kernel") >= 5  # two LayerNorms in each of two blocks, one after them
    assert seen.count("residual_norm_backward_kernel") == seen.count("residual_norm_kernel")
    assert seen.count("gather_kernel") == 2


def test_sgpas_inducing_inputs_pass_through_the_layer_below() -> None:
    """They meet dropout too, at sites of their own."""
    model = vision(layer("softmax"), layer("sgpa"), dtype=torch.float32, dropout=0.3).train()
    plain = exact(model, images(1), dropout_seed=SEED)
    assert_same(results(model, images(1), "on", dropout_seed=SEED), plain)


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


def test_what_is_dropped_follows_the_seed_or_torchs_generator() -> None:
    model, x = vision("softmax", dtype=torch.float32, dropout=0.5), images()
    for mode in ("off", "on"):
        with gp.fused_kernels(mode):  # type: ignore[arg-type]
            still = model(x).logits
            assert torch.equal(model(x, dropout_seed=SEED).logits, still)  # in evaluation nothing drops
            model.train()
            one, two = (model(x, dropout_seed=torch.tensor(seed)).logits for seed in (1, 2))
            assert not torch.allclose(one, two, rtol=1e-3)
            found = []
            for seed in (0, 0, 1):
                torch.manual_seed(seed)
                found.append(model(x).logits)
            assert torch.equal(found[0], found[1])
            assert not torch.allclose(found[0], found[2], rtol=1e-3)
            model.eval().blocks[1].feed_forward.dropout.train()  # one module left in training drops
            assert not torch.allclose(model(x).logits, still, rtol=1e-3)
            model.eval()


class Doubled(nn.LayerNorm):
    """Not the LayerNorm the kernels know."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def replaced(
    change: Callable[[VisionTransformer], Any] = lambda _: None, **options: Any
) -> VisionTransformer:
    """A model of which something is other than the kernels know."""
    model = vision("softmax", **{"dtype": torch.float32} | options)
    change(model)
    return model


def test_where_plain_operations_run_instead() -> None:
    def runs_fused(model: VisionTransformer, need: tuple[str, ...] = ("logits",)) -> bool:
        with counted() as seen:
            model(images(), need=need)
        return any(name.startswith(("residual", "gelu")) for name in seen)

    plain = replaced()
    with gp.fused_kernels("on"):
        assert runs_fused(plain)
        assert not runs_fused(plain, ("logits", "tokens"))
        with hooked(plain, find_dropouts(plain), lambda *_: None):
            assert not runs_fused(plain)
        handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
        assert not runs_fused(plain)
        handle.remove()
        with torch.autocast("cpu", torch.bfloat16):
            assert not runs_fused(plain)
        for model in (
            replaced(lambda m: setattr(m.blocks[1].feed_forward, "norm", Doubled(16))),
            replaced(lambda m: setattr(m, "norm", nn.LayerNorm(16, bias=False))),
            replaced(lambda m: setattr(m.blocks[0].attention.dropout, "p", 1.0)),
            replaced(dtype=torch.float64),
        ):
            assert not runs_fused(model)
        assert not are_fused([], nn.LayerNorm(1025), ("logits",))
        assert are_fused([], nn.LayerNorm(1024), ("logits",))
    with gp.fused_kernels("off"):
        assert not runs_fused(plain)


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
