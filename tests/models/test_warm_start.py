"""Warm starts: a GP transformer begins as the kernel transformer it was made from, or is refused."""

import re
from typing import Any

import pytest
import torch

from gpattention.attention import DirectAttention, Positive, attention_class, base, register_attention
from gpattention.models import Transformer, WarmStart, output_gap, warm_start
from tests.models.small_models import attentions, images, layer, sentences, text, vision

X = images(5)
WORDS = sentences(6, 3, 5)
KERNEL = {"normalize": "none", "symmetric": True}
UNCAPPED = {"max_stddev": 1e6}  # rows far from every key are normalised too, as the kernel's are
SOURCES = [
    {"kernel": kernel, "normalize": normalize, "symmetric": symmetric}
    for kernel in ("rbf", "ard_rbf")
    for normalize in ("none", "rows")
    for symmetric in (False, True)
]
every_source = pytest.mark.parametrize("options", SOURCES, ids=lambda o: " ".join(map(str, o.values())))


def target_of(kind: str, options: dict[str, Any], **more: Any) -> Any:
    """A layer of that kind that can be started from a kernel layer with these options."""
    cap = UNCAPPED if options["normalize"] == "rows" else {}
    return layer(kind, normalize=options["normalize"], **cap, **more)


def with_noise(model: Transformer, noise: float) -> Transformer:
    """Below the floor that float32 needs."""
    for attention in attentions(model):
        attention.noise = Positive((2,), noise, floor=0.0, learned=False, dtype=torch.float64)
    return model


@pytest.mark.parametrize("make", [vision, text])
@every_source
def test_outputs_of_a_kernel_model(make: Any, options: dict[str, Any]) -> None:
    inputs = X if make is vision else WORDS
    source = make(layer("kernel", **options))
    theirs = source(inputs).logits
    for noise in (1e-3, 0.5):  # direct is the kernel model
        target = make(target_of("direct", options, noise=noise), seed=7)
        assert output_gap(target, source, inputs) > 1e-2
        assert warm_start(target, source, inputs=inputs).gap < 1e-9
        torch.testing.assert_close(target(inputs).logits, theirs, rtol=1e-9, atol=1e-9)
    # cgp becomes it without noise.
    # With o = k the mean's weights are K_qo (K_o + s I)^-1 K_o = K_qo - s K_qo (K_o + s I)^-1.  K_qo is
    # at most K_o^1/2 (the process has unit variance), so the error is at most s max_l l^1/2 / (l + s)
    # <= s^1/2 / 2 = 5e-6 whatever the tokens, and s / l_min ~ 1e-8 where they do not coincide.
    target = make(target_of("cgp", options), seed=7)
    assert 1e-6 < warm_start(target, source, inputs=inputs).gap < 0.2  # at sigma^2 = 0.01
    assert output_gap(with_noise(target, 1e-10), source, inputs) < 1e-7
    torch.testing.assert_close(target(inputs).logits, theirs, rtol=1e-7, atol=1e-7)
    # scgp reports what its inducing inputs lose
    target = make(target_of("scgp", options), seed=7)
    gap = warm_start(target, source, inputs=inputs).gap
    assert gap == pytest.approx(((target(inputs).logits - theirs).norm() / theirs.norm()).item())
    assert 1e-3 < gap < 2


def test_scgp_with_inducing_inputs_at_the_keys_loses_nothing() -> None:
    options = {"kernel": "rbf", "normalize": "none"}
    source = vision(attention=layer("kernel", **options), depth=1)
    more = {"num_inducing": 4, "values": "dual", "noise": 0.0002}
    target = vision(attention=target_of("scgp", options, **more), depth=1)
    warm_start(target, source)
    attention = attentions(target)[0]
    keys = attention.key(target.blocks[0].norm(target.embed(X[:1])[0]))[0]  # [N, E]
    with torch.no_grad():
        attention.inducing_q.points.copy_(keys.unflatten(1, (2, 8)).transpose(0, 1))
    assert output_gap(with_noise(target, 1e-8), source, X[:1]) < 1e-3


