"""Which sites earn their draws: added one after the other while the likelihood grows."""

from collections.abc import Callable
from dataclasses import replace

from gpattention.adopt.batches import Batch
from gpattention.adopt.scoring import Scorer
from gpattention.adopt.settings import Settings


def greedy_sites(
    scorer: Scorer, settings: Settings, batches: list[Batch], tell: Callable[[str, int, int], object]
) -> tuple[bool, ...]:
    """Sites in the order of what each gains alone, kept where it adds to those before."""
    count = len(settings.draws)
    some = scorer.some(batches)

    def score(sites: list[int]) -> float:
        drawing = tuple(place in sites for place in range(count))
        return -scorer.finish(replace(settings, draws=drawing), some)[1]

    alone = []
    for place in range(count):
        alone.append(score([place]))
        tell("selection", place + 1, 2 * count)
    kept: list[int] = []
    best = score([])
    for done, place in enumerate(sorted(range(count), key=lambda i: -alone[i])):
        gained = score([*kept, place])
        if gained > best:
            kept, best = [*kept, place], gained
        tell("selection", count + done + 1, 2 * count)
    return tuple(place in kept for place in range(count))
