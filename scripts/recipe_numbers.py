"""Write into every recipe what it gave: figures of the plans in results/, as a comment above its first key.

They are read from results/PLAN/summary.csv, and from results/PLAN-part-*/ where parts of a plan have results
of their own.  `--check` writes nothing and fails where a recipe is not up to date.
"""

import argparse
import csv
import math
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TITLE = "# What it gave"
SETS = {"test": "test", "ood/out-of-domain": "out of domain", "corrupted/mean": "CIFAR-10-C"}
METRICS = {"accuracy": ("accuracy", 100, ".1f"), "mcc": ("MCC", 100, ".1f"), "nll": ("NLL", 1, ".3f"),
           "ece": ("ECE", 1, ".3f")}  # fmt: skip
PREDICTORS = {"model": "as it is", "model+temperature": "temperature"}
Figures = dict[tuple[str, str, str, str], tuple[float, float, int]]  # of model, predictor, set and metric


def main() -> int:
    """Renew all recipes, or list those that are not up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail where one would change")
    check = parser.parse_args().check
    found = given()
    stale = []
    for recipe in sorted((ROOT / "recipes").glob("*.toml")):
        before = recipe.read_text()
        after = with_block(before, found.get(recipe.stem, []))
        if after != before:
            stale.append(recipe.name)
            if not check:
                recipe.write_text(after)
    for name in stale:
        print(f"{name}: {'not up to date' if check else 'renewed'}")
    return 1 if check and stale else 0


def given() -> dict[str, list[str]]:
    """Lines for each recipe, of each model of a plan that came from it."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "recipes" / "plans").glob("*.toml")):
        figures: Figures = {}
        for name in (file.stem, f"{file.stem}-part-*"):
            for summary in sorted((ROOT / "results").glob(f"{name}/summary.csv")):
                figures |= read(summary)
        for run in tomllib.loads(file.read_text())["runs"]:
            if "shared" in run:  # judged again, trained by another plan
                continue
            model = run.get("name", run["recipe"])
            if any(key[0] == model for key in figures):
                found.setdefault(run["recipe"], []).extend(lines_of(file.stem, model, figures))
    return found


def read(summary: Path) -> Figures:
    """Means, standard errors and numbers of runs."""
    with summary.open(newline="") as stream:
        return {
            (row["model"], row["predictor"], row["set"], row["metric"]): (
                float(row["mean"]), float(row["standard_error"] or "nan"), int(row["runs"]),
            )
            for row in csv.DictReader(stream)
            if row["set"] in SETS and row["metric"] in METRICS and not row["score"]
        }  # fmt: skip


def lines_of(plan: str, model: str, figures: Figures) -> list[str]:
    """What one model came to, a line for each predictor and set."""
    text = (model, "model", "ood/out-of-domain", "mcc") in figures
    metrics = [name for name in METRICS if name != ("accuracy" if text else "mcc")]
    lines, seeds = [], 0
    for predictor, words in PREDICTORS.items():
        for place, called in SETS.items():
            shown = []
            for metric in metrics:
                if (model, predictor, place, metric) in figures:
                    mean, error, seeds = figures[model, predictor, place, metric]
                    name, times, form = METRICS[metric]
                    spread = "" if math.isnan(error) else f" ± {times * error:{form}}"  # one seed has none
                    shown.append(f"{name} {times * mean:{form}}{spread}")
            if shown:
                lines.append(f"#     {called}, {words}: {', '.join(shown)}")
    return [f"#   {plan}, {model}, {seeds} {'seed' if seeds == 1 else 'seeds'}", *lines]


def with_block(recipe: str, given_lines: list[str]) -> str:
    """The recipe with the block where its header comment ends, in place of an older one."""
    lines = recipe.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    start = next((i for i, line in enumerate(lines[:end]) if line.startswith(TITLE)), end)
    block = (
        [f"{TITLE} with a plan's changes, mean and standard error (more in results/PLAN):"]
        if given_lines
        else []
    )
    return "\n".join([*lines[:start], *block, *given_lines, *lines[end:]]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
