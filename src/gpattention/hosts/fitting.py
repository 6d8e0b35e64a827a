"""Fit the settings of an attached model to held-out data, by the likelihood of its averaged draws.

The data are split in two parts.  Candidates are fitted to the first, each starting from the previous one: no
draws; one scale, noise and power for all; one for every site; a scale for every head; and a greedy choice of
sites.  The second part chooses among them: a candidate with draws is taken only if it gains more than two
standard errors over the better one without.  Of several that are within a standard error of the best, it is
the cheapest: draws of late layers cost less, as everything before the first draw runs once.  Its last number,
a temperature or residual variance, is then fitted to both parts.  Temperatures follow the rule of
`gpattention.models.prediction`: none below 1 without evidence in the labels.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from gpattention.checks import check_choice, check_count, check_whole
from gpattention.hosts.families.base import AttentionHook
from gpattention.hosts.predict import Task
from gpattention.hosts.settings import Settings
from gpattention.hosts.variance import ALIGNMENTS, Alignment, Frame, measure_frames
from gpattention.models.predict import Inputs, count_items, device_of, evaluating, iterate_rows, take
from gpattention.models.prediction import label_log_likelihoods, least_of, profile_temperature

if TYPE_CHECKING:
    from gpattention.hosts.attach import Runner

T = TypeVar("T")
Data: TypeAlias = Any  # Inputs, (inputs, labels), a mapping with "labels", or an iterable of the last two
Level: TypeAlias = Literal["global", "sites", "heads"]
Progress: TypeAlias = Callable[[str, int, int], object]  # stage, done, total
LEVELS: tuple[Level, ...] = ("global", "sites", "heads")
IGNORED = -100  # label of tokens that do not count, as in transformers
DRAWS = 10  # that costs are given for
CLEAR = 2.0  # standard errors that draws must gain: with four candidates chance alone would pass one
COARSE_ITEMS = 96  # items of coarse comparisons
SCALES = (0.03, 0.1, 0.3, 1.0)  # to start from
START_POWERS = (0.05, 0.5)
NOISES = (1e-3, 10.0)  # least and most noise variance
LARGEST_SCALE = 30.0
RESIDUALS = (math.exp(-20), math.exp(20))  # least and most residual variance
# a scale of 0 is not a bound: then a head does not draw
BOUNDS: dict[str, tuple[float, ...]] = {"scale": (LARGEST_SCALE,), "noise": NOISES, "power": (0.0, 1.0)}
ADVICE = (
    "Check that labels and answers belong together, or fit to more items, or set handle.settings yourself."
)


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit.

    Args:
        samples: draws of every item; half as many in gradient steps.
        steps: gradient steps of each stage.
        levels: candidates to fit, of "global", "sites" and "heads"; with none, draws are not tried.
        select: whether to choose sites greedily too.
        temperature: whether to divide drawn logits by a fitted temperature.
        alignment: the map A between queries and keys: "full" or "none" (see `variance`).
        items: most items used, from the first on.
        batch_size: items of a gradient step.
        rows: most rows (samples times items) that run at once.
        learning_rate: of Adam, on logarithms.
        seed: of all draws and of the order of items.
        progress: called with the name of a stage, how many of its parts are done, and of how many.
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
        least = {"samples": 2, "steps": 1, "batch_size": 1, "rows": 1, "items": 10}  # two, to average over
        for name, count in least.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_count(name, value, least=count))
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        if isinstance(self.levels, str):
            raise ValueError(f"expected levels to be several names, got one string {self.levels!r}")
        for level in self.levels:
            check_choice("levels", level, LEVELS)
        check_choice("alignment", self.alignment, ALIGNMENTS)

    def reported(self, stage: str, parts: Sequence[T]) -> Iterator[T]:
        """The parts of a stage, each of which is reported when the next one is requested."""
        for done, part in enumerate(parts):
            yield part
            if self.progress is not None:
                self.progress(stage, done + 1, len(parts))


@dataclass(frozen=True, eq=False)
class Candidate:
    """Settings and their mean negative log-likelihoods.

    Attributes:
        name: "plain", "temperature", one of the levels, or "selected".
        settings: of its draws.
        fitted_nll: on the items that it was fitted to.
        nll: on the items kept back.
        margin: standard error of its difference from the best.
    """

    name: str
    settings: Settings
    fitted_nll: float
    nll: float
    margin: float = 0.0

    @property
    def draws(self) -> int:
        """Number of sites that draw."""
        return len(self.settings.drawing)

    @property
    def passes(self) -> float:
        """The cost of ten draws in plain passes, if all sites cost the same and early ones run once."""
        sites, drawing = len(self.settings.draws), self.settings.drawing
        return (drawing[0] + DRAWS * (sites - drawing[0])) / sites if drawing else 1.0


@dataclass(frozen=True, eq=False, repr=False)  # its fields are too long to print
class Fit:
    """All candidates, simplest first, and the chosen one.

    Args:
        candidates: fitted to the first part of the items and compared on the second.
        chosen: the name of one of them.
        settings: its settings, with the temperature or residual variance of all items together.
        reason: the reason for this candidate and this temperature.
        on_bounds: a sentence for every kind of number whose best value is on a bound; each was also a
            warning.
    """

    candidates: tuple[Candidate, ...]
    chosen: str
    settings: Settings
    reason: str = ""
    on_bounds: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = f"{'':2}{'candidate':12}{'NLL fitted':>12}{'NLL kept back':>15}{'gain':>9}{'temperature':>13}"
        lines = [f"{names}{'passes':>8}  draws"]
        undrawn = min((c.nll for c in self.candidates if not c.draws), default=math.nan)
        for c in self.candidates:
            mark = "* " if c.name == self.chosen else "  "
            gain = f"{undrawn - c.nll:9.4f}" if c.draws else " " * 9
            numbers = f"{c.fitted_nll:12.4f}{c.nll:15.4f}{gain}{c.settings.temperature:13.3f}{c.passes:8.1f}"
            lines.append(f"{mark}{c.name:12}{numbers}  {c.draws} of {len(c.settings.draws)} sites")
        if self.settings.temperature != 1.0:
            lines.append(f"temperature that all items ask for: {self.settings.temperature:.3f}")
        return "\n".join([*lines, *([self.reason] if self.reason else []), *self.on_bounds])


def fit_settings(runner: "Runner", start: Settings, batches: "list[Batch]", options: FitOptions) -> Fit:
    """Fit and compare all candidates."""
    with evaluating(runner.model):
        device = runner.device(batches[0].inputs)
        answer = runner.answer(take(batches[0].inputs, torch.arange(1), device))  # which shows the task
        if runner.task is None or runner.task == "embedding":
            raise ValueError("expected a model with logits or values to fit to labels, got embeddings")
        for batch in batches:
            check_labels(batch.labels, tuple(answer.shape[1:]), runner.task)
        if runner.task != "regression":  # leave out items without any label
            batches = _those(batches, lambda b: (b.labels.long() != IGNORED).reshape(len(b), -1).any(1))
            if not batches:
                raise ValueError(f"expected labels of at least 4 items, got {IGNORED} for all of them")
        fitted, kept_back = split_batches(batches)
        if not kept_back:
            count = sum(map(len, batches))
            raise ValueError(f"expected at least 4 items to fit to and choose by, got {count}")
        frames = frames_of(runner, fitted, options)
        settings = replace(start.to(device), frames=frames, draws=(True,) * len(runner.sites))
        scorer = Scorer(runner, options, runner.task)
        fit = _choose(scorer, _candidates(scorer, settings, fitted), fitted, kept_back)
    for sentence in fit.on_bounds:
        warnings.warn(sentence, stacklevel=3)  # at the call of Handle.fit
    return fit


@dataclass(frozen=True, eq=False)
class Batch:
    """Items with their labels; `first_item` is the number of the first one among all batches."""

    inputs: Inputs
    labels: Tensor  # [B], [B, N] or [B, D]
    first_item: int

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, items: Tensor) -> "Batch":
        """Some of its items."""
        device = device_of(self.inputs)
        return Batch(take(self.inputs, items, device), self.labels[items], self.first_item + int(items[0]))

    @property
    def numbers(self) -> Tensor:
        """The numbers of its items.  [B]"""
        return self.first_item + torch.arange(len(self))


def _those(batches: Iterable[Batch], chosen: Callable[[Batch], Tensor]) -> list[Batch]:
    """The items for which `chosen(batch)` [B] is True, without empty batches."""
    found = ((batch, chosen(batch)) for batch in batches)
    return [batch.select(own.nonzero()[:, 0]) for batch, own in found if own.any()]


def split_batches(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Three of every five items to fit to and two to choose by, in turn, as data may be sorted."""
    return _those(batches, lambda b: b.numbers % 5 < 3), _those(batches, lambda b: b.numbers % 5 >= 3)


