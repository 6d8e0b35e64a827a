"""Argument checks of the evaluation: every error names the argument, its value and what was expected."""


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
