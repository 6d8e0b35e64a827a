"""The typed errors of the mathematics: a numerical failure is raised, never repaired."""


class NumericalError(RuntimeError):
    """A computation that cannot give a trustworthy number."""


class NotPositiveDefiniteError(NumericalError):
    """A covariance matrix has no Cholesky factor: the noise is too small, or the model is wrong."""


class NonFiniteError(NumericalError, ValueError):
    """An input holds NaN or infinity at a real token."""


class UndefinedCovarianceError(NotImplementedError):
    """The model defines a variance for every token but no covariance between tokens."""
