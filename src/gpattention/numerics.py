"""Where and in which arithmetic the mathematics runs, and how it fails: below everything else.

Computing types and deferred checks, Cholesky factors that fail loudly, health counters for places that
cannot raise, typed errors, derivatives that are written out once, leading axes that broadcast together, and
the choice of a device.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.linalg import solve_triangular

from gpattention.concurrency import Undo, borrowed

# A regulariser that an exact posterior may announce: minus eq. 10, or eq. 23, both with tau^2 = sigma^2.
Cost = Literal["none", "marginal", "kl"]

P = ParamSpec("P")
R = TypeVar("R")

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


def kept(method: Callable[[Any], R]) -> "cached_property[R]":
    """Decorator: a property that is computed when it is first asked for.

    As `functools.cached_property`, whose lock the compiler cannot follow.
    """
    name = f"_kept_{method.__name__}"

    @wraps(method)
    def inner(self: Any) -> R:
        value = getattr(self, name, None)
        if value is None:
            value = method(self)
            setattr(self, name, value)
        return cast(R, value)

    return cast("cached_property[R]", property(inner))


def describe_spread(spread: float, noise: float | None = None) -> str:
    """What is wrong with float32 tokens that far apart, and what to do."""
    beside = "" if noise is None else f" (smallest noise {noise:.1e})"
    return (
        f"expected float32 tokens within {FARTHEST:.0f} length scales of their centre, got one at "
        f"{spread:.3g}{beside}: there float32 cannot tell how far apart near tokens are. "
        "Look for an outlier, scale the tokens down, or compute in float64."
    )


# Where torch keeps the precision of float32 products; each level without one takes that of a level before.
_LEVELS = (
    ("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), ("cuda", "matmul"), ("mkldnn", "matmul"),
)  # fmt: skip

# What becomes of a matrix without a factor: an error at once, or NaN that is counted, or NaN that whoever
# asked for it finds in the result.
Failures = Literal["raised", "counted", "found"]
_failures_are: ContextVar[Failures] = ContextVar("gpattention_failures", default="raised")


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Run the block without reading results back from the device; look at health afterwards.

    Inside, a matrix without a Cholesky factor gives NaN and is counted, and inputs are not searched
    for NaN; `check_health()` raises once for everything counted.  On a GPU this keeps eager code from
    waiting for every factorisation.  CUDA-graph capture, `torch.compile` and `torch.func.vmap` always
    behave so.

    Returns:
        A context manager.

    >>> with deferred_checks():
    ...     loss = step(batch)
    >>> check_health()
    """
    with _Failing("counted"):
        yield


class _Failing:
    """A block in which failures are something else; a class, as every operator of every layer enters one."""

    __slots__ = ("_how", "_token")

    def __init__(self, how: Failures) -> None:
        self._how: Failures = how

    def __enter__(self) -> None:
        self._token = _failures_are.set(self._how)

    def __exit__(self, *_: object) -> None:
        _failures_are.reset(self._token)


def counted_failures() -> AbstractContextManager[None]:
    """`deferred_checks` in less time."""
    return _Failing("counted")


def uncounted_failures() -> AbstractContextManager[None]:
    """`deferred_checks` that counts nothing: for a caller that looks at the result itself."""
    return _Failing("found")


def is_transformed() -> bool:
    """True inside a transform of `torch.func`: vmap, grad, jacrev, jvp and the others.

    Compilers, which see such transforms for themselves, are asked about apart.
    """
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def wants_plain_operations() -> bool:
    """True where a compiler or a transform of `torch.func` has to see every operation.

    Our own autograd functions have no forward-mode derivative, and most have no second one.
    """
    return torch.compiler.is_compiling() or is_transformed()


