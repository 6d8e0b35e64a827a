"""A shared model as a run's folder again: the way back of `write_model_card`."""

from collections.abc import Mapping
from pathlib import Path

from gpattention.data.places import StrPath
from gpattention.experiments.inputs.preprocessing import FILE, FOLDER, WORDS
from gpattention.experiments.reproduction.model_card import MODEL_FILES
from gpattention.experiments.runs import CARD_RECIPE, open_trained
from gpattention.models.storage import make_folder, write_atomically
from gpattention.training.folder import PARTS, SHARED, write_run_recipe
from gpattention.training.records import append_event, read_events

SHARED_FILES = (*MODEL_FILES, f"{FOLDER}/{FILE}", CARD_RECIPE)


def write_shared_run(model: StrPath, out: StrPath) -> list[Path]:
    """Copy a shared model into a new run's folder, which `evaluate_run`, `report` and `adopt` take.

    What its training wrote down is not shared: there is no `metrics.csv`, nothing to resume, and one event
    says so.

    Args:
        model: a folder that `write_model_card` made.
        out: the run's folder; it must not hold a run.
    """
    folder, out = Path(model), Path(out)
    missing = next((name for name in SHARED_FILES if not (folder / name).is_file()), None)
    if missing is not None:
        raise FileNotFoundError(
            f"expected a model shared by `models card` in {folder}, got no {missing} there"
        )
    recipe = open_trained(folder).recipe  # and with it that weights and configuration can be read
    if (out / "recipe.json").exists():
        raise FileExistsError(
            f"expected a folder without a run for the shared model, got {out}, which has one"
        )
    places = {out / "model" / name: folder / name for name in MODEL_FILES}
    places |= {out / FOLDER / name: folder / FOLDER / name for name in (FILE, WORDS)}
    # only models of texts have words
    copied = {place: source.read_bytes() for place, source in places.items() if source.is_file()}
    _check_free(out, copied)
    for place, content in copied.items():
        make_folder(place.parent)
        write_atomically(place, content)
    if not read_events(out):
        append_event(out, SHARED)
    return [*copied, out / "events.jsonl", write_run_recipe(out, recipe)]  # last: now it is a run


def _check_free(out: Path, copied: Mapping[Path, bytes]) -> None:
    """Nothing in the way but what an earlier call that was killed has copied."""
    other = [place for place, content in copied.items() if place.exists() and place.read_bytes() != content]
    other += [out / name for name in PARTS if name not in ("model", "events.jsonl") and (out / name).exists()]
    other += [out / "events.jsonl"] if any(event.get("event") != SHARED for event in read_events(out)) else []
    if other:
        raise FileExistsError(
            f"expected a folder without a run for the shared model, got {out}, which has no recipe.json but "
            f"holds {other[0].relative_to(out)}"
        )
