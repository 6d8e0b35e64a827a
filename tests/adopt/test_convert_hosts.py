"""Hosts with more than plain encoders: decoders beside them, scaled queries, shared modules, hooks."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import gpattention
from gpattention.adopt.convert_torch import ConvertedMultihead
from gpattention.attention import build_attention
from gpattention.models import Prediction
from tests.adopt.hosts import make

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DECODING = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def bart() -> tuple[nn.Module, Any]:
    model = transformers.BartModel(transformers.BartConfig(**DECODING, max_position_embeddings=32))
    ids, mask = torch.randint(3, 40, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return model, {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5]}


def modernbert() -> tuple[nn.Module, Any]:
    config = transformers.ModernBertConfig(**SIZES, vocab_size=40, local_attention=4, pad_token_id=0)
    return transformers.ModernBertModel(config), {"input_ids": torch.randint(3, 40, (3, 9))}


def whisper() -> tuple[nn.Module, Any]:
    config = transformers.WhisperConfig(**DECODING, num_mel_bins=4, max_source_positions=8, num_labels=3)
    return transformers.WhisperForAudioClassification(config), {"input_features": torch.randn(3, 4, 16)}


def qformer() -> tuple[nn.Module, Any]:
    config = transformers.Blip2QFormerConfig(**SIZES, encoder_hidden_size=16, vocab_size=40)
    tokens = {"query_embeds": torch.randn(3, 6, 16), "encoder_hidden_states": torch.randn(3, 6, 16)}
    return transformers.Blip2QFormerModel(config), tokens


@pytest.mark.parametrize("kind", ["softmax-gp", "direct", "cgp"])
@pytest.mark.parametrize("build", [bart, modernbert, whisper, qformer])
def test_it_starts_as_the_host(build: Any, kind: str) -> None:
    """Masks of what is left alone, queries scaled by the host, and keys of other tokens."""
    if build is modernbert and kind == "cgp":
        pytest.skip("turns its keys, which a latent projection does not")
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)  # attention that tells its keys apart
    before = model(**inputs)[0]
    options = {} if kind == "softmax-gp" else {"max_stddev": 1e3, "noise": 1e-3}
    gpattention.convert(model, kind, **options)
    torch.testing.assert_close(model(**inputs)[0], before, atol=1e-2 if kind == "cgp" else 1e-4, rtol=0)


def test_a_decoder_left_alone_goes_on_word_by_word() -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(**DECODING, max_position_embeddings=32, forced_eos_token_id=None)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids = torch.randint(3, 40, (2, 7))
    before = model.generate(ids, max_new_tokens=6, do_sample=False)
    gpattention.convert(model, "softmax-gp")
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), before)


def test_another_implementation_is_refused() -> None:
    """The host's own softmax would run: no draws, no regulariser, and nobody would know."""
    config = transformers.BertConfig(**SIZES, vocab_size=40, num_labels=3)
    model = gpattention.convert(transformers.BertForSequenceClassification(config), "direct")
    inputs = {"input_ids": torch.randint(3, 40, (3, 7))}
    told = gpattention.predict(model, inputs, samples=3).logits
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="to stay 'gpattention_converted', got 'sdpa'"):
        gpattention.predict(model, inputs, samples=3)
    model.set_attn_implementation("gpattention_converted")
    assert torch.equal(gpattention.predict(model, inputs, samples=3).logits, told)


class Twice(nn.Module):
    """One attention under two names."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.ModuleList([shared, shared])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x[:, 0]


def test_a_shared_module_is_converted_under_all_its_names() -> None:
    model = gpattention.convert(Twice(), "direct")
    first, second = model.layers
    assert isinstance(first, ConvertedMultihead)
    assert second is first


def test_hooks_stay() -> None:
    model, seen = Twice(), []
    handle = model.layers[0].register_forward_hook(lambda module, given, told: seen.append(module))
    gpattention.convert(model, "direct")
    model(torch.randn(2, 3, 8))
    assert seen == [model.layers[0]] * 2
    handle.remove()
    model(torch.randn(2, 3, 8))
    assert len(seen) == 2


@pytest.mark.parametrize(
    "change",
    [parametrizations.spectral_norm, lambda module, name: prune.l1_unstructured(module, name, 0.5)],
)
def test_computed_weights_are_refused(change: Any) -> None:
    model, x = Twice().eval(), torch.randn(2, 3, 8)
    change(model.layers[0], "in_proj_weight")
    before = model(x)
    with pytest.raises(ValueError, match=r"layers\.0: expected in_proj_weight to be parameters"):
        gpattention.convert(model, "direct")
    assert torch.equal(model(x), before)
    handle = gpattention.attach(model, task="embedding")  # whose passes are the host's own
    torch.testing.assert_close(handle.process_mean(x), before)


class Buffered(nn.Module):
    """A linear map whose weight is no parameter, as that of a quantised one."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


def test_attention_without_parameters_is_refused() -> None:
    model = make("bert").model
    for layer in model.bert.encoder.layer:
        own = layer.attention.self
        own.query, own.key, own.value = (Buffered(x) for x in (own.query, own.key, own.value))
    with pytest.raises(ValueError, match="expected attention with parameters to train, got none"):
        gpattention.convert(model, "direct")


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 2 * output, weights


