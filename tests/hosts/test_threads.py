"""Predictions of several threads: the bits of one thread, and a host that is as before."""

import asyncio
import copy
import io
import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention.hosts.predict import call_model
from gpattention.models.converted import converted_layers
from tests.hosts import hosts
from tests.hosts.hosts import CLASSES, ITEMS, REAL, TOKENS, Encoder, Host, logits, some
from tests.hosts.test_convert import Inside
from tests.hosts.test_layers import Shared
from tests.threads import TIMEOUT, Pause, at_once, paused, state_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Alone(nn.Module):
    """`nn.MultiheadAttention` without a layer around it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.attention(x, x, x, key_padding_mask=padding)[0][:, 0])


def make(name: str) -> Host:
    kinds: dict[str, Callable[[], nn.Module]] = {
        # as PyTorch makes it: with its fast path, and tensors nested
        "fused encoder": partial(Encoder, nested=True),
        "attention alone": Alone,
        "our attention inside": Inside,
    }
    if name not in kinds:
        return hosts.make(name)
    torch.manual_seed(0)
    model = kinds[name]()
    if name == "our attention inside":
        return Host(model, torch.randn(ITEMS, TOKENS, 8), 1)
    return Host(model, {"x": torch.randn(ITEMS, TOKENS, 16), "padding": ~REAL}, 2)


HOSTS = ["fused encoder", "attention alone", "bert", "bert eager", "vit", "timm", "own softmax", "own kernel"]
FEW = ["fused encoder", "bert", "timm"]


def others(host: Host, i: int) -> Any:
    """Other items, in another number, for every call."""
    return some(host.inputs, slice(i % 3, None))


def jobs(predict: Callable[..., Any], host: Host, count: int) -> list[Callable[[], Tensor]]:
    """Calls that differ in items, seeds and samples; every fifth is the mean."""

    def job(i: int) -> Callable[[], Tensor]:
        inputs = others(host, i)
        return lambda: predict(inputs, samples=i % 5 and 1 + i % 4, seed=i, batch_size=4).logits

    return [job(i) for i in range(count)]


def in_turn(calls: list[Callable[[], Any]]) -> Callable[[], list[Any]]:
    return lambda: [call() for call in calls]


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return len(found) == len(expected) and all(map(same, found, expected))


def check_at_once(host: Host, *work: Callable[[], Any]) -> list[Any]:
    """Threads find what one thread finds, and leave the model as it was; returns that."""
    expected, before = [each() for each in work], state_of(host.model)
    found = at_once(list(work))
    assert [same(f, e) for f, e in zip(found, expected, strict=True)] == [True] * len(work)
    assert state_of(host.model) == before
    return expected


def check_threads(predict: Callable[..., Any], host: Host, threads: int, calls: int = 6) -> None:
    check_at_once(host, *(in_turn(jobs(predict, host, calls + t)[t:]) for t in range(threads)))


@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize("name", HOSTS)
def test_one_handle(name: str, threads: int, training: bool) -> None:
    host = make(name)
    host.model.train(training)
    check_threads(gpattention.attach(host.model).predict, host, threads, calls=12 if threads == 2 else 3)


def test_settings_changed_in_the_middle_of_a_call_are_those_of_the_next() -> None:
    host = make("timm")
    handle = gpattention.attach(host.model, call=pausing_call)
    first = handle.predict(host.inputs, 2, seed=1).logits
    with paused(*begun(handle, host)) as results:
        handle.settings = replace(handle.settings, temperature=3.0, scale=2 * handle.settings.scale)
    assert torch.equal(results[0], first)
    assert not torch.equal(handle.predict(host.inputs, 2, seed=1).logits, first)


@pytest.mark.parametrize("name", FEW)
def test_a_handle_for_every_thread(name: str) -> None:
    """Also attached there, while others predict: their handles are no forward of the host's own."""
    host = make(name)
    host.model.eval()

    def serve(seed: int) -> list[Tensor]:
        found: list[Tensor] = []
        for _ in range(3):
            with gpattention.attach(host.model) as handle:
                assert len(handle.sites) == host.sites
                handle.settings = replace(handle.settings, scale=(1 + seed) * handle.settings.scale)
                found += [handle.predict(host.inputs, 2, seed=1).logits, *handle.variances(host.inputs)]
                seen = handle.signals(host.inputs)
                found += [handle.process_mean(host.inputs), seen.logits, seen.features, seen.variance]
        return found

    served = check_at_once(host, *(lambda seed=seed: serve(seed) for seed in range(4)))
    assert not same(served[0], served[1])


