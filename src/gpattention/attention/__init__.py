"""Attention modules to drop into a model: eight kinds behind one call.

>>> from gpattention.attention import build_attention
>>> attention = build_attention("cgp", embed_dim=128, num_heads=4)
>>> result = attention(x, key_padding_mask=padding, need=("output", "variance"))
>>> result.output, result.variance  # [B, N, 128], [B, 4, N]
"""

import pkgutil
from importlib import import_module

from gpattention.attention.base import (
    DRAWS,
    Attention,
    AttentionOutput,
    Draw,
    Heads,
    MeanProcess,
    attention_class,
    build_attention,
    list_attention,
    register_attention,
)
from gpattention.attention.cgp import CGPAttention
from gpattention.attention.direct import DirectAttention
from gpattention.attention.gaussian import GaussianAttention
from gpattention.attention.kep_svgp import KEPSVGPAttention
from gpattention.attention.kernel import KernelAttention
from gpattention.attention.parameters import Positive
from gpattention.attention.scgp import SCGPAttention
from gpattention.attention.sgpa import SGPAAttention
from gpattention.attention.softmax import SoftmaxAttention, SoftmaxGPAttention

__all__ = [
    "DRAWS", "Attention", "AttentionOutput", "CGPAttention", "DirectAttention", "Draw",
    "GaussianAttention", "Heads", "KEPSVGPAttention", "KernelAttention", "MeanProcess", "Positive",
    "SCGPAttention", "SGPAAttention", "SoftmaxAttention", "SoftmaxGPAttention", "attention_class",
    "build_attention", "list_attention", "register_attention",
]  # fmt: skip

# a kind registers itself when its file is imported: a new kind is a new file here
for _file in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
