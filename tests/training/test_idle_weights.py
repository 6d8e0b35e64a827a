"""A weight of a regulariser that the attention does not have is refused; the default and 0 are not."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpattention.training import Recipe, build_model, fit, recipe_from_dict
from tests.training.toy import toy_data

WITH = [(kind, {}) for kind in ("direct", "cgp", "scgp", "sgpa")]
WITHOUT = [(kind, {}) for kind in ("softmax", "softmax-gp", "kernel")] + [
    (kind, {"regularizer": "none"}) for kind, _ in WITH
]
Kind = tuple[str, dict[str, Any]]
IDLE: dict[str, set[float]] = {"start": {0.0}, "end": {0.0, 0.01}, "normalised": {True}}
number = st.sampled_from([0.0, 0.01]) | st.floats(0, 1e6)
weights_of = st.fixed_dictionaries({}, optional={"start": number, "end": number, "normalised": st.booleans()})


def weighted(kind: Kind, weights: dict[str, Any]) -> Recipe:
    attention, options = kind
    model = {"attention": attention, "options": options, "config": {"width": 8, "depth": 2, "heads": 2}}
    return recipe_from_dict({"model": model, "regularizer": weights})


@settings(deadline=None, max_examples=100)
@given(kind=st.sampled_from(WITH + WITHOUT), weights=weights_of)
def test_only_weights_without_effect_are_refused(kind: Kind, weights: dict[str, Any]) -> None:
    recipe, facts = weighted(kind, weights), toy_data().facts
    refused = [name for name, value in weights.items() if value not in IDLE[name]]
    if kind in WITH or not refused:
        build_model(recipe, facts)
        return
    with pytest.raises(ValueError, match="since it would have no effect") as error:
        build_model(recipe, facts)
    told = str(error.value)
    assert f"for '{kind[0]}' attention without a regulariser" in told
    assert any(
        told.startswith(f"expected regularizer.{name} to be ") and told.endswith(f"got {weights[name]}")
        for name in refused
    )


@pytest.mark.parametrize("kind", WITHOUT, ids=lambda kind: kind[0])
def test_they_show_before_a_run_is_begun(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected regularizer\.end to be 0\.0 or 0\.01 for .*, got 0\.1"):
        fit(weighted(kind, {"end": 0.1}), toy_data(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
