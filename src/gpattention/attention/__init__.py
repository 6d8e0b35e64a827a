"""Attention modules to drop into a model: seven kinds behind one call.

>>> from gpattention.attention import build_attention
>>> attention = build_attention("cgp", embed_dim=128, num_heads=4)
>>> result = attention(x, key_padding_mask=padding, need=("output", "variance"))
>>> result.output, result.variance  # [B, N, 128], [B, 4, N]
"""

from gpattention.attention.base import Attention, Heads
from gpattention.attention.cgp import CGPAttention
from gpattention.attention.diagnosis import AttentionHealth, diagnose
from gpattention.attention.direct import DirectAttention
from gpattention.attention.gaussian import GaussianAttention
from gpattention.attention.kernel import KernelAttention
from gpattention.attention.output import AttentionOutput
from gpattention.attention.parameters import Positive
from gpattention.attention.registry import (
    attention_class,
    build_attention,
    list_attention,
    register_attention,
)
from gpattention.attention.scgp import SCGPAttention
from gpattention.attention.sgpa import SGPAAttention
from gpattention.attention.softmax import SoftmaxAttention, SoftmaxGPAttention

__all__ = [
    "Attention",
    "AttentionHealth",
    "AttentionOutput",
    "CGPAttention",
    "DirectAttention",
    "GaussianAttention",
    "Heads",
    "KernelAttention",
    "Positive",
    "SCGPAttention",
    "SGPAAttention",
    "SoftmaxAttention",
    "SoftmaxGPAttention",
    "attention_class",
    "build_attention",
    "diagnose",
    "list_attention",
    "register_attention",
]
