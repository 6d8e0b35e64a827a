"""The models that are timed, by name: kind, options, and whose algorithm each is compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from gpattention.studies.bench.paper_model import PAPERS, paper_model

SOFTMAX, PAPER_KERNEL = "softmax", "paper-kernel"


@dataclass(frozen=True)
class Variant:
    """One model to be timed."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: str | None = None  # the transcription of the paper's algorithm for the same thing
    eager: bool = False  # not captured, whatever the device


def _scgp(m: int) -> Variant:
    return Variant("scgp", {"normalize": "none", "num_inducing": m, "regularizer": "dtc"}, "paper-scgp")


VARIANTS = {
    SOFTMAX: Variant("softmax"),
    "kernel": Variant("kernel", {"normalize": "none"}, PAPER_KERNEL),
    "direct": Variant("direct", {"normalize": "none", "regularizer": "marginal"}),
    "cgp": Variant("cgp", {"normalize": "none", "regularizer": "marginal"}, "paper-cgp"),
    "cgp-kl": Variant("cgp", {"normalize": "none", "regularizer": "kl"}, "paper-cgp"),
    "cgp-rows": Variant("cgp", {"regularizer": "marginal"}, "paper-cgp"),
    "scgp-8": _scgp(8),
    "scgp-16": _scgp(16),
    "scgp-32": _scgp(32),
    "sgpa-8": Variant("sgpa", {"num_inducing": 8}),
    "sgpa-16": Variant("sgpa", {"num_inducing": 16}),
    "sgpa-32": Variant("sgpa", {"num_inducing": 32}),
    "softmax-eager": Variant("softmax", eager=True),
    **{name: Variant(paper.kind, paper.options, name) for name, paper in PAPERS.items()},
}
# on a CPU a step of the paper's other two takes minutes
SLOW = tuple(name for name in PAPERS if name != PAPER_KERNEL)


def default_kinds(device: torch.device) -> tuple[str, ...]:
    """All that can be timed on a device within minutes."""
    if device.type == "cuda":
        return tuple(VARIANTS)
    return tuple(name for name, variant in VARIANTS.items() if name not in SLOW and not variant.eager)


def check_kinds(kinds: Sequence[str], known: Sequence[str] = tuple(VARIANTS)) -> None:
    """Raise for a kind that cannot be timed."""
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"expected kinds among {', '.join(known)}, got {kind!r}")


def build(name: str, shape: VisionConfig, seed: int = 0) -> VisionTransformer:
    """A model with fresh weights; the same seed gives the same ones."""
    torch.manual_seed(seed)
    if name in PAPERS:
        return paper_model(name, shape)
    variant = VARIANTS[name]
    return VisionTransformer(replace(shape, attention=AttentionConfig(variant.kind, variant.options)))
