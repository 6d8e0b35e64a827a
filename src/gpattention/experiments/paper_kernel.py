"""Kernel attention as the paper's code computes it: the baseline of our times."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from gpattention.attention import KernelAttention
from gpattention.attention.base import Heads
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from gpattention.models.block import Block

OURS = AttentionConfig("kernel", {"normalize": "none"})


class PaperKernelAttention(KernelAttention):
    """Asymmetric rbf attention with its Gram matrix from a difference of every pair, per dimension."""

    def _mean(self, heads: Heads) -> Tensor:
        assert self.key is not None
        q, k = self._split(self.query(heads.queries)), self._split(self.key(heads.keys))
        difference = q.mT[..., :, None] - k.mT[..., None, :]  # [B, H, d, N, N]
        gram = torch.exp(-0.5 * difference.square().sum(2))  # [B, H, N, N]
        return gram @ heads.v


def paper_model(shape: VisionConfig) -> VisionTransformer:
    """A vision transformer with that attention in every layer, and the weights that ours would have."""
    model = VisionTransformer(replace(shape, attention=OURS))
    for block in model.blocks:
        assert isinstance(block, Block)
        ours = block.attention
        theirs = PaperKernelAttention(
            ours.embed_dim, ours.num_heads, normalize="none", dropout=ours.dropout.p
        )
        theirs.load_state_dict(ours.state_dict())
        block.attention = theirs
    return model


def gap_to_ours(shape: VisionConfig) -> float:
    """Largest difference between the outputs of their first layer and of ours, for equal weights."""
    torch.manual_seed(0)
    theirs = paper_model(shape)
    ours = VisionTransformer(replace(shape, attention=OURS))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, shape.tokens, shape.width, generator=torch.Generator().manual_seed(2))
    x = nn.functional.layer_norm(x, (shape.width,))
    a, b = (_first(model)(x).output for model in (theirs, ours))
    return float((a - b).detach().abs().max())


def _first(model: VisionTransformer) -> nn.Module:
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block.attention.eval()
