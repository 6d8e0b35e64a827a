"""Our own softmax and kernel attention: `_mean` answers for the whole head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from gpattention.adopt.attended import Attended, Form, Listener
from gpattention.adopt.sites import Site
from gpattention.attention import KernelAttention, SoftmaxAttention
from gpattention.attention.base import Heads
from gpattention.gp.concurrency import Handler, handling
from gpattention.gp.inputs import keep_rows


@contextmanager
def intercepting(model: nn.Module, sites: Sequence[Site], listener: Listener) -> Iterator[None]:
    """Our attention modules answer with what the listener makes of their means."""
    with handling({(site.module, "_mean"): partial(_mean, site, listener) for site in sites}):
        yield


def _mean(site: Site, listener: Listener, own: Handler, heads: Heads) -> Tensor:
    module = site.module
    assert isinstance(module, SoftmaxAttention | KernelAttention)
    mean = own(heads)
    q, k = module._projected(heads)
    form: Form = "softmax"
    amplitude = None
    if isinstance(module, SoftmaxAttention):
        q, k = (x * module.head_dim**-0.25 for x in (q, k))
    else:
        form = _kernel_form(module)
        if form in ("rbf", "exp_dot") and module.kernel != "rbf":
            amplitude = module.variance()  # [H]
    drawn = listener(site, Attended(mean, q, k, heads.v, heads.mask, form, amplitude))
    return keep_rows(drawn, heads.query_mask)


def _kernel_form(module: KernelAttention) -> Form:
    if module.kernel == "exp_dot":
        return "softmax" if module.normalize == "rows" else "exp_dot"
    return "rows" if module.normalize == "rows" else "rbf"