@pytest.mark.parametrize(
    ("given", "kernel"), [("rbf", "rbf"), ("ard_rbf", "ard_rbf"), ("exp_dot", "exp_dot"), ("ard_rbf", "rbf")]
)
def test_sgpa_is_the_kernel_model_far_from_its_inducing_inputs(given: str, kernel: str) -> None:
    source = vision(attention=layer("kernel", kernel=given, **KERNEL), depth=1)
    if given != kernel:  # length scales go into the projection
        attentions(source)[0].variance.set(1.0)
    target = vision(attention=layer("sgpa", kernel=kernel), depth=1, seed=7)
    report = warm_start(target, source, inputs=X)
    assert 1e-4 < report.gap < 10
    fresh = {name.removeprefix("blocks.0.attention.") for name in report.initialised}
    assert fresh == {"inducing", "inducing_values", "scale_lower", "scale_diagonal.raw"}
    if kernel != "exp_dot":  # which has no far
        with torch.no_grad():
            attentions(target)[0].inducing.mul_(1e3)
        assert output_gap(target, source, X) < 1e-9


class TestReport:
    @pytest.mark.parametrize(("kind", "normalize", "latent_from", "fresh"), [
        ("direct", "rows", "key", {"noise.raw", "prior_scale.raw"}),
        ("direct", "none", "key", {"noise.raw"}),
        ("cgp", "rows", "key", {"noise.raw", "prior_scale.raw"}),
        ("cgp", "none", "query", {"noise.raw"}),
        ("cgp", "none", "none", {"noise.raw", "latent.weight", "latent.bias"}),
        ("scgp", "rows", "query", {"noise.raw", "prior_scale.raw", "inducing_q.points"}),
    ])  # fmt: skip
    def test_names(self, kind: str, normalize: str, latent_from: Any, fresh: set[str]) -> None:
        source = text("softmax", layer("kernel", kernel="ard_rbf", normalize=normalize))
        target = text("softmax", target_of(kind, {"normalize": normalize}), seed=7)
        before = state(target)
        report = warm_start(target, source, latent_from=latent_from)
        after, theirs = state(target), state(source)
        assert set(report.initialised) == {f"blocks.1.attention.{name}" for name in fresh}
        assert sorted(report.copied + report.initialised) == sorted(after)
        assert {name for name in after if torch.equal(after[name], before[name])} == set(report.initialised)
        for name in report.copied:
            if "blocks.1.attention" not in name or name.endswith(("value.weight", "output.weight")):
                assert torch.equal(after[name], theirs[name])

    def test_table(self) -> None:
        table = WarmStart(("a", "b"), ("noise.raw",), 0.5).table()
        assert table.startswith("2 tensors copied, 1 initialised afresh:\n  noise.raw\n")
        assert table.endswith(": 5.00e-01")

    def test_length_scales_are_folded(self) -> None:
        source = vision(layer("kernel", kernel="ard_rbf", normalize="none"))
        target = vision(layer("direct", normalize="none"), seed=7)
        warm_start(target, source)
        ours, theirs = attentions(target)[1], attentions(source)[1]
        scale = theirs.lengthscale().flatten()
        torch.testing.assert_close(ours.query.weight, theirs.query.weight / scale[:, None])
        torch.testing.assert_close(ours.key.bias, theirs.key.bias / scale)
        torch.testing.assert_close(ours.scale_q() * ours.scale_k(), theirs.variance())

    @pytest.mark.parametrize("kind", ["softmax", "kernel", "cgp", "sgpa"])
    def test_the_same_kind_is_copied_whole_and_modes_are_left_alone(self, kind: str) -> None:
        source, target = vision(kind).train(), vision(kind, seed=7).train()
        before = state(source)
        report = warm_start(target, source, inputs=X)
        assert (report.gap, report.initialised) == (0.0, ())
        torch.testing.assert_close(state(source), before, rtol=0, atol=0)
        assert source.training
        assert target.training