@pytest.mark.parametrize("name", FEW)
def test_asyncio(name: str) -> None:
    """`to_thread` copies the context of the caller, an executor gives none."""
    host = make(name)
    work = jobs(gpattention.attach(host.model).predict, host, 8)
    expected, before = in_turn(work)(), state_of(host.model)

    async def serve() -> tuple[list[Tensor], list[Tensor]]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(3) as pool:
            threads = asyncio.gather(*(asyncio.to_thread(call) for call in work))
            executors = asyncio.gather(*(loop.run_in_executor(pool, call) for call in work))
            return await threads, await executors

    found = asyncio.run(serve())
    assert same(found, (expected, expected))
    assert state_of(host.model) == before


PAUSES: list[Pause] = []


def pausing_call(model: nn.Module, inputs: Any) -> Any:
    """Waits inside a call of the thread that is to be paused, where the host is patched."""
    output = call_model(model, inputs)
    if threading.current_thread() is not threading.main_thread() and PAUSES:
        PAUSES.pop()()
    return output


def begun(handle: Any, host: Host) -> tuple[Callable[[], Tensor], Pause]:
    pause = Pause()
    PAUSES.append(pause)
    return lambda: handle.predict(host.inputs, 2, seed=1).logits, pause


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", HOSTS)
def test_copies_of_a_handle_and_its_model(name: str, copied: Callable[[Any], Any]) -> None:
    """Made in the middle of a call they hold nothing of it, and are independent."""
    host = make(name)
    host.model.train()
    handle = gpattention.attach(host.model, call=pausing_call)
    expected = handle.predict(host.inputs, 3, seed=5).logits
    before = state_of(host.model)
    with paused(*begun(handle, host)) as results:
        other, model = copied(handle), copied(host.model)
    assert same(results[0], handle.predict(host.inputs, 2, seed=1).logits)
    for made in (other.model, model):
        assert made is not host.model
        for path, module in made.named_modules():
            assert vars(module).keys() == before["modules"][path].keys(), path
            assert module.training, path
    assert other.model is not model
    assert torch.equal(other.predict(host.inputs, 3, seed=5).logits, expected)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    assert torch.equal(handle.predict(host.inputs, 3, seed=5).logits, expected)
    assert state_of(host.model) == before


@pytest.mark.parametrize("name", ["bert", "bert eager", "vit"])
def test_what_is_saved_in_the_middle_of_a_call_needs_no_library(name: str, tmp_path: Path) -> None:
    host = make(name)
    handle = gpattention.attach(host.model.eval(), call=pausing_call)
    host.model.save_pretrained(tmp_path / "before")
    with paused(*begun(handle, host)):
        host.model.save_pretrained(tmp_path / "meanwhile")
        assert host.model.config._attn_implementation == ("eager" if name == "bert eager" else "sdpa")
        torch.save(host.model, file := io.BytesIO())
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("before", "meanwhile")]
    assert configs[0] == configs[1]
    assert b"gpattention" not in file.getvalue()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize("name", FEW)
def test_a_fork_in_the_middle_of_a_call(name: str) -> None:
    """The child has none of the threads that would have put things back, and none of their locks."""
    host = make(name)
    host.model.train()
    handle = gpattention.attach(host.model, call=pausing_call)
    expected, before = handle.predict(host.inputs, 2, seed=1).logits, state_of(host.model)

    def child() -> None:
        torch.set_num_threads(1)
        assert state_of(host.model) == before
        assert torch.equal(handle.predict(host.inputs, 2, seed=1).logits, expected)
        assert state_of(host.model) == before

    with paused(*begun(handle, host)):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(TIMEOUT)
        process.kill()  # one that hangs
        assert process.exitcode == 0
    assert state_of(host.model) == before


@pytest.mark.parametrize("name", FEW)
def test_a_call_that_raises(name: str) -> None:
    """In one thread; the others go on."""
    host = make(name)
    handle = gpattention.attach(host.model)
    own = jobs(handle.predict, host, 8)
    expected = in_turn(own)()
    broken = threading.local()

    def raise_here(*_: Any) -> None:
        if getattr(broken, "here", False):
            raise RuntimeError("broken")

    handle.sites[1].module.register_forward_pre_hook(raise_here)
    before = state_of(host.model)

    def fail() -> None:
        broken.here = True
        for _ in range(12):
            with pytest.raises(RuntimeError, match="broken"):
                handle.predict(host.inputs, 2)

    found = at_once([in_turn(own), fail, in_turn(own)])
    assert same([found[0], found[2]], [expected, expected])
    assert state_of(host.model) == before


def bare(host: Host, calls: int) -> Callable[[], list[Tensor]]:
    """Calls of the host itself."""
    return torch.no_grad()(in_turn([lambda i=i: logits(host, others(host, i)) for i in range(calls)]))


