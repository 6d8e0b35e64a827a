"""Dropout at prediction: the right masks in distribution, owned by items, and a model left as it was."""

import pytest
import torch
from torch import nn

from gpattention.evaluation import MCDropout
from gpattention.models.prediction import predict
from tests.models.stub_models import StubModel, StubOutput, normal

X = normal(7, 5, seed=1)


class Linear(StubModel):
    """logits = head(dropout(x)): linear in the mask."""

    def __init__(self, dropout: nn.Module, **options) -> None:
        super().__init__(hidden=5, draws=False, **options)
        self.dropout = dropout

    def features(self, inputs, *, draw="none", generator=None):
        return self.dropout(inputs)

    def forward(self, inputs, *, draw="none", generator=None, need=("logits",)):
        return StubOutput(self.head(self.features(inputs)), [])


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_keep_the_mean_and_have_the_variance_of_dropout(p: float) -> None:
    model, samples = Linear(nn.Dropout(p)), 20_000
    told = MCDropout(model).predict(X[:2], samples=samples, batch_size=50_000)
    logits = told.logits.double()  # [S, 2, C]
    x, weight = X[:2].double(), model.head.weight.detach().double()
    cov = p / (1 - p) * torch.einsum("ce,be,de->bcd", weight, x.square(), weight)  # [2, C, C]
    for item in range(2):
        error = (cov[item].diagonal() / samples).sqrt()
        expected = model.head(X[item]).detach().double()
        assert bool(((logits[:, item].mean(0) - expected).abs() < 5 * error).all())
        scale = float(cov[item].diagonal().max())
        torch.testing.assert_close(logits[:, item].T.cov(), cov[item], rtol=0.05, atol=0.05 * scale)


def test_the_rate_may_be_set_later_or_overridden() -> None:
    model = Linear(nn.Dropout(0.2))
    predictor = MCDropout(model)
    model.dropout.p = 1.0
    logits = predictor.predict(X, samples=2).logits
    torch.testing.assert_close(logits, model.head.bias.detach().expand_as(logits))
    model.dropout.p = 0.0
    assert MCDropout(model, p=0.5).predict(X, samples=3).logits.std(0).min() > 0
    assert model.dropout.p == 0.0


@pytest.mark.parametrize("draw", ["none", "independent"])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 20])
def test_batch_size_changes_nothing(batch_size: int, draw) -> None:
    model = StubModel(p=0.3)
    predictor = MCDropout(model, draw=draw)
    whole = predictor.predict(X, samples=6, batch_size=1000)
    part = predictor.predict(X, samples=6, batch_size=batch_size)
    torch.testing.assert_close(part.logits, whole.logits, rtol=1e-6, atol=1e-6)
    later = predictor.predict(X[2:], samples=6, first_item=2)
    torch.testing.assert_close(later.logits, whole.logits[:, 2:], rtol=1e-6, atol=1e-6)
    assert not torch.equal(predictor.predict(X, samples=6, seed=1).logits, whole.logits)
    assert whole.mutual_information.min() > 0
    assert {call["draw"] for call in model.calls if call["noise"]} == ({draw} - {"none"})


def test_samples_0_drops_nothing() -> None:
    model = StubModel(p=0.3)
    found = MCDropout(model).predict(X, samples=0)
    assert torch.equal(found.logits, predict(model, X, samples=0).logits)


def test_the_model_is_left_as_it_was() -> None:
    model = StubModel(p=0.3).train()
    model.second.eval()
    before = [module.training for module in model.modules()]
    MCDropout(model).predict(X, samples=2)
    with pytest.raises(RuntimeError):
        MCDropout(model).predict(X[:, :3], samples=2)
    assert [module.training for module in model.modules()] == before
    assert all(len(module._forward_hooks) == 0 for module in model.modules())
    assert model.eval()(X).logits.equal(model(X).logits)


def test_channel_dropout_drops_whole_channels() -> None:
    class Images(Linear):
        def features(self, inputs, *, draw="none", generator=None):
            self.seen = self.dropout(inputs)
            return self.seen.flatten(2).mean(-1)

    model = Images(nn.Dropout2d(0.5))
    MCDropout(model).predict(torch.ones(7, 5, 2, 3), samples=4, batch_size=100)
    assert model.seen.shape == (28, 5, 2, 3)
    first = model.seen[:, :, :1, :1]
    assert torch.equal(model.seen, first.expand_as(model.seen))
    assert set(first.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("batch_size", [4, 10])
def test_what_items_share_is_not_dropped(batch_size: int) -> None:
    """A parameter of 4 rows passes through dropout as well; a batch of 4 rows must not be mistaken for it."""

    class Shared(StubModel):
        def features(self, inputs, *, draw="none", generator=None):
            shared = self.dropout(torch.ones(4, 6, device=inputs.device))
            assert torch.equal(shared, torch.ones(4, 6))
            return super().features(inputs, draw=draw, generator=generator) + shared.mean()

    found = MCDropout(Shared(p=0.3)).predict(X, samples=6, batch_size=batch_size)
    whole = MCDropout(Shared(p=0.3)).predict(X, samples=6)
    torch.testing.assert_close(found.logits, whole.logits, rtol=1e-6, atol=1e-6)
    assert found.mutual_information.min() > 0


class Folded(Linear):
    def features(self, inputs, *, draw="none", generator=None):
        return self.dropout(inputs.repeat_interleave(2, 0))[::2]


class Bypassed(Linear):
    def features(self, inputs, *, draw="none", generator=None):
        return inputs


def test_errors() -> None:
    with pytest.raises(ValueError, match="dropout modules of p > 0, got none in StubModel"):
        MCDropout(StubModel(p=0.0))
    with pytest.raises(ValueError, match=r"p in \(0, 1\], got 1.5"):
        MCDropout(StubModel(p=0.1), p=1.5)
    with pytest.raises(ValueError, match="draw to be one of none, independent, joint, got 'yes'"):
        MCDropout(StubModel(p=0.1), draw="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nn.Dropout as 'dropout', got AlphaDropout with p=0.1"):
        MCDropout(Linear(nn.AlphaDropout(0.1)))
    with pytest.raises(ValueError, match=r"'dropout' to lead with the batch.*got 4 rows for a batch of 2"):
        MCDropout(Folded(nn.Dropout(0.1))).predict(X)
    with pytest.raises(ValueError, match="calls none: nothing would drop"):
        MCDropout(Bypassed(nn.Dropout(0.1))).predict(X)
    with pytest.raises(ValueError, match="samples to be a whole number >= 0, got -1"):
        MCDropout(StubModel(p=0.1)).predict(X, samples=-1)
