"""`nn.MultiheadAttention` in all the ways it can be called."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention.hosts.sites import find_sites, hooked
from tests.hosts.hosts import pass_on

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "self": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "no bias": ({"bias": False}, {}),
    "without weights": ({}, {"need_weights": False}),
    "weights per head": ({}, {"average_attn_weights": False}),
    "other widths": ({"kdim": 6, "vdim": 5}, {}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("training", [False, True])
def test_it_answers_as_before(name: str, training: bool) -> None:
    torch.manual_seed(0)
    made, called = CALLS[name]
    module = nn.MultiheadAttention(8, 2, dropout=0.2, **made).train(training)
    x = torch.randn(4, 5, 8)
    key, value = (torch.randn(4, 5, made.get(w, 8)) for w in ("kdim", "vdim"))
    tokens = (x, key, value) if "kdim" in made else (x, x, x)
    check(module, tokens, called)


def check(module: nn.MultiheadAttention, tokens: tuple[Tensor, ...], called: dict[str, Any]) -> None:
    def run() -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(1)
        return module(*tokens, **called)

    plain = run()
    with hooked(module, find_sites(module).sites, pass_on):
        met = run()
    for ours, theirs in zip(met, plain, strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs)


def test_unbatched_and_crossed() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2)
    q, k = torch.randn(3, 8), torch.randn(6, 8)
    check(module, (q, k, k), {"key_padding_mask": torch.tensor([False] * 4 + [True] * 2)})
    check(module, (q, k, k), {"need_weights": False})


@pytest.mark.parametrize("padding", [torch.bool, torch.float32])
def test_masks_of_both_kinds(padding: torch.dtype) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    pairs = torch.zeros(4, 4, dtype=torch.bool)
    pairs[:, 1] = True  # nobody sees the second key: still a mask of keys
    if padding != torch.bool:
        mask, pairs = (torch.zeros(m.shape).masked_fill(m, -torch.inf) for m in (mask, pairs))
    check(module, (x, x, x), {"key_padding_mask": mask, "attn_mask": pairs})
    check(module, (x, x, x), {"attn_mask": pairs, "need_weights": False})


def test_other_masks_are_refused() -> None:
    module, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 4, 8)
    for given, message in (
        ({"is_causal": True}, "is_causal"),
        ({"attn_mask": x[:, :4, :4, None]}, "per head"),
    ):
        with hooked(module, find_sites(module).sites, pass_on), pytest.raises(ValueError, match=message):
            module(x, x, x, **given)


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options).eval()


def norm_about_one() -> nn.LayerNorm:
    norm = nn.LayerNorm(8)
    nn.init.ones_(norm.bias)
    return norm


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [True] * 5])
GAPS = torch.tensor([[False] * 5, [False, True, False, False, True], [False] * 5])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mask", [PADDING[:2], GAPS], ids=["at the end", "with gaps"])
@pytest.mark.parametrize("additive", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("options", [{}, {"enable_nested_tensor": False}, {"norm": norm_about_one()}])
@torch.no_grad()
def test_padding_is_left_as_the_fused_encoder_leaves_it(
    mask: Tensor, additive: bool, options: dict[str, Any]
) -> None:
    model, x = encoder(**options), torch.randn(len(mask), 5, 8)
    given = torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if additive else mask
    plain = model(x, src_key_padding_mask=given)
    with hooked(model, find_sites(model).sites, pass_on):
        met = model(x, src_key_padding_mask=given)
    torch.testing.assert_close(met, plain, rtol=1e-5, atol=1e-5)
    fused = options.get("enable_nested_tensor", True) and mask is not GAPS
    # else nothing is shown here
    assert bool((plain[mask] == (1.0 if "norm" in options else 0.0)).all()) == fused
    assert "forward" not in model.__dict__
    assert not model.layers[-1]._forward_hooks


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("fast", [True, False])
def test_padding_is_the_same_where_gradients_flow_and_without_the_fused_pass(fast: bool) -> None:
    model, x = encoder(), torch.randn(3, 5, 8)[: None if fast else 2]
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad():
            plain = model(x, src_key_padding_mask=PADDING[: len(x)])
        with hooked(model, find_sites(model).sites, pass_on):
            met = model(x, src_key_padding_mask=PADDING[: len(x)])
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(met, plain, rtol=1e-5, atol=1e-5)
    assert (float(plain[PADDING[: len(x)]].abs().min()) == 0) == fast


@pytest.mark.parametrize("shut", [-1e4, -1e9, float("-inf")])
def test_numbers_that_shut_a_key_are_padding(shut: float) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    padding = torch.zeros(3, 5)
    padding[1, 3:] = shut
    inputs = {"src": torch.randn(3, 5, 8), "src_key_padding_mask": padding}
    host = nn.ModuleDict({"layer": encoder})
    before = encoder(**inputs)[:, 0]
    handle = gpattention.attach(
        host, task="embedding", call=lambda model, given: model["layer"](**given)[:, 0]
    )
    torch.testing.assert_close(handle.process_mean(inputs), before)
    gpattention.convert(host, "softmax-gp")
    torch.testing.assert_close(encoder(**inputs)[:, 0], before)
