"""Signals of attached and converted hosts, against a host hooked by hand and NumPy's arithmetic."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

import gpattention
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.sites import hooked
from tests.hosts import hosts
from tests.hosts.hosts import CLASSES, ITEMS, REAL, TOKENS, bert, logits, some
from tests.models.test_signals import same
from tests.oracles.signals import entropy, unit_log_variance
from tests.threads import state_of

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
NOISE = 0.1  # sigma^2 before a fit


def calls_of(handle: Any, inputs: Any) -> list[tuple[Site, AttentionCall]]:
    seen: list[tuple[Site, AttentionCall]] = []

    def hook(site: Site, call: AttentionCall) -> Tensor:
        seen.append((site, call))
        return call.mean

    with torch.no_grad(), hooked(handle.model.eval(), handle.sites, hook):
        handle._runner.call(handle.model, inputs)
    return seen


@pytest.mark.parametrize("name", hosts.HOSTS)
def test_every_host(name: str) -> None:
    host = hosts.make(name)
    handle = gpattention.attach(host.model.eval(), call=host.call)
    before = state_of(host.model)
    found = handle.signals(host.inputs, per_token=True)
    assert state_of(host.model) == before
    assert found.variance is not None
    assert found.attention_entropy is not None
    assert_close(found.logits, logits(host).detach(), atol=1e-5, rtol=1e-5)
    heads = [f"{site.title} head {head}" for site in handle.sites for head in range(site.heads)]
    assert (found.sites, found.entropy_sites) == (tuple(heads), tuple(heads))
    column = 0
    for site, call in calls_of(handle, host.inputs):
        dot = call.form in ("softmax", "exp_dot")
        for head in range(site.heads):
            for item in range(ITEMS):
                real = slice(None) if call.mask is None else call.mask[item, 0].numpy()
                q, k, v = (x[item, head].double().numpy()[real] for x in (call.q, call.k, call.v))
                x, y = (q - q.mean(0), k - k.mean(0)) if dot else (q, k)
                log_variance = unit_log_variance(x, y, NOISE) + np.log((v**2).mean())
                spread = entropy(q, k, dot=dot)
                assert int(found.tokens[item]) == len(q)
                for profile, tokens, expected in (
                    (found.variance, found.token_variance, log_variance),
                    (found.attention_entropy, found.token_attention_entropy, spread),
                ):
                    assert tokens is not None
                    np.testing.assert_allclose(profile[item, column], expected.mean(), atol=2e-5)
                    np.testing.assert_allclose(tokens[item, real, column], expected, atol=5e-5)
            column += 1


@pytest.mark.parametrize("name", ["bert", "roberta", "vit", "encoder", "timm", "own softmax", "own text"])
def test_features_are_what_the_head_reads(name: str) -> None:
    host = hosts.make(name)
    found = gpattention.attach(host.model.eval(), call=host.call).signals(host.inputs, variance=False)
    assert found.variance is None
    linears = [m for m in host.model.modules() if isinstance(m, nn.Linear) and m.out_features == CLASSES]
    (head,) = linears
    with torch.no_grad():
        assert_close(head(found.features), found.logits)


def test_padding_batches_loaders_and_fits_change_nothing() -> None:
    host = hosts.make("bert")
    handle = gpattention.attach(host.model)
    whole = handle.signals(host.inputs)
    longer = {
        "input_ids": torch.cat([host.inputs["input_ids"], torch.full((ITEMS, 4), 9)], 1),
        "attention_mask": torch.cat(
            [host.inputs["attention_mask"], torch.zeros(ITEMS, 4, dtype=torch.long)], 1
        ),
    }
    same(handle.signals(longer), whole, 1e-5)
    same(handle.signals(host.inputs, batch_size=2), whole, 1e-5)
    parts = [some(host.inputs, slice(0, 3)), some(host.inputs, slice(3, None))]
    same(handle.signals(parts), whole, 1e-5)
    labelled = ({**part, "labels": torch.zeros(len(part["input_ids"]))} for part in parts)
    same(handle.signals(labelled), whole, 1e-5)
    same(handle.signals([(part, None) for part in parts]), whole, 1e-5)
    off = handle.settings  # what a fit leaves that finds no draws worth having
    handle.settings = type(off)(**{**vars(off), "scale": torch.zeros_like(off.scale)})
    same(handle.signals(host.inputs), whole)


HEADS = {"ForTokenClassification": "tokens", "ForMaskedLM": "tokens", "Model": "embedding"}


@pytest.mark.parametrize("head", HEADS)
def test_answers_for_tokens_are_averaged_over_the_real_ones(head: str) -> None:
    model, task = bert(head).eval(), HEADS[head]
    inputs = {"input_ids": torch.randint(3, 40, (ITEMS, TOKENS)), "attention_mask": REAL.long()}
    handle = gpattention.attach(model)
    found = handle.signals(inputs)
    assert handle.task == task
    assert found.features.shape == (ITEMS, 16)
    with torch.no_grad():
        answers, real = model(**inputs)[0], REAL[..., None].float()
    mean = (answers * real).sum(1) / real.sum(1)
    assert_close(found.logits if task == "tokens" else found.features, mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["cgp", "direct", "scgp", "sgpa", "softmax-gp", "kernel"])
@pytest.mark.parametrize("name", ["bert", "vit", "encoder", "timm", "own text"])
def test_converted_hosts(name: str, kind: str) -> None:
    host = hosts.make(name)
    attached = gpattention.attach(host.model.eval(), call=host.call).signals(host.inputs)
    model = gpattention.convert(host.model, kind=kind, example=host.inputs)
    found = gpattention.signals(
        model.eval(), host.inputs, **({} if name.startswith("own") else {"call": host.call})
    )
    assert_close(found.logits, logits(host).detach(), atol=1e-5, rtol=1e-5)
    assert (found.variance is None) == (kind == "kernel")
    assert (found.attention_entropy is None) == (kind == "scgp")
    assert found.tokens.tolist() == attached.tokens.tolist()
    profile = found.attention_entropy if found.variance is None else found.variance
    assert profile is not None
    assert profile.shape == (ITEMS, 4)
    names = found.sites or found.entropy_sites
    assert names == attached.sites
    if kind in ("cgp", "direct", "softmax-gp") and name != "own text" and found.attention_entropy is not None:
        assert attached.attention_entropy is not None  # what compares queries and keys is the host's still
        assert_close(found.attention_entropy[:, :2], attached.attention_entropy[:, :2], atol=1e-4, rtol=1e-4)


class Looking(nn.Module):
    """Attention that is asked for its weights too, and is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.attention(x, x, x, need_weights=True)[0]
        return self.head(x[:, 0])


