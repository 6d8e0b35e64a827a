"""How predictions run: rows, chunks that share their first layers, replays, and what they ask of inputs."""

import importlib
import threading
import time
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import gpattention
from gpattention import gp
from gpattention.evaluation import MCDropout
from gpattention.models import predict
from gpattention.models.predict import VarianceMeans, run_rows, run_samples
from gpattention.numerics import cholesky
from tests.hosts.hosts import make
from tests.models.graph_stand_in import stand_in
from tests.models.small_models import DRAWING, STACKS, layer, seeded, sentences, text, vision
from tests.models.stub_models import StubModel, normal
from tests.threads import Pause, paused

running = importlib.import_module("gpattention.models.predict")  # the function has its name too
IMAGES = normal(5, 3, 8, 8, seed=3, dtype=torch.float64)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def row_by_row(model, inputs, samples: int, seed: int = 0, draw: str = "independent"):
    """[S, B, C] with one forward pass a row, which is how the draws are defined, and the variances."""

    def forward(rows):
        found = model(rows.inputs, draw=draw, generator=rows.noise, need=("logits", "variance"))
        return found.logits, [layer.variance for layer in found.layers]

    return run_samples(model, forward, inputs, samples=samples, seed=seed, batch_size=1)


def check_rows(model, inputs, *, draw: str = "independent") -> None:
    """However the rows are cut, draws and variances are those of rows alone."""
    logits, variances = row_by_row(model, inputs, 3, 5, draw)
    for batch_size in (1, 2, 7, None):
        asked = {"samples": 3, "seed": 5, "draw": draw, "batch_size": batch_size, "variances": True}
        found = predict(model, inputs, **asked)
        assert_close(found.logits, logits, **CLOSE)
        for a, b in zip(found.variances, variances, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(a, b, **CLOSE)
    if isinstance(inputs, torch.Tensor):
        assert_close(predict(model, inputs[2:], first_item=2, **asked).logits, logits[:, 2:], **CLOSE)


def failing_capture(monkeypatch, failure: Exception) -> list[bool]:
    """Every capture fails so; gives a list with an entry for each try."""
    tried = []

    def refuse(*_, **__):
        tried.append(True)
        raise failure

    stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(running, "why_not_captured", lambda *_: None)
    monkeypatch.setattr(running, "LAUNCH_BOUND", -1.0)  # every chunk's time goes into starting kernels
    monkeypatch.setattr(running, "WORTH", 1)
    return tried


class TestDraws:
    @pytest.mark.parametrize("stack", [s for s in STACKS if set(s) & set(DRAWING)], ids="-".join)
    @pytest.mark.parametrize("draw", ["independent", "joint"])
    def test_are_those_of_rows(self, stack: tuple[str, ...], draw) -> None:
        check_rows(vision(*stack), IMAGES, draw=draw)

    def test_of_padded_text(self) -> None:
        words = torch.randint(1, 20, (4, 9), generator=seeded(0))
        inputs = {"tokens": words, "padding_mask": torch.arange(9) >= torch.tensor([[9], [3], [5], [1]])}
        inputs["contextual"] = normal(4, 9, 4, dtype=torch.float64)
        check_rows(text("softmax", "cgp", contextual_width=4), inputs)

    def test_variances_before_the_samples_part_count_once_for_all(self) -> None:
        model = vision("cgp", "softmax", "scgp", depth=3)
        found = predict(model, IMAGES, samples=3, variances=True).variances
        first = predict(model, IMAGES, samples=0, variances=True).variances
        assert_close(found[0], first[0], rtol=1e-9, atol=1e-12)
        assert found[1] is None
        assert found[2].shape == first[2].shape
        with pytest.raises(ValueError, match="none of the model's 2 layers has a variance"):
            predict(vision("softmax"), IMAGES, variances=True)

    def test_the_part_that_is_shared_runs_once_for_each_item(self, monkeypatch) -> None:
        model, rows = vision("cgp"), []
        forward = model.blocks[0].attention.forward
        monkeypatch.setattr(
            model.blocks[0].attention, "forward", lambda x, **o: (rows.append(len(x)), forward(x, **o))[1]
        )
        for batch_size, expected in ((8, [2, 2, 1]), (4, [1] * 5), (3, [1] * 10), (100, [5])):
            predict(model, IMAGES, samples=4, batch_size=batch_size)
            assert rows == expected
            rows.clear()


class TestReplays:
    @pytest.mark.parametrize(("batch_size", "samples"), [(6, 3), (4, 5), (2, 2)])
    def test_give_what_calls_give(self, monkeypatch, batch_size: int, samples: int) -> None:
        model, images = vision("cgp"), normal(11, 3, 8, 8, seed=1, dtype=torch.float64)
        plain = predict(model, images, samples=samples, batch_size=batch_size, variances=True)
        tapes = stand_in(monkeypatch)
        monkeypatch.setattr(running, "why_not_captured", lambda *_: None)
        found = predict(
            model, images, samples=samples, batch_size=batch_size, variances=True, capture=True
        )  # fmt: skip
        assert_close(found.logits, plain.logits, rtol=1e-12, atol=1e-12)
        for a, b in zip(found.variances, plain.variances, strict=True):
            assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert [tape.replays > 0 for tape in tapes] == [True]

    def test_are_made_where_starting_kernels_takes_the_time(self, monkeypatch) -> None:
        model, images = vision("cgp"), normal(16, 3, 8, 8, seed=1, dtype=torch.float64)
        monkeypatch.setattr(running, "why_not_captured", lambda *_: None)
        for share, made in ((0.9, 1), (0.2, 0)):
            tapes, clock = stand_in(monkeypatch), iter([0.0, share, 1.0])
            monkeypatch.setattr(
                running.time, "perf_counter", lambda clock=clock: next(clock, time.monotonic())
            )
            predict(model, images, samples=2, batch_size=4)
            assert len(tapes) == made
        tapes = stand_in(monkeypatch)
        predict(model, images[:8], samples=2, batch_size=4)  # too few chunks to pay
        predict(model, images, samples=2, batch_size=4, capture=False)
        assert tapes == []

    def test_are_not_made_unasked_beside_other_threads(self, monkeypatch) -> None:
        """Whatever those do on the GPU would end the capture, or fail because of it."""
        model, images = vision("cgp"), normal(16, 3, 8, 8, seed=1, dtype=torch.float64)
        monkeypatch.setattr(running, "why_not_captured", lambda *_: None)
        monkeypatch.setattr(running, "LAUNCH_BOUND", -1.0)
        tapes, pause = stand_in(monkeypatch), Pause()
        with paused(pause, pause):
            predict(model, images, samples=2, batch_size=4)
            assert tapes == []
            predict(model, images, samples=2, batch_size=4, capture=True)
            assert len(tapes) == 1
        assert running._made_by(threading.Thread(target=DataLoader.__iter__)).startswith(running.HELPERS)
        monkeypatch.setattr(running, "HELPERS", ("tests.", *running.HELPERS))
        pause = Pause()
        with paused(pause, pause):
            predict(model, images, samples=2, batch_size=4)
        assert len(tapes) == 2

    def test_a_model_that_cannot_be_captured_runs_eagerly_unless_capture_is_insisted_on(
        self, monkeypatch
    ) -> None:
        tried = failing_capture(
            monkeypatch, RuntimeError("operation not permitted when stream is capturing\nat ...")
        )
        model = vision("direct")
        found = predict(model, IMAGES, samples=3, batch_size=3)
        assert len(tried) == 1
        assert torch.equal(
            found.logits, predict(model, IMAGES, samples=3, batch_size=3, capture=False).logits
        )
        with pytest.raises(
            RuntimeError, match=r"got True: operation not permitted when stream is capturing$"
        ):
            predict(model, IMAGES, samples=3, batch_size=3, capture=True)

    @pytest.mark.parametrize(
        "failure", [torch.OutOfMemoryError("full"), gp.NotPositiveDefiniteError("A"), gp.NonFiniteError("x")]
    )
    @pytest.mark.parametrize("capture", [None, True])
    def test_failures_that_plain_calls_would_not_cure_are_raised(self, monkeypatch, failure, capture) -> None:
        failing_capture(monkeypatch, failure)
        with pytest.raises(type(failure)) as raised:
            predict(vision("direct"), IMAGES, samples=3, batch_size=3, capture=capture)
        assert raised.value is failure

    def test_where_they_are_refused(self, monkeypatch) -> None:
        refusal, model, gpu = running.why_not_captured, vision("cgp"), torch.device("cuda")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert refusal(model, gpu) is None
        handle = model.norm.register_forward_hook(lambda *_: None)
        assert refusal(model, gpu).startswith("norm has forward hooks")
        handle.remove()
        for module, name in ((torch, "is_autocast_enabled"), (torch.cuda, "is_current_stream_capturing")):
            monkeypatch.setattr(module, name, lambda *_: True)
            assert ("autocast" in refusal(model, gpu)) == (module is torch)
            monkeypatch.setattr(module, name, lambda *_: False)
        for other, inputs, reason in (
            (model, IMAGES, "it computes on cpu, and only CUDA has graphs"),
            (StubModel(), normal(4, 5), "its forward pass does not take samples"),
        ):
            with pytest.raises(ValueError, match=rf"capture=None or False .* got True: {reason}"):
                predict(other, inputs, samples=2, capture=True)


class TestFailures:
    def test_are_raised_after_deferred_checks_as_they_are_at_once(self, monkeypatch) -> None:
        model, broken = vision("cgp"), IMAGES.clone()
        broken[3] = torch.nan
        errors = []
        for deferred in (False, True):
            monkeypatch.setattr(running, "_defers_checks", lambda _, deferred=deferred: deferred)
            with pytest.raises(gp.NonFiniteError) as error:
                predict(model, broken, samples=2, batch_size=4)
            errors.append((str(error.value), error.value.__notes__))
        assert errors[0] == errors[1]
        assert sum(gp.health().values()) == 0

    def test_counts_of_other_calls_are_left_alone(self, monkeypatch) -> None:
        monkeypatch.setattr(running, "_defers_checks", lambda _: True)
        singular = -torch.eye(3, dtype=torch.float64)
        with gp.deferred_checks():
            cholesky(singular, name="theirs", noise=1.0)
        broken = IMAGES.clone()
        broken[0] = torch.inf
        with pytest.raises(gp.NumericalError):
            predict(vision("cgp"), broken, samples=2)
        with pytest.raises(gp.NotPositiveDefiniteError):
            gp.check_health()
        predict(vision("cgp"), IMAGES, samples=2)
        assert sum(gp.health().values()) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["softmax", *DRAWING])
