"""Cholesky factors that fail loudly, and the health counters for places that cannot raise.

There is no retry and no growing jitter.  The model's own noise (and the fixed delta of the inducing
Gram matrices) makes every matrix positive definite; one that is not has too little noise for its
floating-point type, or is a bug, and hiding it under a large diagonal gives a silently wrong answer.
"""

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from gpattention.gp.errors import NonFiniteError, NotPositiveDefiniteError
from gpattention.gp.precision import checks_are_deferred, has_values, is_transformed

# One counter per device, kept for ever: captured graphs hold its address.
_failures: dict[torch.device, Tensor] = {torch.device("cpu"): torch.zeros((), dtype=torch.int64)}


def failure_counter(device: torch.device) -> Tensor:
    """The number on that device to which kernels that cannot raise add their failures.  []"""
    if device not in _failures:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the health counter must exist before a CUDA graph is captured: "
                "run the step once eagerly first (as torch.cuda.graphs asks anyway)"
            )
        with torch.inference_mode(False):  # an inference tensor could not be counted up outside
            # one for all threads, whichever comes first
            _failures.setdefault(device, torch.zeros((), dtype=torch.int64, device=device))
    return _failures[device]


def cholesky(
    A: Tensor,  # [..., N, N] symmetric
    *,
    name: str,
    noise: Tensor | float,
) -> Tensor:
    """Lower L with L L^T = A, or `NotPositiveDefiniteError` saying what failed and where.

    `name` and `noise` only serve the message.  Where results cannot be read (compilation, capture, `vmap`,
    `deferred_checks`), a failed matrix becomes NaN and is counted for `check_health`.
    """
    L, info = torch.linalg.cholesky_ex(A)  # [..., N, N], [...]
    if not torch.compiler.is_compiling() and not has_values(A):
        return L  # nothing to count
    if checks_are_deferred():
        return _poison_failures(L, info)
    if A.is_cuda:
        failure_counter(A.device)  # so that a later capture finds it
    if bool((info != 0).any()):
        lost = int((~A.isfinite()).sum())
        if lost:  # more noise would not help
            raise NonFiniteError(f"{name} holds {lost} non-finite numbers: so does what it was made of")
        raise NotPositiveDefiniteError(_describe(info, A.shape[-1], A.dtype, name, noise))
    return L


def report_failures(
    info: Tensor,  # [...] 0, or the first pivot that failed
    n: int,
    dtype: torch.dtype,
    *,
    name: str,
    noise: Tensor | float,
) -> None:
    """Raise `NotPositiveDefiniteError` if a factorisation of n x n matrices failed; reads the device."""
    if bool((info != 0).any()):
        raise NotPositiveDefiniteError(_describe(info, n, dtype, name, noise))


def _poison_failures(L: Tensor, info: Tensor) -> Tensor:
    # cuSOLVER does not always flag NaN input, so the pivots are looked at too
    failed = (info != 0) | ~L.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)  # [...]
    return L.masked_fill(count_failures(failed)[..., None, None], float("nan"))


def count_failures(failed: Tensor) -> Tensor:
    """Add failures that cannot be raised to the device's counter; what is handed on is to be used.  [...]"""
    if torch.compiler.is_dynamo_compiling() or is_transformed():
        return _count_failures(failed)
    if not torch.compiler.is_exporting() and has_values(failed):
        failure_counter(failed.device).add_(failed.sum())  # an exported program has no process to count in
    return failed


# Opaque to the compiler, which otherwise may drop a write to a global tensor; the result is used, so
# that the call is not removed as dead code.
@torch.library.custom_op("gpattention::count_failures", mutates_args=())
def _count_failures(failed: Tensor) -> Tensor:
    """Add the failures to the device's counter and hand them on.  [...]"""
    failure_counter(failed.device).add_(failed.sum())
    return failed.clone()


@_count_failures.register_fake
def _(failed: Tensor) -> Tensor:
    return torch.empty_like(failed)


@_count_failures.register_vmap
def _(info: object, in_dims: tuple[int | None], failed: Tensor) -> tuple[Tensor, int | None]:
    return _count_failures(failed), in_dims[0]  # each of the matrices mapped over counts


def _describe(info: Tensor, n: int, dtype: torch.dtype, name: str, noise: Tensor | float) -> str:
    failed = info != 0
    pivots = torch.where(failed, info, n + 1).reshape(-1)
    worst = int(pivots.argmin())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), info.shape))
    least = float(torch.as_tensor(noise).detach().min())
    return (
        f"{int(failed.sum())} of {failed.numel()} matrices {name} ({n} x {n}, "
        f"{str(dtype).removeprefix('torch.')}) are not positive definite; the earliest pivot to "
        f"fail is number {int(pivots[worst])} of matrix {list(place)}, smallest noise {least:.1e}. "
        "Raise the noise (1e-4 is safe in float32 up to 1024 tokens) or compute in float64."
    )


def solve(B: Tensor, L: Tensor) -> Tensor:
    """(L L^T)^-1 B by two triangular solves: `torch.cholesky_solve` breaks CUDA graphs.  [..., N, D]"""
    return solve_triangular(L.mT, solve_triangular(L, B, upper=False), upper=True)


def inverse(L: Tensor) -> Tensor:
    """(L L^T)^-1, for gradients of log determinants only.  [..., N, N]"""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    root = solve_triangular(L, eye, upper=False, left=False)  # L^-1
    return root.mT @ root


def health() -> dict[str, int]:
    """Matrices that failed unseen since the last `check_health`, per device."""
    return {str(device): int(count) for device, count in _failures.items()}


def check_health() -> None:
    """Raise `NotPositiveDefiniteError` if a factorisation failed where it could not raise; reset.

    Call it after a compiled or captured step, or after a `deferred_checks` block.
    """
    counts = {device: n for device, n in health().items() if n}
    for counter in _failures.values():
        counter.zero_()
    if counts:
        told = ", ".join(f"{n} on {device}" for device, n in counts.items())
        raise NotPositiveDefiniteError(
            f"matrices without a Cholesky factor since the last check: {told}; their results are "
            "NaN. Rerun the step eagerly to see which matrix, or which tokens are too far apart; raise the "
            "noise, or use float64."
        )
