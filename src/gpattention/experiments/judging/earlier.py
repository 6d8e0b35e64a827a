"""What an earlier evaluation of the same weights holds, and a new one must not lose."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpattention.evaluation.records import read_suite
from gpattention.experiments.judging.judges import JUDGES
from gpattention.reading import parse_json

if TYPE_CHECKING:
    from gpattention.experiments.judging.one_run import Settings

REDUCING = ("limit", "types", "severities")  # settings that leave items out; None is all


def with_earlier(asked: "Settings", folder: Path, weights: str) -> "Settings":
    """Settings under which no finished figure is lost.

    Predictors of an earlier evaluation stay: they are judged again with the new ones, of the predictions that
    are kept.  `ValueError`, before any work, where fewer items would replace more.
    """
    predictors, shift_temperature = dict.fromkeys(asked.predictors), asked.shift_temperature
    for suite in asked.suites:
        path = folder / "evaluation" / f"{suite}.json"
        earlier = _settings(path) if path.exists() else {}
        if suite == "efficiency" or earlier.get("model") != weights:
            continue
        reducing = REDUCING if suite == "corrupted" else REDUCING[:1]
        check_as_much({name: getattr(asked, name) for name in reducing}, earlier, path)
        alike = all(earlier.get(name) == getattr(asked, name) for name in ("samples", "seed", "limit"))
        if suite in JUDGES and alike:
            predictors |= dict.fromkeys(earlier.get("predictors", ()))
            shift_temperature = shift_temperature or earlier.get("shift_temperature", False)
    return replace(asked, predictors=tuple(predictors), shift_temperature=shift_temperature)


def check_as_much(
    asked: Mapping[str, Any], earlier: Mapping[str, Any], path: Path, again: str = "evaluate"
) -> None:
    """`ValueError` where settings leave out items that the figures in a file were computed with."""
    for name in REDUCING:
        new, old = asked.get(name), earlier.get(name)
        if new is not None and _is_less(new, old):
            now = new if isinstance(new, int) else ",".join(map(str, new))
            had = "all" if old is None else old if isinstance(old, int) else ",".join(map(str, old))
            raise ValueError(
                f"{path} has figures of the same weights with more items ({name}: {had}), which {name} {now} "
                f"would replace: {again} as it was, or with --fresh (fresh=True) to replace them"
            )


def _is_less(new: int | Sequence[Any], old: int | Sequence[Any] | None) -> bool:
    if old is None:
        return True
    if isinstance(new, int) and isinstance(old, int):
        return new < old
    assert not isinstance(new, int)
    assert not isinstance(old, int)
    return bool(set(old) - set(new))


def _settings(path: Path) -> dict[str, Any]:
    plain = parse_json(read_suite(path).environment.get("settings", "{}"), path, nonfinite=True)
    return plain if isinstance(plain, dict) else {}
