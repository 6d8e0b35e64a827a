"""Launches past Triton: the first of a kind and those somebody listens to are its own, as are the bits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.ops import launching, tapes
from gpattention.ops.launching import QuickKernel
from tests.gp.samples import sample

pytest.importorskip("triton")
pytest.importorskip("triton.knobs")

from triton import knobs

Call = tuple[Any, ...]
A, B = torch.zeros(64), torch.zeros(64)


class Compiled:
    """What Triton hands back, which notes how it is run."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[Call] = []

    def run(self, *args: Any) -> None:
        self.runs.append(args)


class Kernel:
    """A kernel with two constants, which notes Triton's own launches and hands back compiled ones."""

    arg_names = ("x", "n", "SIDE", "SCALE")

    def __init__(self) -> None:
        self.pre_run_hooks: list[Any] = []
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return Kernel()


@pytest.fixture
def quick(kernel: Kernel) -> QuickKernel:
    found = QuickKernel(kernel)
    driver = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    found._driver = SimpleNamespace(active=driver)
    return found


OPTIONS = {"SIDE": 16, "SCALE": 1.0, "num_warps": 4}


def test_the_second_launch_goes_to_what_the_first_compiled(quick: QuickKernel, kernel: Kernel) -> None:
    for x in (A, B, A):
        quick[7, 2](x, 5, **OPTIONS)
    (made,) = kernel.made
    shared = ("stream of 0", "function", "metadata", None, None, None)
    assert [run[:9] for run in made.runs] == [(7, 2, 1, *shared)] * 2
    assert [run[9] is x for run, x in zip(made.runs, (B, A), strict=True)] == [True, True]
    # constants in the kernel's order, no options
    assert [run[10:] for run in made.runs] == [(5, 16, 1.0)] * 2
    quick[3,](A, 5, **OPTIONS)
    assert made.runs[-1][:3] == (3, 1, 1)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((A[1:], 5), {}),  # not divisible by 16 bytes
        ((A.double(), 5), {}),
        ((None, 5), {}),
        (((A, 5), 5), {}),
        ((A, 1), {}),
        ((A, 32), {}),
        ((A, 2**40), {}),
        ((A, 5.0), {}),
        ((A, True), {}),
        ((A, 5), {"SIDE": 32}),
        ((A, 5), {"SCALE": 1}),
        ((A, 5), {"SCALE": True}),
        ((A, 5), {"num_warps": 8}),
        ((A, 5), {"num_stages": 1}),
    ],
)
def test_what_triton_compiles_anew_is_left_to_it(
    quick: QuickKernel, kernel: Kernel, args: Call, options: dict[str, Any]
) -> None:
    quick[1,](A, 5, **OPTIONS)
    for _ in range(2):
        quick[1,](*args, **{**OPTIONS, **options})
    quick[1,](B, 7, **OPTIONS)
    first, other = kernel.made
    assert len(first.runs) == len(other.runs) == 1


def test_another_device_is_another_kernel(
    quick: QuickKernel, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick[1,](A, 5, **OPTIONS)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    for _ in range(2):
        quick[1,](A, 5, **OPTIONS)
    assert [len(made.runs) for made in kernel.made] == [0, 1]
    assert kernel.made[1].runs[0][3] == "stream of 1"


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook", "pre_run_hooks"])
def test_listeners_hear_every_launch(
    quick: QuickKernel, kernel: Kernel, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick[1,](A, 5, **OPTIONS)
    if hook == "pre_run_hooks":
        kernel.pre_run_hooks.append(print)
    else:
        monkeypatch.setattr(knobs.runtime, hook, print)
    for _ in range(2):
        quick[1,](A, 5, **OPTIONS)
    assert len(kernel.made) == 3


def answers(offset: int) -> list[Tensor]:
    """A regularised draw on the GPU, from tokens that begin `offset` numbers behind a boundary; gradients."""
    s = sample(3, 2, queries=16, keys=16, dtype=torch.float32)
    leaves = []
    for name in ("q", "k", "o", "v"):
        x = getattr(s, name)
        room = torch.empty(x.numel() + offset, device="cuda")
        leaves.append(room[offset:].view(x.shape).copy_(x).detach().requires_grad_())
    with gp.fused_kernels("on"):
        posterior = gp.cgp_posterior(*leaves, noise=0.1, with_variance=True, with_cost="marginal")
        noise = gp.ItemNoise(0, torch.arange(3, device="cuda"), torch.zeros(3, device="cuda"))
        draw = posterior.sample(generator=noise)
        loss = draw.square().sum() - posterior.log_density().total.sum()
    return [draw.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_bits_as_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.runtime.jit import JITFunction

    from gpattention.ops.launching import TRIED

    if not triton.__version__.startswith(TRIED):
        pytest.skip(f"launches are Triton's own under {triton.__version__}")
    for offset in (0, 1, 4):  # 1 is no multiple of 16 bytes
        first = answers(offset)
        launched: list[str] = []
        run = JITFunction.run

        def noted(self: Any, *args: Any, run: Any = run, launched: Any = launched, **options: Any) -> Any:
            launched.append(self.__name__)
            return run(self, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", noted)
            again = answers(offset)
            assert launched == []
            for module in (launching, tapes):
                patch.setattr(module, "is_listened_to", lambda: True)
            reference = answers(offset)
            assert launched
        for x, y, z in zip(first, again, reference, strict=True):
            assert torch.equal(x, z)
            assert torch.equal(y, z)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = answers(0)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(aside, answers(0), strict=True))


@pytest.mark.parametrize("op", ["attention", "draws", "exact", "layers", "sgpa", "sparse"])
def test_all_constants_of_kernels_come_last_and_have_no_default(op: str) -> None:
    """A quick launch hands arguments and constants on by place."""
    import inspect

    kernels = launching.imported_kernels(op)
    found = [value for name, value in vars(kernels).items() if name.endswith("_kernel")]
    assert found
    for kernel in found:
        function = getattr(kernel, "_kernel", kernel).fn
        parameters = inspect.signature(function).parameters.values()
        constant = ["constexpr" in str(p.annotation) for p in parameters]
        assert constant == sorted(constant)
        assert all(p.default is p.empty for p in parameters)
