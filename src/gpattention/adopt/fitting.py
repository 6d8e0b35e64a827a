"""Fit what an attached model draws with to held-out data, by the likelihood of its averaged draws.

The data are parted in two.  On the first part candidates are fitted, each from the one before: no draws;
one scale, noise and power for all; one for every site; a scale for every head; and the sites that earn their
draws by greedy choice.  The second part chooses: draws are made only by a candidate that gains more than two
standard errors over the better one without, the simplest such that is not one behind the best.  Its last
number, a temperature or residual variance, is then fitted to both parts.  Temperatures follow the rule of
`gpattention.models.temperature`: none below 1 that the labels do not show.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gpattention.adopt.batches import Batch, Data, collect_batches
from gpattention.adopt.frames import ALIGNMENTS, Alignment, Frame
from gpattention.adopt.labels import IGNORED, check_labels
from gpattention.adopt.listening import Measuring
from gpattention.adopt.running import Runner
from gpattention.adopt.scoring import RESIDUALS, Scorer
from gpattention.adopt.selection import greedy_sites
from gpattention.adopt.settings import Settings
from gpattention.adopt.stages import BOUNDS, SCALES, START_POWERS, Stage, descend
from gpattention.checks import check_count, check_whole
from gpattention.models.rows import evaluating, take

Level: TypeAlias = Literal["global", "sites", "heads"]
CLEAR = 2.0  # standard errors that draws must gain: with four candidates chance alone would pass one
LEVELS: tuple[Level, ...] = ("global", "sites", "heads")
ADVICE = "Fit to more items, or with fewer levels, or set handle.settings yourself."
Progress: TypeAlias = Callable[[str, int, int], object]  # stage, done, total


@dataclass(frozen=True)
class FitOptions:
    """How to fit.

    Args:
        samples: draws of every item; half as many in gradient steps.
        steps: gradient steps of each stage.
        levels: which candidates to fit, of "global", "sites" and "heads".
        select: whether to choose sites greedily too.
        temperature: whether drawn logits are divided by a fitted temperature.
        alignment: the map A between queries and keys: "full", "isotropic" or "none" (see `frames`).
        items: most items used, from the first on.
        batch_size: items of a gradient step.
        rows: most rows (samples times items) that run at once.
        learning_rate: of Adam, on logarithms.
        seed: of all draws and of the order of items.
        progress: called with the stage's name, how much of it is done, and how much there is.
    """

    samples: int = 8
    steps: int = 20
    levels: Sequence[Level] = LEVELS
    select: bool = True
    temperature: bool = True
    alignment: Alignment = "full"
    items: int | None = 1000
    batch_size: int = 24
    rows: int = 256
    learning_rate: float = 0.15
    seed: int = 0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "batch_size", "rows"):
            object.__setattr__(self, name, check_count(name, getattr(self, name), least=1))
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        if self.samples < 2:
            raise ValueError(f"expected samples >= 2 to average over, got {self.samples}")
        if self.items is not None:
            object.__setattr__(self, "items", check_count("items", self.items, least=10))
        if isinstance(self.levels, str):
            raise ValueError(f"expected levels to be several names, got one string {self.levels!r}")
        unknown = [level for level in self.levels if level not in LEVELS]
        if unknown:
            raise ValueError(f"expected levels of {', '.join(LEVELS)}, got {', '.join(map(str, unknown))}")
        if self.alignment not in ALIGNMENTS:
            raise ValueError(
                f"expected alignment to be one of {', '.join(ALIGNMENTS)}, got {self.alignment!r}"
            )


@dataclass(frozen=True, eq=False)
class Candidate:
    """Settings and how they did, as mean negative log-likelihoods."""

    name: str
    settings: Settings
    fitted_nll: float  # on the part they were fitted to
    nll: float  # on the part kept back
    margin: float = 0.0  # standard error of its difference from the best

    @property
    def draws(self) -> int:
        """How many sites draw."""
        return sum(self.settings.drawn(place) for place in range(len(self.settings.draws)))


@dataclass(frozen=True, eq=False, repr=False)  # all its fields would fill pages of a notebook
class Fit:
    """All candidates, simplest first, and the chosen one.

    Args:
        candidates: fitted to the first part of the items and weighed on the second.
        chosen: the name of one of them.
        settings: its settings, with the temperature or residual variance that all items together ask for.
        reason: why this candidate and this temperature, in sentences.
        on_bounds: a sentence for every kind of number whose best value lies on a bound, as a warning told.
    """

    candidates: tuple[Candidate, ...]
    chosen: str
    settings: Settings
    reason: str = ""
    on_bounds: tuple[str, ...] = ()

    def __repr__(self) -> str:
        lines = [f"{'':2}{'candidate':12}{'NLL fitted':>12}{'NLL kept back':>15}{'temperature':>13}  draws"]
        for c in self.candidates:
            mark = "* " if c.name == self.chosen else "  "
            lines.append(
                f"{mark}{c.name:12}{c.fitted_nll:12.4f}{c.nll:15.4f}{c.settings.temperature:13.3f}  "
                f"{c.draws} of {len(c.settings.draws)} sites"
            )
        if self.settings.temperature != 1.0:
            lines.append(f"temperature that all items ask for: {self.settings.temperature:.3f}")
        return "\n".join([*lines, *([self.reason] if self.reason else []), *self.on_bounds])


def fit_settings(
    runner: Runner, start: Settings, data: Data, labels: Tensor | None, options: FitOptions
) -> Fit:
    """All candidates, fitted and compared."""
    batches = collect_batches(data, labels, options.items)
    with evaluating(runner.model):
        device = runner.device(batches[0].inputs)
        answer = runner.output(take(batches[0].inputs, torch.arange(1), device))  # tells the task
        if runner.task is None or runner.task == "embedding":
            raise ValueError(
                "expected a model with logits or values to fit to labels, got embeddings: "
                "set handle.settings, or attach a head"
            )
        for batch in batches:
            check_labels(batch.labels, tuple(answer.shape[1:]), runner.task)
        if runner.task != "regression":
            batches = _with_labels(batches)
        fitted, kept_back = _part(batches)
        tell = options.progress or (lambda stage, done, total: None)
        frames = _measure(runner, fitted, options, tell)
        settings = replace(start.to(device), frames=frames, draws=(True,) * len(runner.sites))
        scorer = Scorer(runner, options.samples, options.rows, options.seed, options.temperature)
        proposed = _candidates(runner, settings, scorer, fitted, options, tell)
        fit = _choose(scorer, proposed, fitted, kept_back, tell)
    for sentence in fit.on_bounds:
        warnings.warn(sentence, stacklevel=3)  # of the call of Handle.fit
    return fit


def _with_labels(batches: list[Batch]) -> list[Batch]:
    """Items of which at least one label counts: others have no likelihood."""
    counts = [(batch, (batch.labels.long() != IGNORED).reshape(len(batch), -1).any(1)) for batch in batches]
    found = [
        batch if bool(known.all()) else batch.select(known.nonzero()[:, 0])
        for batch, known in counts
        if bool(known.any())
    ]
    if not found:
        raise ValueError(f"expected labels of at least 4 items to fit to, got {IGNORED} for all of them")
    return found


def _part(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Three of every five items to fit to, two to choose by."""
    parts: tuple[list[Batch], list[Batch]] = ([], [])
    for batch in batches:
        number = (batch.first_item + torch.arange(len(batch))) % 5
        for part, chosen in zip(parts, (number < 3, number >= 3), strict=True):
            if bool(chosen.any()):
                part.append(batch.select(chosen.nonzero()[:, 0]))
    if not parts[1]:
        raise ValueError(f"expected at least 4 items to fit to and choose by, got {sum(map(len, batches))}")
    return parts


