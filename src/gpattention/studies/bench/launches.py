"""The kernels that a GPU runs for a piece of work: how many, which of them are ours, and their times."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

CALLS = 3  # over which the profiler counts
# what the names of others' kernels tell, the first that fits; ours go by their own names
FAMILIES = {
    "matrix products": r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk",
    "softmax attention": r"fmha|flash|attention",
    "optimiser": r"adam|multi_tensor",
    "copies and fills": r"memcpy|memset|fill",
}
OTHERS = "other operations"


@dataclass(frozen=True)
class KernelTime:
    """What the kernels of one name or family take of a call."""

    name: str
    launches: float
    seconds: float


@dataclass(frozen=True)
class Launches:
    """Of one call; None where no GPU was asked."""

    number: float | None  # kernels, copies and fills
    fused: tuple[str, ...] | None  # names of our kernels among them
    times: tuple[KernelTime, ...] = ()  # the longest first


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
    ours = our_kernels()
    fused = tuple(sorted(ours & {event.key for event in seen}))
    sums: dict[str, tuple[float, float]] = {}
    for event in seen:
        name = event.key if event.key in ours else family(event.key)
        count, microseconds = sums.get(name, (0.0, 0.0))
        sums[name] = count + event.count, microseconds + event.self_device_time_total
    times = [KernelTime(name, count / CALLS, us / CALLS / 1e6) for name, (count, us) in sums.items()]
    times.sort(key=lambda each: -each.seconds)
    return Launches(sum(event.count for event in seen) / CALLS, fused, tuple(times))


def family(kernel: str) -> str:
    """What a kernel of another library does, as far as its name tells."""
    lower = kernel.lower()
    return next((name for name, words in FAMILIES.items() if re.search(words, lower)), OTHERS)


def our_kernels() -> frozenset[str]:
    """Names of the Triton kernels in the parts of the library that were used; none without Triton."""
    if "triton" not in sys.modules:
        return frozenset()
    from triton.runtime.jit import KernelInterface  # type: ignore[import-untyped]

    parts = [module for name, module in list(sys.modules.items()) if name.startswith("gpattention.")]
    found = (thing for part in parts for thing in vars(part).values() if isinstance(thing, KernelInterface))
    return frozenset(str(thing.fn.__name__) for thing in found)
