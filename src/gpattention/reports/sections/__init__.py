"""The sections of a report, in their order; each shows one data set's models."""

from collections.abc import Callable
from dataclasses import dataclass

from gpattention.reports.groups import Comparison
from gpattention.reports.markup import Safe
from gpattention.reports.sections import (
    corruptions,
    cost,
    environment,
    gallery,
    layers,
    outliers,
    reliability,
    selective,
    summary,
    training,
)


def _always(_: Comparison) -> bool:
    return True


@dataclass(frozen=True)
class Section:
    """A heading, what the reader should know, and what fills it."""

    name: str
    title: str
    lead: str
    content: Callable[[Comparison, str], Safe]  # of a comparison, under ids that begin so
    fills: Callable[[Comparison], bool] = _always  # whether a comparison has a place in it


SECTIONS = (
    Section("summary", "Summary", "How right, how sure, and how well these agree.", summary.content),
    Section(
        "reliability", "Reliability",
        "Accuracy of the answers given with a certain confidence, on the clean test set. Red is confidence "
        "that accuracy does not reach, pale is accuracy beyond confidence; the grey strip shows where the "
        "items are.",
        reliability.content,
    ),
    Section(
        "corruptions", "Corrupted images",
        "The same models on damaged images. Accuracy, NLL and ECE belong together: a collapsed model has the "
        "lowest ECE.",
        corruptions.content,
    ),
    Section(
        "outliers", "Unknown data",
        "Data of other kinds than the training data should be met with more uncertainty. Larger scores "
        "mean more unknown.",
        outliers.content,
    ),
    Section(
        "selective", "Selective prediction",
        "A model that knows when it is wrong makes few errors among the items of which it is most certain.",
        selective.content,
    ),
    Section("training", "Training", "One point per validation.", training.content),
    Section(
        "health", "Health by layer", "What the attention layers look like from inside, first layer left.",
        layers.health,
    ),
    Section(
        "oversmoothing", "Oversmoothing", "Tokens that grow alike from layer to layer carry less and less.",
        layers.oversmoothing,
    ),
    Section("cost", "Time and memory", "Measured on the machine named below.", cost.content),
    Section(
        "gallery", "Gallery", "Items of the test set, and how uncertain each token of them is.",
        gallery.content, gallery.fills,
    ),
    Section(
        "environment", "Environment and config", "What the numbers depend on.", environment.content
    ),
)  # fmt: skip

__all__ = ["SECTIONS", "Section"]