def first_items(batches: Iterable[Batch], most: int | None) -> Iterator[Batch]:
    """The first `most` items; no batch is asked for beyond them, as a loader may be endless."""
    left = math.inf if most is None else most
    for batch in batches:
        yield batch if len(batch) <= left else batch.select(torch.arange(left))
        left -= len(batch)
        if left <= 0:
            return


def collect_batches(data: Data, labels: Tensor | None, most: int | None) -> list[Batch]:
    """The batches of any form of data, at most `most` items in all."""
    is_pair = isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor)
    if labels is not None:
        data = [(data, labels)]
    elif is_pair or (isinstance(data, Mapping) and "labels" in data):
        data = [data]
    elif isinstance(data, Mapping | Tensor):
        raise ValueError("expected data with labels to fit to, got inputs alone")

    return number_batches(map(_split, data), most)


def number_batches(pairs: Iterable[tuple[Inputs, Tensor]], most: int | None) -> list[Batch]:
    """Batches of inputs and labels whose items are numbered through, at most `most` items in all."""

    def numbered() -> Iterator[Batch]:
        seen = 0
        for pair in pairs:
            batch = Batch(*pair, seen)
            seen += len(batch)
            yield batch

    if not (batches := list(first_items(numbered(), most))):
        raise ValueError("expected data with at least one batch, got none")
    return batches


