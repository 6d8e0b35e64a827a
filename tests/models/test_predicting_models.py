"""Predictions of real models, and how the models run: chunked, compiled, exported, in bf16, copied."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gpattention
from gpattention import gp
from gpattention.attention import Draw, build_attention
from gpattention.models import (
    FeatureClassifier,
    LayerOutput,
    ModelOutput,
    Prediction,
    Transformer,
    predict,
)
from tests.models.small_models import DRAWING, KINDS, STACKS, images, seeded, sentences, text, vision
from tests.threads import state_of

X = images(5, dtype=torch.float32)
WORDS = sentences(6, 3, 5, 2, 6)
both_models = pytest.mark.parametrize("make", [vision, text])
every_stack = pytest.mark.parametrize("stack", STACKS, ids="+".join)


def inputs_of(make: Any) -> Tensor:
    return X if make is vision else WORDS


class TestPredict:
    @both_models
    @every_stack
    def test_no_samples_is_the_mean_pass(self, make: Any, stack: tuple[str, ...]) -> None:
        model, inputs = make(*stack, dtype=torch.float32).train(), inputs_of(make)
        for options in ({"samples": 0}, {"draw": "none"}, *([] if model.draws else [{"samples": 10}])):
            found = model.predict(inputs, **options)
            assert model.training
            with torch.no_grad():
                expected = copy.deepcopy(model).eval()(inputs).logits
            assert_close(found.logits, expected[None])
            assert_close(found.probs, expected.softmax(-1))
            assert not found.drawn
            with pytest.warns(UserWarning, match="not two draws"):
                assert found.mutual_information.count_nonzero() == 0

    def test_logits_may_be_averaged_instead(self) -> None:
        model = vision("cgp")
        each, found = model.predict(X, samples=4), model.predict(X, samples=4, average="logits")
        assert_close(found.logits, each.logits.mean(0, keepdim=True))
        assert_close(found.probs, each.logits.mean(0).softmax(-1))
        assert found.drawn
        with pytest.raises(ValueError, match=r"average .* probabilities, logits, got 'votes'"):
            model.predict(X, average="votes")

    @pytest.mark.parametrize("samples", [0, 3])
    def test_nothing_is_left_behind(self, samples: int) -> None:
        model = vision("cgp", "softmax", "sgpa", dropout=0.5, dtype=torch.float32).train()
        model.blocks[1].eval()
        before = state_of(model)  # random numbers too
        found = model.predict(X, samples=samples)
        with pytest.raises(ValueError, match="expected images of shape"):
            model.predict(X[:, :2], samples=samples)
        assert state_of(model) == before
        assert not found.logits.requires_grad
        (found.logits * torch.ones(3, requires_grad=True)).sum().backward()  # no inference tensors
        assert [name for name, p in model.named_parameters() if p.grad is not None] == []


class Logits(nn.Module):
    """The tensors of a forward pass, for tools that know no dataclasses."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(inputs, need=("logits", "regularizer", "variance"))
        return (
            output.logits,
            output.regularizer,
            *(x.variance for x in output.layers if x.variance is not None),
        )


FAST = [(vision, "cgp"), (vision, "softmax")]
SLOW = [(make, kind) for make in (vision, text) for kind in KINDS if (make, kind) not in FAST]
every_model = pytest.mark.parametrize(
    ("make", "kind"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)


class TestRuntime:
    @every_model
    def test_compiled_in_one_graph(self, make: Any, kind: str) -> None:
        torch._dynamo.reset()
        model, inputs = Logits(make(kind)), inputs_of(make)
        inputs = inputs.double() if make is vision else inputs
        fast = torch.compile(model, fullgraph=True, backend="aot_eager")
        for ours, theirs in zip(fast(inputs), model(inputs), strict=True):
            assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        gradients = []
        for forward in (fast, model):
            logits, regularizer, *_ = forward(inputs)
            loss = logits.square().sum() + regularizer
            gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        for ours, theirs in zip(*gradients, strict=True):
            if theirs is not None:
                assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
        assert not any(gp.health().values())

    @pytest.mark.parametrize(
        "kind", [k if k == "cgp" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
    )
    def test_compiled_for_batches_of_other_sizes(self, kind: str) -> None:
        """The second size is compiled with symbolic shapes."""
        torch._dynamo.reset()
        model = vision(kind).eval()
        fast = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            for count in (3, 2):
                inputs = images()[:count]
                assert_close(fast(inputs).logits, model(inputs).logits, rtol=1e-9, atol=1e-9)
                if kind in DRAWING:
                    assert fast(inputs, draw="independent").logits.isfinite().all()
                    assert fast(inputs, draw="independent", samples=count).logits.shape == (count, count, 3)

    @every_model
    def test_exported(self, make: Any, kind: str) -> None:
        model, inputs = Logits(make(kind)), inputs_of(make)
        inputs = inputs.double() if make is vision else inputs
        program = torch.export.export(model, (inputs,))
        for ours, theirs in zip(program.module()(inputs), model(inputs), strict=True):
            assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

    @every_stack
    def test_bf16_autocast(self, stack: tuple[str, ...]) -> None:
        model = text(*stack, dtype=torch.float32, stir=0.0).train()
        draw = "independent" if model.draws else "none"
        with torch.autocast("cpu", torch.bfloat16):
            output = model(WORDS, draw=draw, generator=seeded(1), need=("logits", "regularizer", "variance"))
            loss = output.logits.float().square().sum() + output.regularizer
        loss.backward()
        assert output.logits.isfinite().all()
        assert output.regularizer.isfinite()
        assert [x.variance for x in output.layers if x.variance is not None and (x.variance < 0).any()] == []
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        assert bad == []
        full = model.eval()(WORDS).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(model(WORDS).logits.float(), full, rtol=0.1, atol=0.1)


class Own(nn.Module):
    """A classifier that calls an attention module itself; it inherits nothing of ours."""

    draws = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = build_attention("direct", 8, 2)
        self.head = nn.Linear(8, 3)

    def forward(
        self, x: Tensor, *, draw: Draw = "none", generator: Any = None, need: tuple[str, ...] = ("logits",)
    ) -> ModelOutput:
        asked = ("output", *(name for name in need if name == "variance"))
        found = self.attention(x, draw=draw, generator=generator, need=asked)
        return ModelOutput(self.head((x + found.output).mean(1)), layers=(LayerOutput(found.variance),))

    def features(self, x: Tensor) -> Tensor:
        return (x + self.attention(x).output).mean(1)


def test_a_model_of_ones_own_needs_what_the_protocol_says() -> None:
    model, x = Own(), torch.randn(5, 4, 8, generator=seeded(1))
    checked: FeatureClassifier = model  # by the type checker
    found = gpattention.predict(model, x, samples=6, variances=True, batch_size=4)
    assert isinstance(found, Prediction)
    assert_close(found.logits, predict(checked, x, samples=6).logits)
    assert (found.drawn, found.logits.shape, found.variances[0].shape) == (True, (6, 5, 3), (5, 2, 4))
    signals = gpattention.signals(model, x)
    assert_close(signals.logits, model(x).logits.detach())
    assert signals.sites == ("attention head 0", "attention head 1")
    del model.head
    with pytest.raises(ValueError, match="FeatureClassifier"):
        gpattention.signals(model, x)