def test_replays_on_a_gpu(kind: str) -> None:
    model = vision(kind, dtype=torch.float32).cuda()
    images = normal(67, 3, 8, 8, seed=1)
    plain = predict(model, images.cuda(), samples=4, batch_size=16, capture=False, variances=model.draws)
    found = predict(model, images.cuda(), samples=4, batch_size=16, capture=True, variances=model.draws)
    assert_close(found.logits, plain.logits, rtol=1e-5, atol=1e-5)
    with torch.autocast("cuda"), pytest.raises(ValueError, match="got True: autocast is on"):
        predict(model, images.cuda(), samples=4, capture=True)
    slow = predict(model.cpu(), images, samples=4)
    assert_close(found.logits.cpu(), slow.logits, rtol=1e-3, atol=1e-3)
    assert sum(gp.health().values()) == 0


X = torch.randn(4, 3, 8, 8)

NOT_INPUTS: list[Any] = [X.numpy(), (X, X), ["a b", "c"], "a b", DataLoader(TensorDataset(X)), None]


@pytest.mark.parametrize("inputs", NOT_INPUTS, ids=lambda x: type(x).__name__)
def test_other_inputs_are_refused(inputs: Any) -> None:
    model, handle = vision("cgp"), gpattention.attach(make("encoder").model)
    for call in (model.predict, handle.predict, handle.variances, handle.process_mean):
        with pytest.raises(ValueError, match=f"inputs to be a tensor .*, got {type(inputs).__name__}$"):
            call(inputs)


