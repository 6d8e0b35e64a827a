"""Weather: frost with pictures that are given or made, and spatter."""

import pytest
import torch

from gpattention.data.corruptions import corrupt
from tests.data.corruptions.pictures import pictures
from tests.refusals import refusals


def test_given_pictures_are_used_at_a_fifth_of_their_size() -> None:
    black = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    ramp = torch.arange(100, dtype=torch.float64).repeat_interleave(5) / 200  # a fifth of it: 0, 1, ... 99
    picture = ramp.expand(3, 60, 500)
    changed = corrupt(black, "frost", 1, frost=[picture])
    rows = changed[:, 0, 0] * 5 * 200  # 0.2 of it is added
    assert torch.allclose(rows.diff(dim=1), torch.ones(2, 7, dtype=torch.float64))
    assert torch.allclose(rows, rows.round())


def test_bytes_floats_lists_and_tensors_are_the_same_pictures() -> None:
    images, given = pictures(6), pictures(3, 200, 220, seed=9)
    expected = corrupt(images, "frost", 4, frost=given)
    assert torch.equal(corrupt(images, "frost", 4, frost=list(given)), expected)
    assert torch.equal(corrupt(images, "frost", 4, frost=given.double() / 255), expected)
    assert not torch.equal(corrupt(images, "frost", 4), expected)


def test_every_picture_and_many_places_are_drawn() -> None:
    black = torch.zeros(200, 3, 8, 8, dtype=torch.float64)
    flat = torch.linspace(0.2, 1, 5, dtype=torch.float64)[:, None, None, None].expand(5, 3, 60, 60)
    seen = corrupt(black, "frost", 1, frost=flat)[:, 0, 0, 0]
    shares = [float((seen - 0.2 * value).abs().lt(1e-9).double().mean()) for value in (0.2, 0.4, 0.6, 0.8, 1)]
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0.1
    generated = corrupt(black, "frost", 1)
    assert len(generated[:, 0, 0, 0].unique()) > 150


def frosted(*frost: torch.Tensor) -> None:
    corrupt(pictures(1), "frost", 1, frost=list(frost))


SHAPE = r"frost\[0\]: expected shape \[3, h, w\]"
test_refusals = refusals([
    (lambda: frosted(), "frost: expected at least one picture", "none"),
    (lambda: frosted(torch.zeros(200, 200)), SHAPE, r"\(200, 200\)"),
    (lambda: frosted(torch.zeros(3, 200, 160)), r"frost\[0\]: a fifth of \(200, 160\)", r"\(32, 32\)"),
    (lambda: frosted(torch.zeros(3, 200, 200).long()), r"frost\[0\]: expected uint8", "torch.int64"),
    (lambda: frosted(torch.full((3, 200, 200), 7.0)), r"frost\[0\]: expected floats in \[0, 1\]", "7 to 7"),
])  # fmt: skip
