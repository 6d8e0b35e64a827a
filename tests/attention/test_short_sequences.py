"""`exact_when_shorter`: SCGP attention takes short sequences by the exact model of the same parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention import gp
from gpattention.attention import Attention, CGPAttention, SCGPAttention, build_attention
from tests.attention.variants import EMBED, HEADS, TOKENS, padding, tokens

NEED = ("output", "variance", "regularizer", "weights")
COSTS = {"kl": "kl", "dtc": "marginal", "none": "none"}


def pair(normalize: str, regularizer: str, **options: Any) -> tuple[SCGPAttention, CGPAttention]:
    """SCGP that takes up to `TOKENS` tokens exactly, and CGP of the same parameters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": HEADS, "normalize": normalize}
    shared = {"regularizer": regularizer, "num_inducing": (TOKENS + 2, TOKENS), "exact_when_shorter": True}
    scgp = build_attention("scgp", **sizes, **shared, **options).double()
    with torch.no_grad():
        for x in scgp.parameters():
            x.add_(0.2 * torch.randn(x.shape, dtype=x.dtype))
    cgp = build_attention("cgp", **sizes, regularizer=COSTS[regularizer]).double()
    cgp.load_state_dict({name: x for name, x in scgp.state_dict().items() if "inducing" not in name})
    return scgp, cgp


def answers(module: Attention, *x: Tensor, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a call returns, and the gradients of the parameters that take part in it."""
    found = module(*x, need=NEED, **options)
    values = {name: getattr(found, name) for name in NEED}
    module.zero_grad()
    torch.stack([x.sin().sum() for x in values.values()]).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: x.detach() for name, x in values.items()}, gradients


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", ["itself", "padded", "memory"])
@pytest.mark.parametrize("regularizer", COSTS)
@pytest.mark.parametrize("normalize", ["rows", "none"])
def test_short_sequences_are_those_of_cgp(
    normalize: str, regularizer: str, case: str, training: bool
) -> None:
    options = {"key_padding_mask": padding()} if case == "padded" else {}
    x = (tokens(), tokens(length=4)) if case == "memory" else (tokens(),)
    ours, theirs = (answers(module.train(training), *x, **options) for module in pair(normalize, regularizer))
    for found, expected in zip(ours, theirs, strict=True):
        assert found.keys() == expected.keys()  # so inducing inputs have no gradient
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=0, msg=name)


def test_the_posterior_is_that_of_the_heads() -> None:
    scgp, _ = pair("none", "kl")
    x = tokens()
    q, k, o, v = (scgp._split(linear(x)) for linear in (scgp.query, scgp.key, scgp.latent, scgp.value))
    options = {"noise": scgp.noise(), "scale_q": scgp.scale_q(), "scale_k": scgp.scale_k()}
    expected = gp.cgp_posterior(q, k, o, v, **options)
    found = scgp(x, need=("posterior",)).posterior
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.covariance(), expected.covariance())


def test_a_longer_batch_and_a_longer_memory_are_sparse() -> None:
    """The padded length decides, not how many tokens are real; with two sets the smaller one."""
    scgp, _ = pair("rows", "kl")
    plain = build_attention(
        "scgp", embed_dim=EMBED, num_heads=HEADS, num_inducing=(TOKENS + 2, TOKENS)
    ).double()
    plain.load_state_dict(scgp.state_dict())
    short, long = tokens(), tokens(length=TOKENS + 1)
    assert not torch.equal(scgp(short).output, plain(short).output)
    ignored = torch.zeros(len(long), TOKENS + 1, dtype=torch.bool)
    ignored[:, 2:] = True
    for x in ((long,), (short, long), (long, short)):
        assert torch.equal(scgp(*x).output, plain(*x).output)
    options = {"key_padding_mask": ignored}
    assert torch.equal(scgp(long, **options).output, plain(long, **options).output)


def test_one_training_step_after_the_other_may_switch() -> None:
    scgp, _ = pair("rows", "kl")
    optimizer = torch.optim.AdamW(scgp.parameters(), lr=1e-2)
    start = {name: p.detach().clone() for name, p in scgp.named_parameters()}
    moved = []
    for length in (TOKENS, TOKENS + 3, TOKENS):
        optimizer.zero_grad()
        found = scgp(tokens(length=length), draw="joint", need=("output", "regularizer"))
        (found.output.square().mean() + 0.01 * found.regularizer).backward()
        optimizer.step()
        moved.append(not torch.equal(scgp.inducing_q.points, start["inducing_q.points"]))
    assert moved == [False, True, True]
    assert all(bool(torch.isfinite(p).all()) for p in scgp.parameters())
    assert not torch.equal(scgp.latent.weight, start["latent.weight"])


def test_inducing_inputs_at_all_tokens_give_the_same_but_for_the_noise_of_z_o() -> None:
    """The limit that the option stands for: V_sparse = V + sigma^2 A A^T, and dtc is marginal."""
    g = torch.Generator().manual_seed(0)
    q, k, o, v = (0.7 * torch.randn(6, 3, generator=g, dtype=torch.float64) for _ in range(4))
    noise = torch.tensor(0.05, dtype=torch.float64)
    exact = gp.cgp_posterior(q, k, o, v, noise=noise)
    sparse = gp.scgp_posterior(
        q, k, o, v, torch.cat([q, k, o]), noise=noise, values="dual", include_noise=False, delta=1e-12
    )
    near = {"rtol": 0.0, "atol": 1e-7}
    torch.testing.assert_close(sparse.mean, exact.mean, **near)
    gram = torch.exp(-0.5 * torch.cdist(o, o).square()) + noise * torch.eye(6)
    A = torch.linalg.solve(gram, torch.exp(-0.5 * torch.cdist(o, q).square())).mT
    torch.testing.assert_close(sparse.covariance(), exact.covariance() + noise * A @ A.mT, **near)
    for term in ("query", "key"):
        found, expected = (getattr(p.log_density(), term) for p in (sparse, exact))
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": "paper"}, "values to be 'dual' with exact_when_shorter=True, .*got 'paper'"),
        ({"include_noise": True}, "include_noise to be False with exact_when_shorter=True, .*got True"),
        ({"regularizer": "jensen"}, "regularizer to be one of kl, dtc, none with .*, got 'jensen'"),
        ({"exact_when_shorter": "yes"}, "exact_when_shorter to be true or false, got 'yes'"),
        ({"exact_when_short": True}, "did you mean 'exact_when_shorter'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention("scgp", embed_dim=EMBED, num_heads=HEADS, **({"exact_when_shorter": True} | options))
