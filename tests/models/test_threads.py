"""Our own models in several threads, and evaluation mode that several calls need at once."""

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpattention.evaluation import GPLastLayer, MCDropout
from gpattention.models import ModelOutput, Prediction, VisionTransformer
from gpattention.models.dropout import calls_of_items, find_dropouts, hooked
from gpattention.models.predict import evaluating, is_predicting
from tests.models.small_models import images, sentences, text, vision
from tests.threads import Pause, at_once, paused, state_of

STACKS = [("cgp",), ("scgp",), ("sgpa",), ("softmax", "cgp"), ("direct",), ("kernel",), ("softmax-gp",)]
IMAGES, WORDS = images(6), sentences(6, 3, 5, 1, 4, 2)


def bits(found: Prediction) -> list[Tensor]:
    return [found.logits, *(x for x in found.variances or () if x is not None)]


def check(model: nn.Module, calls: list[Callable[[], list[Tensor]]], threads: int) -> None:
    """All calls by every thread, each beginning with another."""

    def turn(first: int) -> list[list[Tensor]]:
        found = {(first + i) % len(calls): calls[(first + i) % len(calls)]() for i in range(len(calls))}
        return [found[i] for i in range(len(calls))]

    expected, before = turn(0), state_of(model)
    for found in at_once([lambda first=first: turn(first) for first in range(threads)]):
        for ours, alone in zip(found, expected, strict=True):
            assert len(ours) == len(alone)
            assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
    assert state_of(model) == before


MAKERS: dict[str, tuple[Callable[..., Any], Tensor]] = {"vision": (vision, IMAGES), "text": (text, WORDS)}


@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize("stack", STACKS, ids="-".join)
@pytest.mark.parametrize("of", MAKERS)
def test_predictions(of: str, stack: tuple[str, ...], threads: int) -> None:
    """In training mode dropout is on: a thread that leaves evaluation mode to another would be seen.

    Of a model with softmax attention MC dropout is all that draws; draws of attention beside it are apart.
    """
    make, inputs = MAKERS[of]
    model = make(*stack, dropout=0.2).train(threads == 2)
    dropping, drawing = MCDropout(model), MCDropout(model, p=0.4, draw="independent")

    def predict(i: int) -> list[Tensor]:
        return bits(model.predict(inputs[i:], i, seed=i, batch_size=5, variances=model.draws and i > 1))

    calls = [partial(predict, i) for i in range(4)]
    calls += [lambda i=i: bits(dropping.predict(inputs[i:], samples=i, seed=i)) for i in range(3)]
    check(model, [*calls, lambda: bits(drawing.predict(inputs, samples=2))], threads)


def test_other_passes_that_look_inside() -> None:
    model = vision("softmax", "cgp", dropout=0.2)
    labels = torch.arange(len(IMAGES)) % 3
    last = GPLastLayer(model, features=16).fit(IMAGES, labels)

    def health(first: int) -> list[Tensor]:
        return [torch.tensor([x.mean_ratio for x in model.health(IMAGES[first:], labels[first:]).layers])]

    calls = [lambda i=i: health(i) for i in range(2)]
    calls += [lambda: bits(last.predict(IMAGES, samples=3)), lambda: bits(model.predict(IMAGES, 2))]
    check(model, calls, 4)


class EncoderClassifier(nn.Module):
    """`nn.TransformerEncoder` with the call of our models: its fused pass would skip all dropout."""

    draws = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, x: Tensor, **_: Any) -> Any:
        return ModelOutput(self.head(self.encoder(x)[:, 0]))


def test_mc_dropout_of_pytorchs_encoder() -> None:
    model, x = EncoderClassifier().eval(), torch.randn(4, 5, 16)
    predictor = MCDropout(model)  # type: ignore[arg-type]

    def bare() -> list[Tensor]:
        with torch.no_grad():
            return [model(x).logits for _ in range(10)]

    assert float(predictor.predict(x, samples=20).logits.std(0).min()) > 0
    check(model, [bare, lambda: bits(predictor.predict(x, samples=3))], 4)


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def mixed() -> VisionTransformer:
    """Parts in training mode and parts in evaluation mode."""
    model = vision("cgp").train()
    model.blocks[0].eval()
    return model