@pytest.mark.parametrize("name", HOSTS)
def test_the_host_itself_keeps_its_bits(name: str) -> None:
    """Called by one thread while another predicts, with PyTorch's fast path where that runs."""
    host = make(name)
    handle = gpattention.attach(host.model.eval())
    plain = bare(host, 40)
    expected = check_at_once(host, plain, in_turn(jobs(handle.predict, host, 12)))
    handle = gpattention.attach(host.model, call=pausing_call)
    with paused(*begun(handle, host)):
        assert same(plain(), expected[0])
    if name == "fused encoder":  # whose fast path has bits of its own, else nothing is shown
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert not same(plain(), expected[0])
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


class Inherited(nn.TransformerEncoderLayer):
    """A forward of its own that calls PyTorch's."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_layers_that_call_the_forward_they_inherit() -> None:
    torch.manual_seed(0)
    layer = Inherited(16, 2, 32, batch_first=True)
    host = Host(nn.Sequential(layer, nn.Flatten(1)).eval(), torch.randn(ITEMS, 4, 16), 1)
    handle = gpattention.attach(host.model)
    torch.testing.assert_close(handle.process_mean(host.inputs), bare(host, 1)()[0], rtol=1e-4, atol=1e-5)
    check_threads(handle.predict, host, 2)


@pytest.mark.parametrize("name", FEW)
def test_a_fit_beside_predictions(name: str) -> None:
    host = make(name)
    labels = torch.arange(ITEMS) % CLASSES
    options = {"steps": 2, "samples": 2, "levels": ("global",), "select": False}

    def fit() -> list[Tensor]:
        handle = gpattention.attach(host.model)
        handle.fit(host.inputs, labels, **options)
        return [handle.settings.scale, handle.settings.noise, torch.tensor(handle.settings.temperature)]

    check_at_once(host, fit, in_turn(jobs(gpattention.attach(host.model).predict, host, 10)))


def converted(name: str, kind: str) -> tuple[Host, Callable[..., Any]]:
    host = make(name)
    model = gpattention.convert(host.model, kind)
    return host, lambda inputs, **options: gpattention.predict(model, inputs, **options)


CONVERTED = [
    ("fused encoder", "cgp"), ("bert", "cgp"), ("bert eager", "direct"), ("vit", "softmax-gp"),
    ("timm", "direct"), ("own softmax", "cgp"), ("our attention inside", "cgp"),
]  # fmt: skip


@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize(("name", "kind"), CONVERTED)
def test_converted_models(name: str, kind: str, threads: int) -> None:
    """Predictions, variances of their own call, and the model itself."""
    host, predict = converted(name, kind)
    host.model.eval()
    calls = [lambda i=i: predict(others(host, i), samples=2, variances=True).variances for i in range(2)]
    work = [in_turn(jobs(predict, host, 3 + t)[t:]) for t in range(threads)]
    check_at_once(host, *work, in_turn(calls), in_turn(calls), bare(host, 20), bare(host, 20))


# the last gives its regulariser where it is called
@pytest.mark.parametrize(("name", "kind"), CONVERTED[:-1])
def test_a_prediction_is_no_pass_to_be_remembered(name: str, kind: str) -> None:
    """What a pass of training left is there after a prediction, of this thread or another."""
    host, predict = converted(name, kind)
    host.model.train()
    if name == "own softmax":
        host.model(host.inputs, need=("logits", "regularizer"))
    else:
        logits(host)
    value = gpattention.regularizer(host.model)
    predict(host.inputs, samples=2)
    at_once([lambda: predict(host.inputs, samples=2)])
    assert torch.equal(gpattention.regularizer(host.model), value)


def test_a_part_called_alone_is_a_pass_of_its_own() -> None:
    """Layers remember one pass: what they kept before is over, graph and all."""
    torch.manual_seed(0)
    model = gpattention.convert(nn.Sequential(Shared()), "direct", draw="none").train()
    (part,), x = model, torch.randn(2, 3, 8)
    model(x)
    whole = gpattention.regularizer(model)
    for _ in range(5):
        part(x)
        assert len(converted_layers(model)[0].regularizers) == 2
        assert torch.equal(gpattention.regularizer(model), whole)
    for _ in range(5):
        part.attention(x, x, x, need_weights=False)
        assert len(converted_layers(model)[0].regularizers) == 1
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        part(torch.randn(2, 3, 7, 1))
    model(x)
    assert torch.equal(gpattention.regularizer(model), whole)


def test_a_compiled_model_draws_as_its_module() -> None:
    host, predict = converted("timm", "direct")
    fast = torch.compile(host.model, fullgraph=True, backend="eager")
    found = gpattention.predict(fast, host.inputs, samples=2).logits
    assert torch.equal(found, predict(host.inputs, samples=2).logits)
    host = make("timm")
    expected = gpattention.attach(host.model).predict(host.inputs, samples=2).logits
    fast = torch.compile(host.model, fullgraph=True, backend="eager")
    assert torch.equal(gpattention.attach(fast).predict(host.inputs, samples=2).logits, expected)