def _split(pair: Any) -> tuple[Inputs, Tensor]:
    """Inputs and labels of one batch."""
    if isinstance(pair, Mapping):
        if "labels" not in pair:
            raise ValueError(f"expected mappings with 'labels', got keys {', '.join(map(str, pair))}")
        pair = ({name: x for name, x in pair.items() if name != "labels"}, pair["labels"])
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"expected batches of (inputs, labels), got {type(pair).__name__}")
    inputs, labels = pair
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        found = "a tensor of shape ()" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"expected labels to be a tensor with one entry per item, got {found}")
    if len(labels) != count_items(inputs):
        raise ValueError(f"expected a label for each of {count_items(inputs)} inputs, got {len(labels)}")
    return inputs, labels


def check_labels(labels: Tensor, answer: tuple[int, ...], task: Task) -> None:
    """Check labels of a batch; `answer` is the shape of the answer for one item: [C], [N, C] or [D]."""
    width, shape = answer[-1], tuple(labels.shape)
    if task == "regression":
        axes, fits = f"[B, {width}]", shape[1:] == (width,) or (labels.ndim == 1 and width == 1)
    else:
        axes, fits = "[B, N]" if task == "tokens" else "[B]", labels.ndim == len(answer)
    if not fits:
        raise ValueError(f"expected labels of shape {axes}, got shape {shape}")
    if task == "regression":
        if bad := int((~labels.isfinite()).sum()):
            raise ValueError(f"expected labels to be finite numbers, got {bad} that are not")
        return
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"expected labels to be whole numbers, an index of a class each, got {labels.dtype}")
    labels = labels.long()  # unsigned types have no -100
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= width))]
    if len(wrong) > 0:
        known = f"from 0 to {width - 1}, or {IGNORED} for what does not count"
        raise ValueError(f"expected labels {known}, got {int(wrong[0])}")


