"""What is found, and what is refused by name."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import gpattention
from gpattention.attention import build_attention
from gpattention.hosts import find_sites
from tests.hosts.hosts import TimmAttention, make

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "vocab_size": 40,
}  # fmt: skip
SHORT = {"n_layer": 1, "n_head": 2, "vocab_size": 40}
IMAGES = {name: x for name, x in SIZES.items() if name != "vocab_size"} | {"image_size": 16, "patch_size": 8}
SWIN = {"embed_dim": 16, "depths": [1], "num_heads": [2], "image_size": 16, "patch_size": 4, "window_size": 2}
T5 = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "vocab_size": 40, "d_kv": 8}
MPT = {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 40}
DEBERTA = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c"]}


def own(kind: str, **options: Any) -> nn.Module:
    return build_attention(kind, embed_dim=16, num_heads=2, **options)


REFUSED = {
    "t5": (lambda: tf.T5EncoderModel(tf.T5Config(**T5)), "relative-position"),
    "deberta": (lambda: tf.DebertaV2Model(tf.DebertaV2Config(**DEBERTA)), "relative-position"),
    "mpnet": (lambda: tf.MPNetModel(tf.MPNetConfig(**SIZES)), "relative-position"),
    "beit": (
        lambda: tf.BeitModel(tf.BeitConfig(**IMAGES, use_relative_position_bias=True)), "relative-position"
    ),
    "swin": (lambda: tf.SwinModel(tf.SwinConfig(**SWIN)), "relative-position"),
    "bloom": (lambda: tf.BloomModel(tf.BloomConfig(hidden_size=16, **SHORT)), "ALiBi"),
    "mpt": (lambda: tf.MptModel(tf.MptConfig(**MPT)), "ALiBi"),
    "own causal": (lambda: own("softmax", causal=True), "causal"),
    "own posterior": (lambda: own("cgp"), "posterior of its own"),
    "bias keys": (lambda: nn.MultiheadAttention(16, 2, add_bias_kv=True), "add_bias_kv"),
    "zero key": (lambda: nn.MultiheadAttention(16, 2, add_zero_attn=True), "add_zero_attn"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    build, reason = REFUSED[name]
    model = build()
    found = find_sites(model)
    assert found.sites == ()
    assert found.left_alone
    assert all(reason in alone.why for alone in found.left_alone)
    with pytest.raises(ValueError, match=reason):
        gpattention.attach(model)


def test_a_mixed_model_is_taken_in_part() -> None:
    model = nn.Transformer(16, 2, 1, 1, 16, batch_first=True)
    handle = gpattention.attach(model.eval())
    assert [site.name for site in handle.sites] == ["encoder.layers.0.self_attn"]
    result = {alone.name: alone.why for alone in handle.found.left_alone}
    assert "causal" in result["decoder.layers.0.self_attn"]
    assert "cross-attention" in result["decoder.layers.0.multihead_attn"]
    for name in (*result, "encoder.layers.0.self_attn"):
        assert name in repr(handle)
        assert name in str(handle.found)


def test_a_refusal_is_one_line_a_kind_with_what_helps_instead() -> None:
    deep = tf.BloomModel(tf.BloomConfig(**{"hidden_size": 16, **SHORT, "n_layer": 12}))
    with pytest.raises(ValueError, match="ALiBi") as refused:
        gpattention.attach(deep)
    assert str(refused.value).count("ALiBi") == 1
    assert "h.0.self_attention and 11 more" in str(refused.value)
    assert "instead: build `Signals` from its logits" in str(refused.value)
    ours = nn.Sequential(*(nn.TransformerDecoderLayer(16, 2, 16) for _ in range(5)))
    with pytest.raises(ValueError, match=r"0.self_attn and 4 more .* causal=True of cgp") as refused:
        gpattention.convert(ours)
    assert str(refused.value).count("cross-attention") == 1
    mixed = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 16), ours)
    assert repr(gpattention.attach(mixed)).count("\n") == 4  # two rows and two reasons
    assert str(gpattention.conversion_of(gpattention.convert(mixed))).count("more  left alone") == 2
    with pytest.raises(ValueError, match=r"'cgp' attention has a posterior .* instead: gpattention.predict"):
        gpattention.attach(gpattention.models.EncoderLayer(16, 2, kind="cgp"))


def test_clip_text_is_causal_and_its_pictures_are_not() -> None:
    text = {**SIZES, "bos_token_id": 0, "eos_token_id": 1}
    config = tf.CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=8)
    found = find_sites(tf.CLIPModel(config))
    attends = [(site.name.split(".")[0], site.attends, site.index) for site in found.sites]
    assert attends == [("text_model", "causal", 0), ("vision_model", "all", 1)]
    only = found.convertible()
    assert [(site.name.split(".")[0], site.index) for site in only.sites] == [("vision_model", 0)]
    assert [alone.name.split(".")[0] for alone in only.left_alone] == ["text_model"]
    assert "causal" in only.left_alone[0].why


def test_sliding_windows_are_left_alone() -> None:
    special = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    config = tf.ModernBertConfig(**{**SIZES, "num_hidden_layers": 2}, global_attn_every_n_layers=2, **special)
    found = find_sites(tf.ModernBertModel(config))
    assert len(found.sites) == 1
    assert "sliding-window" in found.left_alone[0].why


@pytest.mark.parametrize(
    ("name", "family"), [("bert", "huggingface"), ("timm", "timm"), ("encoder", "torch")]
)
def test_sites_know_their_place(name: str, family: str) -> None:
    host = make(name)
    for site in find_sites(host.model).sites:
        assert site.family == family
        assert host.model.get_submodule(site.name) is site.module
        assert site.module in site.parent.children()
        assert (site.heads, site.head_dim, site.embed_dim) == (2, 8, 16)


class HandMade(TimmAttention):
    """Never calls the attention of torch."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return self.proj(x)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        # a bias per pair, as in timm's Swin
        (TimmAttention, {"relative_position_bias_table": torch.zeros(9, 2)}, "relative-position"),
        (TimmAttention, {"qkv": nn.Linear(16, 32)}, "grouped-query"),
        (TimmAttention, {"is_causal": True}, "causal"),
        (HandMade, {}, "does not call"),
    ],
)
def test_variants_of_timm_are_refused(kind: type[TimmAttention], changes: dict[str, Any], why: str) -> None:
    module = kind(16, 2)
    for name, value in changes.items():
        setattr(module, name, value)
    (alone,) = find_sites(module).left_alone
    assert why in alone.why