def _measure(runner: Runner, batches: list[Batch], options: FitOptions, tell: Progress) -> tuple[Frame, ...]:
    """Frames of all sites, by two runs over the data."""
    measuring = Measuring(runner.sites)
    runs = [(second, batch) for second in (False, True) for batch in batches]
    for done, (second, batch) in enumerate(runs):
        if second and done == len(batches):
            measuring.frames(options.alignment)
        for items in torch.arange(len(batch)).split(options.rows):
            runner.output(take(batch.inputs, items, runner.device(batch.inputs)), measuring)
        tell("frames", done + 1, len(runs))
    return measuring.finished()


def _candidates(
    runner: Runner,
    settings: Settings,
    scorer: Scorer,
    batches: list[Batch],
    options: FitOptions,
    tell: Progress,
) -> list[tuple[str, Settings]]:
    """Name and settings, simplest first; all but the first have their last numbers still to be fitted."""
    silent = replace(settings, scale=torch.zeros_like(settings.scale))
    found = [("plain", replace(silent, temperature=1.0))]
    if options.temperature and runner.task != "regression":
        found.append(("temperature", silent))
    best = _coarse(settings, scorer, batches, tell)
    for level in options.levels:
        best = descend(runner, best, batches, Stage(level), scorer, options, tell)
        found.append((level, best))
    if options.select and len(runner.sites) > 1:
        drawing = greedy_sites(scorer, best, batches, tell)
        if any(drawing) and not all(drawing):
            chosen = replace(best, draws=drawing)
            chosen = descend(
                runner, chosen, batches, Stage(options.levels[-1], "selected"), scorer, options, tell
            )
            found.append(("selected", chosen))
    return found


