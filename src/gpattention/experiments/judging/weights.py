"""Which weights an evaluation is of, those that were read, whatever the trainer writes meanwhile; and how."""

from dataclasses import replace
from pathlib import Path

from gpattention.data.places import StrPath
from gpattention.evaluation.prediction_cache import file_digest
from gpattention.evaluation.records import SuiteResult, read_suites
from gpattention.experiments.runs import Run, open_run
from gpattention.reports.words import OTHER_WEIGHTS
from gpattention.runs.results import recorded_settings

READINGS = 5  # of weights that are replaced while they are read, which a trainer does once an epoch


def digest_of_weights(folder: StrPath) -> str | None:
    """SHA-256 of the file with a run's weights, as it is now; None where there is none."""
    file = Path(folder) / "model" / "model.safetensors"
    return file_digest(file) if file.is_file() else None


def open_with_digest(folder: StrPath) -> tuple[Run, str]:
    """A run and the SHA-256 of the very weights in it: the file was the same before and after reading."""
    for _ in range(READINGS):
        before = digest_of_weights(folder)
        run = open_run(folder)  # says what is missing
        after = digest_of_weights(folder)
        if after is not None and after == before:
            return run, after
    raise RuntimeError(
        f"expected the weights of {folder} to stay while they are read, got others in each of {READINGS} "
        "readings: is something writing them all the time?"
    )


def recorded_weights(result: SuiteResult) -> str | None:
    """SHA-256 of the weights that a suite was computed with, as it says itself; None where it does not."""
    found = recorded_settings(result).get("model")
    return found if isinstance(found, str) else None


def read_noted_suites(folder: StrPath) -> dict[str, SuiteResult]:
    """What was evaluated; suites of weights that were replaced since, as by training that went on, say so."""
    found, weights = read_suites(Path(folder)), digest_of_weights(folder)
    for name, result in found.items():
        of = recorded_weights(result)
        if None not in (of, weights) and of != weights:
            found[name] = replace(result, notes=(OTHER_WEIGHTS, *result.notes))
    return found
