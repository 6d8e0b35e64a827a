"""Conversion: hosts with more than plain encoders, what is refused, and that failures change nothing."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import gpattention
from gpattention.attention import SoftmaxAttention, build_attention
from gpattention.hosts.families import FAMILIES, own
from gpattention.models import Prediction
from gpattention.models import converted as layers
from gpattention.models.converted import converted_layers, real_keys
from gpattention.models.projected import ProjectedCGP, ProjectedSGPA
from tests.hosts.hosts import HOSTS, SIZES, Host, bert, logits, make
from tests.refusals import refusals

IDS = {"input_ids": torch.randint(3, 40, (3, 7), generator=torch.Generator().manual_seed(0))}
DECODING = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


PADDED = torch.arange(7) < torch.tensor([7, 4, 7])[:, None]
# name of the model, sizes, inputs
OTHERS: dict[str, tuple[str, dict[str, Any], Callable[[], Any]]] = {
    "Bart": (
        "Model", {**DECODING, "max_position_embeddings": 32},
        lambda: {**IDS, "attention_mask": PADDED.long(), "decoder_input_ids": IDS["input_ids"][:, :5]},
    ),
    "ModernBert": (
        "Model", {**SIZES, "vocab_size": 40, "local_attention": 4, "pad_token_id": 0},
        lambda: {"input_ids": torch.randint(3, 40, (3, 9))},
    ),
    "Whisper": (
        "ForAudioClassification", {**DECODING, "num_mel_bins": 4, "max_source_positions": 8, "num_labels": 3},
        lambda: {"input_features": torch.randn(3, 4, 16)},
    ),
    "Blip2QFormer": (
        "Model", {**SIZES, "encoder_hidden_size": 16, "vocab_size": 40},
        lambda: {"query_embeds": torch.randn(3, 6, 16), "encoder_hidden_states": torch.randn(3, 6, 16)},
    ),
    "DINOv3ViT": ("Model", {**SIZES, "patch_size": 4}, lambda: {"pixel_values": torch.randn(2, 3, 8, 8)}),
    "Bert": ("Model", {**SIZES, "vocab_size": 40}, lambda: IDS),  # with adapters
}  # fmt: skip


class Adapter(nn.Linear):
    """What low-rank adapters do: a linear map that adds to its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.flip(-1)


@pytest.mark.parametrize("kind", ["softmax-gp", "direct", "cgp"])
@pytest.mark.parametrize("name", OTHERS)
def test_it_starts_as_the_host(name: str, kind: str) -> None:
    """Masks of what is left alone, queries scaled by the host, and keys of other tokens.

    A latent projection knows no rotated keys, and the weight of an adapted map alone would be another map.
    """
    torch.manual_seed(0)
    head, sizes, make_inputs = OTHERS[name]
    model = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**sizes))
    inputs = make_inputs()
    for layer in model.encoder.layer if name == "Bert" else ():
        layer.attention.self.key = Adapter(16, 16)
    model.eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(10)  # attention that tells its keys apart
    before = model(**inputs)[0]
    options = {} if kind == "softmax-gp" else {"max_stddev": 1e3, "noise": 1e-3}
    if name in ("ModernBert", "DINOv3ViT", "Bert") and kind == "cgp":
        with pytest.raises(ValueError, match="starts its latent projection from the host's keys"):
            gpattention.convert(model, kind, **options)
        return
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
    model = gpattention.convert(bert(), "direct")
    result = gpattention.predict(model, IDS, samples=3).logits
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="to stay 'gpattention_converted', got 'sdpa'"):
        gpattention.predict(model, IDS, samples=3)
    model.set_attn_implementation("gpattention_converted")
    assert torch.equal(gpattention.predict(model, IDS, samples=3).logits, result)


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


def test_a_shared_module_is_converted_under_all_its_names_and_keeps_its_hooks() -> None:
    model, seen = Twice(), []
    handle = model.layers[0].register_forward_hook(lambda module, given, result: seen.append(module))
    gpattention.convert(model, "direct")
    first, second = model.layers
    assert second is first
    assert converted_layers(first)
    model(torch.randn(2, 3, 8))
    assert seen == [first] * 2
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


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 2 * output, weights