def test_fewer_are_tried_only_where_nobody_asked() -> None:
    tried, halves = [], [256, 128, 64, 32, 16, 8, 4, 2, 1]

    def run(rows: int) -> None:
        tried.append(rows)
        raise torch.OutOfMemoryError

    cases = [
        (None, "cuda", [2000, *halves]),
        (900, "cuda", [900]),
        (None, "cpu", halves),
        (None, "mps", halves),
    ]
    for batch_size, device, expected in cases:
        tried.clear()
        with pytest.raises(torch.OutOfMemoryError):
            run_rows(run, batch_size, torch.device(device))
        assert tried == expected


def test_fewer_rows_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that would take 5 rows and has memory for 2."""
    monkeypatch.setitem(running.ROWS, "cpu", 5)
    monkeypatch.setattr(running, "FEWER", 2)
    model, x, seen = StubModel(), normal(4, 5), []
    asked = {"samples": 3, "variances": True}
    whole, forward = predict(model, x, batch_size=100, **asked), model.forward

    def limited(x: torch.Tensor, **options: Any) -> Any:
        seen.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError
        return forward(x, **options)

    monkeypatch.setattr(model, "forward", limited)
    found = predict(model, x, **asked)
    assert seen == [5, *[2] * 6]
    assert_close(found.logits, whole.logits)
    assert_close(found.variances[1], whole.variances[1])
    with pytest.raises(torch.OutOfMemoryError):
        predict(model, x, batch_size=3, **asked)


def test_half_precision_is_summed_in_single_and_double_stays() -> None:
    for given, kept in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        means = VarianceMeans(1, 300, torch.device("cpu"))
        for _ in range(300):  # in bfloat16 the sum would stay at 256
            means.add(torch.tensor([0]), [torch.ones(1, 2, dtype=given)])
        assert means.means()[0].dtype == kept
        assert means.means()[0].tolist() == [[1.0, 1.0]]


SHORT, LONG = (sentences(6, 3, 5, to=length) for length in (6, 9))


@pytest.mark.parametrize("draw", ["independent", "joint"])
@pytest.mark.parametrize("kind", DRAWING)
def test_draws_do_not_depend_on_padding(kind: str, draw: str) -> None:
    short, long = (predict(text(kind), words, samples=4, draw=draw).logits for words in (SHORT, LONG))
    assert float(short.std(1).max()) > 1e-3  # they differ from draw to draw
    assert_close(long, short, **CLOSE)


@pytest.mark.parametrize("kind", ["softmax", *DRAWING])
def test_nor_do_dropout_masks(kind: str) -> None:
    predictor = MCDropout(text(kind), p=0.3, draw="none" if kind == "softmax" else "independent")
    means = predictor.predict(SHORT, samples=4, seed=1)
    assert float(means.logits.std(1).max()) > 1e-3
    assert_close(predictor.predict(LONG, samples=4, seed=1).logits, means.logits, **CLOSE)


MIXED = sentences(6, 0, 3, 9, 1, 5, to=9)


@pytest.mark.parametrize("batch_size", [3, 7, 24])
@pytest.mark.parametrize("kind", ["softmax", *DRAWING])
def test_chunks_of_texts_are_cut_to_their_longest(monkeypatch, kind: str, batch_size: int) -> None:
    model, seen = text(kind), set()
    drawn = {"samples": 4, "seed": 3, "first_item": 2, "batch_size": batch_size}
    variances = kind != "softmax"

    def all_ways() -> list[torch.Tensor]:
        found = predict(model, MIXED, variances=variances, **drawn)
        masks = MCDropout(model, p=0.3).predict({"tokens": MIXED}, **drawn)
        return [found.logits, masks.logits, *(found.variances or ())]

    expected = all_ways()  # nothing is cut to 64
    monkeypatch.setattr(running, "LENGTHS", 4)
    model.words.register_forward_hook(lambda *given: seen.add(given[2].shape[1]))
    for own, whole in zip(all_ways(), expected, strict=True):
        assert_close(own, whole, **CLOSE)
    assert (len(seen) > 1) == (batch_size < 24)  # all at once have the longest one's length
    assert max(seen) == 9


def test_texts_of_one_length_are_not_cut(monkeypatch) -> None:
    monkeypatch.setattr(running, "LENGTHS", 4)
    model = text(layer("kep-svgp", merge="cat"))
    assert model.text_lengths(MIXED) is None
    assert predict(model, MIXED, samples=2).logits.shape[:2] == (2, 6)


def test_replays_of_texts_are_of_one_length(monkeypatch) -> None:
    monkeypatch.setattr(running, "LENGTHS", 4)
    model, words = text("cgp"), sentences(*[9] * 6, *[3] * 6, to=9)
    plain = predict(model, words, samples=3, batch_size=6)
    tapes = stand_in(monkeypatch)
    monkeypatch.setattr(running, "why_not_captured", lambda *_: None)
    replayed = predict(model, words, samples=3, batch_size=6, capture=True)
    assert tapes
    assert_close(replayed.logits, plain.logits, **CLOSE)
