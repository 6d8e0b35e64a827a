"""`sweep.csv`, `sweep.md` and `chosen.toml` in the folder of a sweep."""

import math

from gpattention.experiments.recipe_file import write_recipe
from gpattention.experiments.sweep.result import SweepResult, SweepSetting
from gpattention.models.storage import make_folder, remove_leftovers, write_atomically
from gpattention.reports.escaping import Markup, csv_text, markdown, markdown_code, markdown_table


def write_sweep(result: SweepResult) -> None:
    """All three; without a choice there is no `chosen.toml`, also none of an earlier time."""
    remove_leftovers(make_folder(result.folder))
    write_atomically(result.folder / "sweep.csv", sweep_csv(result).encode())
    write_atomically(result.folder / "sweep.md", sweep_markdown(result).encode())
    chosen = result.chosen_recipe
    if chosen is None:
        (result.folder / "chosen.toml").unlink(missing_ok=True)
        return
    comment = f"Chosen by {how_chosen(result)}; see sweep.md."
    write_recipe(result.folder / "chosen.toml", chosen, comment)


def sweep_csv(result: SweepResult) -> str:
    """One row for each run."""
    keys, lines = list(result.rows[0].settings), []
    for row in result.rows:
        status = "failed" if row.error else "finished"
        folder = row.folder.relative_to(result.folder)
        values = [row.settings[key] for key in keys]
        lines.append([*values, row.seed, status, row.epoch, row.accuracy, row.nll, folder, row.error])
    heads = ["seed", "status", "epoch", "validation_accuracy", "validation_nll", "folder", "error"]
    return csv_text([*keys, *heads], lines)


def sweep_markdown(result: SweepResult) -> str:
    """One row for each setting, the chosen one in bold, then the runs that failed."""
    keys = list(result.rows[0].settings)
    heads = [*keys, "validation accuracy", "validation NLL", "runs"]
    lines = [f"# Sweep of {markdown(result.recipe.name)}", "", f"Chosen by {how_chosen(result)}.", ""]
    rows = []
    for setting in result.settings:
        cells = [*setting.settings.values(), *numbers(setting)]
        bold = setting is result.chosen
        rows.append([Markup(f"**{markdown(cell)}**") if bold else cell for cell in cells])
    lines.append(markdown_table(heads, rows))
    if result.chosen is None:
        lines += ["", "None was chosen: every setting has a run that failed."]
    failed = [row for row in result.rows if row.error]
    if failed:
        lines += ["", "Failed runs:", ""]
        lines += [
            f"- {markdown_code(row.folder.relative_to(result.folder))}: {markdown(row.error)}"
            for row in failed
        ]
    return "\n".join(lines) + "\n"


def numbers(setting: SweepSetting) -> tuple[str, str, str]:
    """Accuracy and NLL, with their deviation where there is one, and how many runs finished."""
    finished = setting.runs - setting.failed
    return (
        _with_spread(setting.accuracy, setting.accuracy_std),
        _with_spread(setting.nll, setting.nll_std),
        f"{finished}/{setting.runs}" if setting.failed else f"{setting.runs}",
    )


def how_chosen(result: SweepResult) -> str:
    """In words."""
    measure = "accuracy (highest)" if result.choose == "accuracy" else "NLL (lowest)"
    runs = max(setting.runs for setting in result.settings)
    over = f", mean over {runs} seeds" if runs > 1 else ""
    return f"{measure} on the validation split{over}"


def _with_spread(mean: float, std: float) -> str:
    if math.isnan(mean):
        return "-"
    return f"{mean:.4f}" if math.isnan(std) else f"{mean:.4f} ± {std:.4f}"
