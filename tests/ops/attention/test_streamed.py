"""Streamed attention and the plain operations against float64; the kernels under Triton's interpreter."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.attention import KernelAttention, SoftmaxAttention
from gpattention.attention.softmax import _streams
from gpattention.gp import kernel_attention, kernel_weights, softmax_attention
from gpattention.gp.kernels import why_not_streamed
from gpattention.ops import SHOWN_TOKENS
from gpattention.ops.attention import fused_kernel_attention, fused_softmax_attention

pytest.importorskip("triton")

KINDS = ("none", "rows", "softmax")
# queries, keys, width, channels: one tile, a tile of keys for several of queries, several of both
SIZES = [(7, 5, 3, 4), (40, 17, 5, 3), (17, 70, 5, 20)]
LARGE = [(64, 64, 32, 32), (130, 100, 33, 64), (1, 257, 64, 1)]


def inputs(
    sizes: tuple[int, ...], *, offset: float = 0.0, device: str = "cpu", batch: int = 2
) -> list[Tensor]:
    """q, k, v [2, 2, N, X] as projections lay them out."""
    g = torch.Generator().manual_seed(0)
    queries, keys, width, channels = sizes
    shapes = (queries, width), (keys, width), (keys, channels)
    found = [torch.randn(batch, n, 2, c, generator=g).transpose(1, 2) for n, c in shapes]
    return [(x * (0.4 if i < 2 else 1) + (offset if i < 2 else 0)).to(device) for i, x in enumerate(found)]


def masks(sizes: tuple[int, ...], device: str = "cpu", batch: int = 2) -> dict[str, Tensor]:
    """Two thirds of the tokens are real; the last sequence has no key at all."""
    g = torch.Generator().manual_seed(1)
    mask, query_mask = (torch.rand(batch, 1, n, generator=g) > 0.35 for n in (sizes[1], sizes[0]))
    mask[-1] = False
    return {"mask": mask.to(device), "query_mask": query_mask.to(device)}


def reference(kind: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Tensor]) -> Tensor:
    """The same from differences, which need no origin."""
    if kind in ("softmax", "dot none", "dot rows"):
        e = q @ k.mT / (q.shape[-1] ** 0.5 if kind == "softmax" else 1)
    else:
        e = -0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    visible = torch.ones_like(e, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    if options:
        visible = visible & options["mask"][..., None, :] & options["query_mask"][..., None]
    weights = torch.where(visible, e.exp(), 0.0)
    if kind not in ("none", "dot none"):
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return weights @ v


def fused(kind: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Tensor]) -> Tensor:
    if kind == "softmax":
        return fused_softmax_attention(q, k, v, causal=causal, **options)
    return fused_kernel_attention(q, k, v, normalised=kind == "rows", causal=causal, **options)


def plain(kind: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Tensor]) -> Tensor:
    if kind == "softmax":
        return softmax_attention(q, k, v, causal=causal, **options)
    with gp.fused_kernels("off"):
        way = {"normalised": kind.endswith("rows"), "dot": kind.startswith("dot")}
        return kernel_attention(q, k, v, causal=causal, **way, **options)


def check(
    kind: str,
    tokens: list[Tensor],
    causal: bool,
    options: dict[str, Tensor],
    limit: float = 3e-6,
    *,
    call: Callable[..., Tensor] = fused,
    dtype: torch.dtype = torch.float32,
) -> None:
    found = []
    for made_by, kept_in in ((reference, torch.float64), (call, dtype)):
        leaves = [x.to(kept_in).requires_grad_() for x in tokens]
        out = made_by(kind, *leaves, causal, options)
        g = torch.Generator().manual_seed(2)
        weight = torch.randn(out.shape, generator=g).to(out.device, kept_in)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    for name, exact, x in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        error = float((x - exact).norm() / exact.norm().clamp_min(1e-2))  # one key only: no gradient
        assert error < limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize("special", [False, True], ids=["plain", "causal and masked"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(kind: str, sizes: tuple[int, ...], special: bool) -> None:
    check(kind, inputs(sizes), special, masks(sizes) if special else {})


@pytest.mark.parametrize("special", [False, True], ids=["plain", "causal and masked"])
@pytest.mark.parametrize("kind", [*KINDS, "dot none", "dot rows"])
def test_plain_operations_and_gradients(kind: str, special: bool) -> None:
    sizes = (6, 6, 3, 4)
    options = masks(sizes) if special else {}
    check(kind, inputs(sizes), special, options, limit=1e-13, call=plain, dtype=torch.float64)


@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_weights_are_what_values_are_weighed_with(normalised: bool, dot: bool) -> None:
    q, k, v = (x.double() for x in inputs(SIZES[0]))
    variance = torch.tensor([0.5, 2.0], dtype=torch.float64)  # of the heads
    options = {"normalised": normalised, "dot": dot, "variance": variance, **masks(SIZES[0])}
    weights = kernel_weights(q, k, **options)
    with gp.fused_kernels("off"):
        torch.testing.assert_close(weights @ v, kernel_attention(q, k, v, **options), rtol=1e-12, atol=1e-13)
    sums = options["query_mask"][0].expand(2, -1) * (1.0 if normalised else weights[0].sum(-1))
    torch.testing.assert_close(weights[0].sum(-1), sums.double())


@pytest.mark.parametrize("kind", ["none", "rows"])
def test_distances_do_not_see_an_offset(kind: str) -> None:
    # what is left is the rounding of the inputs themselves
    check(kind, inputs(SIZES[0], offset=30.0), False, {}, limit=2e-5)


def test_softmax_loses_no_digits_to_what_all_keys_share() -> None:
    # queries' gradients are differences of keys, whose common part must cancel before it is rounded
    sizes = (5, 70, 8, 4)
    check("softmax", inputs(sizes, offset=3.0), False, {}, limit=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_keys_are_zero_and_hidden_tokens_harmless(kind: str) -> None:
    q, k, v = inputs(SIZES[0])
    options = masks(SIZES[0])
    clean = fused(kind, q, k, v, False, options)
    hidden = ~options["mask"][..., None]
    k, v = (x.masked_fill(hidden, float("nan")) for x in (k, v))
    q = q.masked_fill(~options["query_mask"][..., None], float("nan"))
    assert torch.equal(fused(kind, q, k, v, False, options), clean)
    assert (clean[-1] == 0).all()
    assert (clean.masked_fill(options["query_mask"][..., None], 0) == 0).all()
    assert (clean[0] != 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_stays_so(kind: str) -> None:
    q, k, v = inputs(SIZES[0])
    q[0, 0, 1, 0] = float("nan")
    out = fused(kind, q, k, v, False, {})
    assert out[0, 0].isnan().any()
    assert out[1].isfinite().all()


def test_outputs_and_gradients_are_token_major() -> None:
    leaves = [x.requires_grad_() for x in inputs(SIZES[0])]
    out = fused("rows", *leaves, False, {})
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *grads))


def test_broadcast_leading_axes_and_any_strides() -> None:
    q, k, v = inputs(SIZES[0])
    spread_out = q.mT.contiguous().mT
    assert spread_out.stride(-1) != 1
    expected = fused("none", q, k[:1].expand(2, -1, -1, -1), v, False, {})
    assert torch.equal(fused("none", spread_out, k[:1], v, False, {}), expected)


MODULES = [
    (KernelAttention, {"normalize": "none"}),
    (KernelAttention, {"normalize": "rows", "causal": True}),
    (KernelAttention, {"normalize": "none", "kernel": "ard_rbf"}),
    (KernelAttention, {"normalize": "rows", "kernel": "ard_rbf", "symmetric": True}),
    (KernelAttention, {"normalize": "none", "kernel": "exp_dot"}),  # which stays plain
    (SoftmaxAttention, {}),
    (SoftmaxAttention, {"causal": True}),
]


@pytest.mark.parametrize("padded", [False, True], ids=["all real", "padded"])
@pytest.mark.parametrize(("module", "options"), MODULES, ids=str)
def test_modules_with_the_switch_on_and_off(module, options: dict[str, object], padded: bool) -> None:
    torch.manual_seed(0)
    attention = module(8, 2, **options)
    x = torch.randn(2, 6, 8)
    padding = torch.rand(2, 6) < 0.3 if padded else None
    found = []
    for mode in ("off", "on"):
        attention.zero_grad()
        with gp.fused_kernels(mode):
            out = attention(x, key_padding_mask=padding).output
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad.clone() for p in attention.parameters() if p.grad is not None)])
    largest = max(float(plain.norm()) for plain in found[0])  # some biases have no gradient but rounding
    for plain, streamed in zip(*found, strict=True):
        assert float((streamed - plain).norm()) <= 1e-5 * float(plain.norm()) + 2e-6 * largest


def on_a_gpu(tokens: int) -> Any:
    """All that the switch asks of values."""
    return SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"), shape=(2, 2, tokens, 4))


def test_auto_takes_kernel_attention_at_measured_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPATTENTION_FUSED", raising=False)
    shown, longer, short = (on_a_gpu(n) for n in (SHOWN_TOKENS, SHOWN_TOKENS + 1, 1))
    assert why_not_streamed(shown, shown) is None
    assert why_not_streamed(longer, longer) == "the kernel was not measured on a GPU ('on' takes it)"
    assert why_not_streamed(short, short, dot=True) == "exp_dot has no fused kernel"


def test_auto_leaves_softmax_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPATTENTION_FUSED", raising=False)
    assert not _streams(*[on_a_gpu(8)] * 3)
    with gp.fused_kernels("on"):
        assert _streams(*[on_a_gpu(8)] * 3)


def test_softmax_stays_with_torch_where_the_kernel_cannot() -> None:
    attention = SoftmaxAttention(8, 2, dtype=torch.float64)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    with gp.fused_kernels("on"):
        found = attention(x).output
    assert torch.equal(found, attention(x).output)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LARGE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_large(kind: str, sizes: tuple[int, ...]) -> None:
    check(kind, inputs(sizes), True, masks(sizes))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("special", [False, True], ids=["plain", "causal and masked"])
@pytest.mark.parametrize("sizes", [*SIZES, *LARGE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, sizes: tuple[int, ...], special: bool) -> None:
    options = masks(sizes, "cuda", 25) if special else {}
    check(kind, inputs(sizes, device="cuda", batch=25), special, options, limit=6e-6)