def state(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


REFUSED = [
    ("cgp", {}, layer("kernel", kernel="exp_dot"), "kernel -> cgp: an exp_dot kernel is no rbf kernel"),
    ("cgp", {}, layer("kernel", normalize="none"), "layer 1: kernel -> cgp: expected normalize='rows'"),
    ("cgp", {}, layer("kernel", causal=True), "expected causal=False, got True"),
    ("direct", {"causal": True}, layer("kernel"), "expected causal=True, got False"),
    ("sgpa", {}, layer("kernel", normalize="none"), "expected a symmetric source"),
    ("sgpa", {}, layer("kernel", symmetric=True), "sgpa does not normalise rows, expected normalize='none'"),
    ("sgpa", {}, layer("kernel", **KERNEL, kernel="ard_rbf"), "a source with kernel 'rbf', got 'ard_rbf'"),
    ("sgpa", {"kernel": "ard_rbf"}, layer("kernel", **KERNEL), "a source with kernel 'ard_rbf', got 'rbf'"),
    ("cgp", {}, layer("softmax"), "softmax -> cgp: expected a source with kernel attention"),
    ("softmax-gp", {}, layer("kernel"), "expected a target of kind cgp, direct, scgp, sgpa or kernel"),
    ("kernel", {}, layer("kernel", normalize="none"), "expected normalize='rows', got 'none'"),
    ("kernel", {"kernel": "ard_rbf"}, layer("kernel", kernel="exp_dot"), "expected kernel='ard_rbf', got"),
    ("kernel", {}, layer("kernel", symmetric=True), "expected symmetric=False, got True"),
    ("softmax", {"causal": True}, layer("softmax"), "expected causal=True, got False"),
    ("scgp", {"values": "paper"}, layer("scgp", values="dual"), "expected values='paper', got 'dual'"),
    ("cgp", {"bias": False}, layer("kernel"), "bias has no place in the target"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "source", "message"), REFUSED)
def test_refused_and_untouched(kind: str, options: dict[str, Any], source: Any, message: str) -> None:
    """The first layers would fit: nothing of them may be copied."""
    target = vision("softmax", layer(kind, **options), seed=7)
    refused(target, vision("softmax", source), message)


def test_refused_sizes_and_classes() -> None:
    for sizes, message in (
        ({"width": 32}, "expected positions of shape (1, 4, 16), the source has (1, 4, 32)"),
        ({"heads": 4}, "layer 0: kernel -> cgp: expected 2 heads, got 4"),
        ({"depth": 3, "attention": layer("kernel")}, "expected a source of depth 2, got 3"),
        ({"classes": 4}, "expected head.weight of shape (3, 16), the source has (4, 16)"),
        ({"image_size": 16}, "expected positions of shape (1, 4, 16), the source has (1, 16, 16)"),
    ):
        refused(vision("cgp", seed=7), vision("kernel", **sizes), message)
    refused(vision("cgp"), text("kernel"), "expected a source of VisionTransformer, got TextTransformer")
    for kind in ("cgp", "direct"):
        message = "expected latent_from to be one of key, query, none, got 'value'"
        refused(vision(kind), vision("kernel"), message, latent_from="value")


def refused(target: Transformer, source: Transformer, message: str, **options: Any) -> None:
    before = state(target)
    with pytest.raises(ValueError, match=re.escape(message)):
        warm_start(target, source, **options)
    torch.testing.assert_close(state(target), before, rtol=0, atol=0)


def test_a_kind_of_ones_own_says_what_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but its class is asked: no list elsewhere names the kinds."""
    monkeypatch.setattr(base, "_KINDS", dict(base._KINDS))
    register_attention("mine")(type("MyAttention", (DirectAttention,), {}))
    options = attention_class("mine").kernel_options({"normalize": "none"})
    assert options == {"normalize": "none", "causal": False}
    target = vision(layer("mine", normalize="none"))
    assert warm_start(target, vision(layer("kernel", **options), seed=3), inputs=X).gap < 1e-9
    register_attention("apart")(type("Apart", (DirectAttention,), {"converts_from": ()}))
    refused(vision("apart"), vision("kernel"), "expected a target of kind cgp, direct, mine, scgp, sgpa or")
