"""What else the variance could say, on validation images and their synthetic shifts alone.

    python benchmarks/worth_leads.py profiles RUN ... --data ~/data -o results/worth-leads
    python benchmarks/worth_leads.py convert RUN ... --data ~/data -o results/worth-leads
    python benchmarks/worth_leads.py tables results/worth-leads

`profiles` reads trained models with a variance and compares densities of other summaries of it than the mean
over tokens of every head: by predicted class, token by token, the log determinant of the joint posterior
covariance, and the variance given queries that are remembered from other images instead of the input's own
keys (as GAPA does with activations).  `convert` takes softmax models and tunes them on for a few epochs as
they are, converted in all layers, and converted in the last two, and asks each time what the variance knows.

Detectors are fitted to four fifths of the validation images, the others are told from shifted ones; no test
image is read.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from worth import Looker, grouped, judge, machine, shown, table

import gpattention
from gpattention.attention import Attention, Heads
from gpattention.concurrency import handling
from gpattention.data.shifts import SEVERITIES, shift, shifts_of
from gpattention.evaluation import ItemSet, Strangeness, fit_temperature
from gpattention.files import write_atomically
from gpattention.gp import check_health
from gpattention.metrics import auroc
from gpattention.models.signals import attention_sites
from gpattention.runs import OverSeeds, difference, prepare
from gpattention.strangeness.detectors import (
    fit_gaussians,
    log_distance,
    mahalanobis,
    prediction_entropy,
)
from gpattention.training.engine import Feed, Objective, Schedule, train_steps

MEMORY = 256  # remembered queries of every head
ROWS = 250  # images whose covariances are held at once
PROFILES = {
    "mean over tokens": "variance",
    "mean over tokens, by predicted class": "variance",
    "token by token": "tokens",
    "log determinant of the joint covariance": "determinant",
    "variance given remembered queries": "memory",
    "mean over tokens and remembered": "both",
}
ADDED = "entropy + features"
STEP = 1e-4  # the highest learning rate when a converted model is tuned on


def profiles_of(model: Any, inputs: Tensor, remembered: dict[Attention, Tensor]) -> dict[str, Tensor]:
    """Summaries of the variance, by name.  [B, P] each

    The first call also chooses what is remembered: queries spread over the batch and its tokens.
    """
    found: dict[str, list[Tensor]] = {"variance": [], "tokens": [], "determinant": [], "memory": []}

    def see(module: Attention, own: Callable[..., Any], heads: Heads, **options: Any) -> Any:
        posterior, compared = own(heads, **{**options, "with_variance": True}), module._compared(heads)
        assert compared is not None
        log_variance, q = posterior.log_variance.double(), compared[0].double()  # [B, H, N], [B, H, N, D]
        found["variance"].append(log_variance.mean(-1))
        found["tokens"].append(log_variance.flatten(1))
        noise = module.noise().double()[:, None, None]  # [H, 1, 1]
        eye = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device)  # [N, N]
        covariance = posterior.covariance().double() + noise * eye  # [B, H, N, N]
        pivots = torch.linalg.cholesky(covariance).diagonal(dim1=-2, dim2=-1)  # [B, H, N]
        found["determinant"].append(2 * pivots.log().mean(-1))
        if module not in remembered:
            every = q.transpose(0, 1).flatten(1, 2)  # [H, B N, D]
            remembered[module] = every[:, torch.arange(MEMORY, device=q.device) * every.shape[1] // MEMORY]
        u = remembered[module]  # [H, M, D]
        eye = torch.eye(len(u[0]), dtype=q.dtype, device=q.device)  # [M, M]
        L = torch.linalg.cholesky(torch.exp(-0.5 * torch.cdist(u, u).square()) + noise * eye)  # [H, M, M]
        kappa = torch.exp(-0.5 * torch.cdist(u, q).square())  # [B, H, M, N]
        left = 1 - torch.linalg.solve_triangular(L, kappa, upper=False).square().sum(-2)  # [B, H, N]
        found["memory"].append(left.clamp_min(1e-12).log().mean(-1))
        return posterior

    with torch.no_grad(), handling({(m, "_posterior"): partial(see, m) for m in attention_sites(model)}):
        model(inputs)
    joined = {name: torch.cat(parts, 1).cpu() for name, parts in found.items()}
    return {**joined, "both": torch.cat([joined["variance"], joined["memory"]], 1)}


def density(profile: Tensor, fitted: Tensor, classes: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The log distance to Gaussians of the fitted items, columns in their own standard deviations."""
    centre, unit = profile[fitted].mean(0), profile[fitted].std(0).clamp_min(1e-9)
    usual = fit_gaussians((profile[fitted] - centre) / unit, None if classes is None else classes[fitted])
    return lambda x: log_distance((x - centre) / unit, usual)