def is_mapped() -> bool:
    """True inside `torch.func.vmap`, where a tensor stands for many and has no value to read."""
    if not is_transformed():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def is_capturing() -> bool:
    """True while a CUDA graph is captured, which has no values yet."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def has_values(x: Tensor) -> bool:
    """False for tensors of shape and type alone: on the meta device, or made by `FakeTensorMode`."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def autocast_is_on(device: torch.device) -> bool:
    """Whether autocast changes the operations of a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def checks_are_deferred(*tensors: Tensor) -> bool:
    """True where reading a value, or one of these tensors', is impossible or unwanted."""
    if torch.compiler.is_compiling():
        return True
    if _failures_are.get() != "raised" or is_mapped() or not all(map(has_values, tensors)):
        return True
    return is_capturing()


def checked_once(
    call: Callable[[], R], device: torch.device, results: Callable[[R], Iterable[Tensor | None]]
) -> R:
    """What a call gives, whose failures are looked for once in its results and not at every matrix.

    Each look waits for a GPU.  Where the results are not finite the call is made again with all checks, which
    say what failed and where.  A CPU is asked for nothing, so that failures are raised where they are; so are
    those of several processes, which would have to make the call again together.
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not _waits(device) or together or checks_are_deferred() or is_transformed():
        return call()
    with uncounted_failures():
        found = call()
    sums = [x.detach().sum() for x in results(found) if x is not None]
    if sums and not bool((sums[0] if len(sums) == 1 else torch.stack(sums)).isfinite().all()):
        with torch.no_grad():
            call()
    return found


def _waits(device: torch.device) -> bool:
    """Whether reading a value of a device waits for it."""
    return device.type == "cuda"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half-precision inputs, else the inputs' own type."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _raise_precision(level: tuple[str, str]) -> Undo | None:
    """Full float32 products at one level; None where they are, or where it inherits from one before."""
    precision = torch._C._get_fp32_precision_getter(*level)
    # What a level inherits is "ieee" by now, so this is its own: put back as such, it pins nothing
    # that followed another setting before.
    if precision in ("ieee", "none"):
        return None
    torch._C._set_fp32_precision_setter(*level, "ieee")
    return lambda: torch._C._set_fp32_precision_setter(*level, precision)


# Precision is a setting of the process: threads that need it full at once share one change, and where a user
# lowered it, other threads meanwhile compute in full too.
_IEEE: dict[Hashable, Callable[[], Undo | None]] = {
    ("float32 precision", *level): partial(_raise_precision, level) for level in _LEVELS
}


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function's products and solves run with autocast and TF32 off."""

    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # backend settings are compile-time constants there
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return function(*args, **kwargs)
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(borrowed(_IEEE))
            return function(*args, **kwargs)

    return inner


# One counter per device, kept for ever: captured graphs hold its address.
_failures: dict[torch.device, Tensor] = {torch.device("cpu"): torch.zeros((), dtype=torch.int64)}


def failure_counter(device: torch.device) -> Tensor:
    """The number on that device to which kernels that cannot raise add their failures.  []"""
    _make_counter(device)
    return _failures[device]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _make_counter(device: torch.device) -> None:
    if device in _failures:
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the health counter must exist before a CUDA graph is captured: "
            "run the step once eagerly first (as torch.cuda.graphs asks anyway)"
        )
    # an inference tensor could not be counted up outside, and a compiler's has no value
    with torch.inference_mode(False), unset_fake_temporarily():
        # one for all threads, whichever comes first
        _failures.setdefault(device, torch.zeros((), dtype=torch.int64, device=device))


def failures_are_counted() -> bool:
    """Whether a kernel counts its failures: not where they are raised, or found in the result."""
    return checks_are_deferred() and _failures_are.get() != "found"


