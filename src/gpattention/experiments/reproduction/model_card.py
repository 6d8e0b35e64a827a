"""A run's model as a folder to share: its two files, what prediction needs beside them, and a card."""

import json
from pathlib import Path

from gpattention.data.places import StrPath
from gpattention.experiments.inputs.preprocessing import FILE, FOLDER, WORDS
from gpattention.experiments.recipe_file import recipe_toml
from gpattention.experiments.reproduction.card_text import card_markdown
from gpattention.experiments.reproduction.results.reading import EvaluatedModel, EvaluatedRun, read_run
from gpattention.experiments.runs import open_run
from gpattention.models.storage import make_folder, write_atomically
from gpattention.reading import read_object
from gpattention.reports.words import OTHER_WEIGHTS

LARGEST = 3_000_000  # bytes of weights and config: what a repository bears
MODEL_FILES = ("config.json", "model.safetensors")


def write_model_card(run: StrPath, out: StrPath, *, name: str | None = None) -> list[Path]:
    """Copy a run's model and write its card; `from_pretrained` and `load_preprocessing` take the folder.

    Args:
        run: a run with a model; what it was evaluated on is told, and so are runs beside it that differ by
            their seed alone.
        out: the folder to write.
        name: of the model; that of the recipe if not given.
    """
    folder, out = Path(run), Path(out)
    contents = _contents(folder)
    size = sum(len(contents[file]) for file in MODEL_FILES)
    if size > LARGEST:
        most = f"at most {LARGEST / 1e6:.1f} MB"
        raise ValueError(f"expected a model of {most}, got {size / 1e6:.1f} MB in {folder / 'model'}")
    open_run(folder)  # weights that cannot be loaded are not shared
    this = read_run(folder)
    seeds = EvaluatedModel(name or this.recipe.name, _siblings(this))
    for told in seeds.runs:
        _check_figures(told)
    contents["recipe.toml"] = recipe_toml(this.recipe, f"what {seeds.name} was trained with").encode()
    contents["README.md"] = card_markdown(this, seeds, out, contents).encode()
    for file, content in contents.items():
        make_folder((out / file).parent)
        write_atomically(out / file, content)
    return [out / file for file in contents]


def _contents(folder: Path) -> dict[str, bytes]:
    """The files to copy, by their place in the new folder."""
    places = {name: folder / "model" / name for name in MODEL_FILES}
    places[f"{FOLDER}/{FILE}"] = folder / FOLDER / FILE
    for place in (folder / "recipe.json", *places.values()):
        if not place.is_file():
            raise FileNotFoundError(f"expected a run with a model in {folder}, got no {place}")
    if (folder / FOLDER / WORDS).is_file():
        places[f"{FOLDER}/{WORDS}"] = folder / FOLDER / WORDS
    return {name: place.read_bytes() for name, place in places.items()}


def _check_figures(run: EvaluatedRun) -> None:
    stale = [suite for suite, result in run.suites.items() if OTHER_WEIGHTS in result.notes]
    if stale:
        raise ValueError(
            f"expected figures of the weights in {run.folder / 'model'}, got those of other weights in "
            f"{run.folder / 'evaluation'} ({', '.join(stale)}): evaluate the run again"
        )


def _siblings(run: EvaluatedRun) -> tuple[EvaluatedRun, ...]:
    """This run and those beside it that differ by their seed alone and were evaluated, by rising seed."""
    found = {run.seed: run}
    for place in sorted(run.folder.resolve().parent.glob("*/recipe.json")):
        plain = read_object(place, nonfinite=True)
        if _without_seed(plain) == _without_seed(run.recipe.to_dict()):
            other = read_run(place.parent)
            if other.suites:
                found.setdefault(other.seed, other)
    return tuple(found[seed] for seed in sorted(found))


def _without_seed(plain: dict[str, object]) -> str:
    return json.dumps({k: v for k, v in plain.items() if k not in ("name", "seed")}, sort_keys=True)
