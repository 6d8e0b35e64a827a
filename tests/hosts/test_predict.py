"""Hosts of [tokens, batch, width] are refused also where all shapes happen to fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpattention


class Columns(nn.Module):
    """One answer per column, or per token of each."""

    def __init__(self, pooled: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.pooled, self.rows = pooled, []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        states = self.head(self.encoder(x))
        return states.mean(0) if self.pooled else states


def attached(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return gpattention.attach(model, **options).predict


def converted(model: nn.Module, **options: Any) -> Callable[..., Any]:
    gpattention.convert(model, "direct")
    return lambda x, samples: gpattention.predict(model, x, samples, **options)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("tokens", "batch", "samples"),
    [(2, 6, 3), (5, 5, 0), (5, 5, 1), (6, 5, 3)],  # as many columns as rows, but for the last
)
@pytest.mark.parametrize("adopt", [attached, converted])
def test_hosts_of_columns_are_refused(
    adopt: Any, tokens: int, batch: int, samples: int, pooled: bool
) -> None:
    if pooled or tokens != 6:  # states of as many tokens are no answers of as many items
        with pytest.raises(ValueError, match=r"batches (are not )?the first axis"):
            adopt(Columns(pooled))(torch.randn(tokens, batch, 8), samples)


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("adopt", [attached, converted])
def test_a_call_that_turns_them_is_right(adopt: Any, samples: int) -> None:
    predict = adopt(Columns(), call=lambda host, x: host(x.transpose(0, 1)))
    assert predict(torch.randn(5, 5, 8), samples).label.shape == (5,)


def test_nothing_more_is_run_where_shapes_tell() -> None:
    model = Columns()
    handle = gpattention.attach(model, call=lambda host, x: host(x.transpose(0, 1)))
    handle.predict(torch.randn(4, 5, 8), samples=0)
    assert len(model.rows) == 1
    for _ in range(2):  # and where they do not, once
        handle.predict(torch.randn(5, 5, 8), samples=0)
    assert len(model.rows) == 5


def test_variances_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"variances of 6 rows, got shape \(5, 2, 6\)"):
        gpattention.attach(Columns(pooled=False)).variances(torch.randn(6, 5, 8))
