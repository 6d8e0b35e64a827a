"""Predictions of several threads: the bits of one thread, and a host that is as before."""

import asyncio
import copy
import io
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention.adopt.convert_layer import converted_layers
from gpattention.adopt.reading import call_model
from tests.adopt import hosts
from tests.adopt.hosts import CLASSES, ITEMS, TOKENS, Host
from tests.adopt.test_convert_hosts import Inside
from tests.threads import TIMEOUT, Pause, at_once, paused, state_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Fused(nn.Module):
    """`nn.TransformerEncoder` as PyTorch makes it: with its fast path, and tensors nested."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


class Alone(nn.Module):
    """`nn.MultiheadAttention` without a layer around it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.attention(x, x, x, key_padding_mask=padding)[0][:, 0])


def make(name: str) -> Host:
    if name not in ("fused encoder", "attention alone"):
        return hosts.make(name)
    padding = torch.arange(TOKENS) >= torch.tensor([7, 5, 7, 3, 4])[:, None]
    torch.manual_seed(0)
    model = Fused() if name == "fused encoder" else Alone()
    return Host(model, {"x": torch.randn(ITEMS, TOKENS, 16), "padding": padding}, 2)


HOSTS = ["fused encoder", "attention alone", "bert", "bert eager", "vit", "timm", "own softmax", "own kernel"]
FEW = ["fused encoder", "bert", "timm"]


def some(inputs: Any, first: int) -> Any:
    """Other items, in another number, for every call."""
    if isinstance(inputs, Tensor):
        return inputs[first % 3 :]
    return {name: x[first % 3 :] for name, x in inputs.items()}


def jobs(predict: Callable[..., Any], host: Host, count: int) -> list[Callable[[], Tensor]]:
    """Calls that differ in items, seeds and samples; every fifth is the mean."""

    def job(i: int) -> Callable[[], Tensor]:
        inputs = some(host.inputs, i)
        return lambda: predict(inputs, samples=i % 5 and 1 + i % 4, seed=i, batch_size=4).logits

    return [job(i) for i in range(count)]


def in_turn(calls: list[Callable[[], Any]]) -> Callable[[], list[Any]]:
    return lambda: [call() for call in calls]


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return len(found) == len(expected) and all(map(same, found, expected))


def check_threads(predict: Callable[..., Any], host: Host, threads: int, calls: int = 6) -> None:
    work = [in_turn(jobs(predict, host, calls + t)[t:]) for t in range(threads)]
    expected = [each() for each in work]
    before = state_of(host.model)
    found = at_once(work)
    assert [same(f, e) for f, e in zip(found, expected, strict=True)] == [True] * threads
    assert state_of(host.model) == before


@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize("name", HOSTS)
def test_one_handle(name: str, threads: int, training: bool) -> None:
    host = make(name)
    host.model.train(training)
    check_threads(gpattention.attach(host.model).predict, host, threads, calls=12 if threads == 2 else 3)


