"""What the tables and pictures of the comparisons show, and how it is called."""

from gpattention.experiments.adoption.cola import CONVERSIONS, converted_names
from gpattention.experiments.adoption.methods import TITLES
from gpattention.experiments.adoption.summary import Column

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

_IMAGE = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "aurc": "AURC"}
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

_CONVERTED = {
    name: f"converted to {kind}, fine-tuned{', temperature' if name.endswith('temperature') else ''}"
    for kind in CONVERSIONS
    for name in converted_names(kind)
}
ALL_TITLES = {**TITLES, **_CONVERTED}
