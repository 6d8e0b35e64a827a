"""How long the host takes for each fused operator of a training step.

    python benchmarks/operators.py                 on a GPU, with launches: microseconds of every call
    python benchmarks/operators.py --untaped       the same without launch tapes
    python benchmarks/operators.py --device cpu    without a GPU: kernels are neither compiled nor launched

Sizes are those of one block of the paper's CIFAR-10 model.  What is timed is what generated code calls, until
it returns; a GPU is waited for between rounds.  Without one a small batch keeps out the time that it takes to
get memory from the system.
"""

import argparse
import os
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.ops import launching, tapes
from gpattention.ops.operators import Fused

EXACT = {"normalize": "none", "regularizer": "marginal"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "kernel": ("kernel", {"normalize": "none"}),
    "direct": ("direct", EXACT),
    "cgp": ("cgp", EXACT),
    "scgp-16": ("scgp", {"normalize": "none", "regularizer": "dtc", "num_inducing": 16}),
    "sgpa-32": ("sgpa", {"num_inducing": 32}),
}
ROUNDS, AT_ONCE = 15, 20


class Noted(TorchDispatchMode):
    """Operators of ours and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call."""
        if func.namespace == "gpattention":
            self.calls[func.name().removeprefix("gpattention::")] = func, args, kwargs or {}
        return func(*args, **(kwargs or {}))


def leave_launches_out() -> None:
    """Let kernels be ready that do nothing, on a machine without a GPU."""
    import triton

    def noted(self: Any, grid: Any, args: Any, constants: dict[str, Any], key: Any) -> None:
        last = tuple(constants[name] for name in self._kernel.arg_names[len(args) :])
        first = (0, False, False, None, None, (4, 1, 0), None, None, None)
        self._known[key] = (lambda *args: None), (lambda device: 0), first, last

    launching.TRIED = (triton.__version__,)
    launching.QuickKernel._launch_by_triton = noted
    torch._C._cuda_getDevice = lambda: 0
    for op in ("attention", "draws", "exact", "layers", "sgpa", "sparse"):
        launching.imported_kernels(op)
    os.environ["TRITON_INTERPRET"] = "1"  # what is asked of a CPU, after kernels were made that are not


def operators_of(kind: str, device: str, batch: int) -> dict[str, tuple[Any, Any, Any]]:
    """Those of one training step of a block, with their arguments."""

    def call(self: Fused, *args: Any) -> Any:
        made = self._named(self._operator(*args[: self._count]))
        return tuple(made[name] for name in self.outputs)

    name, options = KINDS[kind]
    attention = build_attention(name, embed_dim=128, num_heads=4, **options).to(device)
    x = torch.randn(batch, 64, 128, device=device)
    by_caller, Fused.__call__ = Fused.__call__, call
    try:
        with gp.fused_kernels("on"), gp.deferred_checks(), Noted() as noted:
            draw = "independent" if attention.draws else "none"
            output = attention(x, need=("output", "regularizer"), draw=draw)
            (output.output.sum() + output.regularizer).backward()
    finally:
        Fused.__call__ = by_caller
    return noted.calls


def microseconds(func: Any, args: Any, kwargs: Any, device: str) -> float:
    """The least time of a call until it returns."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(AT_ONCE):
            func(*args, **kwargs)
        times.append((time.perf_counter() - start) / AT_ONCE)
        if device == "cuda":
            torch.cuda.synchronize()
    return min(times) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, help="100 on a GPU, else 2")
    parser.add_argument("--untaped", action="store_true", help="without launch tapes")
    given = parser.parse_args()
    if given.device == "cpu":
        leave_launches_out()
    if given.untaped:
        tapes.kind_of = lambda args, settings: None
    for kind in given.kinds:
        batch = given.batch or (100 if given.device == "cuda" else 2)
        total = 0.0
        for name, (func, args, kwargs) in operators_of(kind, given.device, batch).items():
            with torch.no_grad():
                took = microseconds(func, args, kwargs, given.device)
            total += took
            print(f"{kind:10s}{name:20s}{took:8.1f} us", flush=True)
        print(f"{kind:10s}{'together':20s}{total:8.1f} us", flush=True)


if __name__ == "__main__":
    main()