@pytest.mark.parametrize("name", FEW)
def test_two_handles_of_one_model(name: str) -> None:
    host = make(name)
    first, second = gpattention.attach(host.model), gpattention.attach(host.model.eval())
    second.settings = replace(second.settings, scale=2 * second.settings.scale)
    work = [
        in_turn(jobs(first.predict, host, 6)),
        in_turn(jobs(second.predict, host, 6)),
        in_turn([lambda: first.variances(host.inputs)] * 4),
        in_turn([lambda: second.process_mean(host.inputs)] * 4),
    ]
    expected, before = [each() for each in work], state_of(host.model)
    assert not same(expected[0], expected[1])
    assert same(at_once(work), expected)
    assert state_of(host.model) == before


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
        found = []
        for _ in range(3):
            with gpattention.attach(host.model) as handle:
                assert len(handle.sites) == host.sites
                found.append(handle.predict(host.inputs, 2, seed).logits)
        return found

    before = state_of(host.model)
    expected = [serve(seed) for seed in range(4)]
    assert same(at_once([lambda seed=seed: serve(seed) for seed in range(4)]), expected)
    assert state_of(host.model) == before


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
    with paused(*begun(handle, host)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                fine = state_of(host.model) == before
                fine = fine and torch.equal(handle.predict(host.inputs, 2, seed=1).logits, expected)
                code = 0 if fine and state_of(host.model) == before else 2
            finally:
                os._exit(code)
        assert exit_code(child) == 0
    assert state_of(host.model) == before


def exit_code(child: int) -> int:
    """Of a process that is killed if it hangs."""
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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


def direct(host: Host, inputs: Any) -> Tensor:
    with torch.no_grad():
        output = host.call(host.model, inputs)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("name", HOSTS)
def test_the_host_itself_keeps_its_bits(name: str) -> None:
    """Called by one thread while another predicts, with PyTorch's fast path where that runs."""
    host = make(name)
    host.model.eval()
    handle = gpattention.attach(host.model)
    bare = in_turn([lambda i=i: direct(host, some(host.inputs, i)) for i in range(40)])
    drawn = in_turn(jobs(handle.predict, host, 12))
    expected, before = [bare(), drawn()], state_of(host.model)
    assert same(at_once([bare, drawn]), expected)
    assert state_of(host.model) == before
    handle = gpattention.attach(host.model, call=pausing_call)
    with paused(*begun(handle, host)):
        assert same(bare(), expected[0])


def test_the_fast_path_has_bits_of_its_own() -> None:
    """Else nothing is shown above."""
    host = make("fused encoder")
    host.model.eval()
    fast = direct(host, host.inputs)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert not torch.equal(direct(host, host.inputs), fast)
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
    torch.testing.assert_close(
        handle.process_mean(host.inputs), direct(host, host.inputs), rtol=1e-4, atol=1e-5
    )
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

    drawn = in_turn(jobs(gpattention.attach(host.model).predict, host, 10))
    expected, before = [fit(), drawn()], state_of(host.model)
    assert same(at_once([fit, drawn]), expected)
    assert state_of(host.model) == before


def converted(name: str, kind: str) -> tuple[Host, Callable[..., Any]]:
    if name == "our attention inside":
        torch.manual_seed(0)
        host = Host(Inside(), torch.randn(ITEMS, TOKENS, 8), 1)
    else:
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
    host, predict = converted(name, kind)
    check_threads(predict, host, threads, calls=8 if threads == 2 else 2)


@pytest.mark.parametrize(("name", "kind"), CONVERTED)
def test_a_converted_model_itself_keeps_its_bits(name: str, kind: str) -> None:
    host, predict = converted(name, kind)
    host.model.eval()
    bare = in_turn([lambda i=i: direct(host, some(host.inputs, i)) for i in range(20)])
    drawn = in_turn(jobs(predict, host, 6))
    expected = [bare(), bare(), drawn()]
    before = state_of(host.model)
    assert same(at_once([bare, bare, drawn]), expected)
    assert state_of(host.model) == before


@pytest.mark.parametrize(("name", "kind"), CONVERTED)
def test_a_prediction_is_no_pass_to_be_remembered(name: str, kind: str) -> None:
    """Of training: what a pass told is there after a prediction, of this thread or another."""
    host, predict = converted(name, kind)
    if name == "our attention inside":
        return  # it tells its regulariser where it is called
    own = name == "own softmax"
    host.model.train()
    need = {"need": ("logits", "regularizer")} if own else {}
    host.call(host.model, host.inputs) if not own else host.model(host.inputs, **need)
    value = gpattention.regularizer(host.model)
    predict(host.inputs, samples=2)
    at_once([lambda: predict(host.inputs, samples=2)])
    assert torch.equal(gpattention.regularizer(host.model), value)


def test_variances_are_those_of_the_call() -> None:
    host, predict = converted("bert", "cgp")
    calls = [lambda i=i: predict(some(host.inputs, i), samples=2, variances=True).variances for i in range(4)]
    expected = in_turn(calls * 3)()
    assert same(at_once([in_turn(calls * 3), in_turn(calls * 3)]), [expected, expected])


class Reused(nn.Module):
    """One attention that a part of the model runs twice."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = x + self.attention(x, x, x, need_weights=False)[0]
            return x

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = Reused.Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def test_a_part_called_alone_is_a_pass_of_its_own() -> None:
    """Layers remember one pass: what they told before is over, graph and all."""
    model = gpattention.convert(Reused(), "direct", draw="none").train()
    x = torch.randn(2, 3, 8)
    model(x)
    whole = gpattention.regularizer(model)
    for _ in range(5):
        model.part(x)
        assert len(converted_layers(model)[0].regularizers) == 2
        assert torch.equal(gpattention.regularizer(model), whole)
    for _ in range(5):
        model.part.attention(x, x, x, need_weights=False)
        assert len(converted_layers(model)[0].regularizers) == 1
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model.part(torch.randn(2, 3, 7, 1))
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