def block(model: nn.Module, pause: Pause) -> Callable[[], None]:
    def run() -> None:
        with evaluating(model):
            pause()

    return run


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_evaluation_mode_lasts_as_long_as_anybody_needs_it(first_to_end: int) -> None:
    model, pauses = mixed(), [Pause(), Pause()]
    before = modes(model)
    with ExitStack() as last:
        with ExitStack() as first:
            for place, pause in enumerate(pauses):
                stack = first if place == first_to_end else last
                stack.enter_context(paused(block(model, pause), pause))
            assert not any(modes(model))
            with evaluating(model), evaluating(model):
                assert not any(modes(model))
        assert not any(modes(model))
    assert modes(model) == before
    assert not any("__getstate__" in vars(module) for module in model.modules())


def test_models_that_share_modules() -> None:
    shared = nn.Linear(3, 3)
    one, other = nn.Sequential(shared, nn.Dropout()), nn.Sequential(nn.ReLU(), shared)
    pause = Pause()
    with ExitStack() as longer:
        with paused(block(one, pause), pause):
            longer.enter_context(evaluating(other))
            assert not other.training
        assert (other.training, shared.training, one.training) == (False, False, True)
    assert (other.training, shared.training, one.training) == (True, True, True)


def test_a_model_in_evaluation_mode_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with the value that is there: others may be reading."""
    model, written = nn.Linear(3, 3).eval(), []
    monkeypatch.setattr(nn.Linear, "__setattr__", lambda *given: written.append(given))
    before = list(vars(model))
    with evaluating(model):
        assert list(vars(model)) == before
    assert written == []


def test_modes_are_restored_when_something_raises() -> None:
    model = mixed()
    before = state_of(model)

    def fail() -> None:
        for _ in range(50):
            with pytest.raises(RuntimeError, match="broken"), evaluating(model):
                raise RuntimeError("broken")

    at_once([fail] * 4)
    assert state_of(model) == before


def test_scripted_and_compiled_modules() -> None:
    inner = nn.Dropout().train()
    for model in (torch.jit.script(nn.Dropout()).train(), torch.compile(inner, backend="eager")):
        with evaluating(model), evaluating(inner):
            assert not model.training
        assert model.training


def test_a_copy_made_meanwhile_has_the_modes_of_before() -> None:
    model = mixed()
    before, pause = modes(model), Pause()
    with paused(block(model, pause), pause):
        other = copy.deepcopy(model)
    assert modes(other) == before == modes(model)
    assert vars(other).keys() == vars(model).keys()


def test_who_predicts_is_of_the_thread() -> None:
    model, pause = mixed(), Pause()
    with paused(block(model, pause), pause):
        assert not is_predicting()
    with evaluating(model):
        assert is_predicting()
        assert at_once([is_predicting]) == [False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_process_keeps_the_loans_of_its_own_thread() -> None:
    model, pause = mixed(), Pause()
    before = modes(model)
    with paused(block(model, pause), pause), evaluating(model.norm):
        child = os.fork()
        if child == 0:
            # the other thread is gone, and what it needed; this one is in evaluation mode still
            expected = [
                mode and module is not model.norm
                for mode, module in zip(before, model.modules(), strict=True)
            ]
            os._exit(0 if modes(model) == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert modes(model) == before


def test_hooks_of_a_call_are_of_its_thread() -> None:
    """What one call notes of dropout is not what another one calls."""
    model = text("softmax", dropout=0.2)
    dropouts, pause, noted = find_dropouts(model), Pause(), []

    def run() -> None:
        with hooked(model, dropouts, lambda name, *_: noted.append(name)):
            pause()
            model(WORDS)

    with paused(run, pause):
        model(WORDS)
        assert not noted
        assert len(calls_of_items(model, model, dropouts, WORDS)) == 7
    assert len(noted) == 7
