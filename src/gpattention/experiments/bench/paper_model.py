"""The paper's way as modules and models: the baselines of our times, checked against our mathematics."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gpattention.attention import Attention, build_attention
from gpattention.experiments.bench.paper_cgp import PaperCGPAttention
from gpattention.experiments.bench.paper_kernel import PaperKernelAttention
from gpattention.experiments.bench.paper_scgp import PaperSCGPAttention
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from gpattention.models.block import Block

ALLOWED_GAP = 1e-5  # between a baseline and ours, relative to the largest number


@dataclass(frozen=True)
class Paper:
    """A transcription, and the kind of ours that has its mathematics and its weights."""

    module: type[Attention]
    kind: str
    options: Mapping[str, Any]


PAPERS = {
    "paper-kernel": Paper(PaperKernelAttention, "kernel", {"normalize": "none"}),
    "paper-cgp": Paper(PaperCGPAttention, "cgp", {"normalize": "none", "regularizer": "monte_carlo"}),
    "paper-scgp": Paper(
        PaperSCGPAttention,
        "scgp",
        {"normalize": "none", "num_inducing": 16, "regularizer": "double_jensen"},
    ),
}


def paper_attention(name: str, embed_dim: int, num_heads: int, **options: Any) -> Attention:
    """One module by name."""
    paper = PAPERS[name]
    return paper.module(embed_dim, num_heads, **{**paper.options, **options})


def paper_model(name: str, shape: VisionConfig) -> VisionTransformer:
    """A vision transformer with that attention in every layer, and the weights that ours would have."""
    paper = PAPERS[name]
    model = VisionTransformer(replace(shape, attention=AttentionConfig(paper.kind, paper.options)))
    for block in model.blocks:
        assert isinstance(block, Block)
        ours = block.attention
        theirs = paper_attention(name, ours.embed_dim, ours.num_heads, dropout=ours.dropout.p)
        theirs.load_state_dict(ours.state_dict())
        block.attention = theirs
    return model


@torch.no_grad()
def gap_to_ours(name: str, *, tokens: int = 9, width: int = 16, heads: int = 2) -> float:
    """Largest relative difference in mean, variance and (where none is drawn) regulariser, in float64.

    Both have the same weights and LayerNorm'ed tokens.
    """
    paper = PAPERS[name]
    torch.manual_seed(0)
    theirs = paper_attention(name, width, heads, dtype=torch.float64).eval()
    ours = build_attention(
        paper.kind, embed_dim=width, num_heads=heads, dtype=torch.float64, **paper.options
    ).eval()  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = nn.functional.layer_norm(x, (width,))
    found = [_told(module, x) for module in (theirs, ours)]
    return max(_relative(a, b) for a, b in zip(*found, strict=True))


def _told(module: Attention, x: Tensor) -> list[Tensor]:
    need = ("output", "variance") if module.draws else ("output",)
    if module.regularizer in ("double_jensen",):  # one that draws has another value each time
        need = (*need, "regularizer")
    told = module(x, need=need)
    return [y for y in (told.output, told.variance, told.regularizer) if y is not None]


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())
