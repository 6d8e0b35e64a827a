"""Converted layers: the regulariser they remember."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import gpattention
from gpattention.models.converted import converted_layers
from gpattention.models.projected import shift_queries, softmax_log_amplitudes
from tests.gp.calls import cgp_kl, direct_kl
from tests.hosts.hosts import logits, make


class Shared(nn.Module):
    """One attention, used twice, perhaps checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.reentrant = reentrant

    def attend(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.attend(x) if self.reentrant is None else checkpoint(
                self.attend, x, use_reentrant=self.reentrant
            )  # fmt: skip
        return x


@pytest.mark.parametrize("masked", [False, True])
def test_amplitudes_give_the_softmax(masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[True] * 5, [True, True, False, False, True]])[:, None] if masked else None
    scale = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    log_a, log_b = softmax_log_amplitudes(q, k, scale=scale, mask=mask, query_mask=mask, max_stddev=math.inf)
    kappa = (-0.5 * torch.cdist(shift_queries(q, k, mask, mask), k).square()).exp()
    weights = log_a.exp()[..., None] * kappa * (log_b.exp() / scale[:, None])[..., None, :]
    allowed = None if mask is None else mask[:, :, None]
    weights = weights if allowed is None else torch.where(allowed, weights, 0.0)
    found = weights @ v
    expected = scaled_dot_product_attention(q * 2, k, v, attn_mask=allowed)  # 2 = sqrt of the width
    real = torch.ones(2, 1, 5, dtype=torch.bool) if mask is None else mask
    assert torch.allclose(*(torch.where(real[..., None], x, 0.0) for x in (found, expected)))


def test_it_is_the_kl_of_every_layer() -> None:
    """Against eq. 23 by the functions themselves."""
    for kind, divergence in (("direct", direct_kl), ("cgp", cgp_kl)):
        torch.manual_seed(0)
        holder = Shared().double()
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
        gpattention.convert(holder, kind)
        holder.train()
        holder.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        found = gpattention.regularizer(holder)
        layer, module = converted_layers(holder)[0], holder.attention
        parts = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in parts)
        q, k, mask = q / math.sqrt(2), k / math.sqrt(2), ~padding[:, None]
        log_a, log_b = softmax_log_amplitudes(
            q, k, scale=layer.attention.prior_scale(), mask=mask, query_mask=mask, max_stddev=2.0
        )
        values = v * log_b.exp()[..., None] / layer.attention.prior_scale()[:, None, None]
        noise = layer.attention.noise()
        latent = (k,) if kind == "cgp" else ()  # at the start the latent inputs are the keys
        inputs = (shift_queries(q, k, mask, mask), k, *latent, values)
        kl = divergence(*inputs, noise=noise, mask=mask, query_mask=mask, log_amplitude=log_a)
        expected = kl.sum() / (2 * 8 * 4)  # heads, real tokens, width of a head
        assert torch.allclose(found, expected.float(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["direct", "scgp"])
def test_checkpointing_changes_nothing(kind: str) -> None:
    x = torch.randn(2, 3, 8)
    found = []
    for reentrant in (None, False):
        model = gpattention.convert(Shared(reentrant), kind).train()
        torch.manual_seed(5)
        loss = model(x).square().mean() + gpattention.regularizer(model)
        loss.backward()
        assert len(converted_layers(model)[0].regularizers) == 2  # nothing was added while it ran again
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    assert torch.allclose(found[0][0], found[1][0])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_refusals() -> None:
    model = gpattention.convert(Shared(True), "direct").train()
    model(torch.randn(2, 3, 8, requires_grad=True))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        gpattention.regularizer(model)
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        converted_layers(model)[0]._replicate_for_data_parallel()
    host = make("bert")
    with pytest.raises(ValueError, match="convert changes its attention"):
        gpattention.regularizer(host.model)
    gpattention.convert(host.model).eval()
    logits(host)
    with pytest.raises(ValueError, match="training mode"):
        gpattention.regularizer(host.model)
    host = make("own softmax")
    gpattention.convert(host.model, "cgp")(host.inputs)
    with pytest.raises(ValueError, match="need="):
        gpattention.regularizer(host.model)
    out = host.model(host.inputs, draw="independent", need=("logits", "regularizer"))
    assert torch.equal(gpattention.regularizer(host.model), out.regularizer)


def test_nothing_is_added_without_a_regularizer_or_gradients() -> None:
    host = make("bert")
    gpattention.convert(host.model, "softmax-gp").train()
    logits(host)
    assert float(gpattention.regularizer(host.model)) == 0.0
    frozen = make("bert")
    gpattention.convert(frozen.model, "direct").requires_grad_(False).train()
    logits(frozen)
    assert not gpattention.regularizer(frozen.model).requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["encoder", "bert", "timm", "own softmax"])
def test_a_model_in_training_can_be_copied(name: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    """As averages of weights and early stopping do between steps."""
    host = make(name)
    gpattention.convert(host.model, "cgp").train()
    if name.startswith("own"):
        host.model(host.inputs, need=("logits", "regularizer"))
    else:
        logits(host)
    value = gpattention.regularizer(host.model)
    other = copied(host.model)
    with pytest.raises(ValueError, match="expected a forward pass"):  # of its own
        gpattention.regularizer(other)
    assert torch.equal(gpattention.regularizer(host.model), value)
    value.backward()
