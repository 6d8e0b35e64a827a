"""One training step of our CGP transformer against one of the paper's kernel attention, on this CPU.

The paper's configuration for CIFAR-10: depth 5, width 128, 4 heads, 64 tokens, batch 100, float32; a step
is forward, loss with regulariser and draws, backward and Adam.  The baseline builds its Gram matrix as the
paper's code does, by one broadcast difference [B, H, d, N, N]; that it computes the same attention as our
`kernel` module is checked first.  Prints medians of 3.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpattention.attention import KernelAttention, register_attention
from gpattention.attention.base import Heads
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer

BATCH, REPEATS = 100, 3


@register_attention("paper-kernel")
class PaperKernelAttention(KernelAttention):
    """Asymmetric rbf attention with its Gram matrix from a difference of every pair, per dimension."""

    def _mean(self, heads: Heads) -> Tensor:
        q, k = self._split(self.query(heads.queries)), self._split(self.key(heads.keys))
        difference = q.mT[..., :, None] - k.mT[..., None, :]  # [B, H, d, N, N]
        gram = torch.exp(-0.5 * difference.square().sum(2))  # [B, H, N, N]
        return gram @ heads.v


def model(kind: str, **options: object) -> VisionTransformer:
    """The paper's vision transformer."""
    torch.manual_seed(0)
    return VisionTransformer(VisionConfig(attention=AttentionConfig(kind, options)))


def step_of(network: VisionTransformer, *, draws: bool) -> Callable[[], None]:
    """A closure that makes one training step on a fixed batch."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
    need = ("logits", "regularizer") if draws else ("logits",)

    def step() -> None:
        optimizer.zero_grad()
        out = network(images, draw="independent" if draws else "none", generator=generator, need=need)
        loss = cross_entropy(out.logits, labels)
        if out.regularizer is not None:
            loss = loss + 0.01 * out.regularizer
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    """Median of a few steps after one to warm up."""
    step()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def check_baseline() -> float:
    """Largest difference between the baseline's output and our kernel module's, for equal weights."""
    ours, theirs = model("kernel", normalize="none"), model("paper-kernel", normalize="none")
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(2))
    x = nn.functional.layer_norm(x, (128,))
    a, b = (net.blocks[0].attention.eval()(x).output for net in (ours, theirs))
    return float((a - b).detach().abs().max())


def main() -> int:
    """Measure, print, judge."""
    gap = check_baseline()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {BATCH}, median of {REPEATS}")
    print(f"baseline and our kernel module differ by {gap:.1e} at most (wanted: 1e-5)")
    kinds = {
        "softmax": ("softmax", False, {}),
        "kernel": ("kernel", False, {"normalize": "none"}),
        "direct": ("direct", True, {"normalize": "none", "regularizer": "marginal"}),
        "cgp": ("cgp", True, {"normalize": "none", "regularizer": "marginal"}),
        "cgp, kl": ("cgp", True, {"normalize": "none", "regularizer": "kl"}),
        "cgp, rows": ("cgp", True, {"regularizer": "marginal"}),
        "scgp": ("scgp", True, {"normalize": "none", "num_inducing": 16}),
    }
    paper = seconds(step_of(model("paper-kernel", normalize="none"), draws=False))
    print("\n  model                        s/step   faster than the paper's kernel attention")
    print(f"  {'kernel as in the paper':<26} {paper:8.2f}   1.0x")
    for name, (kind, draws, options) in kinds.items():
        own = seconds(step_of(model(kind, **options), draws=draws))
        print(f"  {name:<26} {own:8.2f}   {paper / own:.1f}x")
    print(
        "\ndirect, cgp and scgp with draws and regulariser; softmax bounds what any attention can reach here"
    )
    return 0 if gap < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
