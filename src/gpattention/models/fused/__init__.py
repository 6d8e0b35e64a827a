"""What surrounds the attention, with fused Triton kernels beside their slow references.

    residual_norm*   residual, bias, dropout and LayerNorm in one pass
    gelu*            bias, GELU and dropout in one pass, and the linear map after them
    stream           the residual stream from block to block
    switch           when a model runs so, and why not

Modules with kernels import Triton and are imported when a fused path is taken, never before.
"""
