"""Every family becomes every kind: the start, the masks, gradients, predictions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention.adopt.convert_layer import converted_layers
from gpattention.adopt.reading import read
from gpattention.gp import fused_kernels
from gpattention.models import Prediction, Transformer
from tests.adopt.hosts import CLASSES, ITEMS, Host, make

FAMILIES = [
    "bert", "roberta", "distilbert", "electra", "vit", "deit", "encoder", "encoder, batch second", "timm",
    "own softmax", "own text",
]  # fmt: skip
PADDED = ["bert", "roberta", "distilbert", "encoder", "encoder, batch second"]
KINDS = ("softmax-gp", "direct", "cgp", "scgp", "kernel", "sgpa")
EXACT = {"softmax-gp": 1e-5, "direct": 1e-5, "cgp": 2e-2}


def logits(host: Host, inputs: Any = None) -> Tensor:
    inputs = host.inputs if inputs is None else inputs
    return read(host.call(host.model, inputs), "classification", inputs)


def train_step(host: Host) -> Tensor:
    """Logits of a training pass, which remembers the regulariser."""
    host.model.train()
    if isinstance(host.model, Transformer):
        draw = "independent" if host.model.draws else "none"
        return host.model(host.inputs, draw=draw, need=("logits", "regularizer")).logits
    return logits(host)


def gap(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_as_the_host(family: str, kind: str) -> None:
    host = make(family)
    host.model.eval()
    before = logits(host)
    weights = {name: x.clone() for name, x in host.model.state_dict().items()}
    # no standard deviation reaches this cap, which would shrink the mean
    options = {} if kind == "softmax-gp" else {"max_stddev": 1e3}
    assert gpattention.convert(host.model, kind, **options) is host.model
    assert gap(logits(host), before) < EXACT[kind]
    after = host.model.state_dict()
    assert all(torch.equal(after[name], x) for name, x in weights.items())
    new = set(after) - set(weights)
    assert new
    assert all(".gpattention." in name for name in new)


@pytest.mark.parametrize("kind", ["scgp", "kernel", "sgpa"])
@pytest.mark.parametrize("family", ["bert", "encoder", "own text"])
def test_the_other_kinds_start_elsewhere(family: str, kind: str) -> None:
    host = make(family)
    host.model.eval()
    before = logits(host)
    gpattention.convert(host.model, kind)
    after = logits(host)
    assert after.isfinite().all()
    assert gap(after, before) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_fused_kernels_answer_the_same(kind: str) -> None:
    pytest.importorskip("triton")
    host = make("encoder")
    host.model.eval()
    few = {"num_inducing": 4} if kind in ("scgp", "sgpa") else {}  # the interpreter takes its time
    gpattention.convert(host.model, kind, **few)
    with torch.no_grad():
        plain = logits(host)
        with fused_kernels("on"):
            assert gap(logits(host), plain) < 1e-5


def test_keys_of_one_length_make_kernel_attention_softmax() -> None:
    """Its keys pass a LayerNorm, and -1/2 |k_j|^2 is the same for all."""
    host = make("timm")
    host.model.eval()
    before = logits(host)
    gpattention.convert(host.model, "kernel")
    assert gap(logits(host), before) < 1e-4


def test_more_inducing_inputs_come_nearer() -> None:
    found = []
    for count in (2, 64):
        host = make("bert")
        host.model.eval()
        before = logits(host)
        gpattention.convert(host.model, "scgp", num_inducing=count, max_stddev=1e3)
        found.append(gap(logits(host), before))
    assert found[1] < 0.5 * found[0]


def test_kernel_attention_by_dot_products_is_the_hosts() -> None:
    host = make("encoder")
    host.model.eval()
    before = logits(host)
    gpattention.convert(host.model, "kernel", kernel="exp_dot")
    assert gap(logits(host), before) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family", ["bert", "distilbert", "vit", "encoder", "timm", "own softmax", "own text"]
)
def test_gradients_reach_everything_new(family: str, kind: str) -> None:
    host = make(family)
    torch.manual_seed(1)
    gpattention.convert(host.model, kind)
    # sums: a mean of logits would not see the head's bias only
    loss = train_step(host).square().sum() + gpattention.regularizer(host.model)
    loss.backward()
    assert loss.isfinite()
    new = {n: p for n, p in host.model.named_parameters() if ".gpattention." in n}
    without = [name for name, p in new.items() if p.grad is None or not bool((p.grad != 0).any())]
    assert without == []
    assert all(bool(p.grad.isfinite().all()) for p in new.values() if p.grad is not None)
    assert bool(new) == (kind != "kernel")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", PADDED)
def test_padding_is_not_seen(family: str, kind: str) -> None:
    """What is written under the mask changes nothing, and neither does cutting it off."""
    host = make(family)
    host.model.eval()
    gpattention.convert(host.model, kind)
    tokens, mask = ("input_ids", "attention_mask") if "input_ids" in host.inputs else ("x", "padding")
    real = host.inputs[mask].bool() if mask == "attention_mask" else ~host.inputs[mask]
    before = logits(host)
    other = host.inputs[tokens].flip(0)
    chosen = real if tokens == "input_ids" else real[..., None]
    changed = torch.where(chosen, host.inputs[tokens], other)
    # the tokens' own embeddings of padding do not reach the first token, which the heads read
    assert torch.allclose(logits(host, {**host.inputs, tokens: changed}), before, atol=1e-5)
    short = {name: x[3:4, :3] for name, x in host.inputs.items()}
    assert torch.allclose(logits(host, short), before[3:4], atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "vit", "encoder", "timm", "own softmax", "own text"])
def test_predictions_with_samples(family: str) -> None:
    host = make(family)
    gpattention.convert(host.model, "cgp", prior_scale=0.5)
    host.model.train()
    told = gpattention.predict(host.model, host.inputs, samples=4, seed=3, batch_size=7, variances=True)
    assert isinstance(told, Prediction)
    assert host.model.training
    assert told.logits.shape == (4, ITEMS, CLASSES)
    assert len(told.variances) == 2
    assert all(v is not None and bool((v >= 0).all()) and bool((v > 0).any()) for v in told.variances)
    assert bool((told.logits.std(0) > 0).all())
    again = gpattention.predict(host.model, host.inputs, samples=4, seed=3, batch_size=3)
    assert isinstance(again, Prediction)
    assert torch.allclose(again.logits, told.logits, atol=1e-5)
    mean = gpattention.predict(host.model, host.inputs, samples=0)
    assert isinstance(mean, Prediction)
    host.model.eval()
    assert torch.allclose(mean.logits[0], logits(host), atol=1e-5)


def test_kinds_without_a_posterior_predict_once() -> None:
    host = make("bert")
    gpattention.convert(host.model, "kernel")
    told = gpattention.predict(host.model, host.inputs, samples=4, variances=True)
    assert isinstance(told, Prediction)
    assert told.samples == 1
    assert told.variances == (None, None)


def test_tokens_and_embeddings() -> None:
    import transformers

    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "vocab_size": 40, "num_labels": CLASSES,
    }  # fmt: skip
    inputs = make("bert").inputs
    for name, task in (("BertForTokenClassification", "tokens"), ("BertModel", "embedding")):
        torch.manual_seed(0)
        model = getattr(transformers, name)(transformers.BertConfig(**sizes))
        gpattention.convert(model, "direct", prior_scale=1.0)
        told = gpattention.predict(model, inputs, samples=3)
        assert len(told) == ITEMS
        spread = told.mutual_information if task == "tokens" else told.variance  # type: ignore[union-attr]
        assert bool((spread[0] > 0).any())


def test_training_draws_and_evaluation_does_not() -> None:
    for draw, differs in (("independent", True), ("none", False)):
        host = make("encoder")
        for module in host.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        gpattention.convert(host.model, "direct", draw=draw)  # type: ignore[arg-type]
        host.model.train()
        assert torch.equal(logits(host), logits(host)) is not differs
        host.model.eval()
        assert torch.equal(logits(host), logits(host))


def test_kernel_models_convert_by_their_own_warm_start() -> None:
    host = make("own kernel")
    host.model.eval()
    before = logits(host)
    gpattention.convert(host.model, "direct")
    assert isinstance(host.model, Transformer)
    assert [layer.kind for layer in host.model.config.layers] == ["direct", "direct"]
    assert gap(logits(host), before) < 1e-5
    train_step(host)
    assert gpattention.regularizer(host.model) > 0


@pytest.mark.parametrize("kind", ["direct", "cgp"])
def test_a_prior_scale_of_kernel_models_scales_the_draws_alone(kind: str) -> None:
    spreads, means = [], []
    for scale in (1.0, 0.25):
        host = make("own kernel")
        host.model.eval()
        gpattention.convert(host.model, kind, prior_scale=scale)
        assert isinstance(host.model, Transformer)
        told = host.model(host.inputs, need=("logits", "variance"))
        means.append(told.logits)
        spreads.append([layer.variance.sqrt() for layer in told.layers if layer.variance is not None])
    assert gap(means[1], means[0]) < 1e-5
    for whole, part in zip(*spreads, strict=True):
        torch.testing.assert_close(part, 0.25 * whole, rtol=1e-3, atol=1e-6)


def test_a_prior_scale_of_kernel_models_is_positive() -> None:
    host = make("own kernel")
    with pytest.raises(ValueError, match=r"expected prior_scale > 0, got -1"):
        gpattention.convert(host.model, "direct", prior_scale=-1.0)
    assert [layer.kind for layer in host.model.config.layers] == ["kernel", "kernel"]  # type: ignore[union-attr]


@pytest.mark.parametrize("normalize", ["rows", "none"])
def test_the_library_s_own_ways_to_weigh(normalize: str) -> None:
    host = make("bert")
    gpattention.convert(host.model, "cgp", normalize=normalize)
    loss = train_step(host).square().sum() + gpattention.regularizer(host.model)
    loss.backward()
    new = {n: p for n, p in host.model.named_parameters() if ".gpattention." in n}
    assert [n for n, p in new.items() if p.grad is None or not bool((p.grad != 0).any())] == []


@pytest.mark.parametrize("kind", ["cgp", "sgpa"])
def test_our_own_models_stay_whole(kind: str) -> None:
    """Health, weights and joint draws go through the converted layer."""
    host = make("own softmax")
    gpattention.convert(host.model, kind)
    assert isinstance(host.model, Transformer)
    assert kind in host.model.health(host.inputs).table()
    told = host.model(host.inputs, draw="joint", samples=3, need=("logits", "weights", "variance"))
    assert told.logits.shape == (3, ITEMS, CLASSES)
    assert all(layer.weights is not None and layer.variance is not None for layer in told.layers)


def test_half_precision_hosts() -> None:
    host = make("bert")
    host.model.eval()
    before = logits(host)
    host.model.to(torch.bfloat16)
    gpattention.convert(host.model, "cgp")
    assert all(p.dtype == torch.bfloat16 for p in host.model.parameters())
    after = logits(host)
    assert after.dtype == torch.bfloat16
    assert gap(after.float(), before) < 0.1


def test_autocast() -> None:
    host = make("bert")
    host.model.eval()
    before = logits(host)
    gpattention.convert(host.model, "cgp")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gap(logits(host).float(), before) < 0.1
        train_step(host)
        assert gpattention.regularizer(host.model).isfinite()
    assert len(converted_layers(host.model)) == 2


@pytest.mark.parametrize("family", ["bert", "encoder", "own text"])
def test_inducing_inputs_start_at_the_tokens_of_an_example(family: str) -> None:
    found = []
    for example in (False, True):
        host = make(family)
        host.model.eval()
        with torch.no_grad():  # tokens far from where random ones would be
            for name, parameter in host.model.named_parameters():
                if "key.bias" in name or "k_lin.bias" in name or "in_proj_bias" in name:
                    parameter.add_(3.0)
        before = logits(host)
        options = {"example": host.inputs} if example else {}
        gpattention.convert(host.model, "scgp", num_inducing=40, max_stddev=1e3, **options)  # type: ignore[arg-type]
        found.append(gap(logits(host), before))
    assert found[1] < 0.05
    assert found[1] < found[0]


def test_places_are_real_tokens_and_apart() -> None:
    host = make("encoder")
    gpattention.convert(host.model, "sgpa", num_inducing=6, example=host.inputs, seed=1)
    other = make("encoder")
    gpattention.convert(other.model, "sgpa", num_inducing=6, example=host.inputs, seed=1)
    for layer, same in zip(converted_layers(host.model), converted_layers(other.model), strict=True):
        points = layer.attention.inducing
        assert torch.equal(points, same.attention.inducing)
        assert layer.attention.placing is None
        distances = torch.cdist(points, points) + torch.eye(6)
        assert float(distances.detach().min()) > 1e-3


def test_more_points_than_tokens() -> None:
    host = make("encoder")
    few = {"x": host.inputs["x"][:1, :2], "padding": torch.tensor([[False, True]])}
    gpattention.convert(host.model, "scgp", num_inducing=(5, 3), example=few)
    host.model.eval()
    assert logits(host).isfinite().all()
    nothing = {"x": few["x"], "padding": torch.tensor([[True, True]])}
    with pytest.raises(ValueError, match="real tokens"):
        gpattention.convert(make("encoder").model, "scgp", example=nothing)
