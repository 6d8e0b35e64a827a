"""Suite `oversmoothing`: how alike the tokens of a sequence become, layer by layer."""

from typing import Any

import torch

from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.layer_variance import padding_of
from gpattention.evaluation.records import Record
from gpattention.evaluation.suites.findings import Findings
from gpattention.models import token_similarity
from gpattention.models.rows import Inputs, count_items

ITEMS = 1000  # sequences that are looked at, at most
CHUNK = 250


def oversmoothing_findings(model: Any, items: ItemSet, device: torch.device) -> Findings:
    """Mean cosine similarity between the tokens of a sequence after each attention and each block.

    Of the mean pass, without draws, of the first 1000 items; 1 is total oversmoothing.
    """
    looked_at = items.first(ITEMS)
    total, sums = 0, None
    for _, inputs in looked_at.chunks(CHUNK, device):
        count = _sequences(inputs)
        if count == 0:
            continue
        found = token_similarity(model, inputs)
        values = torch.tensor([found.embedded, *found.attended, *found.tokens], dtype=torch.float64)
        if bool(values.isnan().any()):  # images of a single patch
            continue
        sums = count * values if sums is None else sums + count * values
        total += count
    if sums is None:
        return Findings(notes=(f"no sequence of {items.name} has two tokens to compare",))
    embedded, *layers = (sums / total).tolist()
    half = len(layers) // 2
    attention, block = layers[:half], layers[half:]
    records = [
        Record(items.name, "model", "token_similarity", value, {"layer": layer, "after": after})
        for after, values in (("attention", attention), ("block", block))
        for layer, value in enumerate(values)
    ]
    notes = ["similarity of tokens is that of the mean pass, without draws"]
    if len(looked_at) < len(items):
        notes.append(f"reduced: similarity of tokens is that of the first {ITEMS} of {len(items)} items")
    similarity = {"embedded": embedded, "attention": attention, "block": block}
    return Findings(tuple(records), {"similarity": similarity}, tuple(notes))


def _sequences(inputs: Inputs) -> int:
    """How many have two tokens or more."""
    padding = padding_of(inputs)
    return count_items(inputs) if padding is None else int(((~padding).sum(-1) > 1).sum())
