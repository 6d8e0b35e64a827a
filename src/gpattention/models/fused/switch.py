"""When a model's blocks run fused, and why not."""

from typing import TypeGuard

import torch
from torch import nn

from gpattention.attention import Attention
from gpattention.attention.column_sums import MOST_COLUMNS
from gpattention.attention.projections import is_plain, is_watched
from gpattention.gp.fused.switch import why_not_fused_on
from gpattention.gp.precision import autocast_is_on
from gpattention.models.block import Block, FeedForward


def why_not_fused_blocks(blocks: list[Block], norm: nn.Module, need: tuple[str, ...]) -> str | None:
    """None where the blocks and the last LayerNorm run fused, else the reason.

    The fused path reads parameters instead of calling modules, so it is for plain ones that nobody watches.
    """
    if torch.compiler.is_compiling():  # before anything is looked at: the compiler would guard it
        return "the call is being compiled"
    if "tokens" in need:
        return "the tokens between layers are wanted"
    if not is_affine(norm):
        return "the last LayerNorm is watched or was replaced"
    weight = norm.weight
    if weight.dtype != torch.float32 or autocast_is_on(weight.device):
        return "they compute in float32"
    if len(weight) > MOST_COLUMNS:
        return f"a width of {len(weight)} is more than the {MOST_COLUMNS} of one program"
    reason = why_not_fused_on(weight.device, weight.dtype)
    if reason is not None:
        return reason
    for index, block in enumerate(blocks):
        if is_watched(*block.modules()):
            return f"a module of block {index} has hooks"
        if not _is_plain_block(block):
            return f"a module of block {index} was replaced"
    return None


def is_affine(norm: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Whether a module is a LayerNorm of one axis with weight and bias, unwatched."""
    if not is_plain(norm, nn.LayerNorm):
        return False
    return norm.weight is not None and norm.bias is not None and len(norm.normalized_shape) == 1


def may_drop(dropout: nn.Module) -> bool:
    """Whether a module is dropout of a rate that the kernels know, unwatched."""
    return is_plain(dropout, nn.Dropout) and dropout.p < 1


def _is_plain_block(block: Block) -> bool:
    attention, part = block.attention, block.feed_forward
    return (
        type(block) is Block
        and type(part) is FeedForward
        and type(attention).forward is Attention.forward
        and attention.batch_first
        and all(is_affine(norm) for norm in (block.norm, part.norm))
        and all(is_plain(linear, nn.Linear) for linear in (attention.output, part.into, part.back))
        and all(may_drop(dropout) for dropout in (attention.dropout, part.dropout))
    )