@pytest.mark.parametrize("adopt", [gpattention.attach, gpattention.convert])
def test_attention_with_a_forward_of_its_own_is_left_alone(adopt: Any) -> None:
    with pytest.raises(ValueError, match="a forward of its own"):
        adopt(nn.ModuleList([Doubled(8, 2)]))
    model = Twice()
    plain = model.layers[0].forward
    model.layers[0].forward = lambda *args, **kwargs: plain(*args, **kwargs)
    with pytest.raises(ValueError, match="a forward of its own"):
        adopt(model)
    timm = make("timm").model
    timm.blocks[0].forward = timm.blocks[1].forward
    assert len(gpattention.find_sites(timm).sites) == 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_model_of_the_same_configuration_stays(implementation: str) -> None:
    config = transformers.BertConfig(**SIZES, vocab_size=40, attn_implementation=implementation)
    model, other = (transformers.BertModel(config).eval() for _ in range(2))
    inputs = {"input_ids": torch.randint(3, 40, (3, 7))}
    before = other(**inputs, output_attentions=True)
    gpattention.convert(model, "direct")
    after = other(**inputs, output_attentions=True)
    assert torch.equal(after.last_hidden_state, before.last_hidden_state)
    assert len(after.attentions) == len(before.attentions)
    assert not hasattr(other.config, "gpattention")
    gpattention.attach(other).predict(inputs, samples=2)
    assert model.config is model.encoder.layer[0].attention.self.config


class Adapter(nn.Linear):
    """What low-rank adapters do: a linear map that adds to its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.flip(-1)


def test_latent_projections_do_not_start_from_adapted_keys() -> None:
    """The weight alone would be another map, and the start far from the host."""
    model = transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=40)).eval()
    for layer in model.encoder.layer:
        layer.attention.self.key = Adapter(16, 16)
    inputs = {"input_ids": torch.randint(3, 40, (3, 7))}
    before = model(**inputs).last_hidden_state
    with pytest.raises(ValueError, match="starts its latent projection from the host's keys"):
        gpattention.convert(model, "cgp")
    gpattention.convert(model, "direct", max_stddev=1e3)  # has none
    torch.testing.assert_close(model(**inputs).last_hidden_state, before, atol=1e-4, rtol=0)


def test_an_example_the_host_does_not_take_leaves_it_as_it_was() -> None:
    model = make("bert").model
    with pytest.raises(ValueError, match="expected inputs to be a tensor"):
        gpattention.convert(model, "scgp", num_inducing=4, example=3)
    with pytest.raises(RuntimeError):
        gpattention.convert(model, "scgp", num_inducing=4, example=torch.randn(2, 3))
    assert gpattention.conversion_of(model) is None
    assert len(gpattention.find_sites(model).sites) == 2


def test_what_is_not_chosen_cannot_be_attached_to() -> None:
    host = make("bert")
    first = gpattention.find_sites(host.model).sites[0].name
    gpattention.convert(host.model, "direct", layers=[first])
    with pytest.raises(ValueError, match="convert all of it, or none"):
        gpattention.attach(host.model).predict(host.inputs)


def test_errors_name_what_is_expected() -> None:
    host = make("bert")
    with pytest.raises(ValueError, match="normalize to be 'softmax', 'rows' or 'none', got 'row'"):
        gpattention.convert(host.model, "cgp", normalize="row")
    with pytest.raises(ValueError, match="got Handle: call its own predict"):
        gpattention.predict(gpattention.attach(host.model), host.inputs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected call to be a function"):
        gpattention.attach(host.model, call="forward")  # type: ignore[arg-type]
    for cap in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="expected max_log_amplitude >= 0 or None"):
            gpattention.attach(host.model, max_log_amplitude=cap)
    asked = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES, vocab_size=40))
    with pytest.raises(ValueError, match="pass call=, which gives a tensor"):
        gpattention.predict(gpattention.convert(asked, "direct"), host.inputs)


class Inside(nn.Module):
    """Attention of ours in a model that is not."""

    def __init__(self, kind: str = "softmax") -> None:
        super().__init__()
        self.attention = build_attention(kind, embed_dim=8, num_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).output[:, 0]


class Around(nn.Module):
    """A transformer of ours in a model that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make("own softmax").model

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).logits


@pytest.mark.parametrize("kind", ["direct", "cgp", "softmax-gp"])
def test_our_attention_in_other_models_draws_too(kind: str) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(3, 5, 8), gpattention.convert(Inside(), kind)
    told = gpattention.predict(model, x, samples=4000, variances=True)
    assert isinstance(told, Prediction)
    heads = model.attention(x, need=("output", "variance"))
    out = model.attention.output.weight.unflatten(1, (2, 4)).square().sum(-1)  # [E, H]
    expected = heads.variance[:, :, 0] @ out.mT  # [B, E]
    torch.testing.assert_close(told.logits.var(0), expected, rtol=0.15, atol=0)
    torch.testing.assert_close(told.logits.mean(0), model.eval()(x), rtol=0, atol=0.1)
    assert torch.equal(gpattention.predict(model, x, samples=0).logits[0], model(x))
    torch.testing.assert_close(told.variances[0], heads.variance, rtol=1e-3, atol=0)
    assert not model.attention._forward_hooks
    with pytest.raises(ValueError, match="attention of gpattention, which tells it where it is called"):
        gpattention.regularizer(model)


def test_our_transformers_in_other_models_draw_as_by_themselves() -> None:
    model, images = gpattention.convert(Around(), "direct"), make("own softmax").inputs
    told = gpattention.predict(model, images, samples=3, batch_size=2)
    assert bool((told.mutual_information > 0).all())
    by_itself = model.inner.predict(images, samples=3)
    torch.testing.assert_close(told.logits, by_itself.logits, rtol=0, atol=1e-5)
