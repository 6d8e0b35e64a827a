"""Flags keep their promise on real images: the shared CIFAR-10 model, where GPATTENTION_DATA has the data."""

import os
from pathlib import Path

import pytest
import torch
from scipy.stats import betabinom, ks_2samp

from gpattention.data import check, load
from gpattention.models import VisionTransformer
from gpattention.strangeness import Strangeness

MODEL = Path(__file__).parents[2] / "results" / "models" / "cifar10-direct-rows"


@pytest.mark.slow
def test_flags_of_images_that_chose_nothing() -> None:
    """Test images in two halves: no epoch, weight or density was chosen by either, so both are as usual."""
    found = check() if os.environ.get("GPATTENTION_DATA") else ()
    if not any(status.name == "cifar10" and status.state == "present" for status in found):
        pytest.skip("cifar10 is not in the folder that GPATTENTION_DATA names")
    data, model = load("cifar10"), VisionTransformer.from_pretrained(MODEL)
    chosen = torch.randperm(len(data.test.images), generator=torch.Generator().manual_seed(0))[:1600]
    signals = model.signals(data.inputs(data.test.images[chosen]))
    fitted = Strangeness.fit(signals[:800], data.test.labels[chosen[:800]])
    new, n, m = signals[800:], len(fitted.calibration), 800
    assert ks_2samp(fitted.calibration.numpy(), fitted.score(new).numpy()).pvalue > 0.001
    for rate in (0.01, 0.05, 0.2):
        most = int(rate * (n + 1))
        low, high = betabinom(m, most, n + 1 - most).interval(0.999)
        assert low <= int(fitted.flag(new, rate).sum()) <= high
