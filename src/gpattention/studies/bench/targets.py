"""Figures that were set as targets or measured once elsewhere; never measured in a run of ours."""

from dataclasses import dataclass

SOURCE = (
    "reference: the code that the paper and SGPA's authors released, each run once, unmodified, on one H200 "
    "(torch 2.11, float32, not captured); not measured in this run"
)


@dataclass(frozen=True)
class Target:
    """Of one model's training step: the paper's CIFAR-10 configuration, batch 100, one H200."""

    ms: float | None = None  # at most
    mib: float | None = None  # peak, at most
    reference_ms: float | None = None
    reference_mib: float | None = None


CGP = Target(6.0, 900, 244.7, 17306)
STEPS = {
    "softmax": Target(2.5, 300, 8.3, 257),
    "kernel": Target(3.0, 300, 14.3, 1830),
    "direct": Target(5.0, 600),
    "cgp": CGP,
    "cgp-kl": CGP,
    "scgp-8": Target(reference_ms=115, reference_mib=2649),
    "scgp-16": Target(4.0, 450, 98.0, 3358),
    "scgp-32": Target(reference_ms=102, reference_mib=4995),
    "sgpa-8": Target(reference_ms=41, reference_mib=807),
    "sgpa-16": Target(reference_ms=53, reference_mib=1193),
    "sgpa-32": Target(5.0, 700, 46.0, 2087),
    "softmax-eager": Target(reference_ms=8.3, reference_mib=257),
    "paper-kernel": Target(reference_ms=14.3, reference_mib=1830),
    "paper-cgp": Target(reference_ms=244.7, reference_mib=17306),
    "paper-scgp": Target(reference_ms=98.0, reference_mib=3358),
}
PREDICT_SECONDS = {"cgp": 1.5}  # ten samples of 10,000 images on an H200


@dataclass(frozen=True)
class LengthTarget:
    """Of one attention module with its projections, forward and backward."""

    model: str
    batch: int
    tokens: int
    ms: float | None
    mib: float | None
    device: str  # "cuda" is an H200, "cpu" is 2 cores


LENGTHS = (
    LengthTarget("scgp", 1, 1_048_576, 200, 12 * 1024, "cuda"),
    LengthTarget("cgp", 4, 1024, 40, 2 * 1024, "cuda"),
    LengthTarget("scgp", 1, 65_536, None, 4 * 1024, "cpu"),
)
# reference ms and MiB at batch 4, by model and tokens
LENGTH_REFERENCES = {
    ("paper-cgp", 64): (18, 711),
    ("paper-cgp", 1024): (635, 40202),
    ("paper-scgp", 64): (10, 596),
    ("paper-scgp", 1024): (62, 9079),
    ("paper-scgp", 2048): (257, 34628),
    ("softmax", 64): (0.6, None),
    ("softmax", 1024): (0.6, None),
    ("softmax", 4096): (6.2, None),
    ("softmax", 65536): (1554, None),
}
LARGEST_EXPONENT = 1.05  # of scgp's time and memory, 16,384 to 1,048,576 tokens at batch 1
FASTER_FROM = 4096  # tokens from which scgp is to be faster than softmax at batch 4
