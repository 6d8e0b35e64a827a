"""Draws from mean and spread as one operator, and item-keyed numbers in one launch.

The references are `Posterior.sample` with `ItemNoise.normal`, and `ItemNoise.uniform`.  Item-keyed noise is a
hash of its place, so a draw makes it where it is used, and the backward pass makes it again.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpattention.ops.launching import kernels_of
from gpattention.ops.layout import as_two, matrices, padded, token_major, vectors, view, views
from gpattention.ops.operators import Fused, Made

__all__ = [
    "draw_with_lead",
    "draws_fit",
    "fused_draw",
    "fused_item_draw",
    "fused_normal",
    "fused_uniform",
    "noise_of_draw",
    "with_draw",
]

_SIZE = 1024  # numbers of one program
_ROWS = 32
_LARGEST_GRID = 65535  # of the second and third axis of a launch


def fused_normal(keys: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers of the streams from `stream` on, of every key.

    Args:
        keys: [batch], one per item.
        stream: the first draw's; each further draw has the next one.
        shape: [draws, batch, ...].

    Returns:
        float32 numbers of that shape.
    """
    return _numbers(keys, stream, shape, normal=True)


def fused_uniform(keys: Tensor, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers in (0, 1) of the one stream of every key.

    Args:
        keys: [batch], one per item.
        stream: of all numbers.
        shape: [batch, ...].

    Returns:
        float32 numbers of that shape.
    """
    return _numbers(keys, stream, (1, *shape), normal=False)[0]


def _numbers(keys: Tensor, stream: int, shape: tuple[int, ...], *, normal: bool) -> Tensor:
    numbers: Tensor
    (numbers,) = _NUMBERS(keys, stream, shape, normal)
    return numbers


def _make_numbers(keys: Tensor, stream: int, shape: Sequence[int], normal: bool) -> Made:
    draws, batch, *rest = shape
    count = math.prod(rest)
    out = torch.empty(shape, dtype=torch.float32, device=keys.device)
    if out.numel():
        kernels_of("draws").noise_kernel[(draws * batch * -(-count // _SIZE),)](
            keys, out, stream, batch, count, NORMAL=normal, SIZE=_SIZE, num_warps=4
        )
    return {"numbers": out}


_NUMBERS = Fused("numbers", _make_numbers, ("numbers",))


def draws_fit(shape: torch.Size) -> bool:
    """Whether draws are within one launch and its 32-bit places within a sequence.

    Args:
        shape: [n, ..., Q, D] of the draws.

    Returns:
        False where plain operations have to make them.
    """
    return max(shape[0], -(-shape[-2] // _ROWS)) <= _LARGEST_GRID and shape.numel() < 2**31


def fused_draw(mean: Tensor, spread: Tensor, noise: Tensor, *, squared: bool) -> Tensor:
    """mean + standard deviation * noise, with a zero gradient where the spread is 0.

    Args:
        mean: [..., Q, D].
        spread: of tokens [..., Q], or of every channel [..., Q, D].
        noise: [n, ..., Q, D].
        squared: whether the spread is a variance instead of a standard deviation.

    Returns:
        [n, ..., Q, D].
    """
    lead = mean.shape[:-2]
    by_lead = vectors if spread.ndim < mean.ndim else matrices
    draws: Tensor
    (draws,) = _DRAW(
        matrices(mean, lead), by_lead(spread, lead), noise.contiguous(), None, noise.shape[0], squared
    )
    return draws if draws.shape == noise.shape else draws.reshape(noise.shape)


def fused_item_draw(
    mean: Tensor, spread: Tensor, keys: Tensor, *, stream: int, draws: int, squared: bool
) -> Tensor:
    """`fused_draw` with the noise of `ItemNoise`, which is made in the kernel.

    Args:
        mean: [items, ..., Q, D].
        spread: [items, ..., Q].
        keys: [items].
        stream: of the first draw.
        draws: how many.
        squared: whether the spread is a variance instead of a standard deviation.

    Returns:
        [draws, items, ..., Q, D].
    """
    lead = mean.shape[:-2]
    found: Tensor
    (found,) = _DRAW(matrices(mean, lead), vectors(spread, lead), keys.contiguous(), stream, draws, squared)
    return found.reshape(draws, *mean.shape)


def _forward(
    mean: Tensor,  # [B, H, N, D]
    spread: Tensor,  # [B, H, N] or [B, H, N, D]
    noise: Tensor,  # [n, B, H, N, D], or keys [items] where there is a stream
    stream: int | None,
    draws: int,
    squared: bool,
) -> Made:
    B, H, N, D = mean.shape
    # token by token, as the output projection reads it
    out = torch.empty(draws, B, N, H, D, dtype=mean.dtype, device=mean.device).transpose(2, 3)
    kernels_of("draws").draw_kernel[(B * H, -(-N // _ROWS), draws)](
        *views(mean, spread), noise, stream or 0, (out, *out.stride()[:4]), B * H,
        _items(noise, stream, B * H), H, N, D, **_options(spread, D, stream, squared),
    )  # fmt: skip
    return {"draws": out}


def _backward(
    by_draws: Tensor, spread: Tensor, noise: Tensor, stream: int | None, squared: bool,
    needed: Sequence[bool],
) -> Made:  # fmt: skip
    n, B, H, N, D = by_draws.shape
    g = by_draws if by_draws.stride(-1) == 1 else by_draws.contiguous()
    d_spread = None
    if needed[1]:
        channels = spread.ndim == 4
        d_spread = token_major(B, H, N, D, spread) if channels else spread.new_empty(B, H, N)
        kernels_of("draws").draw_backward_kernel[(B * H, -(-N // _ROWS))](
            (g, *g.stride()[:4]), view(spread), noise, stream or 0, view(d_spread), B * H,
            _items(noise, stream, B * H), H, N, D, n, **_options(spread, D, stream, squared),
        )  # fmt: skip
    return {"spread": d_spread}


def _mean_backward(by_draws: Tensor) -> Made:
    return {"mean": by_draws[0] if by_draws.shape[0] == 1 else by_draws.sum(0)}


def _items(noise: Tensor, stream: int | None, heads: int) -> int:
    """How many heads share the key of an item."""
    return 1 if stream is None else heads // len(noise)


def _options(spread: Tensor, D: int, stream: int | None, squared: bool) -> dict[str, int]:
    return {
        "KEYED": stream is not None, "CHANNELS": spread.ndim == 4, "SQUARED": squared,
        "ROWS": _ROWS, "DP": padded(D), "num_warps": 4,
    }  # fmt: skip


_DRAW = Fused("draw", _forward, ("draws",), _backward, beside=_mean_backward)


def with_draw(model: Fused, spread: str, *, squared: bool) -> Fused:
    """A model's operator that makes a draw too, which a compiler then need not call for by itself.

    Args:
        model: its output `mean` is the mean.
        spread: the output that draws scale with.
        squared: whether that is a variance instead of a standard deviation.

    Returns:
        The operator `<name>_draw`: of what the model takes and noise [1, B, H, N, D], `epsilon`.  The draw,
        of that shape, then the model's outputs.
    """
    assert model.backward is not None
    by_spread, back = f"by_{spread}", model.backward
    given, wanted = inspect.signature(model.forward), inspect.signature(back)
    required = [p for p in given.parameters.values() if _is_required(p)]
    others = [p for p in given.parameters.values() if not _is_required(p)]
    epsilon = inspect.Parameter("epsilon", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    place = len(required)
    added = [epsilon.replace(name="by_draws", annotation=Tensor | None), epsilon]
    if spread not in wanted.parameters:
        added.append(epsilon.replace(name=spread, annotation=Tensor | None))

    def forward(*args: Any, **keywords: bool) -> Made:
        made = model.forward(*args[:place], *args[place + 1 :], **keywords)
        mean, scale = made["mean"], made[spread]
        assert mean is not None
        assert scale is not None
        return made | _forward(mean, scale, args[place], None, 1, squared)

    def backward(*args: Any) -> Made:
        asked = dict(zip((*(p.name for p in added), *wanted.parameters), args, strict=False))
        by_draws, noise = asked.pop("by_draws"), asked.pop("epsilon")
        scale = asked[spread] if spread in wanted.parameters else asked.pop(spread)
        if by_draws is not None:
            found = _mean_backward(by_draws) | _backward(by_draws, scale, noise, None, squared, [True, True])
            for name, by in (("by_mean", found["mean"]), (by_spread, found["spread"])):
                asked[name] = by if asked[name] is None else asked[name] + by
        return back(**asked)

    forward.__signature__ = given.replace(parameters=[*required, epsilon, *others])  # type: ignore[attr-defined]
    backward.__signature__ = wanted.replace(parameters=[*added, *wanted.parameters.values()])  # type: ignore[attr-defined]
    return Fused(f"{model.name}_draw", forward, ("draws", *model.outputs), backward, together=model.together)


def noise_of_draw(q: Tensor, v: Tensor, lead: Sequence[int]) -> Tensor:
    """What `with_draw` takes, from torch's own generator.

    Args:
        q: queries.  [..., Q, C]
        v: values.  [..., K, D]
        lead: the leading axes that became B and H.

    Returns:
        [1, B, H, Q, D].
    """
    return torch.randn((1, *as_two(lead), q.shape[-2], v.shape[-1]), dtype=q.dtype, device=q.device)


def draw_with_lead(draw: Tensor, lead: Sequence[int]) -> Tensor:
    """A draw with the leading axes again that became B and H.

    Args:
        draw: [1, B, H, Q, D].
        lead: these axes.

    Returns:
        [1, ..., Q, D].
    """
    return draw if len(lead) == 2 else draw.reshape(1, *lead, *draw.shape[-2:])


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty
