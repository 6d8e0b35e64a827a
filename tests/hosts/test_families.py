"""Every family: it becomes every kind; the start, the masks, gradients, predictions."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.testing import assert_close

import gpattention
from gpattention.gp import fused_kernels
from gpattention.models import Prediction, Transformer
from gpattention.models.converted import converted_layers
from tests.hosts.hosts import CLASSES, ITEMS, Host, logits, make, some

FAMILIES = [
    "bert", "roberta", "distilbert", "electra", "vit", "deit", "encoder", "encoder, batch second", "timm",
    "own softmax", "own text",
]  # fmt: skip
PADDED = ["bert", "roberta", "distilbert", "encoder", "encoder, batch second"]
KINDS = ("softmax-gp", "direct", "cgp", "scgp", "kernel", "sgpa")
# no standard deviation reaches this cap, which would shrink the mean
UNCAPPED = {"max_stddev": 1e3}
STARTS: list[tuple[str, str, dict[str, Any], float]] = [
    *((family, "softmax-gp", {}, 1e-5) for family in FAMILIES),
    *((family, "direct", UNCAPPED, 1e-5) for family in FAMILIES),
    *((family, "cgp", UNCAPPED, 2e-2) for family in FAMILIES),
    ("timm", "kernel", {}, 1e-4),  # its keys pass a LayerNorm, and -1/2 |k_j|^2 is the same for all
    ("encoder", "kernel", {"kernel": "exp_dot"}, 1e-5),
]


def train_step(host: Host) -> Tensor:
    """Logits of a training pass, which remembers the regulariser."""
    host.model.train()
    if isinstance(host.model, Transformer):
        draw = "independent" if host.model.draws else "none"
        return host.model(host.inputs, draw=draw, need=("logits", "regularizer")).logits
    return logits(host)


def converted(name: str, kind: str, **options: Any) -> tuple[Host, Tensor]:
    """The host in evaluation mode, and what it answered before."""
    host = make(name)
    host.model.eval()
    before = logits(host)
    assert gpattention.convert(host.model, kind, **options) is host.model
    return host, before


def gap(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.mark.parametrize(("family", "kind", "options", "tolerance"), STARTS)
def test_it_starts_as_the_host(family: str, kind: str, options: dict[str, Any], tolerance: float) -> None:
    weights = make(family).model.state_dict()
    host, before = converted(family, kind, **options)
    assert gap(logits(host), before) < tolerance
    after = host.model.state_dict()
    assert all(torch.equal(after[name], x) for name, x in weights.items())
    new = set(after) - set(weights)
    assert bool(new) == ((family, kind) != ("timm", "kernel"))
    assert all(".gpattention." in name for name in new)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_kernels_answer_the_same(kind: str) -> None:
    pytest.importorskip("triton")
    few = {"num_inducing": 4} if kind in ("scgp", "sgpa") else {}  # the interpreter takes its time
    host, _ = converted("encoder", kind, layers=["encoder.layers.1.self_attn"], **few)
    inputs = some(host.inputs, slice(3))
    with torch.no_grad():
        plain = logits(host, inputs)
        with fused_kernels("on"):
            assert gap(logits(host, inputs), plain) < 1e-5


LEARNING = ["bert", "distilbert", "vit", "encoder", "timm", "own softmax", "own text"]
TRAINED: list[tuple[str, str, dict[str, Any]]] = [
    *((family, kind, {}) for family in LEARNING for kind in KINDS),
    *(("bert", "cgp", {"normalize": normalize}) for normalize in ("rows", "none")),
]


@pytest.mark.parametrize(("family", "kind", "options"), TRAINED)
def test_gradients_reach_everything_new(family: str, kind: str, options: dict[str, Any]) -> None:
    host = make(family)
    torch.manual_seed(1)
    gpattention.convert(host.model, kind, **options)
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
    host, _ = converted(family, kind)
    tokens, mask = ("input_ids", "attention_mask") if "input_ids" in host.inputs else ("x", "padding")
    real = host.inputs[mask].bool() if mask == "attention_mask" else ~host.inputs[mask]
    before = logits(host)
    chosen = real if tokens == "input_ids" else real[..., None]
    changed = torch.where(chosen, host.inputs[tokens], host.inputs[tokens].flip(0))
    # the tokens' own embeddings of padding do not reach the first token, which the heads read
    assert torch.allclose(logits(host, {**host.inputs, tokens: changed}), before, atol=1e-5)
    short = {name: x[3:4, :3] for name, x in host.inputs.items()}
    assert torch.allclose(logits(host, short), before[3:4], atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "vit", "encoder", "timm", "own softmax", "own text"])
def test_predictions_with_samples(family: str) -> None:
    host = make(family)
    gpattention.convert(host.model, "cgp", prior_scale=0.5)
    host.model.train()
    result = gpattention.predict(host.model, host.inputs, samples=4, seed=3, batch_size=7, variances=True)
    assert isinstance(result, Prediction)
    assert host.model.training
    assert result.logits.shape == (4, ITEMS, CLASSES)
    assert len(result.variances) == 2
    assert all(v is not None and bool((v >= 0).all()) and bool((v > 0).any()) for v in result.variances)
    assert bool((result.logits.std(0) > 0).all())
    again = gpattention.predict(host.model, host.inputs, samples=4, seed=3, batch_size=3)
    assert torch.allclose(again.logits, result.logits, atol=1e-5)
    mean = gpattention.predict(host.model, host.inputs, samples=0)
    host.model.eval()
    assert torch.allclose(mean.logits[0], logits(host), atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast: bool) -> None:
    host = make("bert")
    before = logits(Host(host.model.eval(), host.inputs, 2))
    model = gpattention.convert(host.model if autocast else host.model.bfloat16(), "cgp")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert gap(logits(host).float(), before) < 0.1
        train_step(host)
        assert gpattention.regularizer(model).isfinite()
    assert {p.dtype for p in model.parameters()} == {torch.float32 if autocast else torch.bfloat16}


def test_kinds_without_a_posterior_predict_once() -> None:
    host, _ = converted("bert", "kernel")
    result = gpattention.predict(host.model, host.inputs, samples=4, variances=True)
    assert result.samples == 1
    assert result.variances == (None, None)


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
    host, before = converted("own kernel", "direct")
    assert isinstance(host.model, Transformer)
    assert [layer.kind for layer in host.model.config.layers] == ["direct", "direct"]
    assert gap(logits(host), before) < 1e-5
    train_step(host)
    assert gpattention.regularizer(host.model) > 0


@pytest.mark.parametrize("kind", ["direct", "cgp"])
def test_a_prior_scale_of_kernel_models_scales_the_draws_alone(kind: str) -> None:
    spreads, means = [], []
    for scale in (1.0, 0.25):
        host, _ = converted("own kernel", kind, prior_scale=scale)
        result = host.model(host.inputs, need=("logits", "variance"))
        means.append(result.logits)
        spreads.append([layer.variance.sqrt() for layer in result.layers if layer.variance is not None])
    assert gap(means[1], means[0]) < 1e-5
    for whole, part in zip(*spreads, strict=True):
        torch.testing.assert_close(part, 0.25 * whole, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["cgp", "sgpa"])
def test_our_own_models_stay_whole(kind: str) -> None:
    """Health, weights and joint draws go through the converted layer."""
    host, _ = converted("own softmax", kind)
    assert isinstance(host.model, Transformer)
    assert kind in host.model.health(host.inputs).table()
    result = host.model(host.inputs, draw="joint", samples=3, need=("logits", "weights", "variance"))
    assert result.logits.shape == (3, ITEMS, CLASSES)
    assert all(layer.weights is not None and layer.variance is not None for layer in result.layers)


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


def test_places_are_apart_and_repeat() -> None:
    options = {"num_inducing": 6, "example": make("encoder").inputs, "seed": 1}
    first, second = (converted_layers(converted("encoder", "sgpa", **options)[0].model) for _ in range(2))
    for layer, same in zip(first, second, strict=True):
        points = layer.attention.inducing
        assert torch.equal(points, same.attention.inducing)
        assert layer.attention.placing is None
        assert float((torch.cdist(points, points) + torch.eye(6)).detach().min()) > 1e-3


def test_more_points_than_tokens() -> None:
    host = make("encoder")
    few = {"x": host.inputs["x"][:1, :2], "padding": torch.tensor([[False, True]])}
    gpattention.convert(host.model, "scgp", num_inducing=(5, 3), example=few)
    host.model.eval()
    assert logits(host).isfinite().all()
    nothing = {"x": few["x"], "padding": torch.tensor([[True, True]])}
    with pytest.raises(ValueError, match="real tokens"):
        gpattention.convert(make("encoder").model, "scgp", example=nothing)


STEPS = 25


def added(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for layer in converted_layers(model) for p in layer.parameters()]


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    class GPTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(model, inputs, *args, **kwargs)
            if not model.training:
                return result
            extra = 0.01 * gpattention.regularizer(model)
            return (result[0] + extra, result[1]) if isinstance(result, tuple) else result + extra

    host, labels = make("bert"), torch.tensor([0, 1, 2, 1, 0])
    model, inputs = gpattention.convert(host.model, "cgp"), host.inputs
    before = added(model)
    items = [{**{n: x[i] for n, x in inputs.items()}, "labels": labels[i]} for i in range(len(labels))]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=5, learning_rate=1e-2,
        report_to=[], save_strategy="steps", save_steps=STEPS, use_cpu=True, disable_tqdm=True, seed=0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = GPTrainer(model=model, args=arguments, train_dataset=items, eval_dataset=items)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7
    assert torch.equal(gpattention.predict(model, inputs, samples=4).label, labels)  # learnt by heart
    assert all(not torch.equal(a, b) for a, b in zip(added(model), before, strict=True))
    again = gpattention.from_pretrained(tmp_path / f"checkpoint-{STEPS}")  # what the trainer itself saved
    assert all(torch.equal(a, b) for a, b in zip(added(again), added(model), strict=True))


def longer(inputs: dict[str, Any], by: int = 3) -> dict[str, Any]:
    """The same items with padding behind, as a longer neighbour would bring it."""
    ends = {"input_ids": (0, by), "attention_mask": (0, by), "x": (0, 0, 0, by), "padding": (0, by)}
    values = {"input_ids": 1, "padding": True}  # 1 is what RoBERTa counts positions by
    return {name: pad(x, ends[name], value=values.get(name, 0)) for name, x in inputs.items()}


@pytest.mark.parametrize("name", ["bert", "roberta", "encoder"])
@pytest.mark.parametrize("kind", ["attached", "direct", "cgp", "softmax-gp", "scgp"])
def test_draws_do_not_depend_on_padding(name: str, kind: str) -> None:
    host = make(name)
    model = host.model.double().eval()
    short = {k: x.double() if x.is_floating_point() else x for k, x in host.inputs.items()}
    predict = gpattention.attach(model).predict
    if kind != "attached":
        predict = partial(gpattention.predict, gpattention.convert(model, kind=kind))
    result, again = (predict(inputs, samples=3) for inputs in (short, longer(short)))
    assert float(result.logits.std(1).max()) > 1e-4  # they differ from draw to draw
    assert_close(again.logits, result.logits, rtol=1e-8, atol=1e-8)