def frames_of(runner: "Runner", batches: list[Batch], options: FitOptions) -> tuple[Frame, ...]:
    """The frames of all sites, from two runs over the data."""

    def run(hook: AttentionHook) -> None:
        for batch in options.reported("frames", batches):
            for items in torch.arange(len(batch)).split(options.rows):
                runner.answer(take(batch.inputs, items, runner.device(batch.inputs)), hook)

    return measure_frames(runner.sites, options.alignment, run)


def _comparable(answers: Tensor, labels: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Logits [S, M, C] and classes [M] of items or tokens with a label, or values and their targets."""
    if task == "regression":
        return answers, labels.to(answers.dtype).reshape(answers.shape[1:])
    if task == "tokens":
        if labels.shape[1] != answers.shape[2]:  # lengths may differ between batches
            own, found = answers.shape[2], labels.shape[1]
            raise ValueError(f"expected labels of {own} tokens like the answers, got {found}")
        answers, labels = answers.flatten(1, 2), labels.flatten()
    labels = labels.long()  # as gather needs it
    known = labels != IGNORED
    return answers[:, known], labels[known]


def log_likelihood(
    answers: Tensor,  # [S, M, C] or [S, B, D]
    labels: Tensor,  # [M] or [B, D]
    task: Task,
    log_last: Tensor,  # of the temperature, or of the residual variance in regression
) -> Tensor:
    """log of the probability of every label, or density of every item, averaged over samples.  [M]"""
    if task != "regression":
        return label_log_likelihoods(answers, labels, log_last)
    spread = answers.var(0) if len(answers) > 1 else torch.zeros_like(answers[0])  # [B, D]
    variance = spread + log_last.exp()
    error = (labels - answers.mean(0)).square()
    return -0.5 * (error / variance + variance.log() + math.log(2 * math.pi)).sum(-1)


@dataclass(frozen=True, eq=False)
class Scorer:
    """Compares drawn answers with labels, with the same noise for all settings."""

    runner: "Runner"
    options: FitOptions
    task: Task

    @property
    def last(self) -> str:
        """The setting that acts on drawn answers."""
        return "residual" if self.task == "regression" else "temperature"

    def finish(
        self, settings: Settings, batches: Iterable[Batch], *, tempers: bool = True
    ) -> tuple[Settings, float]:
        """Fit the temperature or the residual variance of the drawn answers.

        Returns the settings with it, and their mean negative log-likelihood.
        """
        answers, labels = self.answers(settings, batches)
        if self.task == "regression":

            def curve(log_residual: float) -> tuple[float, float]:
                """Mean negative log-likelihood, and its slope."""
                x = torch.tensor(log_residual, dtype=torch.float64, requires_grad=True)
                with torch.enable_grad():
                    nll = -log_likelihood(answers, labels, self.task, x).mean()
                return float(nll), float(torch.autograd.grad(nll, x)[0])

            least, most = map(math.log, RESIDUALS)
            grid = torch.linspace(least, most, 81, dtype=torch.float64)
            settings = replace(settings, residual=math.exp(least_of(curve, grid.tolist())))
        elif self.options.temperature and tempers:
            settings = replace(settings, temperature=profile_temperature(answers, labels).temperature)
        return settings, -float(self.score(settings, answers, labels).mean())

    def answers(self, settings: Settings, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        """Answers of all batches in float64, and labels, as `log_likelihood` takes them."""
        samples, options = self.options.samples if settings.any_drawn else 1, self.options

        def draw(batch: Batch) -> tuple[Tensor, Tensor]:
            if not settings.any_drawn:
                return self.draw(settings, batch, 1, options.seed, options.rows)
            rows: dict[str, Any] = {"batch_size": options.rows, "first_item": batch.first_item}
            given = self.runner.draws(batch.inputs, settings, samples=samples, seed=options.seed, **rows)
            return _comparable(given[0], batch.labels.to(given[0].device), self.task)

        with torch.no_grad():
            drawn = [draw(batch) for batch in batches]
        return torch.cat([answers.double() for answers, _ in drawn], 1), torch.cat([y for _, y in drawn])

    def draw(
        self, settings: Settings, batch: Batch, samples: int, seed: int, rows_at_once: int
    ) -> tuple[Tensor, Tensor]:
        """Answers and labels of one batch."""
        device = self.runner.device(batch.inputs)
        chunks = iterate_rows(
            batch.inputs, samples=samples, seed=seed, batch_size=rows_at_once, device=device,
            first_item=batch.first_item,
        )  # fmt: skip
        parts = [self.runner.draw(rows, settings, seed=seed)[0] for rows in chunks]
        answers = torch.cat(parts).unflatten(0, (-1, samples)).transpose(0, 1)  # [S, B, ...]
        return _comparable(answers, batch.labels.to(answers.device), self.task)

    def score(self, settings: Settings, answers: Tensor, labels: Tensor) -> Tensor:
        """The log-likelihood of every labelled item or token.  [M]"""
        last = torch.tensor(max(getattr(settings, self.last), 1e-12), dtype=torch.float64)
        return log_likelihood(answers, labels, self.task, last.log())


def _candidates(scorer: Scorer, settings: Settings, batches: list[Batch]) -> list[tuple[str, Settings]]:
    """Names and settings, simplest first; temperatures or residual variances are not fitted yet."""
    options = scorer.options
    silent = replace(settings, scale=torch.zeros_like(settings.scale))
    found = [("plain", replace(silent, temperature=1.0))]
    if options.temperature and scorer.task != "regression":
        found.append(("temperature", silent))
    if not options.levels:
        return found  # without draws
    best = _coarse(scorer, settings, batches)
    for level in options.levels:
        best = _descend(scorer, best, batches, level)
        found.append((level, best))
    if options.select and len(settings.draws) > 1:
        drawing = _greedy_sites(scorer, best, batches)
        if any(drawing) and not all(drawing):
            chosen = replace(best, draws=drawing)
            found.append(("selected", _descend(scorer, chosen, batches, options.levels[-1], "selected")))
    return found


def _coarse(scorer: Scorer, settings: Settings, batches: list[Batch]) -> Settings:
    """The best of a few scales and powers for all heads, as the likelihood has several maxima."""
    like, first = settings.scale, list(first_items(batches, COARSE_ITEMS))
    trials = [
        replace(settings, scale=torch.full_like(like, scale), power=torch.full_like(like, power))
        for power in START_POWERS
        for scale in SCALES
    ]
    return min(scorer.options.reported("start", trials), key=lambda trial: scorer.finish(trial, first)[1])


def _free_numbers(scorer: Scorer, settings: Settings, level: Level) -> dict[str, Tensor]:
    """Unconstrained numbers of the settings, shared by level, and temperature or residual variance."""

    def share(x: Tensor, *, by_head: bool = False) -> Tensor:
        if level == "global":
            return x.mean().reshape(1, 1)
        return x.clone() if by_head else x.mean(1, keepdim=True)

    numbers = {
        "scale": share(settings.scale.clamp_min(1e-4).log(), by_head=level == "heads"),
        "noise": share(settings.noise.log()),
        "power": share(settings.power.clamp(0.02, 0.98).logit()),
    }
    if scorer.task == "regression" or scorer.options.temperature:
        numbers[scorer.last] = torch.tensor(max(getattr(settings, scorer.last), 1e-3)).log()
    return {name: x.requires_grad_() for name, x in numbers.items()}


def _with_numbers(settings: Settings, numbers: Mapping[str, Tensor]) -> Settings:
    """The settings of unconstrained numbers."""
    last: dict[str, Any] = {
        n: float(numbers[n].detach().exp()) for n in ("temperature", "residual") if n in numbers
    }
    return replace(
        settings,
        scale=numbers["scale"].exp().clamp_max(LARGEST_SCALE).expand_as(settings.scale).clone(),
        noise=numbers["noise"].exp().clamp(*NOISES).expand_as(settings.scale).clone(),
        power=numbers["power"].sigmoid().expand_as(settings.scale).clone(),
        **last,
    )


def _descend(
    scorer: Scorer, settings: Settings, batches: list[Batch], level: Level, title: str | None = None
) -> Settings:
    """Minimise by Adam on small batches with new draws; returns the mean of the last half of the steps."""
    options, kept = scorer.options, list[list[Tensor]]()
    settings, _ = scorer.finish(settings, first_items(batches, COARSE_ITEMS))
    numbers = _free_numbers(scorer, settings, level)
    learnt = list(numbers.values())
    optimiser = torch.optim.Adam(learnt, lr=options.learning_rate, betas=(0.8, 0.95))
    fixed = torch.tensor(max(getattr(settings, scorer.last), 1e-12)).log()
    samples = max(2, options.samples // 2)  # fewer than for comparisons
    small = _endless(batches, options.batch_size, options.seed)
    for step, batch in zip(options.reported(title or level, range(options.steps)), small, strict=False):
        seed = options.seed + 1 + step  # not the one that candidates are compared with
        with torch.enable_grad():
            own = _with_numbers(settings, numbers)
            answers, labels = scorer.draw(own, batch, samples, seed, len(batch) * samples)
            log_last = numbers.get(scorer.last, fixed).to(answers.device)
            loss = -log_likelihood(answers, labels, scorer.task, log_last).mean()
            # not backward(), which would add gradients to the host's weights
            gradients = torch.autograd.grad(loss, learnt)
        for number, gradient in zip(learnt, gradients, strict=True):
            number.grad = gradient
        optimiser.step()
        if "temperature" in numbers:  # below 1 only if the labels have shown it
            numbers["temperature"].data.clamp_(min=min(0.0, math.log(settings.temperature)))
        if step >= options.steps // 2:
            kept.append([x.detach().clone() for x in learnt])
    means = (torch.stack(values).mean(0) for values in zip(*kept, strict=True))
    return _with_numbers(settings, dict(zip(numbers, means, strict=True)))


def _endless(batches: list[Batch], size: int, seed: int) -> Iterator[Batch]:
    """Small batches in random order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(batches), generator=generator).tolist():
            order = torch.randperm(len(batches[index]), generator=generator)
            yield from map(batches[index].select, order.split(size))


