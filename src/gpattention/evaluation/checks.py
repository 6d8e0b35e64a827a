"""Argument checks of the evaluation: every error names the argument, its value and what was expected."""

from torch import Tensor


def check_probs(probs: Tensor) -> None:
    """Probabilities of classes that add up to 1.  [B, C]"""
    if probs.ndim != 2 or not probs.is_floating_point() or probs.shape[1] == 0:
        raise ValueError(
            f"expected probs to be floating-point [items, classes], "
            f"got shape {tuple(probs.shape)} and {probs.dtype}"
        )
    good = (probs >= 0).all(-1) & ((probs.double().sum(-1) - 1).abs() < 1e-3)  # NaN is not good
    if not bool(good.all()):
        worst = int((~good).nonzero()[0])
        told = [round(p, 4) for p in probs[worst].tolist()[:8]]
        raise ValueError(f"expected probs >= 0 that add up to 1, got {told} for item {worst}")


def check_predictor(predictor: object) -> None:
    """Something with a `predict` method; models are wrapped first."""
    if not callable(getattr(predictor, "predict", None)):
        raise ValueError(
            f"expected a predictor with a `predict` method, got {type(predictor).__name__}: "
            "wrap a model as ModelPredictor(model)"
        )


def not_fitted(what: object) -> RuntimeError:
    """The error of using before fitting."""
    return RuntimeError(f"{type(what).__name__} is not fitted yet: call fit(inputs, labels) first")
