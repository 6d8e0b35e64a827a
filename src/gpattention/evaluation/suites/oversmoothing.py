"""Suite `oversmoothing`: how similar the tokens of a sequence become, layer by layer."""

from typing import Any

import torch

from gpattention.evaluation.predictions import ItemSet, padding_of
from gpattention.evaluation.suites.findings import Findings, Subject
from gpattention.models import token_similarity
from gpattention.models.predict import count_items
from gpattention.runs import Record

ITEMS = 1000  # most sequences that are used
CHUNK = 250


def evaluate_oversmoothing(subject: Subject) -> Findings:
    """The model of the run on the test set."""
    return oversmoothing_findings(subject.run.model.to(subject.device), subject.sets.test, subject.device)


def oversmoothing_findings(model: Any, items: ItemSet, device: torch.device) -> Findings:
    """Mean cosine similarity between the tokens of a sequence after each attention and each block.

    It is that of the first 1000 items in the mean pass, without draws; 1 is complete oversmoothing.

    Args:
        model: one of our transformers.
        items: of which sequences with at least two tokens count.
        device: of the model.

    Returns:
        A record for each layer after its attention and one after its block, and the curve "similarity".
    """
    looked_at = items.first(ITEMS)
    total, sums = 0, None
    for _, inputs in looked_at.chunks(CHUNK, device):
        padding = padding_of(inputs)
        count = count_items(inputs) if padding is None else int(((~padding).sum(-1) > 1).sum())
        if count == 0:
            continue
        found = token_similarity(model, inputs)
        values = torch.tensor([found.embedded, *found.attended, *found.tokens], dtype=torch.float64)
        if bool(values.isnan().any()):  # images with a single patch
            continue
        sums = count * values if sums is None else sums + count * values
        total += count
    if sums is None:
        return Findings(notes=(f"no sequence of {items.name} has two tokens to compare",))
    embedded, *layers = (sums / total).tolist()
    half = len(layers) // 2
    similarity = {"attention": layers[:half], "block": layers[half:]}
    records = [
        Record(items.name, "model", "token_similarity", value, {"layer": layer, "after": after})
        for after, values in similarity.items()
        for layer, value in enumerate(values)
    ]
    notes = ["similarity of tokens is that of the mean pass, without draws"]
    if len(looked_at) < len(items):
        notes.append(f"reduced: similarity of tokens is that of the first {ITEMS} of {len(items)} items")
    return Findings(tuple(records), {"similarity": {"embedded": embedded, **similarity}}, tuple(notes))
