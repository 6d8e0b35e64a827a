"""SGPA's kernels against float64, outputs and every gradient, under Triton's interpreter."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from gpattention import gp
from gpattention.attention import SGPAAttention
from gpattention.gp import ArdRbf
from gpattention.ops.draws import fused_draw
from gpattention.ops.sgpa import fused_triangle
from tests.ops.comparison import check_fused, with_gradients

pytest.importorskip("triton")


@dataclass(frozen=True)
class Problem:
    """Sizes and conditions of one comparison."""

    tokens: int
    width: int = 3
    channels: int = 4
    inducing: int = 5
    masked: bool = False
    scaled: bool = False
    jitter: float = 1e-4
    lead: tuple[int, ...] = (2, 2)

    def __str__(self) -> str:
        flags = [name for name in ("masked", "scaled") if getattr(self, name)]
        return "-".join([f"{self.tokens}x{self.width}x{self.channels}x{self.inducing}", *flags])

    def leaves(self) -> dict[str, Tensor]:
        """Tokens as projections lay them out, and parameters per head."""
        g = torch.Generator().manual_seed(0)
        (*batch, H), m, D = self.lead, self.inducing, self.channels

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        found = {
            "q": (0.5 * normal(*batch, self.tokens, H, self.width)).transpose(-3, -2),
            "v": normal(*batch, self.tokens, H, D).transpose(-3, -2),
            "inducing_k": 0.5 * normal(H, m, self.width),
            "inducing_v": normal(H, m, D),
            "scale_tril": 0.2 * normal(H, D, m, m).tril(-1) + torch.diag_embed(0.3 + normal(H, D, m).abs()),
        }
        if self.scaled:
            found["lengthscale"] = 1 + 0.3 * normal(H, self.width).abs()
            found["variance"] = 0.6 + 0.3 * normal(H).abs()
        return found

    def mask(self) -> Tensor | None:
        g = torch.Generator().manual_seed(1)
        shape = (*self.lead[:-1], 1, self.tokens)
        return torch.rand(shape, generator=g) > 0.35 if self.masked else None


QUICK = [
    Problem(7),
    Problem(6, masked=True, scaled=True, lead=(2, 1)),
    Problem(1, 1, 1, 1, scaled=True, lead=(1,)),
    Problem(33, 17, 3, 4, masked=True, lead=(1, 1)),
]
LARGE = [
    Problem(3, 2, 2, 18, lead=(13, 1)),
    Problem(64, 32, 32, 32, lead=(2, 1)),
    Problem(100, 20, 33, 40, masked=True, scaled=True, lead=(1, 2)),
    Problem(128, 64, 64, 64, lead=(1, 1)),
]


def posterior(leaves: dict[str, Tensor], problem: Problem, device: str = "cpu", **options: object):
    names = ("q", "v", "inducing_k", "inducing_v", "scale_tril")
    kernel = {name: x for name, x in leaves.items() if name not in names}
    mask = problem.mask()
    return gp.sgpa_posterior(
        *(leaves[name] for name in names), kernel=ArdRbf(**kernel) if kernel else gp.rbf,
        jitter=problem.jitter, mask=None if mask is None else mask.to(device), **options,
    )  # fmt: skip


def evaluate(problem: Problem, device: str, what: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs and the gradients of all leaves."""
    leaves = {name: x.to(device, dtype).requires_grad_() for name, x in problem.leaves().items()}
    p = posterior(leaves, problem, device, with_variance=what != "mean")
    if what == "draws":
        items = torch.arange(problem.lead[0], device=device)
        noise = gp.ItemNoise(0, items, torch.zeros_like(items))
        return with_gradients(
            leaves, {"draws": p.sample(2, generator=noise), "more": p.sample(generator=noise)}
        )
    outputs = {"mean": p.mean, "kl": p.kl()} | ({"variance": p.variance} if what == "all" else {})
    return with_gradients(leaves, outputs)


def check(problem: Problem, what: str = "all", device: str = "cpu") -> None:
    """The kernels against the plain operations."""
    with gp.fused_kernels("on"):
        leaves = {name: x.to(device) for name, x in problem.leaves().items()}
        assert posterior(leaves, problem, device).why_not_fused() is None
    check_fused(lambda dtype: evaluate(problem, device, what, dtype), 4e-6)