def _coarse(settings: Settings, scorer: Scorer, batches: list[Batch], tell: Progress) -> Settings:
    """The best of a few scales and powers for all heads."""
    trials = [
        replace(
            settings,
            scale=torch.full_like(settings.scale, scale),
            power=torch.full_like(settings.power, power),
        )
        for power in START_POWERS
        for scale in SCALES
    ]
    some = scorer.some(batches)
    scores = []
    for done, trial in enumerate(trials):
        scores.append(-scorer.finish(trial, some)[1])
        tell("start", done + 1, len(trials))
    return trials[max(range(len(trials)), key=lambda i: scores[i])]


def _choose(
    scorer: Scorer,
    proposed: list[tuple[str, Settings]],
    fitted: list[Batch],
    kept_back: list[Batch],
    tell: Progress,
) -> Fit:
    """All candidates with how they do on either part, and the choice."""
    finished, scores = [], []
    for done, (name, settings) in enumerate(proposed):
        own, nll = scorer.finish(settings, fitted, tempers=name != "plain")
        finished.append((name, own, nll))
        scores.append(scorer.score(own, kept_back))  # [M]
        tell("choice", done + 1, len(proposed))
    best = max(scores, key=lambda score: float(score.mean()))
    candidates = [
        Candidate(name, settings, nll, -float(score.mean()), _margin(best - score))
        for (name, settings, nll), score in zip(finished, scores, strict=True)
    ]
    chosen = candidates[_chosen(candidates, scores, best)]
    settings, reason, on_bounds = _concluded(scorer, chosen, [*fitted, *kept_back])
    drawn = "draws gain" if chosen.draws else "no candidate that draws gains"
    reason = f"{chosen.name}: {drawn} more than {CLEAR:g} standard errors on the items kept back. {reason}"
    return Fit(tuple(candidates), chosen.name, settings, reason.strip(), on_bounds)


def _concluded(
    scorer: Scorer, chosen: Candidate, batches: list[Batch]
) -> tuple[Settings, str, tuple[str, ...]]:
    """The chosen settings with their last number, why it is that, and what lies on a bound."""
    if scorer.is_regression or not scorer.tempers:
        settings, _ = scorer.finish(chosen.settings, batches)
        return settings, "", bounds_reached(settings, regression=scorer.is_regression)
    profile = scorer.profile(chosen.settings, batches)
    reached = bounds_reached(chosen.settings)
    if profile.on_bound and profile.wrong:
        reached += (
            f"The best temperature lies on its bound, {profile.on_bound:g}; {profile.temperature:.3g} is "
            f"taken. {'Logits tell no more than guessing' if profile.optimum > 1 else 'Logits are tiny'}: "
            "check that labels and logits belong together, or fit to more items.",
        )
    if chosen.name != "plain":
        return replace(chosen.settings, temperature=profile.temperature), profile.reason, reached
    kept = "The temperature is 1: a fitted one does no better on the items kept back."
    return chosen.settings, profile.reason if profile.temperature == 1 else kept, reached


def bounds_reached(settings: Settings, *, regression: bool = False) -> tuple[str, ...]:
    """A sentence for every kind of number of the sites that draw, or residual variance, that lies on a bound.

    The best value may lie beyond it, so that what was taken is no estimate.
    """
    drawing = [place for place in range(len(settings.draws)) if settings.drawn(place)]
    told = []
    for name, (least, most) in BOUNDS.items():
        values = getattr(settings, name)[drawing].flatten().tolist()
        for bound in (x for x in (least, most) if x is not None):
            found = [x for x in values if math.isclose(x, bound, rel_tol=1e-4, abs_tol=0 if bound else 1e-4)]
            if found:
                told.append(
                    f"Fitted {name} lies on its bound: {found[0]:.4g} at {len(found)} of {len(values)} "
                    f"heads, the bound is {bound:g}. {ADVICE}"
                )
    for bound in RESIDUALS if regression else ():
        if math.isclose(settings.residual, bound, rel_tol=1e-4):
            told.append(
                f"Fitted residual lies on its bound: {settings.residual:.4g}, the bound is {bound:.4g}. "
                "Check that targets are not the model's own answers and have a usual scale."
            )
    return tuple(told)


def _chosen(candidates: list[Candidate], scores: list[Tensor], best: Tensor) -> int:
    """Without draws, unless a candidate clearly gains; then the simplest such that is close to the best."""
    silent = [i for i, candidate in enumerate(candidates) if not candidate.draws]
    baseline = max(silent, key=lambda i: float(scores[i].mean()))
    for i, candidate in enumerate(candidates):
        gain, behind = scores[i] - scores[baseline], float((best - scores[i]).mean())
        clear = float(gain.mean()) > CLEAR * _margin(gain)
        if candidate.draws and clear and behind <= candidate.margin:
            return i
    return baseline


def _margin(gap: Tensor) -> float:
    """Standard error of the mean of paired differences."""
    return float(gap.std() / len(gap) ** 0.5) if len(gap) > 1 else 0.0
