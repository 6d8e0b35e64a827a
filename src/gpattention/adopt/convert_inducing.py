"""Where the inducing inputs of a converted layer start: at tokens of an example.

In the many dimensions of a trained head a kernel is near 0 between almost any two points: inducing inputs
that are not where the tokens are switch attention off.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

CANDIDATES = 4096  # tokens looked at


@dataclass(eq=False)
class Placing:
    """What a layer does while an example runs: it puts its inducing inputs where it meets tokens."""

    generator: Generator

    @torch.no_grad()
    def place_(self, points: Tensor, met: Tensor, mask: Tensor | None) -> None:
        """Choose points [H, m, D] among met tokens [B, H, N, D], those that mask [B, 1, N] calls real.

        Each next one with a probability that grows with its squared distance from those before (k-means++):
        spread out, and never twice at one place, where the Gram matrix would have no factor.
        """
        tokens = met.transpose(1, 2).flatten(0, 1)  # [B N, H, D]
        if mask is not None:
            tokens = tokens[mask[:, 0].flatten()]
        if len(tokens) == 0:
            raise ValueError("expected an example with real tokens, got padding alone")
        order = torch.randperm(len(tokens), generator=self.generator)[:CANDIDATES].to(tokens.device)
        for head in range(points.shape[0]):
            points[head] = self._spread(tokens[order, head].double(), points.shape[1]).to(points)

    def _spread(self, x: Tensor, count: int) -> Tensor:
        """[R, D] -> [m, D]"""
        chosen = [x[0]]
        nearest = (x - x[0]).square().sum(-1)  # [R]
        scale = x.std(0).clamp_min(1e-3) if len(x) > 1 else torch.ones_like(x[0])
        while len(chosen) < count:
            chances = nearest.cpu()
            if float(chances.max()) < 1e-6:  # fewer tokens than points: near one of them
                noise = torch.randn(x.shape[1], generator=self.generator, dtype=x.dtype).to(x)
                point = chosen[len(chosen) % len(x) % len(chosen)] + 0.3 * scale * noise
            else:
                point = x[int(torch.multinomial(chances, 1, generator=self.generator))]
            chosen.append(point)
            nearest = torch.minimum(nearest, (x - point).square().sum(-1))
        return torch.stack(chosen)
