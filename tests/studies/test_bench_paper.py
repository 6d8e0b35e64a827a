"""The paper's way: it computes what our mathematics says where the paper is right, its own slow way."""

import pytest
import torch
from torch import Tensor

from gpattention.attention import build_attention, list_attention
from gpattention.gp import NotPositiveDefiniteError, rbf
from gpattention.models import VisionConfig
from gpattention.studies.bench_paper import (
    ALLOWED_GAP,
    PAPERS,
    PaperKernelAttention,
    PaperPosterior,
    gap_to_ours,
    outer,
    paper_attention,
    paper_gram,
    paper_model,
    paper_root,
)

SMALL = VisionConfig(width=16, heads=2, depth=2, image_size=8, patch=4)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def both(name: str, **options: str):
    """The paper's module and ours with the same random parameters, amplitudes that are not 1 included."""
    torch.manual_seed(1)
    theirs = paper_attention(name, 16, 2, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = build_attention(
        PAPERS[name].kind, embed_dim=16, num_heads=2, dtype=torch.float64,
        **{**PAPERS[name].options, **options},
    ).eval()  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("name", PAPERS)
def test_baselines_are_our_mathematics(name: str) -> None:
    assert gap_to_ours(name) < 1e-2 * ALLOWED_GAP
    assert name not in list_attention()  # it is no kind that a recipe could name


@pytest.mark.parametrize("name", ["paper-cgp", "paper-scgp"])
def test_covariances_of_all_channels_are_ours(name: str) -> None:
    theirs, ours = both(name)
    x = tokens(3, 7, 16)
    mine = ours(x, need=("output", "posterior")).posterior
    posterior = theirs(x, need=("output", "posterior")).posterior
    assert isinstance(posterior, PaperPosterior)
    torch.testing.assert_close(posterior.mean, mine.mean, rtol=1e-8, atol=1e-10)
    expected = mine.covariance()[..., None, :, :].expand_as(posterior.channels)
    torch.testing.assert_close(posterior.channels, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", PAPERS)
def test_gradients_are_ours(name: str) -> None:
    found = []
    for module in both(name):
        x = tokens(2, 5, 16).requires_grad_()
        facts = module(x, need=("output", "variance") if module.draws else ("output",))
        (facts.output.square().sum() + (facts.variance.sum() if module.draws else 0.0)).backward()
        parameters = dict(module.named_parameters())
        found.append({"x": x.grad} | {key: p.grad for key, p in parameters.items() if p.grad is not None})
    theirs, ours = found
    assert theirs.keys() == ours.keys()
    for key, gradient in theirs.items():
        torch.testing.assert_close(gradient, ours[key], rtol=1e-6, atol=1e-8, msg=key)


def test_draws_have_the_covariance() -> None:
    theirs, _ = both("paper-cgp")
    x = tokens(1, 3, 16).expand(20_000, -1, -1)
    torch.manual_seed(0)
    with torch.no_grad():
        posterior = theirs(x[:1], need=("output", "posterior")).posterior
        drawn = PaperPosterior(
            posterior.mean.expand(20_000, -1, -1, -1), posterior.channels.expand(20_000, -1, -1, -1, -1)
        ).sample()[0]  # [20000, H, N, D]
    channel = drawn[:, 0, :, 1]  # [20000, N]
    torch.testing.assert_close(channel.T.cov(), posterior.channels[0, 0, 1], rtol=0.05, atol=0.02)
    torch.testing.assert_close(channel.mean(0), posterior.mean[0, 0, :, 1], rtol=0.05, atol=0.03)


def test_the_monte_carlo_regulariser_has_the_closed_form_as_its_mean() -> None:
    theirs, ours = both("paper-cgp", regularizer="jensen")
    x = tokens(1, 4, 16)
    torch.manual_seed(0)
    with torch.no_grad():
        each = torch.stack(
            [theirs(x.expand(500, -1, -1), need=("output", "regularizer")).regularizer for _ in range(8)]
        )
        expected = ours(x, need=("output", "regularizer")).regularizer
    assert abs(each.mean() - expected) < 5 * each.std() / len(each) ** 0.5


def test_the_sparse_regulariser_is_the_double_jensen_bound() -> None:
    theirs, ours = both("paper-scgp")
    a, b = (module(tokens(2, 6, 16), need=("output", "regularizer")).regularizer for module in (theirs, ours))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=0)


def test_the_papers_matrices() -> None:
    a, b = tokens(2, 3, 4, 5), tokens(2, 3, 6, 5, seed=1)
    torch.testing.assert_close(paper_gram(a, b), rbf(a, b))
    torch.testing.assert_close(outer(a)[..., 1, :, :], a[..., 1:2] @ a[..., 1:2].mT)
    fine, flat = torch.eye(2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    root = paper_root(torch.stack([fine, flat]))  # roots take the first jitter that does
    torch.testing.assert_close(root @ root.mT, torch.stack([fine, flat]), rtol=0, atol=2e-7)
    wrong = fine - 0.5 * torch.ones_like(fine) * 2.2  # eigenvalue -1.2
    root = paper_root(wrong)
    assert float((root @ root.mT - wrong).diagonal().mean()) == pytest.approx(10.0)
    with pytest.raises(NotPositiveDefiniteError, match="no factor up to a jitter of 1e"):
        paper_root(-1e9 * fine)


def test_models_have_it_in_every_layer_and_train_with_it() -> None:
    for name, paper in PAPERS.items():
        model = paper_model(name, SMALL)
        assert all(type(block.attention) is paper.module for block in model.blocks)  # type: ignore[union-attr]
        drawing = "independent" if model.draws else "none"
        out = model(torch.randn(2, 3, 8, 8), draw=drawing, need=("logits", "regularizer"))
        out.logits.sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert isinstance(paper_model("paper-kernel", SMALL).blocks[0].attention, PaperKernelAttention)  # type: ignore[union-attr]