def _greedy_sites(scorer: Scorer, settings: Settings, batches: list[Batch]) -> tuple[bool, ...]:
    """Try sites in the order of their gain alone, and keep those that add to the ones before."""
    sites, first = range(len(settings.draws)), list(first_items(batches, COARSE_ITEMS))

    def nll(drawing: list[int]) -> float:
        return scorer.finish(replace(settings, draws=tuple(i in drawing for i in sites)), first)[1]

    alone = [nll([index]) for index in scorer.options.reported("selection", sites)]
    kept: list[int] = []
    best = nll([])
    order = sorted(sites, key=alone.__getitem__)
    for index in scorer.options.reported("selection, together", order):
        if (found := nll([*kept, index])) < best:
            kept, best = [*kept, index], found
    return tuple(index in kept for index in sites)


def _choose(
    scorer: Scorer, proposed: list[tuple[str, Settings]], fitted: list[Batch], kept_back: list[Batch]
) -> Fit:
    """Evaluate all candidates on both parts, and choose one."""
    finished, scores = [], []
    for name, settings in scorer.options.reported("choice", proposed):
        own, nll = scorer.finish(settings, fitted, tempers=name != "plain")
        finished.append((name, own, nll))
        scores.append(scorer.score(own, *scorer.answers(own, kept_back)))  # [M]
    best = max(scores, key=lambda score: float(score.mean()))
    candidates = [
        Candidate(*done, -float(score.mean()), _margin(best - score))
        for done, score in zip(finished, scores, strict=True)
    ]
    chosen = candidates[_chosen(candidates, scores, best)]
    drawn = "draws gain" if chosen.draws else "no candidate that draws gains"
    reason = f"{chosen.name}: {drawn} more than {CLEAR:g} standard errors on the items kept back."
    settings, why, on_bounds = _concluded(scorer, chosen, [*fitted, *kept_back])
    return Fit(tuple(candidates), chosen.name, settings, f"{reason} {why}".strip(), on_bounds)