class StrangeAttention(nn.Module):
    """An attention of nobody's."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Headless(nn.Module):
    """Goes through the interface but tells nothing of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = object()

    def forward(self, x: Tensor) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](x)  # noqa: F821 - never called


def test_strangers_are_named() -> None:
    (alone,) = find_sites(nn.Sequential(nn.Linear(2, 2), StrangeAttention())).left_alone
    assert (alone.name, alone.kind) == ("1", "StrangeAttention")
    (alone,) = find_sites(nn.Sequential(Headless())).left_alone
    assert "number of heads" in alone.why


class ByHand(nn.Module):
    """Attention that no module stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*self.to_qkv(x).chunk(3, -1))


def test_models_without_attention_are_refused_with_what_would_be_found() -> None:
    with pytest.raises(ValueError, match=r"got Linear with none"):
        gpattention.attach(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"nn.Module, got int"):
        gpattention.attach(3)  # type: ignore[arg-type]
    for adopt in (gpattention.attach, gpattention.convert):
        with pytest.raises(ValueError, match=r"what would be found: nn\.MultiheadAttention, .*timm's layout"):
            adopt(ByHand())


def test_an_attention_may_be_the_whole_model() -> None:
    handle = gpattention.attach(nn.MultiheadAttention(16, 2), call=lambda m, x: m(x, x, x)[0].transpose(0, 1))
    assert "(the model)" in repr(handle)
    assert handle.sites[0].parent is None
