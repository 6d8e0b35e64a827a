"""Launch tapes: the bits of the calls they were noted from, for every operator, and calls that have none."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpattention import gp, graphed
from gpattention.attention import build_attention
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from gpattention.ops import attention, draws, exact, launching, layers, sgpa, sparse, tapes
from gpattention.ops.operators import Fused
from gpattention.ops.tapes import Tape, Taped
from tests.gp.samples import sample
from tests.ops.comparison import without_tapes
from tests.ops.test_launching import Kernel

pytest.importorskip("triton")

ALL = [
    value for op in (attention, draws, exact, layers, sgpa, sparse) for value in vars(op).values()
    if isinstance(value, Fused)
]  # fmt: skip
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted on a CPU alone")


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tape]]:
    """The tapes that ran, of which there are none at first."""
    found: list[Tape] = []
    written = tapes._Writer.tape

    def noted(self: Any) -> Tape:
        tape = written(self)

        def play(*args: Any) -> Any:
            found.append(tape)
            return tape.play(*args)

        return tape._replace(play=play)

    monkeypatch.setattr(tapes._Writer, "tape", noted)
    tapes.forget_tapes()
    with gp.fused_kernels("on"), gp.deferred_checks():
        yield found
    tapes.forget_tapes()  # they are noted here


def reasons() -> set[str]:
    return {reason for fused in ALL for taped in fused.taped for reason in taped.reasons.values()}


def by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on eager calls take the way of compiled ones."""

    def call(self: Fused, *args: Any) -> Any:
        made = self._named(self._operator(*args[: self._count]))
        return tuple(made[name] for name in self.outputs)

    monkeypatch.setattr(Fused, "__call__", call)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# every one asks for outputs and gradients of something for other numbers of the same kind


