"""Densities and divergences take what their posterior is given, and none of what it may answer with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpattention import gp

EXACT = [gp.cgp_log_density, gp.cgp_kl, gp.direct_log_density, gp.direct_kl]
SPARSE = [gp.scgp_log_density, gp.scgp_kl]


@pytest.mark.parametrize("function", [*EXACT, *SPARSE], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["with_variance", "with_cost", "objectives", "include_noise", "jitter"])
def test_other_keywords_are_refused(function: Callable[..., Any], name: str) -> None:
    tokens = [torch.zeros(3, 2)] * (3 if function.__name__.startswith("direct") else 4)
    inducing = [torch.zeros(2, 2)] * 2 if function in SPARSE else []
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword.*{name}"):
        function(*tokens, *inducing, noise=0.1, **{name: True})