def test_shared_layers_have_columns_for_every_call() -> None:
    torch.manual_seed(0)
    model, x = Looking().eval(), torch.randn(ITEMS, TOKENS, 16)
    names = tuple(f"attention{call} head {head}" for call in ("", " call 2") for head in (0, 1))
    assert gpattention.attach(model).signals(x).sites == names
    assert gpattention.signals(gpattention.convert(model, kind="cgp", example=x), x).sites == names


def test_refusals() -> None:
    host = hosts.make("bert")
    with pytest.raises(ValueError, match="expected a converted model"):
        gpattention.signals(host.model, host.inputs)
    handle = gpattention.attach(Looking().eval(), call=lambda model, x: model(x)[:, :2])
    with pytest.raises(ValueError, match=r"to have 2 outputs.* got \[3\]"):
        handle.signals(torch.randn(ITEMS, TOKENS, 16))
    handle.detach()
    with pytest.raises(ValueError, match="detached"):
        handle.signals(torch.randn(ITEMS, TOKENS, 16))


def test_half_precision_and_a_compiled_host() -> None:
    host = hosts.make("vit")
    whole = gpattention.attach(host.model.eval()).signals(host.inputs)
    compiled = gpattention.attach(torch.compile(host.model)).signals(host.inputs)
    assert_close(compiled.variance, whole.variance, atol=1e-5, rtol=0)
    assert_close(compiled.features, whole.features, atol=1e-5, rtol=0)
    half = gpattention.attach(host.model.bfloat16()).signals(
        {n: x.bfloat16() for n, x in host.inputs.items()}
    )
    assert half.logits.dtype == half.features.dtype == torch.float32
    assert half.variance is not None
    assert_close(half.variance, whole.variance, atol=0.1, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", hosts.HOSTS)
def test_on_a_gpu(name: str) -> None:
    host = hosts.make(name)
    plain = gpattention.attach(host.model.eval(), call=host.call).signals(host.inputs, per_token=True)
    host.model.to("cuda")
    inputs = tree_map(lambda x: x.to("cuda") if isinstance(x, Tensor) else x, host.inputs)
    found = gpattention.attach(host.model, call=host.call).signals(inputs, per_token=True)
    assert found.logits.is_cuda
    same(found.to("cpu"), plain, 5e-4)
