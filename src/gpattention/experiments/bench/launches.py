"""How many kernels a GPU starts for a piece of work, and which of them are ours."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

CALLS = 3  # over which the profiler counts


@dataclass(frozen=True)
class Launches:
    """Of one call; None where no GPU was asked."""

    number: float | None  # kernels, copies and fills
    fused: tuple[str, ...] | None  # names of our kernels among them


def count_launches(call: Callable[[], object], device: torch.device) -> Launches:
    """What the profiler sees on the GPU, a mean over three calls."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize(device)
    seen = [event for event in found.key_averages() if event.device_type.name == "CUDA"]
    names = {event.key for event in seen}
    fused = tuple(sorted(name for name in our_kernels() if name in names))
    return Launches(sum(event.count for event in seen) / CALLS, fused)


def our_kernels() -> frozenset[str]:
    """Names of the Triton kernels in the parts of the library that were used; none without Triton."""
    if "triton" not in sys.modules:
        return frozenset()
    from triton.runtime.jit import KernelInterface  # type: ignore[import-untyped]

    parts = [module for name, module in list(sys.modules.items()) if name.startswith("gpattention.")]
    found = (thing for part in parts for thing in vars(part).values() if isinstance(thing, KernelInterface))
    return frozenset(str(thing.fn.__name__) for thing in found)