def _chosen(candidates: list[Candidate], scores: list[Tensor], best: Tensor) -> int:
    """The best without draws, unless others clearly gain; then the cheapest close to the best.

    Of several of the same cost it is the simplest.
    """
    silent = [i for i, candidate in enumerate(candidates) if not candidate.draws]
    baseline = max(silent, key=lambda i: float(scores[i].mean()))
    worth: list[int] = []
    for i, candidate in enumerate(candidates):
        gain, behind = scores[i] - scores[baseline], float((best - scores[i]).mean())
        clear = float(gain.mean()) > CLEAR * _margin(gain)
        if candidate.draws and clear and behind <= candidate.margin:
            worth.append(i)
    return min(worth, key=lambda i: candidates[i].passes, default=baseline)


def _margin(gap: Tensor) -> float:
    """Standard error of the mean of paired differences."""
    return float(gap.std() / len(gap) ** 0.5) if len(gap) > 1 else 0.0


def _concluded(
    scorer: Scorer, chosen: Candidate, batches: list[Batch]
) -> tuple[Settings, str, tuple[str, ...]]:
    """The chosen settings with their last number, the reason for it, and what is on a bound."""
    settings = chosen.settings
    if scorer.task == "regression" or not scorer.options.temperature:
        settings, _ = scorer.finish(settings, batches)
        return settings, "", bounds_reached(settings)
    profile, reached = profile_temperature(*scorer.answers(settings, batches)), bounds_reached(settings)
    if profile.on_bound and profile.wrong:
        taken = f"{profile.on_bound:g}; {profile.temperature:.3g} is taken"
        reached += (f"The best temperature lies on its bound, {taken}. {ADVICE}",)
    if chosen.name != "plain":
        return replace(settings, temperature=profile.temperature), profile.reason, reached
    kept = "The temperature is 1: a fitted one does no better on the items kept back."
    return settings, profile.reason if profile.temperature == 1 else kept, reached


def bounds_reached(settings: Settings) -> tuple[str, ...]:
    """A sentence for every kind of number, of sites that draw, that is on a bound.

    The best value may be beyond it, so that the number is no estimate.
    """
    numbers = {name: getattr(settings, name)[settings.drawing].flatten().tolist() for name in BOUNDS}
    numbers["residual"] = [settings.residual] if settings.residual else []  # of regression alone
    sentences = []
    for name, values in numbers.items():
        for bound in BOUNDS.get(name, RESIDUALS):
            found = [x for x in values if math.isclose(x, bound, rel_tol=1e-4, abs_tol=0 if bound else 1e-4)]
            if found:
                where = "" if name == "residual" else f" at {len(found)} of {len(values)} heads"
                sentences.append(f"Fitted {name} lies on its bound, {bound:.4g}{where}. {ADVICE}")
    return tuple(sentences)