def cholesky(
    A: Tensor,  # [..., N, N] symmetric
    *,
    name: str,
    noise: Tensor | float,
) -> Tensor:
    """The Cholesky factor of A, or an error saying what failed and where.

    Where results cannot be read (compilation, capture, `vmap`, `deferred_checks`), a failed matrix becomes
    NaN and is counted for `check_health`.

    Args:
        A: symmetric matrices.
        name: what they are called, for the message.
        noise: what was added to their diagonals, for the message.

    Returns:
        Lower L with L L^T = A.  [..., N, N]

    Raises:
        NotPositiveDefiniteError: a matrix has no factor.
        NonFiniteError: a matrix that has none holds NaN or infinity.
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
        report_failures(info, A.shape[-1], A.dtype, name=name, noise=noise)
    return L


def report_failures(
    info: Tensor,  # [...] 0, or the first pivot that failed
    n: int,
    dtype: torch.dtype,
    *,
    name: str,
    noise: Tensor | float | Callable[[], Tensor],
) -> None:
    """Raise `NotPositiveDefiniteError` if a factorisation of n x n matrices failed, where they are raised."""
    if checks_are_deferred(info):
        return
    failed = info != 0
    if not bool(failed.any()):
        return
    pivots = torch.where(failed, info, n + 1).reshape(-1)
    worst = int(pivots.argmin())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), info.shape)]
    least = float(torch.as_tensor(noise() if callable(noise) else noise).detach().min())
    raise NotPositiveDefiniteError(
        f"{int(failed.sum())} of {failed.numel()} matrices {name} ({n} x {n}, "
        f"{str(dtype).removeprefix('torch.')}) are not positive definite; the earliest pivot to "
        f"fail is number {int(pivots[worst])} of matrix {place}, smallest noise {least:.1e}. "
        "Raise the noise (1e-4 is safe in float32 up to 1024 tokens) or compute in float64."
    )


def _poison_failures(L: Tensor, info: Tensor) -> Tensor:
    # cuSOLVER does not always flag NaN input, so the pivots are looked at too
    failed = (info != 0) | ~L.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)  # [...]
    return L.masked_fill(count_failures(failed)[..., None, None], float("nan"))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Whether a program is exported; torch 2.11 answers every compiled function with True if asked inside."""
    return torch.compiler.is_exporting()


def count_failures(failed: Tensor) -> Tensor:
    """Add failures, or a number of them, that cannot be raised to the counter, and hand them on.  [...]"""
    if is_exporting():
        return failed  # an exported program has no process to count in
    if torch.compiler.is_dynamo_compiling() or is_transformed():
        _count_failures(failed, failure_counter(failed.device))
    elif has_values(failed) and _failures_are.get() != "found":
        failure_counter(failed.device).add_(failed.sum())
    return failed


# An operator that says what it writes: a compiler may drop a plain write to a global tensor.
@torch.library.custom_op("gpattention::count_failures", mutates_args=("counter",))
def _count_failures(failed: Tensor, counter: Tensor) -> None:
    counter.add_(failed if failed.ndim == 0 else failed.sum())


@_count_failures.register_fake
def _(failed: Tensor, counter: Tensor) -> None:
    return None


@_count_failures.register_vmap
def _(info: object, in_dims: tuple[int | None, ...], failed: Tensor, counter: Tensor) -> tuple[None, None]:
    return _count_failures(failed, counter), None  # each of the matrices mapped over counts


def solve(B: Tensor, L: Tensor) -> Tensor:
    """(L L^T)^-1 B by two triangular solves: `torch.cholesky_solve` breaks CUDA graphs.  [..., N, D]"""
    return solve_triangular(L.mT, solve_triangular(L, B, upper=False), upper=True)


def inverse(L: Tensor) -> Tensor:
    """(L L^T)^-1, for gradients of log determinants only.  [..., N, N]"""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    root = solve_triangular(L, eye, upper=False, left=False)  # L^-1
    return root.mT @ root


def health() -> dict[str, int]:
    """Matrices that failed unseen since the last `check_health`.

    Returns:
        Their number for each device.
    """
    return {str(device): int(count) for device, count in _failures.items()}


def check_health() -> None:
    """Raise if a factorisation failed where it could not raise, and count anew.

    Call it after a compiled or captured step, or after a `deferred_checks` block.

    Raises:
        NotPositiveDefiniteError: with the number of matrices that failed on each device.
    """
    counts = {device: n for device, n in health().items() if n}
    for counter in _failures.values():
        counter.zero_()
    if counts:
        where = ", ".join(f"{n} on {device}" for device, n in counts.items())
        raise NotPositiveDefiniteError(
            f"matrices without a Cholesky factor since the last check: {where}; their results are "
            "NaN. Rerun the step eagerly to see which matrix, or which tokens are too far apart; raise the "
            "noise, or use float64."
        )


