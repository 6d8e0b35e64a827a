"""The kernels around the attention on a CUDA device, compiled: float64 accuracy at real and odd sizes."""

import pytest
import torch
from torch import nn

from gpattention import gp
from gpattention.attention.projections import projected_together
from gpattention.models import TextConfig, TextTransformer, VisionConfig, VisionTransformer
from gpattention.ops.layers import Added, residual_norm, seeded_dropout
from tests.models.fused.problems import Gelu, Norm, Problem, Sums, check

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROBLEMS = [
    Norm((1, 1), 1, kind="alone"),
    Norm((100, 64), 128, kind="alone"),
    Norm((100, 64), 128, rate=0.1),
    Norm((100, 64), 128, rate=0.1, kind="inside"),
    Norm((10, 20, 64), 128, kind="repeated"),
    Norm((37, 11), 250, rate=0.5, biased=False),
    Norm((3001,), 1000, rate=0.9),
    Norm((50_001,), 128, rate=0.1),
    Gelu((100, 64), 128, 128, rate=0.1),
    Gelu((37, 11), 530, 33, rate=0.5, biased=False),
    Sums(6400, 128, 3),
    Sums(6400, 128, 4),
    Sums(5001, 250, 2),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_outputs_and_gradients(problem: Problem) -> None:
    check(problem, "cuda")


def test_masks_have_the_bits_of_the_plain_operations() -> None:
    seed, ones = torch.tensor(5, device="cuda"), torch.ones(6400, 128, device="cuda")
    for site in (0, 1, 2, 16, 1000):
        y = residual_norm(0 * ones, Added(ones, None, 0.1, site), ones[0], ones[0], 1e-5, seed)[0]
        assert torch.equal(y, seeded_dropout(ones, 0.1, seed, site))


def test_projections_of_one_input() -> None:
    torch.manual_seed(0)
    maps = [nn.Linear(128, 128, device="cuda") for _ in range(4)]
    x = torch.randn(100, 64, 128, device="cuda", requires_grad=True)
    weights = torch.randn(4, 100, 64, 128, device="cuda")
    leaves = [x, *(p for m in maps for p in m.parameters())]
    made = projected_together(x, maps)
    assert made is not None
    found = torch.autograd.grad(sum((y * w).sum() for y, w in zip(made, weights, strict=True)), leaves)
    apart = [m(x) for m in maps]
    exact = torch.autograd.grad(sum((y * w).sum() for y, w in zip(apart, weights, strict=True)), leaves)
    for a, b in zip((*made, *found), (*apart, *exact), strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.parametrize("kind", ["softmax", "sgpa"])
@pytest.mark.parametrize("words", [False, True])
def test_models(kind: str, words: bool) -> None:
    torch.manual_seed(0)
    if words:
        model = TextTransformer(TextConfig(attention=kind, vocabulary=50)).cuda()
        inputs = torch.randint(0, 50, (16, 23), device="cuda")
    else:
        model = VisionTransformer(VisionConfig(attention=kind)).cuda()
        inputs = torch.randn(16, 3, 32, 32, device="cuda")
    found = []
    for mode in ("off", "on"):
        model.zero_grad()
        with gp.fused_kernels(mode):  # type: ignore[arg-type]
            out = model(inputs, dropout_seed=torch.tensor(3, device="cuda"))
            out.logits.square().sum().backward()
        # a parameter that the mean does not touch has no gradient in plain operations, and 0 in a kernel's
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append([out.logits.detach(), *grads])
    largest = max(float(g.norm()) for g in found[0][1:])
    for fused, plain in zip(found[1], found[0], strict=True):
        assert float((fused - plain).norm()) < 1e-4 * max(float(plain.norm()), 1e-2 * largest)
