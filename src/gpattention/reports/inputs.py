"""What a report is made of: plain data of runs, as their folders hold it."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpattention.reports.comparable import Sets, judged_items

Plain = Mapping[str, Any]
UNSEEN = "unseen_test_items"  # in the detail of an ensemble's records that leave test items out


@dataclass(frozen=True)
class RunData:
    """One run: its recipe, its training, and the suites that were evaluated, as in their JSON files."""

    name: str
    recipe: Plain = field(default_factory=dict)
    rows: Sequence[Plain] = ()  # of metrics.csv, numbers as numbers
    events: Sequence[Plain] = ()  # of events.jsonl
    suites: Mapping[str, Plain] = field(default_factory=dict)  # by name: clean, corrupted, ood, ...
    folder: str = ""  # for the commands that a report suggests

    @property
    def data(self) -> str:
        """The name of the data set."""
        return str(self._of_recipe("data", "name") or self._of_suites("data") or "unnamed data")

    @property
    def attention(self) -> str:
        """The kind of attention."""
        return str(self._of_recipe("model", "attention") or self._of_suites("attention") or "")

    @property
    def seed(self) -> int | None:
        """Of training and data."""
        seed = self.recipe.get("seed", self._of_suites("seed"))
        return seed if isinstance(seed, int) else None

    @property
    def texts(self) -> bool:
        """Whether it reads text rather than images."""
        return self._of_recipe("model", "type") == "text"

    def records(self, suite: str) -> Iterator[Plain]:
        """The numbers of a suite; none where it was not evaluated."""
        yield from self.suites.get(suite, {}).get("records", ())

    def curve(self, suite: str, name: str) -> Any:
        """A curve of a suite; None where there is none."""
        return self.suites.get(suite, {}).get("curves", {}).get(name)

    def value(
        self, suite: str, set: str, metric: str, predictor: str = "model", **detail: Any
    ) -> float | None:
        """One number; None where there is none or it is not finite."""
        for record in self.records(suite):
            same = (record["set"], record["metric"], record["predictor"]) == (set, metric, predictor)
            if same and all(record.get("detail", {}).get(key) == value for key, value in detail.items()):
                return number(record["value"])
        return None

    def judged_on(self, suite: str, sets: Sequence[str], predictor: str = "model") -> Sets:
        """How many items of these sets a predictor was judged on.

        Against sets of other kinds, also how many test items, where some of them are left out.
        """
        plain = self.suites.get(suite, {})
        told = _settings(plain.get("environment", {}).get("settings"))
        found = [(name, judged_items(suite, name, predictor, plain.get("curves", {}), told)) for name in sets]
        unseen = {
            record["detail"][UNSEEN]
            for record in (self.records(suite) if suite == "ood" else ())
            if record["predictor"] == predictor and UNSEEN in record.get("detail", {})
        }
        return (*found, *(("test", count) for count in sorted(unseen)))

    def _of_recipe(self, *keys: str) -> Any:
        found: Any = self.recipe
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def _of_suites(self, key: str) -> Any:
        return next((suite[key] for suite in self.suites.values() if key in suite), None)


def number(value: Any) -> float | None:
    """A finite number, or None: files hold null and NaN where there was nothing to measure."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _settings(text: Any) -> Plain:
    """Of an evaluation, as it says itself; nothing where it does not."""
    try:
        found = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