def once_differentiable(backward: Callable[..., R]) -> Callable[..., R]:
    """Decorator of a backward pass that refuses `create_graph=True`.

    Torch's own lets it pass where the incoming gradients require none, as those of `loss.sum()`, or where the
    second derivative is asked of some inputs alone (`torch.autograd.grad`): what goes through the saved
    tensors is left out then, silently.
    """

    @wraps(backward)
    def inner(ctx: Any, *grads: Tensor) -> R:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        return backward(ctx, *grads)

    return inner


def refuse_second_derivative(name: str = "this gradient") -> NoReturn:
    """Raise `RuntimeError` for a derivative of a gradient that is written out."""
    raise RuntimeError(
        f"expected a backward pass without create_graph=True: {name} is written out and "
        "torch.autograd cannot differentiate it again. For second derivatives take torch.func "
        "(hessian, grad of grad, jvp of grad), which sees plain operations"
    )


def broadcast(*shapes: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, without its cost where the longest shape ends in all the others."""
    longest = shapes[0]
    for shape in shapes:  # max(key=len) cannot be compiled where a size is symbolic
        longest = shape if len(shape) > len(longest) else longest
    if all(shape == longest[len(longest) - len(shape) :] for shape in shapes):
        return longest
    return torch.broadcast_shapes(*shapes)


def count_real(mask: Tensor | None, x: Tensor) -> Tensor:
    """Real tokens per sequence as a number of x's type.  [...]"""
    if mask is None:
        return x.new_full((), x.shape[-2])
    return mask.sum(-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Checked inputs of one attention call, in the type to compute in.

    `masked` has overwritten padded rows: values with 0, inputs with the centre of the keys.
    """

    q: Tensor  # [..., Q, C]
    k: Tensor  # [..., K, C]
    o: Tensor | None  # [..., K, C]
    v: Tensor  # [..., K, D]
    inducing: tuple[Tensor, ...]  # each [..., m, C]
    noise: Tensor  # [..., 1, 1]  sigma^2
    scale_q: Tensor  # [..., 1, 1]
    scale_k: Tensor  # [..., 1, 1]
    mask: Tensor | None  # [..., K]
    query_mask: Tensor | None  # [..., Q]
    log_amplitude: Tensor | None  # [..., Q]
    dtype: torch.dtype  # of the results

    @property
    def latent(self) -> Tensor:
        """The latent inputs o of the canonical GP, where the model has them.  [..., K, C]"""
        if self.o is None:
            raise ValueError("this model has no latent inputs")
        return self.o

    def real_keys(self) -> Tensor:
        """Number of real keys per sequence.  [...]"""
        return count_real(self.mask, self.k)

    def real_queries(self) -> Tensor:
        """Number of real queries per sequence.  [...]"""
        return count_real(self.query_mask, self.q)

    def amplify(self, rows: Tensor) -> Tensor:
        """Multiply query rows [..., Q, X] by s_q a_i (section 13)."""
        rows = self.scale_q * rows
        return rows if self.log_amplitude is None else self.log_amplitude.exp()[..., None] * rows


_EXPECTED = "expected device to be auto, cpu, cuda or cuda:N"


def choose_device(name: torch.device | str = "auto") -> torch.device:
    """The device of that name, if this machine has it.

    Args:
        name: `cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one.

    Returns:
        The device.

    Raises:
        ValueError: the name is of no device, or of one that this machine lacks.
    """
    if isinstance(name, torch.device):
        return name
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{_EXPECTED}, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):  # others, such as mps, lack the float64 that is used here
        raise ValueError(f"{_EXPECTED}, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"expected a device of this machine, got {name!r}, and it has no CUDA GPU")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"expected a device of this machine, got {name!r}, and it has {count} CUDA GPUs")
    return device
