"""The metrics of the paper's tables: which record is like with like, and which way is better."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measure:
    """One metric as the paper prints it."""

    label: str
    records: tuple[
        str, ...
    ]  # metrics of an evaluation's records, the one that is most like the paper's first
    larger: bool  # whether larger is better
    scale: float = 1.0  # 100 where the paper prints per cent
    unit: str = ""
    detail: Mapping[str, str] = field(default_factory=dict)  # of the record

    @property
    def heading(self) -> str:
        """With its unit and which way is better."""
        unit = f", {self.unit}" if self.unit else ""
        return f"{self.label}{unit} {'↑' if self.larger else '↓'}"

    def better(self, one: float, other: float) -> bool:
        """Whether one figure beats another."""
        return one > other if self.larger else one < other

    def best(self, values: list[float]) -> float:
        """Of some figures."""
        return max(values) if self.larger else min(values)

    def worst(self, values: list[float]) -> float:
        """Of some figures."""
        return min(values) if self.larger else max(values)


_ALL = (
    Measure("Acc", ("accuracy",), larger=True, scale=100),
    Measure("MCC", ("mcc",), larger=True, scale=100),
    Measure("NLL", ("nll",), larger=False),
    # means over batches, as the paper's: pooled errors are smaller and would win unfairly
    Measure("MCE", ("batch_mce",), larger=False),
    Measure("ECE", ("batch_ece",), larger=False),
    Measure("AUROC", ("auroc",), larger=True, scale=100),
    Measure("AUPR-IN", ("aupr_in",), larger=True, scale=100),
    Measure("AUPR-OUT", ("aupr_out",), larger=True, scale=100),
    Measure("FPR@95", ("fpr95_out", "fpr95"), larger=False, scale=100),
    Measure("Memory", ("train_peak_mib",), larger=False, unit="MiB"),
    Measure("Epoch", ("train_epoch_seconds",), larger=False, unit="s"),
    Measure("Similarity after attention", ("token_similarity",), larger=False, detail={"after": "attention"}),
    Measure("Similarity after block", ("token_similarity",), larger=False, detail={"after": "block"}),
)
MEASURES = {measure.label: measure for measure in _ALL}