@pytest.mark.parametrize("adopt", [gpattention.attach, gpattention.convert])
def test_attention_with_a_forward_of_its_own_is_left_alone(adopt: Any) -> None:
    model = Twice()
    plain = model.layers[0].forward
    model.layers[0].forward = lambda *args, **kwargs: plain(*args, **kwargs)
    for host in (model, nn.ModuleList([Doubled(8, 2)])):
        with pytest.raises(ValueError, match="a forward of its own"):
            adopt(host)
    timm = make("timm").model
    timm.blocks[0].forward = timm.blocks[1].forward
    assert len(gpattention.find_sites(timm).sites) == 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_model_of_the_same_configuration_stays(implementation: str) -> None:
    other = bert("Model", attn_implementation=implementation).eval()
    model = transformers.BertModel(other.config).eval()
    before = other(**IDS, output_attentions=True)
    gpattention.convert(model, "direct")
    after = other(**IDS, output_attentions=True)
    assert torch.equal(after.last_hidden_state, before.last_hidden_state)
    assert len(after.attentions) == len(before.attentions)
    assert not hasattr(other.config, "gpattention")
    gpattention.attach(other).predict(IDS, samples=2)
    assert model.config is model.encoder.layer[0].attention.self.config


class Holder(nn.Module):
    """Any attention in a model that is not ours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x)
        return output.output[:, 0] if hasattr(output, "output") else output.logits


class Inside(Holder):
    """Attention of ours."""

    def __init__(self) -> None:
        super().__init__(build_attention("softmax", embed_dim=8, num_heads=2))


@pytest.mark.parametrize("kind", ["direct", "cgp", "softmax-gp"])
def test_our_attention_in_other_models_draws_too(kind: str) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(3, 5, 8), gpattention.convert(Inside(), kind)
    result = gpattention.predict(model, x, samples=4000, variances=True)
    assert isinstance(result, Prediction)
    heads = model.inner(x, need=("output", "variance"))
    out = model.inner.output.weight.unflatten(1, (2, 4)).square().sum(-1)  # [E, H]
    expected = heads.variance[:, :, 0] @ out.mT  # [B, E]
    torch.testing.assert_close(result.logits.var(0), expected, rtol=0.15, atol=0)
    torch.testing.assert_close(result.logits.mean(0), model.eval()(x), rtol=0, atol=0.1)
    assert torch.equal(gpattention.predict(model, x, samples=0).logits[0], model(x))
    torch.testing.assert_close(result.variances[0], heads.variance, rtol=1e-3, atol=0)
    assert not model.inner._forward_hooks
    with pytest.raises(ValueError, match="attention of gpattention, which gives it where it is called"):
        gpattention.regularizer(model)


def test_our_transformers_in_other_models_draw_as_by_themselves() -> None:
    host = make("own softmax")
    model = gpattention.convert(Holder(host.model), "direct")
    result = gpattention.predict(model, host.inputs, samples=3, batch_size=2)
    assert bool((result.mutual_information > 0).all())
    torch.testing.assert_close(result.logits, host.model.predict(host.inputs, 3).logits, rtol=0, atol=1e-5)


def attention(kind: str = "direct", **options: Any) -> Any:
    torch.manual_seed(0)
    holder = Holder(nn.MultiheadAttention(8, 2, batch_first=True, **options))
    return gpattention.convert(holder, kind).inner


def converted(name: str = "bert", kind: str = "direct") -> Any:
    return gpattention.convert(make(name).model.eval(), kind)


def masked_bert(mask: Tensor, **config: Any) -> Any:
    model = converted()
    vars(model.config).update(config)
    return model(**{**make("bert").inputs, "attention_mask": mask})


def bert_attention(tokens: Any, *, sliced: bool = False, **options: Any) -> Any:
    module = converted().bert.encoder.layer[0].attention.self
    if sliced:  # other keys than its tokens
        module.register_forward_pre_hook(lambda m, args: (args[0][:, :2],))
    return module(tokens, **options)


def quantised() -> nn.Module:
    """Weights that are no parameters."""
    model = bert()
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        for name in ("weight", "bias"):
            linear.register_buffer(name, linear._parameters.pop(name))
    return model


def strange_timm() -> nn.Module:
    model: Any = make("timm").model
    model.blocks[0].gate = nn.Linear(2, 2)
    return model


def questions() -> nn.Module:
    return bert("ForQuestionAnswering", num_labels=2)


def partly_converted(name: str = "bert") -> nn.Module:
    model = make(name).model
    return gpattention.convert(model, "direct", layers=[gpattention.find_sites(model).sites[0].name])


X, KEYS = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
TEXTS = make("bert").inputs
PAIRS, BIAS = torch.ones(5, 1, 7, 7).bool().tril(), torch.zeros(5, 1, 7, 7)
BIAS[..., 1] = 0.3
convert, predict = gpattention.convert, gpattention.predict
test_refusals = refusals([
    (lambda: convert("bert-base-uncased"), "nn.Module, got str"),
    (lambda: convert(nn.TransformerEncoder), "nn.Module, got type"),
    (lambda: convert(converted("encoder")), "not converted yet"),
    (lambda: convert(nn.Linear(2, 2)), "none to convert"),
    (lambda: convert(nn.TransformerDecoderLayer(8, 2, 8)), "causal"),
    (lambda: convert(nn.MultiheadAttention(8, 2)), "wrap it"),
    (lambda: convert(SoftmaxAttention(8, 2), "direct"), "wrap it"),
    (lambda: convert(make("own kernel").model, "direct", layers=["blocks.0.attention"]), "a whole"),
    (lambda: convert(make("own kernel").model, "softmax-gp"), "cgp, direct, scgp, sgpa .*got 'softmax-gp'"),
    (lambda: convert(make("own kernel").model, "direct", prior_scale=-1.0), "prior_scale > 0, got -1"),
    (lambda: convert(bert(), "cgp", normalize="row"), "normalize .*'row'"),
    (lambda: convert(quantised(), "direct"), "parameters to train, got none"),
    (lambda: convert(strange_timm(), "direct"), "'gate'"),
    (lambda: convert(partly_converted(), "direct"), "converted"),
    (lambda: gpattention.attach(partly_converted()).predict(IDS), "convert all of it, or none"),
    (lambda: predict(gpattention.attach(bert()), IDS), "got Handle: call its own predict"),
    (lambda: predict(make("encoder").model, IDS), "expected a converted model"),
    (lambda: predict(converted("encoder"), make("encoder").inputs, task="answers"), "task.*'answers'"),
    (lambda: predict(convert(questions(), "direct"), IDS), "gives a tensor"),
    (lambda: ProjectedCGP(8, 2).start(None, 1.0), "latent projection from"),
    (lambda: ProjectedSGPA(8, 2).start(None, 1.0), "inducing keys from"),
    (lambda: attention()(X, X, X, attn_mask=torch.ones(3, 3).bool().triu(1)), "differs between queries"),
    (lambda: attention()(X, X, X, is_causal=True), "causal"),
    (lambda: attention()(X, X, X, key_padding_mask=torch.full((2, 3), 0.5)), "adds numbers"),
    (lambda: attention("sgpa")(X, KEYS, KEYS), "its keys are its queries"),
    (lambda: converted("timm").blocks[0](torch.randn(2, 3, 16), is_causal=True), "causal"),
    (lambda: masked_bert(PAIRS), "differs between queries"),
    (lambda: masked_bert(BIAS), "adds numbers"),
    (lambda: masked_bert(TEXTS["attention_mask"], is_decoder=True), "differs between queries"),
    (lambda: bert_attention(torch.randn(2, 3, 16), is_causal=True), "causal attention or a position bias"),
    (lambda: bert_attention(None), "tokens first"),
    (lambda: bert_attention(torch.randn(2, 3, 16), sliced=True), "self-attention over the tokens"),
])  # fmt: skip


def test_a_mask_of_padding_in_every_form() -> None:
    real = torch.tensor([[True, True, False], [True, False, False]])
    added = torch.where(real, 0.0, torch.finfo(torch.float32).min)
    pairs = real[:, None, None]
    for mask in (real, added, pairs, pairs.expand(2, 4, 3, 3), added[:, None, None]):
        assert torch.equal(real_keys(mask, "here"), real)
    assert torch.equal(real_keys(real[:1, None].expand(1, 3, 3), "here"), real[:1])
    block, x = converted("timm").blocks[0], make("timm").inputs
    last = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
    last[..., -2:] = False
    assert torch.allclose(block(x, attn_mask=last)[:, :-2], block(x[:, :-2]), atol=1e-5)


@pytest.mark.parametrize("shape", ["batched", "batch second", "unbatched", "cross", "other widths"])
def test_the_call_of_multihead_attention(shape: str) -> None:
    torch.manual_seed(1)
    x = key = torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    options: dict[str, Any] = {"batch_first": shape != "batch second"}
    if shape == "cross":
        key = torch.randn(2, 4, 8)
    if shape == "other widths":
        key, options = torch.randn(2, 4, 6), {**options, "kdim": 6, "vdim": 6}
    if shape == "unbatched":
        x, key, padding = x[1], x[1], padding[1]
    if shape == "batch second":
        x = key = x.transpose(0, 1)
    torch.manual_seed(0)
    holder = Holder(nn.MultiheadAttention(8, 2, **options)).eval()
    before = holder.inner(x, key, key, key_padding_mask=padding)
    gpattention.convert(holder, "direct", max_stddev=1e3)
    after = holder.inner(x, key, key, key_padding_mask=padding)
    # padded queries get nothing here where queries are the keys
    real = torch.ones_like(padding) if shape in ("cross", "other widths") else ~padding
    outputs = [(out.transpose(0, 1) if shape == "batch second" else out)[real] for out, _ in (before, after)]
    assert torch.allclose(*outputs, atol=1e-5)
    assert torch.allclose(before[1][real], after[1][real], atol=1e-5)
    if shape == "batched":
        each = holder.inner(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1]
        assert torch.allclose(each.mean(1), after[1])
        assert holder.inner(x, x, x, need_weights=False)[1] is None


def test_transformers_modules_that_stay_softmax() -> None:
    host = make("bert")
    before = logits(Host(host.model.eval(), host.inputs, 2))
    gpattention.convert(host.model, "direct", layers=["bert.encoder.layer.0.attention.self"], max_stddev=1e3)
    assert len(converted_layers(host.model)) == 1
    assert torch.allclose(logits(host), before, atol=1e-5)


def test_weights_of_transformers() -> None:
    host: Any = make("bert")
    host.model.eval().set_attn_implementation("eager")
    before = host.model(**host.inputs, output_attentions=True).attentions
    gpattention.convert(host.model, "direct", max_stddev=1e3)
    after = host.model(**host.inputs, output_attentions=True).attentions
    real = host.inputs["attention_mask"].bool()[:, None, :, None]
    for ours, theirs in zip(after, before, strict=True):
        assert torch.allclose(ours, torch.where(real, theirs, 0.0), atol=1e-5)


def test_errors_name_the_layer() -> None:
    with pytest.raises(gpattention.gp.NonFiniteError) as result:
        converted("encoder", "cgp")(torch.full((1, 3, 16), torch.nan))
    assert any("encoder.layers.0.self_attn (cgp)" in note for note in result.value.__notes__)


@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_converted_layers_are_no_sites(name: str) -> None:
    before = gpattention.find_sites(make(name).model).sites
    found = gpattention.find_sites(partly_converted(name))
    assert [site.name for site in found.sites] == [site.name for site in before[1:]]


TABLES = [name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)]


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a module is but the values of its weights: identities, attributes, tables, configs."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        own = module.__dict__
        found[f"{name} itself"] = (id(module), type(module))
        found[f"{name} attributes"] = {key: id(value) for key, value in own.items()}
        found[f"{name} plain"] = {k: v for k, v in own.items() if isinstance(v, bool | int | float | str)}
        for table in TABLES:
            content = own[table]
            content = {k: id(v) for k, v in content.items()} if isinstance(content, dict) else set(content)
            found[f"{name} {table}"] = list(content.items()) if isinstance(content, dict) else content
        config = own.get("config")
        found[f"{name} config"] = deepcopy(getattr(config, "__dict__", None))
    return found


def check_undone(
    host: Host, error: type[BaseException], match: str | None, during: Callable[[], Any]
) -> None:
    host.model.eval()
    answers, before = logits(host), state(host.model)
    tensors = {name: tensor.clone() for name, tensor in host.model.state_dict().items()}
    generator = torch.random.get_rng_state()
    with pytest.raises(error, match=match):
        during()
    assert state(host.model) == before
    assert all(torch.equal(x, tensors[name]) for name, x in host.model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert gpattention.conversion_of(host.model) is None
    assert torch.equal(logits(host), answers)


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"kind": "softmax"}, "expected kind"),
    ({"draw": "joint"}, "expected draw"),
    ({"seed": 0.5}, "expected seed"),
    ({"causal": True}, "the host decides"),
    ({"nonsense": 1}, None),
    ({"noise": -1.0}, None),
    ({"noise": "much"}, None),
    ({"normalize": "columns"}, None),
    ({"regularizer": "nonsense"}, None),
    ({"kind": "scgp", "num_inducing": 0}, None),
    ({"kind": "sgpa", "num_inducing": -2}, None),
    ({"num_heads": 2}, "the host decides num_heads"),
    ({"layers": "encoder.layers.0.self_attn"}, "several names"),
    ({"layers": ["nowhere"]}, "expected layers among .*, got 'nowhere'"),
    ({"layers": [2]}, "expected layers among .*, got 2"),
    ({"layers": []}, "none to convert"),
    ({"example": {}}, None),
    ({"example": 3}, "expected inputs to be a tensor"),
]


@pytest.mark.parametrize("family", HOSTS)
def test_refusals_change_nothing(family: str) -> None:
    host = make(family)
    for given, match in REFUSED:
        check_undone(host, ValueError, match, lambda given=given: gpattention.convert(host.model, **given))
    strange = torch.zeros(2, 3, 1, 1, 1)  # which the host does not take
    check_undone(host, Exception, None, lambda: gpattention.convert(host.model, example=strange))


STEPS = {
    "place": [*((type(family), "place") for family in FAMILIES.values()), (own, "warm_start")],
    "finish": [*((type(family), "finish") for family in FAMILIES.values()), (own, "warm_start")],
    "hook": [(nn.Module, "register_forward_pre_hook"), (nn.Module, "register_forward_hook")],
    "example": [(layers, "place_inducing")],
}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("family", [name for name in HOSTS if "exp_dot" not in name])  # no kind takes those
def test_failures_on_the_way_change_nothing(
    family: str, step: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make(family)
    for holder, name in STEPS[step]:
        original, calls = getattr(holder, name), []

        def fails(*args: Any, original: Any = original, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls.append(1)
            done = original(*args, **kwargs)  # after it changed what it changes
            if step != "place" or len(calls) == host.sites or original.__name__ == "warm_start":
                raise error("on the way")
            return done

        monkeypatch.setattr(holder, name, fails)
    check_undone(
        host, error, "on the way", lambda: gpattention.convert(host.model, "cgp", example=host.inputs)
    )
    monkeypatch.undo()
    gpattention.convert(host.model, "cgp", example=host.inputs)
    assert torch.isfinite(logits(host)).all()


def pyramid() -> Host:
    """Three of its four layers merge their tokens before they make keys of them."""
    config = transformers.SegformerConfig(
        num_labels=3, hidden_sizes=[16] * 4, num_attention_heads=[2] * 4, depths=[1] * 4
    )  # fmt: skip
    model = transformers.SegformerForImageClassification(config)
    return Host(model, {"pixel_values": torch.randn(2, 3, 32, 32)}, 4)


@pytest.mark.parametrize("kind", ["cgp", "direct", "scgp", "softmax-gp", "kernel", "sgpa"])
def test_attention_to_merged_tokens_is_refused_before_anything_is_changed(kind: str) -> None:
    torch.manual_seed(0)
    host = pyramid()
    for example in (None, host.inputs):
        check_undone(
            host, ValueError, "keys of fewer tokens, which sequence_reduction",
            lambda x=example: gpattention.convert(host.model, kind, example=x),
        )  # fmt: skip
    whole = [site.name for site in gpattention.find_sites(host.model).sites][-1:]  # merges no tokens
    gpattention.convert(host.model, kind, layers=whole, example=host.inputs)
    assert torch.isfinite(logits(host)).all()
