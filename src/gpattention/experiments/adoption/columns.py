"""What the tables and pictures of the comparisons show, and how it is called."""

from gpattention.experiments.adoption.methods import BASELINE, TITLES
from gpattention.experiments.adoption.summary import Column
from gpattention.experiments.adoption.trainings import (
    CONVERSIONS,
    STARTS,
    TUNED_ON,
    TUNED_ON_TEMPERATURE,
    converted,
)

INSIDE, OUTSIDE = "test", "ood/out-of-domain"


def _labelled(set: str, short: str, metrics: dict[str, str]) -> list[Column]:
    return [
        Column(set, metric, f"{short} {head}".strip(), larger=metric in ("mcc", "accuracy"))
        for metric, head in metrics.items()
    ]


_TEXT = {"mcc": "MCC", "nll": "NLL", "ece": "ECE", "mce": "MCE", "aurc": "AURC"}
COLA_COLUMNS = (*_labelled(INSIDE, "in", _TEXT), *_labelled(OUTSIDE, "out", _TEXT))
COLA_PANELS = {
    head: {"in domain": Column(INSIDE, metric, head), "out of domain": Column(OUTSIDE, metric, head)}
    for metric, head in {"mcc": "MCC", "nll": "NLL", "ece": "ECE", "aurc": "AURC"}.items()
}

_IMAGE = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "mce": "MCE", "aurc": "AURC"}
_OOD = {"entropy": "entropy", "mutual_information": "mutual inf.", "max_softmax": "max-prob"}
IMAGE_COLUMNS = (
    *_labelled("test", "", _IMAGE),
    *_labelled("corrupted/mean", "corr.", _IMAGE),
    *(Column("ood/*", f"auroc_{score}", f"AUROC {head}", larger=True) for score, head in _OOD.items()),
)
IMAGE_PANELS = {
    **{
        head: {"clean": Column("test", metric, head), "corrupted": Column("corrupted/mean", metric, head)}
        for metric, head in {"nll": "NLL", "ece": "ECE", "aurc": "AURC"}.items()
    },
    "AUROC of foreign images": {"entropy": Column("ood/*", "auroc_entropy", "entropy")},
}

_STARTED = {"host": "tuned on", "pretrained": "fine-tuned"}
_ENDINGS = ("", ", temperature", ", no draws, temperature")
_CONVERTED = {
    name: f"converted to {kind}, {_STARTED[start]}{ending}"
    for start in STARTS
    for kind in CONVERSIONS
    for name, ending in zip(converted(kind, start).methods, _ENDINGS, strict=True)
}
ALL_TITLES = {
    **TITLES, TUNED_ON: "tuned on", TUNED_ON_TEMPERATURE: "tuned on, temperature", **_CONVERTED,
}  # fmt: skip
BASELINES = (BASELINE, TUNED_ON_TEMPERATURE)  # the second is to converted rows what the first is to all
