"""What a sweep found: its runs, its settings, the one chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpattention.experiments.recipe_file import changed_recipe
from gpattention.training import Recipe

Criterion = Literal["accuracy", "nll"]
CRITERIA: tuple[Criterion, ...] = ("accuracy", "nll")


@dataclass(frozen=True)
class SweepRow:
    """One run; numbers are those of the weights it chose, on its validation split."""

    settings: Mapping[str, str]
    seed: int
    folder: Path
    epoch: int | None = None
    accuracy: float | None = None
    nll: float | None = None
    error: str = ""  # why it failed; empty if it did not


@dataclass(frozen=True)
class SweepSetting:
    """All seeds of one setting: means and standard deviations over the runs that finished."""

    settings: Mapping[str, str]
    runs: int
    failed: int
    accuracy: float
    accuracy_std: float
    nll: float
    nll_std: float


@dataclass(frozen=True)
class SweepResult:
    """All runs, what they say of each setting, and the setting that was chosen."""

    recipe: Recipe
    folder: Path
    choose: Criterion
    rows: tuple[SweepRow, ...]
    settings: tuple[SweepSetting, ...]
    chosen: SweepSetting | None  # None: no setting finished all its runs

    @property
    def chosen_recipe(self) -> Recipe | None:
        """The recipe with the chosen values, under its own name and seed."""
        if self.chosen is None:
            return None
        return changed_recipe(self.recipe, [f"{k}={v}" for k, v in self.chosen.settings.items()])