def of_attention(kind: str, padded: bool, seed: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = build_attention(kind, embed_dim=8, num_heads=2, **options)
    x = numbers(2, 5, 8, seed=seed).requires_grad_()
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]) if padded else None
    draw = "independent" if module.draws else "none"
    torch.manual_seed(1)
    found = module(x, key_padding_mask=mask, need=("output", "regularizer"), draw=draw)
    loss = found.output.square().sum()
    loss = loss if found.regularizer is None else loss + found.regularizer
    asked = [x, *(p for p in module.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(loss, asked, allow_unused=True, materialize_grads=True)
    return [found.output.detach(), *gradients]


def of_posterior(
    make: Callable[..., Any], seed: int, *, density: bool = True, **options: Any
) -> list[Tensor]:
    """With queries of their own, amplitudes and masks, and numbers that belong to items."""
    s = sample(2, 2, queries=4, keys=5, dtype=torch.float32)
    leaves = [(getattr(s, name) + 0.1 * seed).requires_grad_() for name in ("q", "k", "o", "v")]
    if make is gp.direct_posterior:
        leaves = [leaves[0], leaves[1], leaves[3]]
    log_amplitude = numbers(2, 2, 4, seed=seed).requires_grad_()
    noise = torch.tensor([0.1, 0.2]).requires_grad_()
    mask = torch.arange(5) < torch.tensor([[[5]], [[3]]])
    query_mask = torch.arange(4) < torch.tensor([[[4]], [[2]]])
    mask, query_mask = mask.expand(2, 2, 5), query_mask.expand(2, 2, 4)
    posterior = make(
        *leaves, noise=noise, log_amplitude=log_amplitude, mask=mask, query_mask=query_mask,
        with_variance=True, **options,
    )  # fmt: skip
    items = torch.arange(2)
    draw = posterior.sample(generator=gp.ItemNoise(seed, items, items))
    loss = draw.square().sum()
    if density:
        loss = loss + posterior.log_density().total.sum()
    leaves += [log_amplitude, noise]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [draw.detach(), posterior.mean.detach(), posterior.variance.detach(), *gradients]


def of_residual(seed: int) -> list[Tensor]:
    """Two kinds of sums and norms, of which one is given back as it is."""
    x, z = numbers(2, 3, 8, seed=seed).requires_grad_(), numbers(2, 3, 8, seed=seed + 9).requires_grad_()
    weight, shift, bias = (numbers(8, seed=i).requires_grad_() for i in range(3))
    key = torch.tensor(seed)
    y, n = layers.residual_norm(x, layers.Added(z, bias, 0.5, 1), weight, shift, 1e-5, key)
    alone, m = layers.residual_norm(y, None, weight, shift, 1e-5, None)
    leaves = [x, z, bias, weight, shift]
    loss = n.square().sum() + m.sum() + alone.sum()
    return [y.detach(), n.detach(), m.detach(), *torch.autograd.grad(loss, leaves)]


KINDS: dict[str, dict[str, Any]] = {
    "softmax": {}, "kernel": {}, "direct": {}, "cgp": {}, "scgp": {"num_inducing": 3},
    "sgpa": {"num_inducing": 3},
}  # fmt: skip


def of_gelu(seed: int) -> list[Tensor]:
    """With products of torch's, and what gathers gradients."""
    h, weight, bias = numbers(2, 3, 8, seed=seed), numbers(4, 8, seed=seed + 1), numbers(8, seed=seed + 2)
    leaves = [x.requires_grad_() for x in (h, weight, bias)]
    z = layers.gelu_linear(h, bias, weight, 0.5, torch.tensor(seed), 2)
    gradients = torch.autograd.grad(z.square().sum(), leaves)
    gathered = layers.gather_and_sum([numbers(6, 4, seed=seed), numbers(4, 6, seed=seed).mT])
    return [z.detach(), *gradients, *gathered]


CALLS: dict[str, Callable[[int], list[Tensor]]] = {
    **{name: partial(of_attention, name, False, **options) for name, options in KINDS.items()},
    **{f"{name}-padded": partial(of_attention, name, True, **options) for name, options in KINDS.items()},
    "cgp-exact": partial(of_attention, "cgp", False, normalize="none", regularizer="marginal"),
    "scgp-dtc": partial(
        of_attention, "scgp", False, normalize="none", regularizer="dtc", num_inducing=3
    ),
    "cgp-posterior": partial(of_posterior, gp.cgp_posterior, with_cost="marginal"),
    "direct-posterior": partial(of_posterior, gp.direct_posterior, with_cost="marginal"),
    "cgp-mean-alone": partial(of_posterior, gp.cgp_posterior, density=False),
    "residual": of_residual,
    "gelu": of_gelu,
}  # fmt: skip


def untaped(call: Callable[[int], list[Tensor]], seed: int) -> list[Tensor]:
    with without_tapes():
        return call(seed)


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@interpreted
@pytest.mark.parametrize("way", ["operators", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_same_bits_with_and_without(
    name: str, way: str, played: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "operators":
        by_operators(monkeypatch)
    call = CALLS[name]
    call(0)
    assert not played  # many kinds of calls come once
    found = call(1)
    ran = len(played)
    assert ran >= 2  # forward and backward
    check_same(found, untaped(call, 1))
    assert len(played) == ran
    assert not reasons()


def triangle(lower: Tensor, raw: Tensor, floor: Any = 0.5) -> Tensor:
    return sgpa.fused_triangle(lower, raw, floor)


def kinds() -> int:
    return len(sgpa._TRIANGLE.taped[0].tapes)


def moved(x: Tensor, offset: int) -> Tensor:
    """The same numbers, that many numbers behind a boundary."""
    room = torch.empty(x.numel() + offset)
    return room[offset:].view(x.shape).copy_(x)


@interpreted
@pytest.mark.parametrize(
    "change",
    [
        lambda x, raw, floor: (x.mT.contiguous().mT, raw, floor),
        lambda x, raw, floor: (x[:1], raw[:1], floor),
        lambda x, raw, floor: (moved(x, 1), raw, floor),
        lambda x, raw, floor: (x.double(), raw.double(), floor),
        lambda x, raw, floor: (x, raw, 0.25),
        lambda x, raw, floor: (x, raw, 1),
    ],
)
def test_another_kind_of_call_is_another_tape(change: Callable[..., Any], played: list[Tape]) -> None:
    x, raw = numbers(2, 4, 4), numbers(2, 4)
    for _ in range(3):
        triangle(x, raw, 1.0)
    triangle(moved(x, 4), raw, 1.0)  # at a boundary again
    assert kinds() == 1
    assert len(played) == 3
    given = change(x, raw, 1.0)
    expected = untaped(lambda _: [triangle(*given)], 0)
    for _ in range(2):
        check_same([triangle(*given)], expected)
    assert kinds() == 2
    check_same([triangle(x, raw, 1.0)], untaped(lambda _: [triangle(x, raw, 1.0)], 0))


@interpreted
@pytest.mark.parametrize("shared", [True, False])
def test_arguments_may_share_memory_or_not(shared: bool, played: list[Tape]) -> None:
    """A tape knows nothing of where one argument lies beside another."""

    def call(shared: bool, seed: int) -> list[Tensor]:
        given = numbers(2, 3, 5, 2, 4, seed=seed).unbind(1)  # [B, N, H, C] each
        given = [x.transpose(1, 2) for x in given]
        if not shared:
            given = [torch.empty_strided(x.shape, x.stride()).copy_(x) for x in given]
        return [gp.kernel_attention(*given, normalised=True)]

    for seed in range(2):
        call(shared, seed)
    for seed in range(2, 4):
        check_same(call(not shared, seed), untaped(partial(call, shared), seed))
    assert len(played) == 3


@interpreted
def test_failures_of_a_tape_are_counted_once(played: list[Tape]) -> None:
    same = numbers(1, 1, 1, 3).expand(1, 1, 4, 3)
    for call in range(3):
        posterior = gp.cgp_posterior(same, same, same, same, noise=1e-12, with_variance=True)
        assert posterior.mean.isnan().all()
        assert gp.health()["cpu"] == 2
        with pytest.raises(gp.NotPositiveDefiniteError):
            gp.check_health()
        assert bool(played) == (call > 0)


@interpreted
def test_raised_failures_are_looked_for_without_tapes(played: list[Tape]) -> None:
    from gpattention.numerics import _Failing

    same = numbers(1, 1, 1, 3).expand(1, 1, 4, 3)
    with _Failing("raised"):
        for _ in range(3):
            with pytest.raises(gp.NotPositiveDefiniteError):
                gp.cgp_posterior(same, same, same, same, noise=1e-12, with_variance=True)
    assert not played
    assert reasons() == {"it calls aten.ne.Scalar"}


@interpreted
def test_results_are_new_tensors(played: list[Tape]) -> None:
    x, raw = numbers(2, 4, 4), numbers(2, 4)
    found = [triangle(x, raw) for _ in range(4)]
    assert len(played) == 3
    assert len({y.data_ptr() for y in found}) == 4
    found[0].zero_()
    check_same(found[1:2], found[2:3])


@interpreted
@pytest.mark.parametrize("hook", ["launch_enter_hook", "pre_run_hooks"])
def test_listeners_hear_every_launch(hook: str, played: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    x, raw = numbers(2, 4, 4), numbers(2, 4)
    for _ in range(2):
        triangle(x, raw)
    with monkeypatch.context() as patch:
        heard: list[object] = []

        def listener(*args: Any, **options: Any) -> None:
            heard.append(args)

        hooks = launching.imported_kernels("sgpa").triangle_kernel.pre_run_hooks
        if hook == "pre_run_hooks":
            hooks.append(listener)
        else:
            patch.setattr(launching._knobs(), hook, listener)
        triangle(x, raw)
        hooks.clear()
    assert bool(heard) == (hook == "pre_run_hooks")  # interpreted kernels know no other
    assert len(played) == 1
    triangle(x, raw)
    assert len(played) == 2


@interpreted
def test_tensors_without_values_have_no_tape(played: list[Tape]) -> None:
    x, raw = numbers(2, 4, 4), numbers(2, 4)
    for _ in range(2):
        triangle(x, raw)
    with FakeTensorMode() as mode:
        operator = torch.ops.gpattention.triangle.default
        (found,) = operator(mode.from_tensor(x), mode.from_tensor(raw), 0.5)
        assert found.shape == x.shape
    assert len(played) == 1


@interpreted
def test_there_are_only_so_many(played: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "MOST", 2)
    for n in (3, 4, 5, 6):
        for _ in range(2):
            x, raw = numbers(2, n, n), numbers(2, n)
            check_same([triangle(x, raw)], untaped(lambda _, x=x, raw=raw: [triangle(x, raw)], 0))
    assert kinds() == 2
    triangle(numbers(2, 3, 3), numbers(2, 3))
    assert len(played) == 3
    assert len(sgpa._TRIANGLE.taped[0]._met) <= 4 * tapes.MOST


class TestWriting:
    """Functions that allocate, take views and call torch, as the bodies of operators do."""

    @staticmethod
    def check(function: Callable[..., list[Any]], *args: Any) -> Tape | None:
        taped = Taped(function)
        for _ in range(3):
            for one, other in zip(taped(*args), function(*args), strict=True):
                assert (one is None) == (other is None)
                if other is not None:
                    assert torch.equal(one, other)
                    assert one.stride() == other.stride()
        return next(iter(taped.tapes.values()), None)

    def test_operations_of_torch(self) -> None:
        def function(x: Tensor, y: Tensor | None, n: int) -> list[Any]:
            some = torch.empty(2, *x.shape).zero_()
            first, second = some.unbind()
            first.copy_(x)
            return [some.sum((1, 2)).view(-1, 1), second, None, x, x.mT, (x - first)[:1], x.clone(), y]

        assert self.check(function, numbers(3, 4), None, 1) is not None
        assert self.check(function, numbers(4, 3).mT, numbers(3), 1) is not None
        assert self.check(function, numbers(0, 4), None, 1) is not None

    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (lambda x: [x.clone() if float(x[0, 0]) else x], "_local_scalar_dense"),
            (lambda x: [x.clone().normal_()], "normal_"),
            (lambda x: [torch.zeros_like(x).view(torch.int32)], "float32 as torch.int32"),
            (lambda x: [torch.empty(3, device="meta")], "allocates on meta"),
            (lambda x: [x[:, 1:].zero_()], "writes to what it is given (aten.zero_.default)"),
        ],
    )
    def test_what_is_not_repeated_says_why(self, function: Callable[..., Any], reason: str) -> None:
        taped, x = Taped(function), numbers(3, 4)
        for _ in range(3):
            assert taped(x)[0].shape[0] == 3
        assert not taped.tapes
        (told,) = taped.reasons.values()
        assert reason in told

    def test_compiled_kernels_are_given_addresses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = Kernel()
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        quick = launching.QuickKernel(kernel)
        streams = iter(range(10))
        quick._driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: next(streams)))
        monkeypatch.setattr(tapes, "imported_kernels", lambda op: SimpleNamespace(one=quick))
        monkeypatch.setattr(launching, "imported_kernels", lambda op: SimpleNamespace(one=quick))

        def function(x: Tensor, y: Tensor) -> list[Any]:
            out, room = torch.empty(4), torch.empty(2, 64)
            one = launching.kernels_of("some").one
            one[3,]((x[1:], 4), 5, SIDE=16, SCALE=0.5, num_warps=4)
            one[3, 2](((None, room[1]), out[:0], y.mT), True, SIDE=16, SCALE=0.5, num_warps=4)
            return [out]

        taped = Taped(function)
        x, y = numbers(8), numbers(3, 4)
        for _ in range(2):
            (out,) = taped(x, y)
        (tape,) = taped.tapes.values()
        first, second = (made.runs[0] for made in kernel.made)
        assert first == (
            3,
            1,
            1,
            0,
            "function",
            "metadata",
            None,
            None,
            None,
            (x[1:].data_ptr(), 4),
            5,
            16,
            0.5,
        )
        assert second[:4] == (3, 2, 1, 0)  # one stream of a call
        (nothing, place), empty, other = second[9]
        assert (nothing, empty, other, *second[10:]) == (None, 0, y.data_ptr(), True, 16, 0.5)
        assert place % 64 == 0
        assert place != out.data_ptr()
        (other_out,) = taped(y[0].repeat(2), y)
        assert len(kernel.made) == 2
        assert kernel.made[0].runs[1][3] == 1
        assert other_out.data_ptr() != out.data_ptr()
        assert len(taped.tapes) == 1
        assert tape.hooks == ([],)

    def test_threads_share_tapes(self) -> None:
        taped = Taped(lambda x: [x.clone(), torch.empty(2).zero_()])
        found: list[Any] = []

        def calls(seed: int) -> None:
            x = numbers(3, seed=seed)
            found.extend((x, *taped(x)) for _ in range(200))

        threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taped.tapes) == 1
        assert len(found) == 1600
        assert all(torch.equal(x, y) and not z.any() for x, y, z in found)

    def test_options_that_are_no_numbers_have_no_key(self) -> None:
        x = numbers(3)
        assert tapes.kind_of((x, [1, 2], None, "name", (True,)), ()) is not None
        assert tapes.kind_of((x, SimpleNamespace()), ()) is None
        assert tapes.kind_of((x, [x]), ()) is None
        assert tapes.kind_of((1, 2), ()) is None
        assert tapes.kind_of((x, 1), ()) != tapes.kind_of((x, True), ())
        assert tapes.kind_of((x, 1), (True,)) != tapes.kind_of((x, 1), (False,))


def steps(kind: str, way: str) -> list[Tensor]:
    """Losses and parameters of some training steps on a GPU."""
    torch.manual_seed(0)
    options = {"scgp": {"num_inducing": 8}, "sgpa": {"num_inducing": 8}}.get(kind, {})
    shape = VisionConfig(attention=AttentionConfig(kind, options), depth=2, width=32, heads=2)
    model = VisionTransformer(shape).cuda().train()
    images, labels = torch.randn(4, 3, 32, 32, device="cuda"), torch.arange(4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    called = torch.compile(model, fullgraph=True) if way == "compiled" else model
    draw = "independent" if model.draws else "none"

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        output = called(images, draw=draw, need=("logits", "regularizer"))
        loss = torch.nn.functional.cross_entropy(output.logits, labels) + 0.01 * output.regularizer
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(1)
    if way == "captured":
        graph = graphed(step, images, labels)
        losses = [graph(images, labels) for _ in range(6)]
        assert graph.captured
    else:
        losses = [step(images, labels) for _ in range(6)]
    torch.cuda.synchronize()
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["eager", "compiled", "captured"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_steps_on_a_gpu(kind: str, way: str, played: list[Tape]) -> None:
    import triton

    if not triton.__version__.startswith(launching.TRIED):
        pytest.skip(f"launches are Triton's own under {triton.__version__}")
    torch._dynamo.reset()
    with gp.fused_kernels("auto"):
        expected = untaped(lambda _: steps(kind, way), 0)
        assert not played
        found = steps(kind, way)
        assert played or kind == "softmax"
        check_same(found, expected)
        gp.check_health()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_kernel_is_given_an_address_of_the_host(played: list[Tape]) -> None:
    h, weight, seed = numbers(2, 3, 8).cuda(), numbers(4, 8).cuda(), torch.tensor(1)
    for _ in range(3):
        layers.gelu_linear(h, None, weight, 0.5, seed.cuda(), 2)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        layers.gelu_linear(h, None, weight, 0.5, seed, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_stream_is_launched_on(played: list[Tape]) -> None:
    x, raw = numbers(64, 64, 64).cuda(), numbers(64, 64).cuda()
    expected = triangle(x, raw)
    stream = torch.cuda.Stream()
    for _ in range(20):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            later = x.clone()
            torch.cuda._sleep(1_000_000)
            later.mul_(2)
            found = triangle(later, raw)
        stream.synchronize()
        check_same([found.tril(-1)], [2 * expected.tril(-1)])
    assert played
