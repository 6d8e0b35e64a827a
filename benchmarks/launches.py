"""How the kernels of a host's variances are launched best: `ops.layout.LAUNCHES` at 128 tokens is a guess.

    python benchmarks/launches.py                  96 and 960 matrices of 128 tokens, heads of 64 channels
    python benchmarks/launches.py --warps 4 8 --stages 2 --kernels roots

One kernel's options change at a time.  Every choice is compiled first, some seconds each; the time is the
least of several rounds of the two kernels together, beside plain operations and today's options.
"""

import argparse
from typing import Any

import torch

from gpattention import gp
from gpattention.ops.layout import LAUNCHES
from gpattention.ops.tapes import forget_tapes


def milliseconds(sequences: int, tokens: int, device: str, rounds: int) -> float:
    """Of the unit variances of so many sequences with 12 heads."""
    q, k = torch.randn(2, sequences, 12, tokens, 64, device=device) / 3
    none = torch.zeros_like(k[..., :1])
    least = float("inf")
    with gp.deferred_checks(), torch.no_grad():
        for _ in range(rounds):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                variance = gp.direct_posterior(q, k, none, noise=0.1, with_variance=True).variance
            stop.record()
            assert bool(variance.isfinite().all())  # waits
            least = min(least, start.elapsed_time(stop) / 5)
    return least


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", default=["roots", "direct"])
    parser.add_argument("--warps", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--stages", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sequences", nargs="+", type=int, default=[8, 80])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()

    def row(name: str, mode: Any = "auto") -> None:
        with gp.fused_kernels(mode):
            times = [milliseconds(n, given.tokens, "cuda", given.rounds) for n in given.sequences]
        told = "".join(f"{ms:10.3f} ms" for ms in times)
        print(f"  {name:40s}{told}", flush=True)

    print(f"  {'matrices':40s}" + "".join(f"{12 * n:13d}" for n in given.sequences))
    row("plain operations", "off")
    row("as they are")
    for kernel in given.kernels:
        small, large = LAUNCHES[kernel]
        for warps in given.warps:
            for stages in given.stages:
                LAUNCHES[kernel] = small, {"num_warps": warps, "num_stages": stages}
                forget_tapes()
                row(f"{kernel}: {warps} warps, {stages} stages")
        LAUNCHES[kernel] = small, large
        forget_tapes()


if __name__ == "__main__":
    main()
