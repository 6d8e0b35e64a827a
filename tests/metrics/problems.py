"""Predictions with everything that can go wrong: ties, empty bins, zeros and ones, one class, one item."""

import torch
from torch import Tensor

Problem = tuple[Tensor, Tensor]  # probs [B, C], labels [B]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def predictions(count: int, classes: int, seed: int = 0, sharp: float = 2.0) -> Problem:
    """Over-confident ones: labels are drawn from softer probabilities than the returned ones."""
    logits = sharp * torch.randn(count, classes, dtype=torch.float64, generator=seeded(seed))
    labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=seeded(seed + 1))[:, 0]
    return logits.softmax(-1), labels


def coarse(count: int, classes: int, parts: int = 10, seed: int = 0) -> Problem:
    """Multiples of 1 / parts: many ties, among classes and items, values on bin edges, 0 and 1 among them."""
    cuts = torch.randint(parts + 1, (count, classes - 1), generator=seeded(seed)).sort(-1).values
    ends = torch.cat([torch.zeros(count, 1), cuts, torch.full((count, 1), parts)], -1)
    labels = torch.randint(classes, (count,), generator=seeded(seed + 1))
    return ends.diff(dim=-1).double() / parts, labels


def certain(count: int, classes: int, seed: int = 0) -> Problem:
    """Probabilities 0 and 1 alone, some of them wrong."""
    guess = torch.randint(classes, (count,), generator=seeded(seed))
    keep = torch.rand(count, generator=seeded(seed + 1)) < 0.7
    other = torch.randint(classes, (count,), generator=seeded(seed + 2))
    return torch.nn.functional.one_hot(guess, classes).double(), torch.where(keep, guess, other)


def cases() -> dict[str, Problem]:
    probs, labels = predictions(60, 3, seed=5)
    return {
        "binary": predictions(200, 2),
        "three": predictions(101, 3, seed=1),
        "ten": predictions(300, 10, seed=2),
        "ties": coarse(120, 3),
        "binary ties": coarse(80, 2, seed=3),
        "on fifteenths": coarse(90, 4, parts=15, seed=4),
        "all alike": (torch.full((40, 4), 0.25, dtype=torch.float64), torch.arange(40) % 4),
        "certain": certain(50, 3),
        "certain and right": (torch.eye(4).double(), torch.arange(4)),
        "certain and wrong": (torch.eye(4).double(), torch.arange(4).roll(1)),
        "one class": (torch.ones(7, 1).double(), torch.zeros(7, dtype=torch.int64)),
        "labels of one class": (probs, torch.full_like(labels, 2)),
        "single item": predictions(1, 3, seed=6),
        "two items": predictions(2, 5, seed=7),
        "float32": (predictions(70, 4, seed=8)[0].float(), predictions(70, 4, seed=8)[1]),
        "bfloat16": (predictions(70, 2, seed=9)[0].bfloat16(), predictions(70, 2, seed=9)[1]),
        "int32 labels": (probs, labels.int()),
    }


CASES = cases()

Scores = tuple[Tensor, Tensor]  # scores_in [n], scores_out [m]


def score_cases() -> dict[str, Scores]:
    normal = torch.randn(300, dtype=torch.float64, generator=seeded(0))
    few = torch.randint(6, (150,), generator=seeded(1)).double()
    infinite = torch.tensor([-torch.inf, -1.0, 0.0, torch.inf, torch.inf])
    return {
        "overlapping": (normal[:180], normal[180:] + 1),
        "reversed": (normal[:100] + 1, normal[100:]),
        "apart": (normal[:50], normal[50:90] + 100),
        "ties": (few[:80], few[80:] + 1),
        "all equal": (torch.ones(20), torch.ones(30)),
        "one each": (torch.tensor([0.1]), torch.tensor([0.3])),
        "one each, equal": (torch.tensor([0.3]), torch.tensor([0.3])),
        "twenty": (normal[:20], normal[20:30] + 0.5),
        "infinite": (infinite, infinite[1:] + 1),
        "half precision": (normal[:90].half(), (normal[90:200] + 1).half()),
    }


SCORES = score_cases()
