"""The least that a training step can take: arithmetic, bytes and launches counted from the model's sizes.

Everything is counted for one step with B items of N tokens, width E, L layers, H heads of width d = E / H and
m inducing inputs, in float32:

- arithmetic: a product of [a, b] and [b, c] is 2abc operations, a Cholesky factor n^3 / 3, a triangular solve
  with c right-hand sides n^2 c; a backward pass is twice its forward pass.
- bytes: every tensor of tokens that the next product needs is written and read once forward, and read once
  with its gradient written and read backward; weights are read twice, their gradients written and read, and
  Adam reads and writes weights and both moments.  Matrices between tokens never leave the chip.
- launches: one for each product, norm, attention and chain of elementwise operations.

The time is no less than the largest of the three, each at the peak that the machine is assumed to have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpattention.models import VisionConfig
from gpattention.studies.bench.variants import VARIANTS, check_kinds

FLOPS_PER_SECOND = 67e12  # float32 of an H200, without tensor cores
BYTES_PER_SECOND = 4.8e12  # its memory
SECONDS_PER_LAUNCH = 2.2e-6  # of an empty kernel inside a captured graph
ASSUMED = "H200: 67 TFLOP/s in float32, 4.8 TB/s, 2.2 us for a launch inside a captured graph"

FORWARD_LAUNCHES, BACKWARD_LAUNCHES, OTHER_LAUNCHES = 11, 19, 25  # of a layer, a layer, and all the rest
PROJECTIONS = {"softmax": 3, "kernel": 3, "direct": 3, "cgp": 4, "scgp": 4, "sgpa": 2}
TOKEN_TENSORS = 7  # beside the projections: two norms, heads, output, residuals, hidden before and after


@dataclass(frozen=True)
class Floor:
    """Of one model's training step."""

    name: str
    flops: float
    bytes_moved: float
    launches: int

    @property
    def flop_seconds(self) -> float:
        """The arithmetic's share."""
        return self.flops / FLOPS_PER_SECOND

    @property
    def byte_seconds(self) -> float:
        """The memory's share."""
        return self.bytes_moved / BYTES_PER_SECOND

    @property
    def launch_seconds(self) -> float:
        """The launches' share."""
        return self.launches * SECONDS_PER_LAUNCH

    @property
    def seconds(self) -> float:
        """The largest of the three."""
        return max(self.flop_seconds, self.byte_seconds, self.launch_seconds)


def step_floors(
    kinds: Sequence[str] | None = None, *, batch: int = 100, config: VisionConfig | None = None
) -> tuple[Floor, ...]:
    """Of each kind of ours; the paper's ways have the floor of the same mathematics."""
    known = tuple(name for name, variant in VARIANTS.items() if variant.kind in PROJECTIONS)
    ours = [name for name in known if not name.startswith("paper") and not VARIANTS[name].eager]
    chosen = ours if kinds is None else list(kinds)
    check_kinds(chosen, known)
    shape = VisionConfig() if config is None else config
    return tuple(_floor(name, batch, shape) for name in chosen)


def _floor(name: str, batch: int, shape: VisionConfig) -> Floor:
    variant = VARIANTS[name]
    tokens, width = batch * shape.tokens, shape.width
    hidden = shape.width if shape.mlp_width is None else shape.mlp_width
    maps = PROJECTIONS[variant.kind] + 1  # and the output's
    dense = 2 * tokens * width * (maps * width + 2 * hidden)
    attended = batch * shape.heads * attention_flops(name, shape.tokens, width // shape.heads)
    patches = 2 * tokens * shape.channels * shape.patch**2 * width
    flops = 3.0 * (shape.depth * (dense + attended) + patches)
    weights = shape.depth * width * (maps * width + 2 * hidden) + tokens // batch * width
    token_bytes = 4 * shape.depth * tokens * width * (PROJECTIONS[variant.kind] + TOKEN_TENSORS)
    moved = 5 * token_bytes + 4 * weights * (2 + 2 + 6)
    launches = shape.depth * (FORWARD_LAUNCHES + BACKWARD_LAUNCHES) + OTHER_LAUNCHES
    return Floor(name, flops, float(moved), launches)


def attention_flops(name: str, n: int, d: int) -> float:
    """Forward pass of one sequence and head, without projections, regulariser included."""
    variant = VARIANTS[name]
    m = int(variant.options.get("num_inducing", 0))
    gram = 2 * n * n * d  # one matrix of kappa, or one product with the values
    chol = n**3 / 3
    density = gram + chol + n * n * d  # -log N(mean; 0, K_q + tau^2 I), eq. 10
    if variant.kind in ("softmax", "kernel"):
        return 2 * gram
    if variant.kind == "direct":  # K_qk V, K_k, one factor and one solve (eq. 2), two densities
        return 3 * gram + chol + n**3 + density + n * n * d
    if variant.kind == "cgp":  # four matrices, K_ok V, two factors, three solves and a product (eq. 4, 6)
        exact = 4 * gram + gram + 2 * chol + 3 * n**3 + 2 * n**3 + 2 * gram
        if variant.options.get("regularizer") == "kl":  # K_q, V, both factors, one solve each way (eq. 23)
            return exact + gram + 4 * n**3 + 2 * chol + n**3 + n * n * d
        return exact + density + n * n * d
    small = 2 * n * m * d  # kappa with the inducing inputs, or a product m x n with the values
    if variant.kind == "scgp":  # four matrices, whitened; their products; mean and variance (eq. 15); dtc
        return 4 * (small + n * m * m) + 4 * 2 * n * m * m + 2 * small + 4 * m**3
    # sgpa: K_qq, its product with v, two with the inducing inputs, a variance for each channel (eq. 19)
    return 2 * gram + 3 * small + n * m * m + d * 2 * n * m * m + (d + 1) * m**3 / 3
