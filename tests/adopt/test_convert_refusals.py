"""What cannot be converted, or not used so, is refused before anything is changed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention.adopt.convert_kinds import KINDS, ProjectedCGP, ProjectedSGPA, projections
from gpattention.adopt.convert_layer import converted_layers
from gpattention.adopt.convert_masks import ignored_keys
from gpattention.attention import Heads, SoftmaxAttention
from tests.adopt.hosts import make
from tests.adopt.test_convert_families import logits


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Pooled(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(0)


@pytest.mark.parametrize("model", ["bert-base-uncased", nn.TransformerEncoder])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ValueError, match=f"expected model to be an nn.Module, got {type(model).__name__}"):
        gpattention.convert(model)


@pytest.mark.parametrize("samples", [0, 3])
def test_batches_that_are_not_the_first_axis(samples: int) -> None:
    """Cut along the tokens, a chunk would be a sequence of its own."""
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    pooled = Pooled(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    model, x = gpattention.convert(pooled, kind="direct"), torch.randn(6, 5, 8)  # [tokens, batch, width]
    with pytest.raises(ValueError, match="first axis"):
        gpattention.predict(model, x, samples=samples, task="embedding")
    right = gpattention.predict(
        model, x.transpose(0, 1), samples, task="embedding", call=lambda host, y: host(y.transpose(0, 1))
    )
    assert right.mean.shape == (5, 8)


def test_twice() -> None:
    host = make("encoder")
    gpattention.convert(host.model)
    with pytest.raises(ValueError, match="not converted yet"):
        gpattention.convert(host.model)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kind": "softmax"}, "expected kind to be one of"),
        ({"draw": "joint"}, "expected draw"),
        ({"num_heads": 2}, "the host decides num_heads"),
        ({"causal": True}, "the host decides causal"),
        ({"nonsense": 1}, "'cgp' attention does not take these options: unknown 'nonsense'; known: "),
        ({"normalize": "columns"}, "expected normalize"),
        ({"layers": "encoder.layers.0.self_attn"}, "several names"),
        ({"layers": ["nowhere"]}, "expected layers among encoder.layers.0.self_attn"),
        ({"layers": [2]}, "self_attn, got 2"),
        ({"layers": []}, "none to convert"),
    ],
)
def test_arguments(arguments: dict[str, Any], match: str) -> None:
    host = make("encoder")
    before = {name: id(module) for name, module in host.model.named_modules()}
    with pytest.raises(ValueError, match=match):
        gpattention.convert(host.model, **arguments)
    assert {name: id(module) for name, module in host.model.named_modules()} == before


def test_a_mistake_inside_a_constructor_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(KINDS["cgp"]):
        def drop_projections(self) -> None:
            raise TypeError("a bug")

    monkeypatch.setitem(KINDS, "cgp", Broken)
    with pytest.raises(TypeError, match=r"^a bug$"):
        gpattention.convert(make("encoder").model, noise=0.1)


def test_models_without_softmax_attention() -> None:
    with pytest.raises(ValueError, match="none to convert"):
        gpattention.convert(nn.Linear(2, 2))
    decoder = nn.TransformerDecoderLayer(8, 2, 8)
    with pytest.raises(ValueError, match="causal"):
        gpattention.convert(decoder)
    with pytest.raises(ValueError, match="wrap it"):
        gpattention.convert(nn.MultiheadAttention(8, 2))


def test_part_of_a_kernel_model() -> None:
    model = make("own kernel").model
    with pytest.raises(ValueError, match="a whole transformer"):
        gpattention.convert(model, "direct", layers=["blocks.0.attention"])
    with pytest.raises(ValueError, match="cgp, direct, scgp or sgpa"):
        gpattention.convert(model, "softmax-gp")


def test_hosts_whose_keys_are_rotated_have_no_latent_projection() -> None:
    import transformers

    config = transformers.Dinov3ViTConfig if hasattr(transformers, "Dinov3ViTConfig") else None
    config = config or transformers.DINOv3ViTConfig
    model = transformers.DINOv3ViTModel(
        config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, patch_size=4)
    )
    with pytest.raises(ValueError, match="starts its latent projection"):
        gpattention.convert(model, "cgp")
    pixels = torch.randn(2, 3, 8, 8)
    model.eval()
    before = model(pixels).last_hidden_state
    gpattention.convert(model, "direct", max_stddev=1e3)
    assert torch.allclose(model(pixels).last_hidden_state, before, atol=1e-4)


def attention(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return gpattention.convert(
        Holder(nn.MultiheadAttention(8, 2, batch_first=True, **options)), "direct"
    ).inner


def test_masks_of_pairs() -> None:
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="attn_mask"):
        attention()(x, x, x, attn_mask=torch.ones(3, 3, dtype=torch.bool).triu(1))
    with pytest.raises(ValueError, match="causal"):
        attention()(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="adds numbers"):
        attention()(x, x, x, key_padding_mask=torch.full((2, 3), 0.5))
    host = make("bert")
    host.model.eval()
    gpattention.convert(host.model, "direct")
    pairs = torch.ones(5, 1, 7, 7, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="differs between queries"):
        logits(host, {**host.inputs, "attention_mask": pairs})
    bias = torch.zeros(5, 1, 7, 7)
    bias[..., 1] = 0.3
    with pytest.raises(ValueError, match="adds numbers"):
        logits(host, {**host.inputs, "attention_mask": bias})


def test_what_transformers_may_not_ask() -> None:
    host = make("bert")
    gpattention.convert(host.model, "direct")
    module = host.model.bert.encoder.layer[0].attention.self  # type: ignore[union-attr, index]
    x = torch.randn(2, 3, 16)
    with pytest.raises(ValueError, match="causal attention or a position bias"):
        module(x, is_causal=True)
    with pytest.raises(ValueError, match="its tokens first"):
        module(None)
    slicing = module.register_forward_pre_hook(
        lambda m, args: (args[0][:, :2],)
    )  # other keys than its tokens
    with pytest.raises(ValueError, match="self-attention over the tokens"):
        module(x)
    slicing.remove()
    host.model.config.is_decoder = True  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="differs between queries"):
        logits(host)


def test_heads_of_a_host_are_needed() -> None:
    layer = converted_layers(gpattention.convert(Holder(nn.MultiheadAttention(8, 2)), "direct"))[0]
    x = torch.randn(2, 3, 8)
    with pytest.raises(TypeError, match="projections of a host"):
        projections(Heads(x, x, x[:, None], None, None, None))
    with pytest.raises(ValueError, match="latent projection from"):
        ProjectedCGP(8, 2).start(None, 1.0)
    with pytest.raises(ValueError, match="inducing keys from"):
        ProjectedSGPA(8, 2).start(None, 1.0)
    assert "draw='independent'" in repr(layer)


def test_a_mask_of_padding_in_every_form() -> None:
    real = torch.tensor([[True, True, False], [True, False, False]])
    added = torch.where(real, 0.0, torch.finfo(torch.float32).min)
    for mask in (
        real,
        added,
        real[:, None, None],
        real[:, None, None].expand(2, 4, 3, 3),
        added[:, None, None],
    ):
        assert torch.equal(ignored_keys(mask, "here"), ~real)
    assert torch.equal(ignored_keys(real[:1, None].expand(1, 3, 3), "here"), ~real[:1])


def test_timm_masks_and_strangers() -> None:
    host = make("timm")
    gpattention.convert(host.model, "direct")
    block, x = host.model.blocks[0].eval(), host.inputs  # type: ignore[index]
    mask = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
    mask[..., -2:] = False
    assert torch.allclose(block(x, attn_mask=mask)[:, :-2], block(x[:, :-2]), atol=1e-5)
    with pytest.raises(ValueError, match="causal"):
        block(x, is_causal=True)
    other = make("timm")
    other.model.blocks[0].gate = nn.Linear(2, 2)  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match="'gate'"):
        gpattention.convert(other.model, "direct")


def multihead(x: Tensor, key: Tensor, padding: Tensor | None, **options: Any) -> tuple[Any, Any, Any]:
    """Output and weights of a host and of what it becomes."""
    torch.manual_seed(0)
    holder = Holder(nn.MultiheadAttention(8, 2, **options)).eval()
    before = holder.inner(x, key, key, key_padding_mask=padding)
    gpattention.convert(holder, "direct", max_stddev=1e3)
    return holder.inner, before, holder.inner(x, key, key, key_padding_mask=padding)


@pytest.mark.parametrize("shape", ["batched", "batch second", "unbatched", "cross", "other widths"])
def test_the_call_of_multihead_attention(shape: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    options: dict[str, Any] = {"batch_first": shape != "batch second"}
    key = x
    if shape == "cross":
        key = torch.randn(2, 4, 8)
    if shape == "other widths":
        key, options = torch.randn(2, 4, 6), {**options, "kdim": 6, "vdim": 6}
    if shape == "unbatched":
        x, key, padding = x[1], x[1], padding[1]
    if shape == "batch second":
        x = key = x.transpose(0, 1)
    module, before, after = multihead(x, key, padding, **options)
    # padded queries get nothing here where queries are the keys
    real = ~padding if shape in ("batched", "unbatched") else torch.ones_like(padding)
    outputs = [
        out.transpose(0, 1)[~padding] if shape == "batch second" else out[real] for out, _ in (before, after)
    ]
    assert torch.allclose(*outputs, atol=1e-5)
    chosen = ~padding if shape in ("batched", "batch second", "unbatched") else real
    assert torch.allclose(before[1][chosen], after[1][chosen], atol=1e-5)
    if shape == "batched":
        each = module(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1]
        assert torch.allclose(each.mean(1), after[1])
        assert module(x, x, x, need_weights=False)[1] is None


def test_symmetric_attention_does_not_cross() -> None:
    holder = gpattention.convert(Holder(nn.MultiheadAttention(8, 2, batch_first=True)), "sgpa")
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="its keys are its queries"):
        holder.inner(x, torch.randn(2, 3, 8), torch.randn(2, 3, 8))


def test_transformers_modules_that_stay_softmax() -> None:
    host = make("bert")
    host.model.eval()
    before = logits(host)
    gpattention.convert(host.model, "direct", layers=["bert.encoder.layer.0.attention.self"], max_stddev=1e3)
    assert len(converted_layers(host.model)) == 1
    assert torch.allclose(logits(host), before, atol=1e-5)


def test_weights_of_transformers() -> None:
    host = make("bert")
    host.model.eval()
    host.model.set_attn_implementation("eager")  # type: ignore[operator]
    before = host.model(**host.inputs, output_attentions=True).attentions
    gpattention.convert(host.model, "direct", max_stddev=1e3)
    after = host.model(**host.inputs, output_attentions=True).attentions
    real = host.inputs["attention_mask"].bool()[:, None, :, None]
    for ours, theirs in zip(after, before, strict=True):
        assert torch.allclose(ours, torch.where(real, theirs, 0.0), atol=1e-5)


def test_own_attention_alone() -> None:
    with pytest.raises(ValueError, match="wrap it"):
        gpattention.convert(SoftmaxAttention(8, 2), "direct")


def test_errors_name_the_layer() -> None:
    host = make("encoder")
    gpattention.convert(host.model, "cgp")
    host.model.eval()
    inputs = {"x": torch.full((1, 3, 16), torch.nan), "padding": None}
    with pytest.raises(gpattention.gp.NonFiniteError) as told:
        logits(host, inputs)
    assert any("encoder.layers.0.self_attn (cgp)" in note for note in told.value.__notes__)


def test_predictions_of_others() -> None:
    host = make("encoder")
    with pytest.raises(ValueError, match="without a converted layer"):
        gpattention.predict(host.model, host.inputs)
    gpattention.convert(host.model)
    with pytest.raises(ValueError, match="expected task"):
        gpattention.predict(host.model, host.inputs, task="answers")  # type: ignore[arg-type]


def test_lazy_names() -> None:
    assert {"convert", "attach", "regularizer", "from_pretrained"} <= set(dir(gpattention))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gpattention.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_converted_layers_are_no_sites(name: str) -> None:
    host = make(name)
    before = gpattention.find_sites(host.model).sites
    gpattention.convert(host.model, "direct", layers=[before[0].name])
    found = gpattention.find_sites(host.model)
    assert [site.name for site in found.sites] == [site.name for site in before[1:]]
    with pytest.raises(ValueError, match="converted"):
        gpattention.convert(host.model, "direct")