@pytest.mark.parametrize("problem", QUICK, ids=str)
def test_moments_and_kl(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("what", ["mean", "draws"])
def test_mean_alone_and_draws(what: str) -> None:
    check(QUICK[1], what)


@pytest.mark.slow
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_large(problem: Problem) -> None:
    check(problem)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("what", ["all", "mean", "draws"])
@pytest.mark.parametrize(
    "problem", [*QUICK, *LARGE, Problem(64, 32, 32, 32, jitter=1e-6, lead=(100, 4))], ids=str
)
def test_on_a_gpu(problem: Problem, what: str) -> None:
    if what == "draws" and len(problem.lead) == 1:
        pytest.skip("draws keyed by item have a batch")
    check(problem, what, "cuda")


def test_a_variance_asked_for_later_is_the_same() -> None:
    leaves = QUICK[0].leaves()
    with gp.fused_kernels("on"):
        early, late = posterior(leaves, QUICK[0], with_variance=True), posterior(leaves, QUICK[0])
        assert torch.equal(early.variance, late.variance)
        assert torch.equal(early.mean, late.mean)
        assert torch.equal(early.kl(), late.kl())


def test_other_views_of_a_fused_posterior() -> None:
    leaves, found = QUICK[1].leaves(), []
    for mode in ("off", "on"):
        with gp.fused_kernels(mode):
            p = posterior(leaves, QUICK[1])
            g = torch.Generator().manual_seed(0)
            found.append([p.covariance(), p.stddev, p.prior_stddev, p.sample(joint=True, generator=g)])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_padding_hides_whatever_is_written_there() -> None:
    problem = QUICK[1]
    leaves, hidden = problem.leaves(), ~problem.mask()[..., None]
    spoiled = {name: leaves[name].masked_fill(hidden, float("nan")) for name in ("q", "v")}
    with gp.fused_kernels("on"):
        clean = posterior(leaves, problem, with_variance=True)
        spoilt = posterior({**leaves, **spoiled}, problem, with_variance=True)
    for a, b in ((clean.mean, spoilt.mean), (clean.variance, spoilt.variance), (clean.kl(), spoilt.kl())):
        assert torch.equal(a, b)
    assert (clean.mean.masked_select(hidden) == 0).all()
    assert (clean.variance.masked_select(hidden) == 0).all()


def coinciding(problem: Problem) -> dict[str, Tensor]:
    """All inducing inputs of the second head are one."""
    leaves = problem.leaves()
    leaves["inducing_k"][1] = leaves["inducing_k"][1, :1]
    return leaves


def test_a_failed_factor_raises_with_its_place() -> None:
    problem = Problem(3, jitter=1e-9)
    with gp.fused_kernels("on"), pytest.raises(gp.NotPositiveDefiniteError) as caught:
        posterior(coinciding(problem), problem)
    assert "1 of 2 matrices K_bb + jitter I (5 x 5, float32)" in str(caught.value)
    assert "pivot to fail is number 2 of matrix [1]" in str(caught.value)


def test_a_deferred_failure_is_nan_and_counted() -> None:
    problem = Problem(3, jitter=1e-9)
    with gp.fused_kernels("on"), gp.deferred_checks():
        p = posterior(coinciding(problem), problem, with_variance=True)
    assert p.variance[:, 1].isnan().all()
    assert p.variance[:, 0].isfinite().all()
    with pytest.raises(gp.NotPositiveDefiniteError, match="1 on cpu"):
        gp.check_health()


def test_what_the_kernels_leave_to_plain_operations() -> None:
    problem = QUICK[0]
    leaves = problem.leaves()
    per_sequence = {**leaves, "inducing_k": leaves["inducing_k"].expand(2, -1, -1, -1)}
    with gp.fused_kernels("on"):
        found = posterior(per_sequence, problem)
        assert found.why_not_fused() == "inducing inputs differ between sequences"
        torch.testing.assert_close(found.mean, posterior(leaves, problem).mean, rtol=1e-4, atol=1e-5)
        other = gp.sgpa_posterior(*list(leaves.values())[:5], kernel=gp.exp_dot)
        assert other.why_not_fused() == "the kernel is neither rbf nor ArdRbf"


def test_draws_pass_no_gradient_where_the_variance_is_zero() -> None:
    mean = torch.zeros(1, 2, 3).requires_grad_()
    variance = torch.tensor([[[0.0, 1.0, 4.0], [1.0, 0.0, 9.0]]]).requires_grad_()
    noise = torch.full((1, 1, 2, 3), 2.0)
    draws = fused_draw(mean, variance, noise, squared=True)
    assert torch.equal(draws[0], 2 * variance.detach().sqrt())
    by_mean, by_variance = torch.autograd.grad(draws.sum(), (mean, variance))
    assert torch.equal(by_mean, torch.ones_like(mean))
    expected = torch.where(variance > 0, 1 / variance.detach().clamp_min(1e-9).sqrt(), 0.0)
    torch.testing.assert_close(by_variance, expected.detach())


def test_triangular_factors_and_their_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    raw = torch.cat([torch.tensor([-90.0, -30.0, -9.0, 0.0, 25.0]), torch.randn(10, generator=g)]).view(3, 5)
    lower, weight = torch.randn(3, 5, 5, generator=g), torch.randn(3, 5, 5, generator=g)
    found = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (lower, raw)]
        if dtype == torch.float32:
            out = fused_triangle(*leaves, 1e-4)
        else:
            out = leaves[0].tril(-1) + torch.diag_embed(1e-4 + softplus(leaves[1]))
        found.append([out.detach(), *torch.autograd.grad((out * weight.to(dtype)).sum(), leaves)])
    for exact, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, exact.float(), rtol=1e-6, atol=1e-34)
    alone = fused_triangle(torch.zeros(3, 5, 5), raw, 0.0).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(alone, softplus(raw.double()).float(), rtol=1e-6, atol=1e-34)


@pytest.mark.parametrize("kernel", ["rbf", "ard_rbf"])
def test_the_module_with_the_switch_on_and_off(kernel: str) -> None:
    torch.manual_seed(0)
    attention = SGPAAttention(8, 2, num_inducing=3, kernel=kernel, jitter=1e-4)
    x, padding, found = torch.randn(3, 5, 8), torch.rand(3, 5) < 0.3, []
    padding[1] = True  # a sequence that is no example
    items = torch.arange(3)
    for mode in ("off", "on"):
        attention.zero_grad()
        noise = gp.ItemNoise(0, items, torch.zeros_like(items))
        with gp.fused_kernels(mode):
            result = attention(
                x, key_padding_mask=padding, draw="independent", generator=noise,
                need=("output", "regularizer"),
            )  # fmt: skip
            (result.output.square().sum() + result.regularizer).backward()
        gradients = [p.grad.clone() for p in attention.parameters()]
        found.append([result.output.detach(), result.regularizer.detach(), *gradients])
    largest = max(float(plain.norm()) for plain in found[0])  # a bias has no gradient but rounding
    for plain, fused in zip(*found, strict=True):
        assert float((fused - plain).norm()) <= 3e-5 * float(plain.norm()) + 3e-6 * largest
