"""The typed errors of the mathematics: a numerical failure is raised, never repaired."""

# Length scales from the centre within which float32 tokens may lie: they have digits enough there for
# gradients right to 1e-3.
FARTHEST = 2.0**14


class NumericalError(RuntimeError):
    """A computation that cannot give a trustworthy number."""


class NotPositiveDefiniteError(NumericalError):
    """A covariance matrix has no Cholesky factor: the noise is too small, or the model is wrong."""


class NonFiniteError(NumericalError, ValueError):
    """An input holds NaN or infinity at a real token."""


class TooFarApartError(NumericalError, ValueError):
    """Tokens are so many length scales apart that their floating-point type has no digits for near ones."""


class UndefinedCovarianceError(NotImplementedError):
    """The model defines a variance for every token but no covariance between tokens."""


def describe_spread(spread: float, noise: float | None = None) -> str:
    """What is wrong with float32 tokens that far apart, and what to do."""
    beside = "" if noise is None else f" (smallest noise {noise:.1e})"
    return (
        f"expected float32 tokens within {FARTHEST:.0f} length scales of their centre, got one at "
        f"{spread:.3g}{beside}: there float32 cannot tell how far apart near tokens are. "
        "Look for an outlier, scale the tokens down, or compute in float64."
    )
