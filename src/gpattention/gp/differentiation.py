"""First derivatives that are written out, and an error where somebody wants a second one."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Gradients = TypeVar("Gradients")


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorator of a backward pass that refuses `create_graph=True`.

    Torch's own lets it pass where the incoming gradients require none, as those of `loss.sum()`, or where the
    second derivative is asked of some inputs alone (`torch.autograd.grad`): what goes through the saved
    tensors is left out then, silently.
    """

    @wraps(backward)
    def inner(ctx: Any, *grads: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "expected a backward pass without create_graph=True: this gradient is written out and "
                "torch.autograd cannot differentiate it again. For second derivatives take torch.func "
                "(hessian, grad of grad, jvp of grad), which sees plain operations"
            )
        return backward(ctx, *grads)

    return inner
