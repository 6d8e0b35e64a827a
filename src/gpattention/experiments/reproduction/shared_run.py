"""A shared model as a run's folder again: the way back of `write_model_card`."""

import json
from pathlib import Path

from gpattention.data.places import StrPath
from gpattention.experiments.inputs.preprocessing import FILE, FOLDER, WORDS
from gpattention.experiments.reproduction.model_card import MODEL_FILES
from gpattention.experiments.runs import CARD_RECIPE, open_trained
from gpattention.models.storage import write_atomically
from gpattention.training.folder import SHARED
from gpattention.training.records import append_event

RECIPE = "recipe.json"


def write_shared_run(model: StrPath, out: StrPath) -> list[Path]:
    """Copy a shared model into a new run's folder, which `evaluate_run`, `report` and `adopt` take.

    What its training wrote down is not shared: there is no `metrics.csv`, nothing to resume, and one event
    says so.

    Args:
        model: a folder that `write_model_card` made.
        out: the run's folder; it must not hold a run.
    """
    folder, out = Path(model), Path(out)
    contents = {f"model/{name}": _read(folder, name) for name in MODEL_FILES}
    contents[f"{FOLDER}/{FILE}"] = _read(folder, f"{FOLDER}/{FILE}")
    if (folder / FOLDER / WORDS).is_file():
        contents[f"{FOLDER}/{WORDS}"] = _read(folder, f"{FOLDER}/{WORDS}")
    _read(folder, CARD_RECIPE)
    recipe = open_trained(folder).recipe  # and with it that weights and configuration can be read
    if (out / RECIPE).exists():
        raise FileExistsError(
            f"expected a folder without a run for the shared model, got {out}, which has one"
        )
    for name, content in contents.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out / name, content)
    append_event(out, SHARED)
    write_atomically(
        out / RECIPE, (json.dumps(recipe.to_dict(), indent=2) + "\n").encode()
    )  # now it is a run
    return [*(out / name for name in contents), out / "events.jsonl", out / RECIPE]


def _read(folder: Path, name: str) -> bytes:
    if not (folder / name).is_file():
        raise FileNotFoundError(f"expected a model shared by `models card` in {folder}, got no {name} there")
    return (folder / name).read_bytes()