def in_batches(looker: Looker, items: ItemSet, remembered: dict[Attention, Tensor]) -> dict[str, Tensor]:
    """All of a set: its profiles, and the logits and features of a pass without draws."""
    parts = []
    for _, inputs in items.chunks(ROWS, looker.device):
        assert isinstance(inputs, Tensor)
        signals = looker.signals(inputs, variance=False)
        answers = {"logits": signals.logits.double().cpu(), "features": signals.features.double().cpu()}
        parts.append({**answers, **profiles_of(looker.model, inputs, remembered)})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def split(looker: Looker, given: argparse.Namespace) -> tuple[ItemSet, ItemSet]:
    """Validation images that detectors are fitted to, and others."""
    validation = looker.sets.validation.first(given.validation)
    kept = len(validation) * 4 // 5
    return validation.first(kept), validation.select(torch.arange(kept, len(validation)))


def shifted_sets(items: ItemSet) -> dict[str, ItemSet]:
    """Under every shift, all severities in one set."""
    images = items.stored
    assert isinstance(images, Tensor)
    return {
        name: ItemSet(name, torch.cat([shift(images, name, s) for s in SEVERITIES]), None, items.prepare)
        for name in shifts_of(images.shape[1])
    }


def compare_profiles(folder: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One run's summaries, each alone and beside the entropy and the features."""
    looker = Looker(folder, given)
    fitting, left_out = split(looker, given)
    densities, weighing, _ = Strangeness.split(len(fitting))
    remembered: dict[Attention, Tensor] = {}
    usual = in_batches(looker, fitting, remembered)
    others = in_batches(looker, left_out, remembered)
    strange = {
        name: in_batches(looker, items, remembered)
        for name, items in shifted_sets(fitting.select(weighing[: given.shifted])).items()
    }
    classes = usual["logits"].argmax(-1)
    features = fit_gaussians(usual["features"][densities], fitting.labels[densities])  # type: ignore[index]
    scores: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = {
        "entropy": lambda x: prediction_entropy(x["logits"]),
        "features": lambda x: 0.5 * mahalanobis(x["features"], features).log1p(),
    }
    for name, profile in PROFILES.items():
        score = density(usual[profile], densities, classes if "class" in name else None)
        scores[name] = lambda x, score=score, profile=profile: score(x[profile])
    scale = {
        name: (a := score(usual)[weighing], float(a.mean()), float(a.std())) for name, score in scores.items()
    }

    def unit(name: str, x: Mapping[str, Tensor]) -> Tensor:
        _, mean, spread = scale[name]
        return (scores[name](x) - mean) / spread

    sums = {name: (name,) for name in scores} | {ADDED: ("entropy", "features")}
    sums |= {f"{ADDED} + {name}": ("entropy", "features", name) for name in PROFILES}
    separates = {
        title: {
            name: auroc(sum(unit(part, others) for part in parts), sum(unit(part, x) for part in parts))  # type: ignore[arg-type]
            for name, x in strange.items()
        }
        for title, parts in sums.items()
    }
    return [{**about(looker, given), "task": "profiles", "separates": separates}]


def about(looker: Looker, given: argparse.Namespace) -> dict[str, Any]:
    """Where a record comes from."""
    recipe = looker.run.recipe
    date = datetime.now(UTC).date().isoformat()
    where = {"machine": machine(looker.device), "date": date}
    return {"run": looker.run.folder.name, "recipe": recipe.name, "seed": recipe.seed, **where}


def tune(looker: Looker, model: Any, given: argparse.Namespace) -> None:
    """Some further epochs of AdamW with the run's own feed; converted attention draws."""
    recipe = replace(looker.run.recipe, phases=replace(looker.run.recipe.phases, draw="independent"))
    feed = Feed(recipe, prepare(recipe, given.data).training, looker.device, torch.float32)
    objective = Objective(model, recipe, "gp" if model.draws else "kernel")
    steps = Schedule(recipe, feed.steps_per_epoch)
    total, first = given.epochs * feed.steps_per_epoch, steps.total_steps
    optimizer = torch.optim.AdamW(objective.parameters(), lr=STEP, weight_decay=0.01)
    nothing = torch.zeros((), device=looker.device)  # the regulariser's weight

    def loss(numbered: tuple[int, list[Any]]) -> Tensor:
        step, (batch,) = numbered
        seed = torch.tensor(steps.controls(step).seed, device=looker.device)
        return objective(batch.inputs, batch.labels, batch.items, seed, nothing)[0]

    def rate(step: int) -> float:
        return STEP * min(1.0, (step + 1) / (0.1 * total), (total - step) / (0.9 * total))

    torch.manual_seed(looker.run.recipe.seed)
    batches = islice(enumerate(feed.updates(first), first), total)
    cuda = looker.device.type == "cuda"
    for _ in train_steps(objective, loss, batches, optimizer, rate, clip=1.0, defer_checks=cuda):
        pass
    if cuda:
        check_health()
    model.eval()


def compare_conversions(folder: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A softmax model tuned on as it is, converted, and converted in its last two layers."""
    first, rows = Looker(folder, given), []
    sites = [site.name for site in gpattention.find_sites(first.model).sites]
    ways: dict[str, list[str] | None] = {
        "as it is": None, "tuned on": [], "converted": sites, "converted, last two layers": sites[-2:],
    }  # fmt: skip
    for way, layers in ways.items():
        looker = Looker(folder, given)
        model = deepcopy(first.model)
        if layers:
            options = {"prior_scale": given.prior_scale, "seed": first.run.recipe.seed}
            model = gpattention.convert(model, "direct", layers=layers, **options)
        if layers is not None:
            tune(looker, model, given)
        looker.model = model
        looker.predictor = gpattention.evaluation.build_predictor("model", model, given.samples, None)
        looker.signals = partial(gpattention.signals, model) if layers else gpattention.attach(model).signals
        rows.append({**about(looker, given), "task": "convert", "way": way, **judged(looker, given)})
        print(
            way, {k: round(100 * fmean(v.values()), 1) for k, v in rows[-1]["separates"].items()}, flush=True
        )
    return rows


def judged(looker: Looker, given: argparse.Namespace) -> dict[str, Any]:
    """How well scores tell shifted images, and left-out images by their constant temperature."""
    fitting, left_out = split(looker, given)
    _, weighing, _ = Strangeness.split(len(fitting))
    clean, others = looker(fitting), looker(left_out)
    strange = {
        name: looker(items) for name, items in shifted_sets(fitting.select(weighing[: given.shifted])).items()
    }
    parts = {
        "variance": ("variance_density",),
        ADDED: ("entropy", "mahalanobis"),
        f"{ADDED} + variance": ("entropy", "mahalanobis", "variance_density"),
    }
    separates = {}
    for title, chosen in parts.items():
        fitted = Strangeness.fit(clean.signals, clean.labels, chosen)
        inside = fitted.score(others.signals)
        separates[title] = {name: auroc(inside, fitted.score(x.signals)) for name, x in strange.items()}
    assert clean.labels is not None
    heat = fit_temperature(clean.draws, clean.labels)
    return {"separates": separates, "left out": judge(others, heat), "epochs": given.epochs}


def tables(folder: Path) -> str:
    """Markdown of all records in a folder."""
    records = [row for file in sorted(folder.glob("*.json")) for row in json.loads(file.read_text())]
    where = "; ".join(", ".join(sorted({r[key] for r in records})) for key in ("machine", "date", "run"))
    text = ["# What else the variance could say", "", "Made by `benchmarks/worth_leads.py`. AUROC in hundredths of shifted against left-out validation images, mean over the shifts; means over seeds, ± the standard error.", "", where + "."]  # fmt: skip  # noqa: E501
    for task, key, title in (
        ("profiles", "recipe", "Other summaries of the variance"),
        ("convert", "way", "A softmax model tuned on, as it is and converted"),
    ):
        rows = [{**r, "recipe": r[key]} for r in records if r["task"] == task]
        if not rows:
            continue
        groups = grouped(rows)
        cells: dict[str, list[str]] = {}
        for score in rows[0]["separates"]:
            cells[score] = [
                shown([fmean(r["separates"][score].values()) for r in g], 100, 1) for g in groups.values()
            ]
        base = {"profiles": f"{ADDED} + mean over tokens", "convert": ADDED}[task]
        for score in [s for s in cells if s.startswith(ADDED + " +") and s != base]:
            gaps = []
            for g in groups.values():
                one, other = (
                    {r["seed"]: 100 * fmean(r["separates"][s].values()) for r in g} for s in (score, base)
                )
                gap = difference(OverSeeds(one), OverSeeds(other))
                gaps.append(f"{gap.mean:+.1f}" + (f" ± {gap.error:.1f}" if gap.error else "") + (", clear" if gap.clear else ""))  # fmt: skip  # noqa: E501
            cells[f"{score}, against {base}"] = gaps
        if task == "convert":
            for metric in ("accuracy", "nll", "ece"):
                cells[f"left-out images: {metric}"] = [
                    shown([r["left out"][metric] for r in g], 1, 3) for g in groups.values()
                ]
        text += [
            "",
            f"## {title}",
            "",
            *table("score", [f"{n} ({len(g)})" for n, g in groups.items()], cells),
        ]
    return "\n".join(text) + "\n"


def main() -> None:
    """Compare, or write tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["profiles", "convert", "tables"])
    parser.add_argument("folders", nargs="+", help="runs, or the folder of their records")
    parser.add_argument("--data", help="folder of the data sets (default: GPATTENTION_DATA)")
    parser.add_argument("--validation", type=int, help="images (default: all)")
    parser.add_argument(
        "--shifted", type=int, default=250, help="images, each under every shift and severity"
    )
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5, help="of tuning on")
    parser.add_argument("--prior-scale", type=float, default=0.3, help="of converted attention")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-o", "--out", type=Path, default=Path("results/worth-leads"))
    given = parser.parse_args()
    if given.task == "tables":
        folder = Path(given.folders[0])
        write_atomically(folder / "README.md", tables(folder).encode())
        print(folder / "README.md")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    compare = compare_profiles if given.task == "profiles" else compare_conversions
    for folder in given.folders:
        found = compare(folder, given)
        file = given.out / f"{given.task}-{found[0]['run']}.json"
        write_atomically(file, json.dumps(found, indent=1).encode())
        print(file, flush=True)


if __name__ == "__main__":
    main()
