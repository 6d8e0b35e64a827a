"""`graphed`: a call as a CUDA graph, or why it is none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention
from gpattention import gp, graphs
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_without_a_gpu_calls_are_eager_and_say_so() -> None:
    calls = []

    def double(x: Tensor) -> Tensor:
        calls.append(x)
        return 2 * x

    step = gpattention.graphed(double, torch.ones(3))
    assert not step.captured
    assert step.reason == "its example lies on cpu, and only CUDA has graphs"
    for size in (3, 4):
        assert torch.equal(step(torch.ones(size)), torch.full((size,), 2.0))
    assert len(calls) == 2
    assert not step.captured
    assert "no tensor" in str(gpattention.graphed(double).reason)


class FakeGraph:
    """Replays by calling what was captured."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.call()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Graphs that were made, on a machine that takes its CPU for a GPU."""
    made: list[FakeGraph] = []

    def capture(call: Any, *, error_mode: str) -> tuple[FakeGraph, Any]:
        found = call()
        made.append(FakeGraph(lambda: found.copy_(call())))
        return made[-1], found

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "why_no_graph", lambda device: None)
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    return made


def on_fake_gpu(fn: Any, *example: Any) -> Any:
    step = gpattention.graphed(fn, *example)
    step._refusal = None
    return step


def test_replays_read_new_arguments_and_give_tensors_of_their_own(captures: list[FakeGraph]) -> None:
    step = on_fake_gpu(lambda batch, factor: batch["x"] * factor, {"x": torch.zeros(2)}, 3)
    first, second = (step({"x": torch.full((2,), value)}, 3) for value in (1.0, 2.0))
    assert step.captured
    assert step.reason is None
    assert [first.tolist(), second.tolist()] == [[3.0, 3.0], [6.0, 6.0]]
    assert captures[0].replays == 2


def test_other_arguments_and_settings_run_eagerly(captures: list[FakeGraph]) -> None:
    module = nn.Linear(2, 2)
    step = on_fake_gpu(module, torch.zeros(3, 2))
    step(torch.ones(3, 2))
    cases: list[tuple[str, Any]] = [
        ("((4, 2)", lambda: step(torch.ones(4, 2))),
        ("float64", lambda: step.__call__(torch.ones(3, 2, dtype=torch.float64).float().double())),
        ("keywords", lambda: step(input=torch.ones(3, 2))),
    ]
    for reason, call in cases:
        try:
            call()
        except RuntimeError:  # nn.Linear's own, of another type
            assert reason == "float64"
        assert reason in str(step.reason)
    module.eval()
    step(torch.ones(3, 2))
    assert "mode of the module" in str(step.reason)
    module.train()
    with torch.no_grad():
        step(torch.ones(3, 2))
    assert "gradients" in str(step.reason)
    step(torch.ones(3, 2))
    assert step.reason is None
    assert captures[0].replays == 2


def test_what_cannot_be_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(call: Any, *, error_mode: str) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "why_no_graph", lambda device: None)
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    step = on_fake_gpu(lambda x: x + 1, torch.zeros(1))
    assert step(torch.ones(1)).item() == 2
    assert not step.captured
    assert step.reason == "it cannot be captured: operation not permitted when stream is capturing"


def trained(kind: str, steps: int, *, graph: bool, autocast: bool = False) -> tuple[list[float], Any]:
    """Losses of a user's own loop on a GPU, and its step."""
    torch.manual_seed(0)
    config = VisionConfig(
        depth=2, width=32, heads=2, image_size=16, dropout=0.0, attention=AttentionConfig(kind)
    )
    model = VisionTransformer(config).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(images, need=("logits", "regularizer"))
        loss = nn.functional.cross_entropy(out.logits.float(), labels) + 0.01 * out.regularizer
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 3, 16, 16, generator=data), torch.arange(4)) for _ in range(steps)]
    call: Any = gpattention.graphed(step, *(x.cuda() for x in batches[0])) if graph else step
    losses = []
    for images, labels in batches:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            losses.append(float(call(images.cuda(), labels.cuda())))
    gp.check_health()
    return losses, call


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "kernel", "direct", "cgp", "scgp", "sgpa"])
def test_a_graphed_loop_learns_as_the_eager_one(kind: str, autocast: bool) -> None:
    eager, _ = trained(kind, 8, graph=False, autocast=autocast)
    graphed, step = trained(kind, 8, graph=True, autocast=autocast)
    assert step.captured
    assert step.reason is None
    assert graphed == pytest.approx(eager, rel=2e-2 if autocast else 1e-3)


@pytest.mark.gpu
@CUDA
def test_a_graphed_prediction_is_the_eager_one_and_other_shapes_run() -> None:
    model = VisionTransformer(VisionConfig(depth=1, width=32, heads=2, image_size=16)).cuda().eval()
    images = torch.randn(6, 3, 16, 16, device="cuda")
    with torch.no_grad():
        fast = gpattention.graphed(lambda x: model(x).logits, images)
        for _ in range(5):
            found = fast(images)
        assert fast.captured
        assert torch.allclose(found, model(images).logits, atol=1e-5)
        assert fast(images[:2]).shape == (2, 10)
        assert "not like those of the example" in str(fast.reason)


@pytest.mark.gpu
@CUDA
def test_a_step_that_waits_for_the_gpu_says_why_it_is_not_captured() -> None:
    step = gpattention.graphed(lambda x: x * float(x.sum()), torch.ones(2, device="cuda"))
    for _ in range(5):
        assert step(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    assert not step.captured
    assert "cannot be captured" in str(step.reason)
