"""What an attention call returns."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gpattention.checks import check_count
from gpattention.gp import Posterior
from gpattention.gp.checks import check_choice

Draw = Literal["none", "independent", "joint"]
NEEDS = ("output", "variance", "regularizer", "weights", "posterior")
DRAWS: tuple[Draw, ...] = ("none", "independent", "joint")


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """The output, and whatever `need` named; the rest is None and was not computed."""

    output: Tensor  # [B, Q, E]; [S, B, Q, E] when more than one sample was drawn
    variance: Tensor | None = None  # [B, H, Q] per head; [B, H, Q, D] for sgpa
    regularizer: Tensor | None = None  # a number to add to a loss
    weights: Tensor | None = None  # [B, H, Q, K], what the mean multiplies the values with
    posterior: Posterior | None = None  # over the heads' outputs, before the output projection
    inducing: Tensor | None = None  # [H, m, E], the inducing inputs sgpa used


def check_request(kind: str, draws: bool, draw: str, samples: int, need: tuple[str, ...]) -> None:
    """Refuse what this kind of attention cannot give, before anything is computed."""
    check_choice("draw", draw, DRAWS)
    samples = check_count("samples", samples)
    if samples > 1 and draw == "none":
        raise ValueError(f"samples={samples} without a draw: pass draw='independent' or draw='joint'")
    check_need(need, NEEDS)
    if not draws and (draw != "none" or "variance" in need or "posterior" in need):
        asked = f"draw={draw!r}" if draw != "none" else f"need={need!r}"
        raise ValueError(
            f"{kind!r} attention has no posterior, so {asked} cannot be answered: "
            "use softmax-gp, direct, cgp, scgp or sgpa"
        )


def check_need(need: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuse names that nothing answers to, and one name without its comma, which is a row of letters."""
    if isinstance(need, str):
        raise ValueError(f"expected need to be a tuple of names, got the text {need!r}: write ({need!r},)")
    unknown = [name for name in need if name not in known]
    if unknown:
        raise ValueError(f"expected need to name {', '.join(known)}, got {', '.join(map(repr, unknown))}")
