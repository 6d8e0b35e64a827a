"""How the attention of each library is met while a model runs, and left as it was afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from gpattention.adopt.attended import Listener
from gpattention.adopt.families import huggingface, own, timm, torch_mha
from gpattention.adopt.sites import Site

_FAMILIES = {
    "torch": torch_mha.intercepting,
    "huggingface": huggingface.intercepting,
    "timm": timm.intercepting,
    "gpattention": own.intercepting,
}


@contextmanager
def intercepting(model: nn.Module, sites: Sequence[Site], listener: Listener) -> Iterator[None]:
    """Inside, every call of a site passes what it attended to `listener` and goes on with the answer.

    Nothing of the model is changed outside, whatever happens inside.
    """
    with ExitStack() as stack:
        for family, intercept in _FAMILIES.items():
            chosen = [site for site in sites if site.family == family]
            if chosen:
                stack.enter_context(intercept(model, chosen, listener))
        yield
